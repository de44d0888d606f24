"""PagedEviction (arXiv 2509.04377): whole pages by the norms of their values and keys."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp

from kvjax.errors import InputError, whole_number
from kvjax.policies.budget import Budgeted
from kvjax.policy import Held, one_of

if TYPE_CHECKING:
    from kvjax.spec import CacheSpec

SCORES = ("v_over_k", "inv_k", "v")
_LEAST_NORM = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedEviction(Budgeted):
    """Prunes prompts token by token, and drops one page whenever decode has filled one and is over budget.

    A token's score is |v| / |k|, averaged over the heads that share its page; a page's is the mean over its tokens.
    Lowest scores go first. The first page and the newest `page_size` tokens stay, so that only full pages are dropped
    and a row holds at most a page more than its budget. Prompts are pruned after attention to the whole of them; a
    prompt that ends with a step of one token, and is over budget by no more than a page, is left to decode.

    Attributes:
        budget: tokens, at least three pages.
        recent: newest tokens that stay; a page of them by default, and never less. More of them serve perplexity
            (docs/policies.md); it is no part of the paper.
        score: "v_over_k" as in the paper, "inv_k" (1 / |k|) or "v" (|v|) as in its authors' code.
    """

    name: ClassVar[str] = "paged_eviction"
    in_decode: ClassVar[bool] = True
    by_page: ClassVar[bool] = True
    score: str = "v_over_k"
    recent: int = 1

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "recent", whole_number("recent", self.recent, 1))
        one_of("score", self.score, SCORES)

    def check(self, spec: CacheSpec) -> None:
        super().check(spec)
        size = spec.page_size
        if self.budget < (least := self._stay(size) + size):
            raise InputError(
                f"budget {self.budget} of policy {self.name} leaves less than a page of {size} tokens beside the first "
                f"page and the newest {self._stay(size) - size} tokens, which stay: give at least {least}"
            )

    def _stay(self, page_size: int) -> int:
        """Tokens that stay whatever their score."""
        return page_size + max(self.recent, page_size)

    def slot_state(self) -> dict[str, str]:
        return dict(score="float32")

    def write(self, k, v, kinds):
        of_keys, of_values = (jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for x in (k, v))
        of_keys += _LEAST_NORM
        score = dict(v=of_values, inv_k=1 / of_keys, v_over_k=of_values / of_keys)[self.score].mean(-1)
        # What has overflowed is the first to go: as a rank, infinity stays.
        return dict(score=jnp.where(jnp.isposinf(score), jnp.nan, score))

    def rank(self, held: Held):
        stays = (held.place < held.page_size) | (held.age <= max(self.recent, held.page_size))
        return jnp.where(stays, jnp.inf, held.slots["score"]), self.budget - self._stay(held.page_size)
