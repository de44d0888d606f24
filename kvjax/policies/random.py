"""Tokens at random: the control that every other policy must beat."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from kvjax.errors import whole_number
from kvjax.policies.budget import Budgeted
from kvjax.policy import Held


@dataclasses.dataclass(frozen=True, kw_only=True)
class Random(Budgeted):
    """Keeps the first `sinks` tokens, the newest `recent`, and others at random.

    Attributes:
        recent: half of what the budget leaves beside the sinks by default: what prose needs, so that policies must
            choose better than chance to beat it.
        seed: of the choice, which depends on it, the row and the step alone.
    """

    name: ClassVar[str] = "random"
    in_decode: ClassVar[bool] = True
    sinks: int = 4
    recent: int | None = None
    seed: int = 0

    def __post_init__(self):
        least = dict(sinks=0, seed=0) | ({} if self.recent is None else dict(recent=1))
        for name, lowest in least.items():
            object.__setattr__(self, name, whole_number(name, getattr(self, name), lowest))
        super().__post_init__()

    @property
    def protected(self) -> int:
        return self.sinks + self._newest

    @property
    def _newest(self) -> int:
        return max((self.budget - self.sinks) // 2, 1) if self.recent is None else self.recent

    def rank(self, held: Held):
        rows = held.positions.shape[:-1]
        step = jnp.broadcast_to(held.next_position, rows).reshape(-1)
        key = jax.random.key(self.seed)
        keys = jax.vmap(lambda row, step: jax.random.fold_in(jax.random.fold_in(key, row), step))(
            held.number.reshape(-1), step
        )
        drawn = jax.vmap(lambda key: jax.random.uniform(key, held.positions.shape[-1:]))(keys)
        stays = (held.age <= self._newest) | (held.place < self.sinks)
        return jnp.where(stays, jnp.inf, drawn.reshape(held.positions.shape)), self.budget - self.protected
