"""What rows of policies show when they are set side by side: limits reached or missed, with their figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SAVED, _LOST = 0.35, 1.05
# Figures that are better when they are larger; perplexity is better when it is smaller.
_LARGER = ("passkey", "copy")


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what can be said of the rows so far: `limit` in words, `reached`, and the figures compared.

    Args:
        rows: as `kvjax.evaluation.policies.run` reports them.
    """
    by_row = {(row["policy"], row["budget"]): row for row in rows}
    found = []
    for (text, budget), row in by_row.items():
        if text != "random" and budget is not None and (control := by_row.get(("random", budget))):
            found.append(_of_pair(f"{text} beats random at {budget:g}", row, control, least=2))
        if text == "paged_eviction" and budget == 0.5 and (other := by_row.get(("streaming", budget))):
            found.append(_no_worse(f"{text} is no worse than streaming at {budget:g}", row, other))
        if text == "entropy" and (uniform := by_row.get(("entropy:gamma=0", budget))):
            found.append(_of_pair(f"{text} beats a uniform split at {budget:g}", row, uniform, least=2))
    fastgen = [row for row in rows if row["policy"].startswith("fastgen")]
    if fastgen:
        found.append(_saving(fastgen))
    return found


def better(row: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the measures, of ppl, passkey and copy, in which a row is better than another."""
    found = ["ppl"] if row["ppl"] < other["ppl"] else []
    return found + [of for of in _LARGER if row[of] is not None and row[of] > other[of]]


def _of_pair(limit: str, row: dict[str, Any], other: dict[str, Any], least: int) -> dict[str, Any]:
    found = better(row, other)
    return dict(limit=limit, reached=len(found) >= least, better=found, worse=better(other, row))


def _no_worse(limit: str, row: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    worse = [of for of in better(other, row) if of != "copy"]
    return dict(limit=limit, reached=not worse, better=better(row, other), worse=better(other, row))


def _saving(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """FastGen's aim, and the pair that each recovery gives."""
    pairs = {row["said"]: [1 - row["bytes_ratio"], row["ppl_ratio"]] for row in rows}
    reached = any(saved >= _SAVED and lost <= _LOST for saved, lost in pairs.values())
    return dict(
        limit=f"fastgen saves {_SAVED:.0%} at {_LOST - 1:.0%} more perplexity", reached=reached,
        saved_and_ppl_ratio=pairs,
    )  # fmt: skip
