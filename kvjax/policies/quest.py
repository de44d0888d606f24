"""Quest (arXiv 2406.10774): of a long context, decode steps read the pages that a query can attend to most."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp

from kvjax.errors import InputError, whole_number
from kvjax.kernels.formats import rounded_down
from kvjax.policy import Policy

if TYPE_CHECKING:
    from kvjax.spec import CacheSpec

_DTYPE = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quest(Policy):
    """Keeps everything; a decode step reads, for each KV head, the newest page and `top_pages` others.

    Every page keeps the least and the greatest value of each channel of its keys, as attention reads them, rounded
    outward to bfloat16: 4 * head_dim bytes a page and KV head. For a query these bound the logit of any key of the
    page, sum_d max(q_d min_d, q_d max_d); pages are taken by it, the largest over the query heads of a KV head. (The
    authors' code chooses for each query head, and lets the newest page compete.) Prompts are read in full.

    Attributes:
        top_pages: pages; the authors take at least 3.
        dense_layers: the first layers, which read all pages. So do layers with a window.
    """

    name: ClassVar[str] = "quest"
    top_pages: int
    dense_layers: int = 2

    def __post_init__(self):
        object.__setattr__(self, "top_pages", whole_number("top_pages", self.top_pages, 1))
        object.__setattr__(self, "dense_layers", whole_number("dense_layers", self.dense_layers, 0))

    @property
    def pages_read(self) -> int:
        return self.top_pages + 1

    @property
    def reads_all_before(self) -> int:
        return self.dense_layers

    def check(self, spec: CacheSpec) -> None:
        if spec.key_form.is_per_channel:
            raise InputError(
                f"policy {self.name} needs the keys of open pages as they will be read, and keys with scales per "
                "channel have no codes until their page is full: use format int4_hadamard, which has scales per token"
            )

    def page_state(self, spec: CacheSpec) -> dict[str, tuple[tuple[int, ...], str]]:
        shape = (spec.heads_per_group, spec.head_dim)
        return dict(least=(shape, _DTYPE), greatest=(shape, _DTYPE))

    def summarize(self, keys, used):
        used = used[..., None, :, None]
        least, negated = (jnp.where(used, of, jnp.inf).min(-2) for of in (keys, -keys))
        return dict(least=rounded_down(least, _DTYPE), greatest=-rounded_down(negated, _DTYPE))

    def score_pages(self, q, kept):
        # [groups, seqs, pages, heads, head_dim] -> [kv_heads, seqs, 1, pages, head_dim]
        of_heads = lambda of: jnp.moveaxis(of, 3, 1).reshape(-1, *of.shape[1:3], of.shape[-1])[:, :, None]  # noqa: E731
        least, greatest = (of_heads(kept[name]).astype(jnp.float32) for name in ("least", "greatest"))
        q = q.swapaxes(0, 1)[:, :, :, None]
        # No einsum: XLA would gather the bounds of a layer's pages into an array for it.
        return (jnp.maximum(q, 0) * greatest + jnp.minimum(q, 0) * least).sum(-1).max(2)
