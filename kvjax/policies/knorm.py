"""Key norms (arXiv 2406.11430): tokens with small keys, which attract attention."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax.errors import whole_number
from kvjax.policies.budget import ByHead
from kvjax.policy import Held


@dataclasses.dataclass(frozen=True, kw_only=True)
class KNorm(ByHead):
    """Keeps the tokens of the smallest key norms; kvpress's KnormPress.

    Attributes:
        recent: newest tokens that stay. kvpress compresses prompts alone and protects none (`recent=0`); where decode
            drops tokens too, half the budget keeps far more of the quality (docs/kvpress.md).
    """

    name: ClassVar[str] = "knorm"
    in_decode: ClassVar[bool] = True
    recent: int = 1

    def __post_init__(self):
        object.__setattr__(self, "recent", whole_number("recent", self.recent, 0))
        super().__post_init__()

    @property
    def protected(self) -> int:
        return self.recent

    def slot_state(self) -> dict[str, str]:
        return dict(score="float32")

    def write(self, k, v, kinds):
        return dict(score=-jnp.linalg.norm(k.astype(jnp.float32), axis=-1).mean(-1))

    def rank(self, held: Held):
        return jnp.where(held.age <= self.recent, jnp.inf, held.slots["score"]), self.budget - self.recent
