"""TOVA (arXiv 2401.06104): tokens to which the newest query attends most."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvjax.policies.budget import Budgeted
from kvjax.policy import Held, Seen


@dataclasses.dataclass(frozen=True, kw_only=True)
class TOVA(Budgeted):
    """Keeps the tokens of most attention from the newest query, the mean over the heads that share pages.

    With `groups = 1`, as in the paper, that is the mean over all heads of a layer, and all keep the same tokens. The
    newest token always stays, as in kvpress.
    """

    name: ClassVar[str] = "tova"
    in_decode: ClassVar[bool] = True
    decode_queries: ClassVar[int] = 1

    @property
    def protected(self) -> int:
        return 1

    @property
    def prompt_queries(self) -> int:
        return 1

    def slot_state(self) -> dict[str, str]:
        return dict(score="float32")

    def observe(self, held: Held, seen: Seen) -> Held:
        return dataclasses.replace(held, slots=dict(score=seen.mass))

    def rank(self, held: Held):
        return jnp.where(held.age <= 1, jnp.inf, held.slots["score"]), self.budget - 1
