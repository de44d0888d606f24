"""The `kvjax` command: options of its own, and dispatch to one module a subcommand."""

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

import kvjax
from kvjax.errors import InputError
from kvjax.paths import cache_dir

# Subcommand -> what --help says. `kvjax x-y` runs `kvjax.cli.x_y.main(argv) -> exit code`.
COMMANDS = {
    "generate": "generate text from prompts",
    "stream": "feed a text, or the model's own, for ever in constant memory",
    "benchmark": "measure speed and memory on this machine",
    "evaluate": "measure what page formats and eviction policies cost in quality",
    "compile-kernels": "compile the GPU and TPU kernels without a device, and check the result",
    "benchmark-kernels": "measure the attention kernels on an H100 or H200",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `kvjax` command.

    Args:
        argv: the arguments after the program's name; those of the process when None.

    Returns:
        The exit code: 0, 2 after a mistake of the user's or a refusal of the system's (one line on stderr), 130 after
        an interrupt (which ends a process of its own), 141 where nobody reads the output any more.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escapes stand for what a terminal or a pipe without UTF-8 cannot show.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _ended_by_interrupt():
            return _run(arguments)
    except InputError as error:
        print(f"kvjax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        _drop_output()
        print(f"kvjax: error: {error}: make room or give permission, or use another place", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(arguments: Sequence[str]) -> int:
    try:
        if arguments and arguments[0] in COMMANDS:
            return importlib.import_module(f"kvjax.cli.{arguments[0].replace('-', '_')}").main(arguments[1:])
        return _own_options(arguments)
    finally:
        if sys.stdout is not None:
            # Here, and not when Python ends, where an error would be a traceback.
            sys.stdout.flush()


@contextlib.contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Let an interrupt end the process at once: libraries in C lose KeyboardInterrupt, or make another error of it."""
    own = signal.getsignal(signal.SIGINT)
    if own is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)


def _drop_output() -> None:
    """Have what is left in the buffer of stdout go nowhere: Python writes it when it ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _own_options(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="kvjax",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="A paged KV cache for JAX language models.\n\ncommands (kvjax COMMAND --help says more):\n"
        + "\n".join(f"  {name:<19}{text}" for name, text in COMMANDS.items()),
        epilog="Weights, compiled programs and downloads are kept in the folder KVJAX_CACHE, "
        f"now\n{cache_dir()}".replace("%", "%%"),
    )
    parser.add_argument("--version", action="store_true", help="print the versions of kvjax and jax, and the backend")
    # Reached only by a name that COMMANDS lacks: argparse then names the choices and exits with 2.
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help="one of the commands above")
    if parser.parse_args(arguments).version:
        print(_version())
    else:
        parser.print_help()
    return 0


def _version() -> str:
    import jax

    devices = jax.devices()
    return (
        f"kvjax {kvjax.__version__}, jax {jax.__version__}, "
        f"backend {jax.default_backend()} ({len(devices)} x {devices[0].device_kind})"
    )
