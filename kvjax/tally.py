"""The figures of a stream, in constant memory."""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.options import MOST_NEW_TOKENS
from kvjax.spec import CacheSpec

if TYPE_CHECKING:
    from kvjax.streaming import Piece

RECENT = 1024
"""Tokens whose perplexity a stream reports: its first and its last so many."""


class Tally:
    """The figures of a stream, in constant memory.

    Attributes:
        tokens: of the stream.
        pages_after_fill: most pages held after a step by the time that the cache was full, None before.
        pages_end: the same by now. Greater where the pages have grown since.
    """

    def __init__(self, spec: CacheSpec):
        most = spec.policy.most_slots(MOST_NEW_TOKENS, 0, spec.max_query_length, spec.page_size)
        self._full = spec.policy.num_sinks + max(min(most, window or most) for window in spec.layer_windows)
        # Pages held depend on where in a page a step ends: after so many steps most have occurred.
        self._settled = self._full + spec.page_size * spec.max_query_length
        self.tokens, self.pages_end, self.pages_after_fill = 0, 0, None
        self._scored, self._first = 0, 0.0
        self._last: collections.deque[float] = collections.deque(maxlen=RECENT)

    def add(self, piece: Piece, pages: int) -> None:
        """Count a step, after which at most `pages` pages had been held."""
        if self._full <= self.tokens + len(piece.tokens) and (
            self.pages_after_fill is None or self.tokens + len(piece.tokens) <= self._settled
        ):
            self.pages_after_fill = pages
        self.tokens, self.pages_end = self.tokens + len(piece.tokens), pages
        self._first += float(piece.nll[: max(RECENT - self._scored, 0)].sum(dtype=np.float64))
        self._scored += len(piece.nll)
        self._last.extend(piece.nll.tolist())

    @property
    def perplexity_first(self) -> float | None:
        """Perplexity of the first `RECENT` tokens, or of those there are."""
        count = min(self._scored, RECENT)
        return math.exp(self._first / count) if count else None

    @property
    def perplexity_last(self) -> float | None:
        """Perplexity of the last `RECENT` tokens."""
        return math.exp(math.fsum(self._last) / len(self._last)) if self._last else None

    def figures(self) -> dict[str, Any]:
        """What `--json` prints, but for the speed."""
        names = ("tokens", "pages_after_fill", "pages_end", "perplexity_first", "perplexity_last")
        return {name: getattr(self, name) for name in names}

    def saved(self) -> dict[str, Any]:
        """All of it, as JSON may hold it."""
        return vars(self) | dict(_last=list(self._last))

    def restore(self, saved: dict[str, Any]) -> None:
        """Set what `saved` returned."""
        vars(self).update(saved | dict(_last=collections.deque(saved["_last"], maxlen=RECENT)))
