"""The formats benchmark: time of a decode step with pages in each format, against float32 pages and against another
engine's quantised cache."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvjax.benchmarks.loops import PagedEngine, Point
from kvjax.benchmarks.measure import Notify, check_sizes, cores, interleaved, machine, ratio, row
from kvjax.benchmarks.peers import Peer, PeerError
from kvjax.errors import InputError
from kvjax.formats import best_page_size, canonical_format
from kvjax.models.decoder import Decoder

BASE = "float32"
FORMATS = (BASE, "bfloat16", "int8", "fp8_e4m3", "int4_hadamard", "int4")
_PEER, _CACHE, _MODEL = "transformers", "hqq-4bit", "smollm2-135m"
# Idle workers may spin for a moment before they sleep, which would slow down whoever comes next.
_PAUSE_S = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        model: its name, to know whether the peer has the same.
        dtype: of weights and computation.
        formats: page formats; float32 comes first whether it is named or not.
        batches: sequences, all of them are measured.
        context: tokens of a sequence at the end.
        new_tokens: decode steps of one measurement.
        repeats: measurements of each format, in turns.
        peers: compare with the 4-bit QuantizedCache of transformers too.

    Raises: InputError for a number out of range, and for a name that is no page format.
    """

    model: str = _MODEL
    dtype: str = "float32"
    formats: tuple[str, ...] = FORMATS
    batches: tuple[int, ...] = (1, 8)
    context: int = 1024
    new_tokens: int = 32
    repeats: int = 5
    peers: bool = False

    def __post_init__(self):
        check_sizes(self.new_tokens, (self.context,), self.batches, self.repeats)
        names = [canonical_format(name) for name in self.formats]
        object.__setattr__(self, "formats", tuple(dict.fromkeys((BASE, *names))))


def run(model: Decoder, settings: Settings, notify: Notify) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        model: the decoder.
        settings: what to measure.
        notify: is called with a line before each part.

    Returns: `{"benchmark", "machine", "rows", "summary", "peers"}`; rows carry `ratio`, the time over that of float32
        pages, and `ratio_range`, the least and the greatest of the pairs; the summary has them by format and batch,
        and with a peer its time over that of each 4-bit format.
    """
    about, rows, summary = machine(), [], {}
    with _peer(settings, notify) as (peer, peers):
        for batch in settings.batches:
            notify(f"batch {batch}, context {settings.context}: compiling {len(settings.formats)} programs")
            engines = _engines(model, settings, batch, peer)
            notify(f"batch {batch}: measuring")
            times = interleaved(engines, settings.repeats)
            for name, seconds in times.items():
                pairs = [a / b for a, b in zip(seconds, times[BASE], strict=True)]
                measured = row(name, batch, settings.context, seconds, settings.new_tokens)
                over = dict(ratio=round(ratio(seconds, times[BASE]), 3), ratio_range=_range(pairs))
                rows.append(measured | over)
            ratios = {f"{name}_over_{BASE}_b{batch}": ratio(times[name], times[BASE]) for name in settings.formats[1:]}
            if peer is not None:
                theirs = times[_label(peer)]
                packed = [name for name in settings.formats if name.startswith("int4")]
                ratios |= {f"{_PEER}_{_CACHE}_over_{name}_b{batch}": ratio(theirs, times[name]) for name in packed}
            summary |= {name: round(value, 4) for name, value in ratios.items()}
    return dict(benchmark="formats", machine=about, rows=rows, summary=summary, peers=peers)


def _range(pairs: list[float]) -> list[float]:
    return [round(min(pairs), 3), round(max(pairs), 3)]


def _engines(model: Decoder, settings: Settings, batch: int, peer: Peer | None) -> dict[str, Callable[[], float]]:
    """What measures the last steps up to the context: pages in every format, and the peer."""
    engines: dict[str, Callable[[], float]] = {}
    for name in settings.formats:
        point = Point(
            batch=batch, context=settings.context, steps=settings.new_tokens, dtype=name,
            page_size=best_page_size(name),
        )  # fmt: skip
        engines[name] = _rested(PagedEngine(model, point), peer)
    if peer is not None:
        # The prompt gives the first token, so there is one step less than tokens.
        prompt, tokens = settings.context - settings.new_tokens, settings.new_tokens + 1
        theirs = lambda: peer.decode(batch, prompt, tokens, cache=_CACHE)  # noqa: E731
        engines[_label(peer)] = _rested(theirs, peer)
    return engines


def _rested(measure: Callable[[], float], peer: Peer | None) -> Callable[[], float]:
    """Measure after a pause where a peer runs too."""
    if peer is None:
        return measure

    def rested() -> float:
        time.sleep(_PAUSE_S)
        return measure()

    return rested


def _label(peer: Peer) -> str:
    return f"{peer.engine}: {_CACHE}"


@contextlib.contextmanager
def _peer(settings: Settings, notify: Notify) -> Iterator[tuple[Peer | None, dict[str, Any]]]:
    """The peer if it is asked for, set up and comparable, and what the report says of it."""
    with Peer(_PEER, threads=cores()) as peer:
        missing = {_PEER: {"command": peer.how_to_install()}}
        if not settings.peers:
            yield None, missing
        elif (settings.model, settings.dtype) != (_MODEL, "float32"):
            notify(f"the peer runs {_MODEL} in float32 only: not compared")
            yield None, missing
        elif not peer.available():
            notify(f"peer {_PEER} is not set up: {peer.how_to_install()}")
            yield None, missing
        else:
            notify(f"starting {_PEER}")
            peer.start()
            _check_cache(peer)
            yield peer, {_PEER: {"engine": peer.engine, "cache": _CACHE}}


def _check_cache(peer: Peer) -> None:
    """Try the quantised cache, which an environment of an earlier setup lacks."""
    try:
        peer.decode(1, 8, 2, cache=_CACHE)
    except PeerError as error:
        raise InputError(f"{error}; run in the repository: {peer.how_to_install()}, or leave out --peers") from error
