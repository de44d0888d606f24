"""`kvjax benchmark-kernels`: speed of the attention kernels on a machine with an H100 or H200."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.cli import arguments
from kvjax.errors import InputError, whole_number

_QUICK_SHAPES, _QUICK_REPEATS = 8, 3


def main(argv: Sequence[str]) -> int:
    """Run `kvjax benchmark-kernels`.

    Returns: the exit code: 0, or 1 if one of the library's kernels is wrong or fails.

    Raises: InputError on a machine without an H100 or H200, for values out of range and for files that are no report.
    """
    args = _parser().parse_args(argv)
    if args.plot is not None:
        _require_matplotlib()
    report = _read(args.report) if args.report is not None else _measured(args)
    text = json.dumps(report, indent=2)
    if args.json not in (None, "-"):
        Path(args.json).write_text(text + "\n")
    if args.plot is not None:
        from kvjax.benchmarks.roofline import draw

        draw(report, Path(args.plot))
    print(text if args.json == "-" else _table(report))
    return 1 if report["summary"]["faults"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvjax benchmark-kernels",
        description="Check the attention kernels on an H100 or H200 against the definition, then measure them beside "
        "jax's own attention and plain XLA, and beside what the machine copies and multiplies. us is the time of one "
        "of many launches in one program, single_us that of a launch of its own, with what the host adds, plan_us that "
        "of the plan that a step makes once for all its layers; shares are of the measured rates. The exit code is 1 "
        "if a kernel of kvjax is wrong, 2 without such a GPU.",
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write the report to FILE; alone: print it as JSON"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw a roofline picture (needs the extra `plots`)")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_SHAPES} shapes, {_QUICK_REPEATS} repeats")
    parser.add_argument("--repeats", type=int, metavar="N", help="measurements of each (default: 7)")
    parser.add_argument(
        "--budget", type=int, default=420, metavar="SECONDS",
        help="begin no shape that might end later; the most important come first (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--report", metavar="FILE", help="print and draw a report that --json wrote; measure nothing")
    return parser


def _require_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise InputError('--plot needs matplotlib, which is not installed: pip install "kvjax[plots]"')


def _read(path: str) -> dict[str, Any]:
    from kvjax.benchmarks.roofline import points

    try:
        report = json.loads(Path(path).read_text())
    except ValueError as error:
        raise InputError(f"--report {path} is no JSON: {error}") from None
    try:
        points(report)
        _table(report)
        len(report["summary"]["faults"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise InputError(f"--report {path} is no report of kvjax benchmark-kernels") from None
    return report


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    repeats = args.repeats if args.repeats is not None else _QUICK_REPEATS if args.quick else 7
    repeats, budget = whole_number("--repeats", repeats, 1), whole_number("--budget", args.budget, 1)
    device = _hopper()
    # Late, so that --help and a wrong flag cost no start of JAX.
    from kvjax.benchmarks import kernels
    from kvjax.benchmarks.kernel_contenders import contenders
    from kvjax.benchmarks.kernel_rates import measure_rates
    from kvjax.benchmarks.measure import machine

    about = machine()
    arguments.progress("copies and products")
    shapes = kernels.benchmark_shapes()[: _QUICK_SHAPES if args.quick else None]
    settings = kernels.Settings(shapes, repeats, budget)
    return dict(machine=about) | kernels.run(settings, contenders(device), measure_rates(), arguments.progress)


def _hopper() -> str:
    """Return the kind of this machine's GPU. Raises InputError if there is none or if it is no Hopper."""
    import jax

    import kvjax

    try:
        device = jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # the second where JAX_PLATFORMS names what is not installed
        raise InputError(f"this benchmark needs an H100 or H200, and jax finds no device: {error}") from None
    spec = kvjax.CacheSpec(
        num_layers=1, num_kv_heads=8, head_dim=128, num_pages=2, max_seqs=1, pages_per_seq=1, max_query_length=1
    )
    reasons = dict(kvjax.explain(spec, 32, device.device_kind))
    if not reasons["hopper"].startswith("runs"):
        raise InputError(f"this benchmark needs an H100 or H200: {reasons['hopper']}")
    return device.device_kind


def _table(report: dict[str, Any]) -> str:
    """The report for readers."""
    rates = report["rates"]
    lines = [
        f"{report.get('machine', {}).get('device', 'a device')}: copies {rates['copy_bytes_per_s'] / 1e9:.0f} GB/s, "
        f"products {rates['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s in bfloat16"
    ]
    shape = None
    for row in report["rows"]:
        if row["shape"] != shape:
            shape = row["shape"]
            lines += ["", f"{row['kernel']}, {shape}"]
        lines.append(f"  {row['contender']:<30}" + (_figures(row) if row["us"] is not None else row["reason"]))
    lines += ["", *(f"left out, as the time was over: {label}" for label in report["left_out"])]
    lines += [f"{name:<28}{_said(value)}" for name, value in report["summary"].items()]
    return "\n".join(lines)


def _figures(row: dict[str, Any]) -> str:
    return (
        f"{row['us']:>11.2f} us {row['single_us']:>11.2f} us alone"
        f"{row['gb_s']:>9.1f} GB/s {row['share_of_copy']:>6.1%} of copy"
        f"{row['tflops']:>8.1f} TFLOP/s {row['share_of_matmul']:>6.1%} of products"
    )


def _said(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(value) or "nothing"
    return "not measured" if value is None else f"{value:.1%}"
