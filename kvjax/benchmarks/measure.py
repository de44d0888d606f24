"""Interleaved timing, ratios of it, and the machine it ran on."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from kvjax.errors import InputError

Notify = Callable[[str], None]


def check_sizes(new_tokens: int, contexts: tuple[int, ...], batches: tuple[int, ...], repeats: int) -> None:
    """Raise InputError unless all are 1 or more, and new tokens fit into contexts that end with them."""
    given = dict(batches=batches, contexts=contexts, new_tokens=(new_tokens,), repeats=(repeats,))
    for name, numbers in given.items():
        if not numbers or min(numbers) < 1:
            raise InputError(f"{name} {', '.join(map(str, numbers))} is out of range: give 1 or more")
    if min(contexts) <= new_tokens:
        raise InputError(
            f"context {min(contexts)} is too small: it ends with the {new_tokens} new tokens that are measured; give a "
            "larger context or fewer new tokens"
        )


def interleaved(engines: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run all engines once to warm up, then in turns; returns what each measured.

    Args:
        engines: each returns the seconds of one measurement.
        repeats: rounds A, B, ..., A, B, ...: what disturbs the machine disturbs all of them.
    """
    for run in engines.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, run in engines.items():
            seconds[name].append(run())
    return seconds


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of measurements that were neighbours."""
    return statistics.median(time / other for time, other in zip(times, others, strict=True))


def row(engine: str, batch: int, context: int, seconds: Sequence[float], tokens: int) -> dict[str, Any]:
    """Return one row of the report.

    Args:
        engine: its name.
        batch, context: sequences, and tokens of each in the cache at the end.
        seconds: one measurement a repeat.
        tokens: tokens of one sequence in a measurement; ms_per_token is the time between two of its tokens.
    """
    middle = statistics.median(seconds)
    return dict(
        engine=engine,
        batch=batch,
        context=context,
        ms_per_token=round(middle / tokens * 1e3, 4),
        tokens_per_s=round(batch * tokens / middle, 3),
        spread=round((max(seconds) - min(seconds)) / middle, 3),
    )


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Describe the machine as it is before the measurement: processor, cores, load and versions."""
    return dict(
        cpu=_cpu_model(),
        cores=cores(),
        load=[round(load, 2) for load in os.getloadavg()],
        platform=jax.default_backend(),
        device=jax.devices()[0].device_kind,
        python=platform.python_version(),
        jax=jax.__version__,
    )


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
