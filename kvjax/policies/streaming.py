"""StreamingLLM (arXiv 2309.17453): the first tokens and a recent window, for streams without end."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvjax.errors import whole_number
from kvjax.policy import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streaming(Policy):
    """Keeps the first `sinks` tokens and the newest `window`, numbered by their places in the cache.

    A query sees itself, the `window - 1` tokens before it and the sinks, these as if no farther than the cache is long:
    no distance exceeds `sinks + window - 1`. What the window has passed is given back page by page.
    """

    name: ClassVar[str] = "streaming"
    window: int
    sinks: int = 4

    def __post_init__(self):
        object.__setattr__(self, "window", whole_number("window", self.window, 1))
        object.__setattr__(self, "sinks", whole_number("sinks", self.sinks, 1))

    @property
    def window_size(self) -> int:
        return self.window

    @property
    def num_sinks(self) -> int:
        return self.sinks
