"""A picture of quality against bytes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvjax.errors import InputError


def require_picture(path: str) -> None:
    """Raise InputError unless `draw` will be able to write a picture there: found out before a long run."""
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row in report["rows"]:
        point = row["bytes_ratio"], max(row["kl"], 1e-8)
        axes.plot(*point, "o" if row["stored"] else "x")
        axes.annotate(row["format"], point, xytext=(5, 5), textcoords="offset points")
    axes.set(
        yscale="log", xlabel="bytes of keys and values / those of bfloat16, scales included",
        ylabel="KL(float32 pages || format), nats a token", title=f"{report['model']}, context {report['context']}",
    )  # fmt: skip
    axes.margins(0.2)
    axes.grid(which="both", alpha=0.2)
    figure.savefig(path, dpi=150)
