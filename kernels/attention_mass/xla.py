"""Attention mass in plain XLA: the portable path.

One loop over tiles of consecutive queries of one sequence, each over the blocks of pages that the tile can see, as in
the prefill loop of `paged_attention`: cost follows the live pages, whatever the sizes of the pool and of the tables
(the result alone is as large as the tables). Only keys are read. A block's column sums are added to the tiles of its
pages, which are brought into the order of the table's entries at the end: a page of a ring counts at the entry where it
stands, so `column_sums` lie beside the row's slots, not beside positions.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kvjax.kernels.formats import Stored
from kvjax.kernels.paged_attention.arguments import Queries, Rows
from kvjax.kernels.paged_attention.xla_pages import Block, Pool, Tokens
from kvjax.kernels.paged_attention.xla_slots import empty_tiles, in_rows, tile_index
from kvjax.kernels.paged_attention.xla_tiles import Tile, cut, over_blocks, over_tiles, tile_size


def attention_mass(
    q: Float[Array, "tokens heads head_dim"],
    lse: Float32[Array, "tokens heads"],
    keys: Float[Array, "pages heads_per_group page_size head_dim"] | Stored,
    positions: Int32[Array, "pages page_size"],
    rows: Rows,
    queries: Queries,
    *,
    scale: float,
    soft_cap: float | None = None,
    band: int | Int32[Array, " seqs"] | None = None,
    sink_query: Float[Array, "tokens heads head_dim"] | None = None,
    max_query_length: int,
) -> tuple[Float32[Array, "kv_heads seqs slots"], Float32[Array, "heads seqs"]]:
    """Sum the attention probabilities of a step's queries over the queries; see `reference.attention_mass`.

    Args:
        max_query_length: bounds `queries.lengths` (static).

    Returns: float32 column sums [kv_heads, seqs, slots] and entropy [heads, seqs], in nats. Both are 0 for sequences
        without queries; a NaN in a sequence's queries, keys or `lse` reaches that sequence alone.
    """
    # Values are never read.
    pool = Pool(Stored.of(keys), Stored.of(keys), positions, rows, scale, soft_cap, None)
    size, heads = 1 if max_query_length == 1 else tile_size(max_query_length), q.shape[1]
    in_group = pool.keys.codes.shape[1]
    # A tile may reach beyond the last token.
    pad = lambda array: jnp.pad(array, ((0, size), *((0, 0),) * (array.ndim - 1)))  # noqa: E731
    padded, padded_lse = Tokens(q, sink_query if rows.sinks else None).map(pad), pad(lse)

    def body(carry, sequence, number):
        columns, entropy = carry
        offset = number * size
        place = queries.starts[sequence] + offset
        count = jnp.minimum(queries.lengths[sequence] - offset, size)
        widest = band[sequence] if isinstance(band, Array) else band
        tile = Tile(cut(padded, place, size, pool), sequence, offset, count, size)
        of_queries = lax.dynamic_slice_in_dim(padded_lse, place, size).T.reshape(1, pool.kv_heads, -1, 1)

        def add(carry: tuple[Array, Array], block: Block) -> tuple[Array, Array]:
            columns, entropy = carry
            visible = block.visible & tile.is_mine
            log_p = jnp.where(visible, pool.cap(pool.logits(tile.tokens, block)) - of_queries, -jnp.inf)
            p = jnp.exp(log_p)
            entropy -= jnp.where(visible, p * log_p, 0).sum(-1).reshape(heads, size).sum(1)
            counted = p if widest is None else jnp.where(block.distance <= widest, p, 0)
            # [groups, heads of a group, pages, slots] -> [groups, 1, pages, 1, heads of a group, slots]
            of_pages = counted.sum(2).reshape(pool.groups, in_group, -1, pool.page_size).swapaxes(1, 2)
            where = tile_index(pool, sequence[None], block.pages)
            return columns.at[where].add(of_pages[:, None, :, None], mode="promise_in_bounds"), entropy

        columns, of_tile = over_blocks(pool, queries, tile, add, (columns, jnp.zeros(heads, jnp.float32)))
        return columns, entropy.at[sequence].add(of_tile, mode="promise_in_bounds")

    nothing = (empty_tiles(pool, 1, in_group, fill=0), jnp.zeros((queries.lengths.shape[0], heads), jnp.float32))
    columns, entropy = over_tiles(-(-queries.lengths // size), body, nothing)
    return in_rows(columns, pool)[:, 0].swapaxes(0, 1), entropy.T
