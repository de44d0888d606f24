"""Ctrl-C as a request: what is running ends soon and keeps what it has."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from kvjax.cli import arguments


@contextlib.contextmanager
def noted_interrupt(said: str) -> Iterator[threading.Event]:
    """Have Ctrl-C set an event and show a line, once: again, it ends the process.

    An exception of the handler itself would come up in the middle of libraries that lose it.
    """
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(*_: object) -> None:
        noted.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        arguments.progress(said)

    own = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, own)


@contextlib.contextmanager
def stoppable(stopped: type[Exception]) -> Iterator[Callable[[], None]]:
    """Yield a function that raises `stopped` once Ctrl-C has been pressed."""
    with noted_interrupt("stopping soon, with the rows measured so far; once more ends at once") as noted:

        def pause() -> None:
            if noted.is_set():
                raise stopped

        yield pause
