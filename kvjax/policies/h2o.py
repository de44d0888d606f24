"""H2O (arXiv 2306.14048): tokens that have received most attention so far, and recent ones."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax.errors import whole_number
from kvjax.policies.budget import ByHead
from kvjax.policy import ALL, Held, Seen, one_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class H2O(ByHead):
    """Keeps the `recent` newest tokens and, of the others, those of the largest score.

    A token's score is the attention that it has received so far, from its own query and those behind it, of all query
    heads of its KV head (their mean: the order is that of their sum), in prompts and in decode. Scores are of each
    sequence alone; the authors' code sums them over the batch.

    Attributes:
        recent: newest tokens that stay; half the budget by default.
        normalize: "sum", or "mean" to divide by the number of queries that could see the token. With `recent=0` the
            latter is kvpress's ObservedAttentionPress.
    """

    name: ClassVar[str] = "h2o"
    in_decode: ClassVar[bool] = True
    every_chunk: ClassVar[bool] = True
    decode_queries: ClassVar[int] = 1
    recent: int | None = None
    normalize: str = "sum"

    def __post_init__(self):
        recent = self.recent
        if recent is not None:
            object.__setattr__(self, "recent", whole_number("recent", recent, 0))
        one_of("normalize", self.normalize, ("sum", "mean"))
        super().__post_init__()

    @property
    def protected(self) -> int:
        return self.budget // 2 if self.recent is None else self.recent

    @property
    def prompt_queries(self) -> int:
        return ALL

    def slot_state(self) -> dict[str, str]:
        return dict(score="float32")

    def observe(self, held: Held, seen: Seen) -> Held:
        score = jnp.where(seen.is_new, 0, held.slots["score"]) + seen.mass
        return dataclasses.replace(held, slots=dict(score=score))

    def rank(self, held: Held):
        score = held.slots["score"]
        score = score / jnp.maximum(held.age, 1).astype(jnp.float32) if self.normalize == "mean" else score
        return jnp.where(held.age <= self.protected, jnp.inf, score), self.budget - self.protected
