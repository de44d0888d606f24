"""Speed of the attention kernels on a GPU: checked first, then beside other ways and what the machine can do."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from kvjax.benchmarks.kernel_cases import Case, case_of, ragged_case, reference_output, samples
from kvjax.benchmarks.kernel_contenders import HOPPER, XLA, Contender
from kvjax.benchmarks.kernel_rates import Rates
from kvjax.benchmarks.measure import Notify, interleaved
from kvjax.kernels.shapes import ATTENTION_SHAPES, AttentionShape

# More than the second-level cache holds is read before the same pages are read again.
_CACHE_BYTES, _MOST_LAYERS = 200e6, 32
_TOLERANCE = 0.03  # of outputs of about 1, in bfloat16
_MEASUREMENT_S, _MOST_LAUNCHES = 0.02, 512
_OWN = (HOPPER, XLA)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure: shapes in the order of their importance, measurements of each, and seconds for all."""

    shapes: tuple[AttentionShape, ...]
    repeats: int = 7
    budget_s: float = 480


def benchmark_shapes() -> tuple[AttentionShape, ...]:
    """The production shapes with short contexts and whole prompts; one of each kind comes first."""
    llama = ATTENTION_SHAPES[0]
    more = (
        dataclasses.replace(llama, batch=64, context=512),
        dataclasses.replace(llama, batch=4, context=4096, queries=4096),
    )
    first: dict[tuple[Any, ...], AttentionShape] = {}
    for shape in (*more, *ATTENTION_SHAPES):
        first.setdefault((shape.kernel, shape.head_dim, shape.context >= 4096), shape)
    return tuple(dict.fromkeys((*more, *first.values(), *ATTENTION_SHAPES)))


def flops(shape: AttentionShape) -> int:
    """Floating-point operations of both products over what every query sees; all queries stand at the end."""
    ends = range(shape.context - shape.queries + 1, shape.context + 1)
    seen = sum(min(end, shape.window) if shape.window else end for end in ends)
    return 4 * shape.batch * shape.heads * shape.head_dim * seen


def run(settings: Settings, contenders: Sequence[Contender], rates: Rates, notify: Notify) -> dict[str, Any]:
    """Measure until all shapes are done, or the next might not end within the budget.

    Returns: `{"benchmark", "rates", "rows", "summary", "left_out"}`.
    """
    began, longest = time.perf_counter(), 0.0
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for shape in settings.shapes:
        spent = time.perf_counter() - began
        if spent + longest > settings.budget_s:
            left_out.append(shape.label)
            continue
        notify(f"{spent:.0f} s: {shape.kernel}, {shape.label}")
        rows += measure(shape, contenders, rates, settings.repeats)
        longest = max(longest, time.perf_counter() - began - spent)
    return dict(
        benchmark="kernels", rates=dataclasses.asdict(rates), rows=rows, summary=summary(rows), left_out=left_out
    )


def measure(shape: AttentionShape, contenders: Sequence[Contender], rates: Rates, repeats: int) -> list[dict[str, Any]]:
    """Check all contenders at one shape, measure those that are right, and return a row for each."""
    case = case_of(shape, layers=min(max(math.ceil(_CACHE_BYTES / shape.bytes_moved), 1), _MOST_LAYERS))
    rows = {contender.name: _row(shape, contender.name) for contender in contenders}
    ready: dict[str, tuple[Contender, Any]] = {}
    programs: dict[str, Any] = {}
    for contender in contenders:
        row = rows[contender.name]
        try:
            if contender.name in _OWN:
                _require(ragged_error(contender, _kind(shape)))
            arrays = contender.prepare(case)
            lowered = jax.jit(_one_launch(shape, contender)).lower(arrays, case.q)
            ready[contender.name], programs[contender.name] = (contender, arrays), lowered
        except Exception as error:
            _refuse(row, error, contender.name)
    programs = _compiled(programs, rows)
    for name in list(programs):
        _check(rows[name], case, ready[name], programs[name])
    singles = {
        name: _seconds(program, ready[name][1], case.q) for name, program in programs.items() if _good(rows[name])
    }
    for name, times in interleaved(singles, repeats).items():
        rows[name]["single_us"] = round(statistics.median(times) * 1e6, 2)
        if (planner := ready[name][0].planner) is not None:
            planned = interleaved(dict(plan=_seconds(planner(case))), repeats)["plan"]
            rows[name]["plan_us"] = round(statistics.median(planned) * 1e6, 2)
    loops, counts = {}, {}
    for name in singles:
        counts[name] = _launches(rows[name]["single_us"] / 1e6, case.layers)
        loops[name] = jax.jit(_loop(shape, ready[name][0], case.layers, counts[name])).lower(ready[name][1], case.q)
    loops = {name: _seconds(loop, ready[name][1], case.q) for name, loop in _compiled(loops, rows).items()}
    for name, times in interleaved(loops, repeats).items():
        _add_figures(rows[name], shape, [of / counts[name] for of in times], rates)
    return list(rows.values())


def _row(shape: AttentionShape, name: str) -> dict[str, Any]:
    return dict(
        kernel=shape.kernel, shape=shape.label, batch=shape.batch, context=shape.context, window=shape.window,
        contender=name, bytes=shape.bytes_moved, flops=flops(shape), max_error=None, plan_us=None, single_us=None,
        us=None, spread=None, gb_s=None, share_of_copy=None, tflops=None, share_of_matmul=None, reason=None,
        is_fault=False,
    )  # fmt: skip


