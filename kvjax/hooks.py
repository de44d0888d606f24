"""What the hooks of a policy return, checked while a step is traced: a user's policy is told what it does wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from kvjax.errors import InputError, shown
from kvjax.policy import Held, Policy, Seen


def written(policy: Policy, k: Array, v: Array, kinds: Array | None, slots: Mapping[str, Array]) -> dict[str, Array]:
    """Return what `policy.write` says of tokens, arrays [tokens, groups] by names of `slots`."""
    return _arrays(policy, "write", policy.write(k, v, kinds), {name: k.shape[:2] for name in slots}, all_of_them=False)


def observed(policy: Policy, held: Held, seen: Seen) -> Held:
    """Return what `policy.observe` makes of what a layer holds."""
    found = policy.observe(held, seen)
    if not isinstance(found, Held):
        raise _wrong(policy, "observe", f"{shown(found)}: give a kvjax.policy.Held")
    for name in ("slots", "rows"):
        given, before = getattr(found, name), getattr(held, name)
        _arrays(policy, "observe", given, {key: of.shape for key, of in before.items()}, all_of_them=True)
    return found


def settled(policy: Policy, rows: dict[str, Array], ends: Bool[Array, " seqs"], layers: list[int]) -> dict[str, Array]:
    """Return what `policy.settle` makes of the state of rows."""
    shapes = {name: of.shape for name, of in rows.items()}
    return _arrays(policy, "settle", policy.settle(rows, ends, layers), shapes, all_of_them=True)


def ranked(policy: Policy, held: Held) -> tuple[Float32[Array, "*rows slots"], Int32[Array, ...]]:
    """Return what `policy.rank` says: float32 ranks of slots, and how many of the finite ones are allowed."""
    found, shape = policy.rank(held), held.positions.shape
    if not isinstance(found, tuple) or len(found) != 2:
        raise _wrong(policy, "rank", f"{shown(found)}: give ranks, and how many tokens are allowed")
    rank, allowed = found
    if not _is(rank, jnp.floating) or rank.shape != shape:
        raise _wrong(policy, "rank", f"{_said(rank)} for ranks: give float32 {list(shape)}")
    if not (isinstance(allowed, int) or _is(allowed, jnp.integer)) or isinstance(allowed, bool):
        raise _wrong(policy, "rank", f"{_said(allowed)} for what is allowed: give a whole number, or one for each row")
    return rank.astype(jnp.float32), jnp.asarray(allowed, jnp.int32)


def _arrays(
    policy: Policy, hook: str, found: Any, shapes: Mapping[str, tuple[int, ...]], *, all_of_them: bool
) -> dict[str, Array]:
    if not isinstance(found, Mapping):
        raise _wrong(policy, hook, f"{shown(found)}: give arrays by name")
    names = set(shapes) if all_of_them else set(shapes) & set(found)
    if set(found) != names:
        raise _wrong(policy, hook, f"arrays {sorted(found)}: its state has {sorted(shapes)}")
    for name, of in found.items():
        if not isinstance(of, Array) or of.shape != shapes[name]:
            raise _wrong(policy, hook, f"{_said(of)} for {name}: give {list(shapes[name])}")
    return dict(found)


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, Array) and jnp.issubdtype(value.dtype, kind)


def _said(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Array) else shown(value)


def _wrong(policy: Policy, hook: str, what: str) -> InputError:
    return InputError(f"{hook} of policy {policy.name} returned {what}")
