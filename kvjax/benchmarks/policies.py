"""The policies benchmark: time of a decode step of a cache that a policy keeps full, against one that keeps all."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.benchmarks.loops import PagedEngine, Point
from kvjax.benchmarks.measure import Notify, check_sizes, interleaved, machine, ratio, row
from kvjax.models.decoder import Decoder
from kvjax.policies import parse_policy
from kvjax.policy import Policy

BASE = "full"
POLICIES = (
    BASE, "streaming", "h2o:heads=mean", "tova", "knorm:heads=mean", "random", "h2o", "knorm",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        policies: as `--policy` takes them; where one names no budget or window, steps see `context` tokens. "full" is
            measured first, whether it is named or not.
        dtype: of weights, computation and pages.
        batches: sequences, all of them are measured.
        context: tokens that a sequence holds.
        new_tokens: decode steps of one measurement.
        repeats: measurements of each policy, in turns.

    Raises: InputError for a number out of range, and for a text that is no policy.
    """

    policies: tuple[str, ...] = POLICIES
    dtype: str = "float32"
    batches: tuple[int, ...] = (1, 8)
    context: int = 1024
    new_tokens: int = 32
    repeats: int = 5

    def __post_init__(self):
        check_sizes(self.new_tokens, (self.context,), self.batches, self.repeats)
        object.__setattr__(self, "policies", tuple(dict.fromkeys((BASE, *self.policies))))
        for text in self.policies:
            self.policy(text)

    def policy(self, text: str) -> Policy:
        """The policy that a text stands for, with room for a step to see the context, its own token included."""
        sinks = parse_policy(text, budget=self.context - 1, window=1).num_sinks
        return parse_policy(text, budget=self.context - 1, window=self.context - sinks)


def run(model: Decoder, settings: Settings, notify: Notify) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        model: the decoder.
        settings: what to measure.
        notify: is called with a line before each part.

    Returns: `{"benchmark", "machine", "rows", "summary", "peers"}`; rows carry `ratio`, the time over that of a cache
        that keeps all, and the summary has it by policy and batch.
    """
    about, rows, summary = machine(), [], {}
    for batch in settings.batches:
        notify(f"batch {batch}, context {settings.context}: compiling {len(settings.policies)} programs")
        point = Point(batch=batch, context=settings.context, steps=settings.new_tokens, dtype=settings.dtype)
        engines = {
            text: PagedEngine(model, dataclasses.replace(point, policy=settings.policy(text)))
            for text in settings.policies
        }
        notify(f"batch {batch}: measuring")
        times = interleaved(engines, settings.repeats)
        for text, seconds in times.items():
            measured = row(text, batch, settings.context, seconds, settings.new_tokens)
            rows.append(measured | dict(ratio=round(ratio(seconds, times[BASE]), 3)))
        others = settings.policies[1:]
        summary |= {f"{text}_over_{BASE}_b{batch}": round(ratio(times[text], times[BASE]), 4) for text in others}
    return dict(benchmark="policies", machine=about, rows=rows, summary=summary, peers={})
