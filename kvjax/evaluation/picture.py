"""Pictures of quality against bytes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvjax.errors import InputError

# What a picture of policies shows: keys of rows, whether more is better, and what to write at the axis.
_MEASURES = (
    ("ppl_ratio", -1, "perplexity / that of the full cache"),
    ("passkey", 1, "passkeys found"),
    ("copy", 1, "tokens of copies that were the likeliest"),
)


def require_picture(path: str) -> None:
    """Raise InputError unless a picture can be written there: found out before a long run."""
    if find_spec("matplotlib") is None:
        raise InputError('--plot needs matplotlib, which is not installed: pip install "kvjax[plots]"')
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = sorted(FigureCanvasAgg.get_supported_filetypes())
    if Path(path).suffix[1:].lower() not in kinds:
        raise InputError(f"--plot {path} has no ending of a picture: use one of {', '.join(kinds)}")
    is_new = not Path(path).exists()
    try:
        with Path(path).open("ab"):
            pass
        if is_new:
            Path(path).unlink()
    except OSError as error:
        raise InputError(f"cannot write --plot {path}: {error}: choose another place") from None


def draw(report: dict[str, Any], path: str) -> None:
    """Draw the rows of a report: KL over bytes, both as shares of what stands in the row, into a file."""
    figure, (axes,) = _figure(1)
    for row in report["rows"]:
        point = row["bytes_ratio"], max(row["kl"], 1e-8)
        axes.plot(*point, "o" if row["stored"] else "x")
        axes.annotate(row["format"], point, xytext=(5, 5), textcoords="offset points")
    axes.set(
        yscale="log", xlabel="bytes of keys and values / those of bfloat16, scales included",
        ylabel="KL(float32 pages || format), nats a token", title=f"{report['model']}, context {report['context']}",
    )  # fmt: skip
    figure.savefig(path, dpi=150)


def draw_policies(report: dict[str, Any], path: str) -> None:
    """Draw the rows of a report on policies into a file: each measure over bytes, and the rows that nothing betters."""
    measures = [
        (name, sign, said) for name, sign, said in _MEASURES if any(row[name] is not None for row in report["rows"])
    ]
    figure, panels = _figure(len(measures))
    for axes, (name, sign, said) in zip(panels, measures, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in report["rows"]:
            text = row["policy"] if row["budget"] is not None else row["policy"].partition(":")[0]
            lines.setdefault(text, []).append((row["bytes_ratio"], row[name]))
        for text, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=text, alpha=0.7)
        front = pareto([point for points in lines.values() for point in points], sign)
        axes.plot(*zip(*front, strict=True), "k--", linewidth=1, label="Pareto front")
        axes.set(xlabel="bytes held / those of the full cache", ylabel=said)
    panels[0].set_yscale("log")
    panels[-1].legend(fontsize="small")
    figure.suptitle(f"{report['model']}, prompts of {report['context']} tokens")
    figure.savefig(path, dpi=150)


def pareto(points: Sequence[tuple[float, float]], sign: int) -> list[tuple[float, float]]:
    """Return the points, by bytes, that no other betters in both; `sign` is 1 where more of the second is better."""
    front: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda of: (of[0], -sign * of[1])):
        if not front or sign * point[1] > sign * front[-1][1]:
            front.append(point)
    return front


def _figure(panels: int) -> tuple[Any, Sequence[Any]]:
    """A figure with as many panels side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8 if panels == 1 else 6 * panels, 5), layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(1, panels, squeeze=False)[0]
    for axes in every:
        axes.margins(0.2 if panels == 1 else 0.05)
        axes.grid(which="both", alpha=0.2)
    return figure, list(every)
