"""The decode benchmark: time per token of the paged cache against a contiguous one and against other engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.benchmarks import against_peers
from kvjax.benchmarks.loops import ContiguousEngine, PagedEngine, Point
from kvjax.benchmarks.measure import Notify, check_sizes, interleaved, machine, ratio, row
from kvjax.benchmarks.memory import slots_used_share
from kvjax.models.decoder import Decoder

LARGER = 16
_POOL, _TABLE = f"paged, pool x{LARGER}", f"paged, page table x{LARGER}"
SUMMARY = (
    "paged_over_contiguous_b1", "paged_over_contiguous_b8", "pool16_over_pool1", "table16_over_table1",
    "slots_used_share", "vs_transformers_b1", "vs_transformers_b8", "prefill_vs_transformers", "vs_openvino_b1",
    "vs_openvino_b8",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        model: its name, for the report and to know whether the peers have the same.
        dtype: of computation and pages.
        batches, contexts: every pair is measured; the context is the tokens of a sequence at the end.
        new_tokens: decode steps of one measurement.
        repeats: measurements of each engine, in turns.
        peers: compare with other engines too.

    Raises: InputError for a number out of range.
    """

    model: str = "smollm2-135m"
    dtype: str = "float32"
    batches: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = (128, 1024)
    new_tokens: int = 32
    repeats: int = 5
    peers: bool = False

    def __post_init__(self):
        check_sizes(self.new_tokens, self.contexts, self.batches, self.repeats)


def run(model: Decoder, settings: Settings, notify: Notify) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        model: the decoder.
        settings: what to measure.
        notify: is called with a line before each part.

    Returns: `{"benchmark", "machine", "rows", "summary", "peers"}`; what was not measured is None in the summary.
    """
    summary: dict[str, float | None] = dict.fromkeys(SUMMARY)
    about = machine()
    notify("slots used")
    summary["slots_used_share"] = slots_used_share()
    rows: list[dict[str, Any]] = []
    worst: dict[str, float] = {}
    for batch in settings.batches:
        for context in settings.contexts:
            notify(f"batch {batch}, context {context}")
            point = Point(batch=batch, context=context, steps=settings.new_tokens, dtype=settings.dtype)
            times = interleaved(_engines(model, point, context == min(settings.contexts)), settings.repeats)
            rows += [row(name, batch, context, seconds, point.steps) for name, seconds in times.items()]
            for key, value in _ratios(times, batch).items():
                worst[key] = max(worst.get(key, 0.0), value)
    summary |= {key: value for key, value in worst.items() if key in SUMMARY}
    peers = against_peers.not_compared()
    if settings.peers:
        more, versus, peers = against_peers.compare(
            model, settings.model, settings.dtype, settings.batches, settings.repeats, notify
        )
        rows += more
        summary |= {key: value for key, value in versus.items() if key in SUMMARY}
    rounded = {key: None if value is None else round(value, 4) for key, value in summary.items()}
    return dict(benchmark="decode", machine=about, rows=rows, summary=rounded, peers=peers)


def _engines(model: Decoder, point: Point, larger: bool) -> dict[str, Callable[[], float]]:
    """The engines of one point; where `larger`, also those with a larger pool and larger tables."""
    engines: dict[str, Callable[[], float]] = {
        "paged": PagedEngine(model, point),
        "contiguous": ContiguousEngine(model, point),
    }
    if larger:
        engines[_TABLE] = PagedEngine(model, point, table=LARGER)
        engines[_POOL] = PagedEngine(model, point, pool=LARGER)
    return engines


def _ratios(times: Mapping[str, list[float]], batch: int) -> dict[str, float]:
    """The ratios of one point, by their key in the summary."""
    pairs = {
        f"paged_over_contiguous_b{batch}": ("paged", "contiguous"),
        "pool16_over_pool1": (_POOL, "paged"),
        "table16_over_table1": (_TABLE, "paged"),
    }
    return {key: ratio(times[a], times[b]) for key, (a, b) in pairs.items() if a in times}
