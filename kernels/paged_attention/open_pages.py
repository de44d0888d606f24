"""Open pages of per-channel keys: their exact keys stand apart until the page is full and gets its codes.

A backend attends to the full pages (`Rows.full_only`), XLA to the open ones, at most one of each row, by the loops and
with the masks that it has for the pages of a pool; both parts are joined by their log-sum-exp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from kvjax.kernels.formats import Stored
from kvjax.kernels.paged_attention.arguments import Attention, Queries, Rows
from kvjax.kernels.paged_attention.xla import attend
from kvjax.kernels.paged_attention.xla_pages import Block, Pages, Pool, Tokens


@dataclasses.dataclass(frozen=True)
class OpenPages(Pages):
    """Open pages: `ids` are those of their values, `key_ids` those of their keys."""

    key_ids: Int32[Array, "n groups 1"]


@dataclasses.dataclass(frozen=True)
class OpenPool(Pool):
    """Only the open page of every row; `keys` are one page for each layer, group and sequence."""

    @property
    def entries(self) -> int:
        return 1

    @property
    def pinned(self) -> int:
        return 1

    @property
    def is_open(self) -> bool:
        return True

    def locate_pinned(self, sequence: Int32[Array, " n"], used: Bool[Array, " n"]) -> Pages:
        end_slot, (_, groups, seqs) = self.end_slot[:, sequence], self.rows.end_slot.shape
        live = (end_slot % self.page_size > 0) & used[None]
        found = self.locate(sequence, (end_slot // self.page_size)[..., None], live[..., None])
        group = jnp.arange(groups, dtype=jnp.int32)[None, :, None]
        key_ids = (self.rows.layer * groups + group) * seqs + sequence[:, None, None]
        return OpenPages(found.ids, jnp.zeros_like(found.entry), found.live, key_ids)

    def logits(self, tokens: Tokens, block: Block) -> Float32[Array, "n kv_heads queries slots"]:
        assert isinstance(block.pages, OpenPages)
        keys = dataclasses.replace(block.pages, ids=block.pages.key_ids)
        return super().logits(tokens, dataclasses.replace(block, pages=keys))


def paged_attention(
    backend: Callable[..., Attention],
    q: Float[Array, "tokens heads head_dim"],
    keys: Stored,
    values: Float[Array, "pages heads_per_group page_size head_dim"] | Stored,
    positions: Int32[Array, "pages page_size"],
    rows: Rows,
    queries: Queries,
    open_keys: Float[Array, "layers groups seqs heads_per_group page_size head_dim"],
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_logits: Float[Array, " heads"] | None = None,
    sink_query: Float[Array, "tokens heads head_dim"] | None = None,
    last_logits: int = 0,
    max_query_length: int,
    **options,
) -> Attention:
    """Attend every query token to the visible slots of its sequence; see `reference.paged_attention`.

    Args:
        backend: the `paged_attention` that reads the full pages.
        open_keys: keys of the page that a row's `end_slot` lies in, as they are; only slots before it are read.
        options: for the backend alone. Lists of pages are not served.

    Returns: as the backend does.
    """
    of_both: dict[str, Any] = dict(scale=scale, soft_cap=soft_cap)
    full = backend(
        q, keys, values, positions, dataclasses.replace(rows, full_only=True), queries, sink_query=sink_query,
        last_logits=last_logits, max_query_length=max_query_length, **of_both, **options,
    )  # fmt: skip
    one_a_row = Stored.of(open_keys.reshape(-1, *open_keys.shape[3:]))
    pool = OpenPool(one_a_row, Stored.of(values), positions, rows, sink_logits=None, **of_both)
    tokens = Tokens(q, sink_query if rows.sinks else None)
    opened = attend(tokens, pool, queries, last_logits=last_logits, max_query_length=max_query_length)
    joined = _join(full, opened, sink_logits)
    if not last_logits:
        return joined
    return dataclasses.replace(joined, slot_logits=_put(full.slot_logits, opened.slot_logits, pool))


def _join(a: Attention, b: Attention, sink_logits: Float[Array, " heads"] | None) -> Attention:
    """Attention over disjoint slots, and a learned sink."""
    lse = jnp.logaddexp(a.lse, b.lse)
    total = lse if sink_logits is None else jnp.logaddexp(lse, sink_logits.astype(jnp.float32)[None])
    total = jnp.where(lse == -jnp.inf, lse, total)

    def weighted(part: Attention) -> Array:
        weight = jnp.where(part.lse == -jnp.inf, 0, jnp.exp(part.lse - total))
        return part.out.astype(jnp.float32) * weight[..., None]

    return Attention((weighted(a) + weighted(b)).astype(a.out.dtype), total)


def _put(full, opened, pool: OpenPool) -> Float32[Array, "seqs last heads slots"]:
    """Write the open pages' logits where these stand in their rows."""
    rows = pool.rows
    sequence = jnp.arange(rows.end_slot.shape[2], dtype=jnp.int32)
    page = (pool.end_slot // pool.page_size)[..., None]
    place = Pool.locate(pool, sequence, page, page >= 0).entry[..., 0]
    # A row without an open page keeps the logits of the page that stands there.
    place = jnp.where(pool.end_slot % pool.page_size > 0, place, -1)
    per_head = jnp.repeat(place.T, full.shape[2] // place.shape[0], axis=1)
    entries = rows.page_table.shape[-1]
    is_open = per_head[:, None, :, None, None] == jnp.arange(entries, dtype=jnp.int32)[None, None, None, :, None]
    by_page = full.reshape(*full.shape[:3], entries, pool.page_size)
    return jnp.where(is_open, opened[..., None, :], by_page).reshape(full.shape)
