"""Text of tokens as they come, up to a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StoppedText:
    """The text of a sequence's tokens, cut before the first stop text.

    Attributes:
        text: what can be shown so far.
        count: tokens taken so far, up to and including the one that completed a stop text.
        stopped: whether a stop text has been found; nothing is taken after it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self._stream, self._stops = tokenizer.decode_stream(), stops
        self._held = ""
        self.text, self.count, self.stopped = "", 0, False

    def push(self, token_ids: Sequence[int], *, last: bool) -> str:
        """Take tokens and return what they add to `text`: what may be the beginning of a stop text is held back."""
        for token in token_ids:
            if not self.stopped:
                self.count += 1
                self._hold(self._stream.push(token))
        if last and not self.stopped:
            self._hold(self._stream.finish())
        keep = 0
        if not (last or self.stopped):
            beginnings = (stop[:n] for stop in self._stops for n in range(1, len(stop)))
            keep = max((len(begin) for begin in beginnings if self._held.endswith(begin)), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.text += shown
        return shown

    def _hold(self, text: str) -> None:
        self._held += text
        ends = [self._held.find(stop) for stop in self._stops if stop in self._held]
        if ends:
            self._held, self.stopped = self._held[: min(ends)], True