def _refuse(row: dict[str, Any], error: Exception, name: str) -> None:
    """Note why there are no figures; it is a fault if the library's own code is what fails."""
    row["reason"] = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
    row["is_fault"] = name in _OWN


def _good(row: dict[str, Any]) -> bool:
    return row["reason"] is None


def _compiled(lowered: dict[str, Any], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compile all programs at once; those that fail are left out, with the reason in their rows."""
    compiled = {}
    with ThreadPoolExecutor(max(len(lowered), 1)) as pool:
        futures = {name: pool.submit(program.compile) for name, program in lowered.items()}
    for name, future in futures.items():
        try:
            compiled[name] = future.result()
        except Exception as error:
            _refuse(rows[name], error, name)
    return compiled


def _check(row: dict[str, Any], case: Case, ready: tuple[Contender, Any], program: Any) -> None:
    """Compare some outputs of the program that will be timed with float64 products over the pages themselves."""
    try:
        out = np.asarray(program(ready[1], case.q), np.float64)
    except Exception as error:
        _refuse(row, error, ready[0].name)
        return
    row["max_error"] = max(float(np.abs(out[token, head] - wanted).max()) for token, head, wanted in samples(case))
    try:
        _require(row["max_error"])
    except ValueError as error:
        _refuse(row, error, ready[0].name)


def _require(error: float) -> None:
    if not error <= _TOLERANCE:
        raise ValueError(f"wrong: outputs differ from the oracle's by {error:.3g}")


def _kind(shape: AttentionShape) -> AttentionShape:
    """The shape without what makes no other kernel of it; its window small enough for short sequences."""
    window = shape.window and 2 * shape.page_size + 1
    return dataclasses.replace(shape, name="", batch=1, context=2, queries=min(shape.queries, 2), window=window)


@functools.cache
def ragged_error(contender: Contender, shape: AttentionShape) -> float:
    """Return the largest error of one of the library's contenders against `reference` at lengths around page edges."""
    case = ragged_case(shape)
    program = jax.jit(_one_launch(case.shape, contender))
    out = np.asarray(program(contender.prepare(case), case.q), np.float64)
    return float(np.abs(out - reference_output(case)).max())


def _seconds(program: Any, *arguments: Any) -> Callable[[], float]:
    def once() -> float:
        began = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        return time.perf_counter() - began

    return once


def _launches(single_s: float, layers: int) -> int:
    """Launches of one measurement: whole rounds over the layers, of about _MEASUREMENT_S."""
    wanted = min(_MEASUREMENT_S / max(single_s, 1e-9), _MOST_LAUNCHES)
    return layers * max(round(wanted / layers), 1)


def _one_launch(shape: AttentionShape, contender: Contender) -> Callable[..., Any]:
    return lambda arrays, q: contender.attend(shape, arrays, q, 0)


def _loop(shape: AttentionShape, contender: Contender, layers: int, launches: int) -> Callable[..., Any]:
    """A program of many launches, each with the outputs of the last as its queries, so that none can be left out.

    The number of iterations is known when it is compiled: otherwise the host would be asked before each.
    """

    def run(arrays, q):
        def one(i, q):
            return contender.attend(shape, arrays, q, i % layers).astype(q.dtype)

        def one_round(_, q):
            return functools.reduce(lambda q, layer: one(layer, q), range(layers), q)

        if contender.takes_traced_layers:
            return jax.lax.fori_loop(0, launches, one, q)
        return jax.lax.fori_loop(0, launches // layers, one_round, q)

    return run


def _add_figures(row: dict[str, Any], shape: AttentionShape, seconds: list[float], rates: Rates) -> None:
    middle = statistics.median(seconds)
    speed, work = shape.bytes_moved / middle, flops(shape) / middle
    row |= dict(
        us=round(middle * 1e6, 3),
        spread=round((max(seconds) - min(seconds)) / middle, 3),
        gb_s=round(speed / 1e9, 1),
        share_of_copy=round(speed / rates.copy_bytes_per_s, 3),
        tflops=round(work / 1e12, 2),
        share_of_matmul=round(work / rates.matmul_flops_per_s, 3),
    )


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst shares of the kernel for Hopper, and the shapes at which something else is faster or it is wrong."""
    own = [row for row in rows if row["contender"] == HOPPER and row["us"] is not None]
    decode = [row for row in own if row["kernel"] == "decode" and not row["window"]]
    times = {row["shape"]: row["us"] for row in own}
    return dict(
        decode_share_of_copy_4k=_least(row["share_of_copy"] for row in decode if row["context"] >= 4096),
        decode_share_of_copy_512=_least(row["share_of_copy"] for row in decode if row["context"] == 512),
        prefill_share_of_matmul=_least(row["share_of_matmul"] for row in own if row["kernel"] == "prefill"),
        faster=[
            f"{row['contender']}: {row['shape']}"
            for row in rows
            if row["contender"] not in _OWN and row["us"] is not None and row["us"] < times.get(row["shape"], 0)
        ],
        faults=[f"{row['contender']}: {row['shape']}: {row['reason']}" for row in rows if row["is_fault"]],
    )


def _least(shares) -> float | None:
    return min(shares, default=None)
