"""Entropy-guided caching (Mathematics 13(15):2366, 2025): layers whose attention is spread keep more tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from kvjax.errors import InputError, shown, whole_number
from kvjax.policies.budget import MOST_TOKENS, AtPromptEnd
from kvjax.policy import Held, Seen

if TYPE_CHECKING:
    from kvjax.spec import CacheSpec

_LEAST_WEIGHT = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entropy(AtPromptEnd):
    """Compresses a prompt at its end, every layer to a budget by the entropy of its attention.

    Of the source only the abstract says what it does: higher entropy, larger budget; one set of tokens for all heads
    of a layer. The rest is defined here. A layer's entropy is that of the prompt's last `observation` queries, the mean
    over its heads, over the most it could be (the sums over the queries of -sum a ln a and of ln of the tokens that a
    query sees; not the mean of their quotients). Budgets are in proportion to its power `gamma`, at least
    `sinks + recent` tokens and at most those there are; what that leaves over is shared out anew, to the last token.
    A layer keeps its first `sinks` tokens, its newest `recent`, and those of most attention from these queries.
    Budgets are tokens, not rounded to pages. What is generated is added to them.

    Attributes:
        total_budget: tokens that a sequence keeps of its prompt in all layers without a window together: so many times
            the mean budget of a layer.
        sinks, recent: first and newest tokens that stay in every layer.
        observation: queries that are looked at; a prompt's last chunk must hold them.
        gamma: 0 shares evenly.
    """

    name: ClassVar[str] = "entropy"
    total_budget: int
    sinks: int = 4
    recent: int = 16
    observation: int = 64
    gamma: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        ranges = dict(
            total_budget=(1, MOST_TOKENS), sinks=(0, MOST_TOKENS), recent=(1, MOST_TOKENS), observation=(1, 2**14)
        )  # fmt: skip
        for name, limits in ranges.items():
            object.__setattr__(self, name, whole_number(name, getattr(self, name), *limits))
        if not isinstance(self.gamma, float | int) or not 0 <= self.gamma < math.inf:
            raise InputError(f"gamma is {shown(self.gamma)}: give a number of at least 0")

    @property
    def protected(self) -> int:
        """Tokens that stay in every layer."""
        return self.sinks + self.recent

    @property
    def prompt_queries(self) -> int:
        return self.observation

    def most_slots(self, prompt: int, new: int, chunk: int, page_size: int) -> int:
        return max(prompt, min(prompt, self.total_budget) + new)

    def check(self, spec: CacheSpec) -> None:
        super().check(spec)
        layers = sum(window is None for window in spec.layer_windows)
        if self.total_budget <= layers * self.protected:
            raise InputError(
                f"total_budget {self.total_budget} of policy {self.name} leaves no token beside the {self.protected} "
                f"that always stay in each of {layers} layers: give at least {layers * self.protected + 1}"
            )
        if spec.skip_layers:
            raise InputError(
                f"policy {self.name} shares a budget between all layers, and skip_layers parts them in two pools: "
                "leave them out, or use another policy"
            )

    def slot_state(self) -> dict[str, str]:
        return dict(score="float32")

    def row_state(self) -> dict[str, str]:
        return dict(entropy="float32", tokens="int32", budget="int32")

    def observe(self, held: Held, seen: Seen) -> Held:
        assert seen.entropy is not None, "decode steps are not observed"
        # Heads with pages of their own keep the same tokens too, so that these stand in the same slots.
        of_layer = lambda of_groups: jnp.broadcast_to(of_groups.mean(0, keepdims=True), of_groups.shape)  # noqa: E731
        before_last = jnp.arange(self.observation, dtype=jnp.int32)[None, None]
        sees = jnp.maximum(held.count[..., None] - before_last, 1).astype(jnp.float32)
        most = jnp.where(before_last < seen.queries[None, :, None], jnp.log(sees), 0).sum(-1)
        entropy = jnp.clip(of_layer(seen.entropy / jnp.maximum(most, jnp.finfo(jnp.float32).tiny)), 0, 1)
        rows = held.rows | dict(entropy=entropy, tokens=held.count)
        return dataclasses.replace(held, slots=dict(score=of_layer(seen.mass)), rows=rows)

    def settle(self, rows, ends, layers: Sequence[int]):
        of_layers = np.array(layers)
        entropy, tokens = (rows[name][of_layers, 0] for name in ("entropy", "tokens"))
        shares = shared_out(self.total_budget, entropy**self.gamma, jnp.minimum(tokens, self.protected), tokens)
        budget = jnp.where(ends[None, None], shares[:, None], rows["budget"][of_layers])
        return rows | dict(budget=rows["budget"].at[of_layers].set(budget))

    def rank(self, held: Held):
        stays = (held.place < self.sinks) | (held.age <= self.recent)
        allowed = jnp.maximum(held.rows["budget"] - self.protected, 0)
        return jnp.where(stays, jnp.inf, held.slots["score"]), allowed


def shared_out(
    total: int,
    weights: Float32[Array, "layers seqs"],
    least: Int32[Array, "layers seqs"],
    most: Int32[Array, "layers seqs"],
) -> Int32[Array, "layers seqs"]:
    """Share a number out by weights, but no less and no more than given; sums are exact.

    Every share is the same multiple of its weight, or one of its bounds. Whole numbers are made of them by largest
    remainders, of equal ones the lower layer's first. Where the bounds do not allow the total, the sum is the nearest
    that they do.
    """
    target = jnp.clip(jnp.int32(total), least.sum(0, dtype=jnp.int32), most.sum(0, dtype=jnp.int32))
    low, high, wanted = (of.astype(jnp.float32) for of in (least, most, target))
    largest = weights.max(0, keepdims=True)
    weights = jnp.where(largest > 0, jnp.maximum(weights / largest, _LEAST_WEIGHT), 1)
    starts, stops = low / weights, high / weights
    # The sum grows with the multiple, and its slope changes where a layer leaves or meets a bound.
    multiples = jnp.concatenate([starts, stops])
    sums = jnp.clip(multiples[:, None] * weights[None], low[None], high[None]).sum(1)
    reached = jnp.where(sums <= wanted[None], multiples, 0).max(0, keepdims=True)
    free = (starts <= reached) & (reached < stops)
    bound = jnp.where(reached < starts, low, high)
    rest = wanted - jnp.where(free, 0, bound).sum(0)
    multiple = rest / jnp.maximum(jnp.where(free, weights, 0).sum(0), _LEAST_WEIGHT)
    ideal = jnp.clip(jnp.where(free, multiple[None] * weights, bound), low, high)
    # One below the least whole number that is not less: a remainder of 1 for those that are whole.
    whole = jnp.ceil(ideal) - 1
    place = jnp.argsort(jnp.argsort(whole - ideal, axis=0), axis=0)
    shares = whole.astype(jnp.int32)
    return shares + (place < (target - shares.sum(0, dtype=jnp.int32))[None]).astype(jnp.int32)
