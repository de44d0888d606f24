"""A roofline picture of a report of the kernels: operations a second over operations a byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.errors import InputError, shown


def points(report: dict[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Return for every contender that was measured its operations a byte, and its TFLOP/s.

    Raises: InputError if it is no report of `kvjax benchmark-kernels`.
    """
    try:
        rows = [row for row in report["rows"] if row["us"] is not None]
        found = {row["contender"]: ([], []) for row in rows}
        for row in rows:
            of_contender = found[row["contender"]]
            of_contender[0].append(row["flops"] / row["bytes"])
            of_contender[1].append(float(row["tflops"]))
        return found
    except (KeyError, TypeError):
        raise InputError(f"{shown(report)} is no report of kvjax benchmark-kernels") from None


def roof(report: dict[str, Any], intensities: Sequence[float]) -> list[float]:
    """Return the most TFLOP/s at each number of operations a byte: what the copy or the product rate allows."""
    rates = report["rates"]
    return [min(rates["copy_bytes_per_s"] * x, rates["matmul_flops_per_s"]) / 1e12 for x in intensities]


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the picture into a file, whose ending gives its kind (png, svg, pdf).

    Raises: InputError if matplotlib is missing, cannot write such a file or if it is no report.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError('a picture needs matplotlib, which is not installed: pip install "kvjax[plots]"') from None
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    measured = points(report)
    everywhere = [x for of in measured.values() for x in of[0]] or [1.0]
    ends = [min(everywhere) / 2, report["rates"]["matmul_flops_per_s"] / report["rates"]["copy_bytes_per_s"]]
    ends.append(max(2 * ends[1], 2 * max(everywhere)))
    axes.plot(ends, roof(report, ends), color="black", label="copy rate and rate of products, measured")
    for (name, (x, y)), marker in zip(measured.items(), "os^vDPX*", strict=False):
        axes.plot(x, y, marker, label=name, alpha=0.7)
    axes.set(xscale="log", yscale="log", xlabel="operations / byte that must be moved", ylabel="TFLOP/s")
    axes.set_title(report.get("machine", {}).get("device", ""))
    axes.grid(which="both", alpha=0.2)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise InputError(f"cannot draw into {path}: {error}") from None
