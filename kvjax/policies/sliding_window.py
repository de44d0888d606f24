"""A sliding window in layers that were trained without one: the baseline that StreamingLLM betters."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvjax.errors import whole_number
from kvjax.policy import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindow(Policy):
    """A query sees itself and the `window - 1` tokens before it, in every layer without a window of its own.

    Pages that the window has passed are given back. Positions stay what they are.
    """

    name: ClassVar[str] = "sliding_window"
    window: int

    def __post_init__(self):
        object.__setattr__(self, "window", whole_number("window", self.window, 1))

    @property
    def window_size(self) -> int:
        return self.window
