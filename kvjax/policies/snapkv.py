"""SnapKV (arXiv 2404.14469): of a prompt, the tokens to which its last queries attend, and their neighbours."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from kvjax.errors import InputError, whole_number
from kvjax.policies.budget import ByHead, no_chunks
from kvjax.policy import Held, Seen


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKV(ByHead):
    """Compresses a prompt at its end to `budget` tokens; what is generated is added to them.

    The last `observation` tokens stay. Of the others those of the largest attention from these stay, averaged over
    `kernel` neighbours (zeros beyond the ends, as torch's avg_pool1d counts them).

    Attributes:
        observation: the paper's window of observation; a prompt's last chunk must hold it.
        kernel: odd; kvpress has 5.
    """

    name: ClassVar[str] = "snapkv"
    observation: int = 32
    kernel: int = 7

    def __post_init__(self):
        object.__setattr__(self, "observation", whole_number("observation", self.observation, 1, 2**14))
        object.__setattr__(self, "kernel", whole_number("kernel", self.kernel, 1, 2**10))
        if self.kernel % 2 == 0:
            raise InputError(f"kernel {self.kernel} is even: give an odd number, so that it has a middle")
        super().__post_init__()
        if self.in_chunks:
            raise no_chunks(self)

    @property
    def protected(self) -> int:
        return self.observation

    @property
    def prompt_queries(self) -> int:
        return self.observation

    def slot_state(self) -> dict[str, str]:
        return dict(score="float32")

    def observe(self, held: Held, seen: Seen) -> Held:
        # A prompt's tokens stand in order: this policy moves tokens only to where those before them were.
        before = held.used & (held.age > self.observation)
        return dataclasses.replace(held, slots=dict(score=pooled(jnp.where(before, seen.mass, 0), self.kernel)))

    def rank(self, held: Held):
        stays = held.age <= self.observation
        return jnp.where(stays, jnp.inf, held.slots["score"]), self.budget - self.observation


def pooled(scores, kernel: int):
    """Average over neighbours along the last axis, with zeros beyond the ends."""
    window, padding = (1,) * (scores.ndim - 1) + (kernel,), ((0, 0),) * (scores.ndim - 1) + ((kernel // 2,) * 2,)
    return lax.reduce_window(scores, 0.0, lax.add, window, (1,) * scores.ndim, padding) / kernel
