"""The prefill loop: tiles of consecutive queries of one sequence, block after block of its pages."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvjax.kernels.paged_attention.arguments import Queries
from kvjax.kernels.paged_attention.xla_pages import Pool, attend_block, empty_partial, finish, merge

TILE = 128
BLOCK_SLOTS = 512


def prefill(
    q: Float[Array, "tokens heads head_dim"], pool: Pool, queries: Queries, *, max_query_length: int
) -> Float[Array, "tokens heads head_dim"]:
    """Attend the queries of all sequences that bring more than one token; places of other tokens are 0."""
    tile = min(TILE, -(-max_query_length // 8) * 8)
    tiles = jnp.where(queries.lengths > 1, -(-queries.lengths // tile), 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    # A tile may reach beyond the last token.
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def body(state):
        i, out = state
        sequence = (ends <= i).sum(dtype=jnp.int32)
        offset = (i - (ends - tiles)[sequence]) * tile
        start = queries.starts[sequence] + offset
        count = jnp.minimum(queries.lengths[sequence] - offset, tile)
        attended = _attend_tile(lax.dynamic_slice_in_dim(padded, start, tile), pool, queries, sequence, offset, count)
        mine = (jnp.arange(tile) < count)[:, None, None]
        old = lax.dynamic_slice_in_dim(out, start, tile)
        return i + 1, lax.dynamic_update_slice_in_dim(out, jnp.where(mine, attended.astype(q.dtype), old), start, 0)

    _, out = lax.while_loop(lambda state: state[0] < ends[-1], body, (jnp.int32(0), jnp.zeros_like(padded)))
    return out[: q.shape[0]]


def _attend_tile(q: Float[Array, "tile heads head_dim"], pool: Pool, queries: Queries, sequence, offset, count):
    """Attend the queries `offset`.. of a sequence to its pages, from the first visible one on."""
    tile, heads, head_dim = q.shape
    size, rows, kv_heads = pool.page_size, pool.rows, pool.kv_heads
    pages = max(1, BLOCK_SLOTS // size)
    position = queries.positions[sequence] + offset + jnp.arange(tile, dtype=jnp.int32)
    start = queries.start_positions[sequence]
    # Slots of the tokens of this step stand at the end of a row, so the tile's own are known from there.
    first_slot = rows.end_slot[:, sequence] - queries.lengths[sequence] + offset
    # Rows of layers with a window have no holes, so slots are as far apart as positions.
    oldest = jnp.maximum(first_slot - jnp.minimum(pool.window - 1, first_slot), 0) // size
    first_page = jnp.maximum(rows.first_page[:, sequence], jnp.where(pool.window <= first_slot, oldest, 0))
    end_page = -(-(first_slot + count) // size)
    scaled = (q.astype(jnp.float32) * pool.scale).astype(q.dtype)
    scaled = scaled.reshape(tile, kv_heads, heads // kv_heads, head_dim).transpose(1, 2, 0, 3)
    scaled = scaled.reshape(1, kv_heads, -1, head_dim)

    def body(state):
        block, done = state
        logical = (first_page + block * pages)[:, None, None] + jnp.arange(pages, dtype=jnp.int32)[None, None]
        live = logical < end_page[:, None, None]
        ids = pool.page_ids(sequence[None], logical, live)
        slots = pool.read_positions(ids, live)
        seen, query = slots[:, :, None], position[None, None, :, None]
        visible = (seen >= start) & (seen <= query) & (query - seen < pool.window)
        visible = jnp.tile(pool.per_kv_head(visible), (1, 1, heads // kv_heads, 1))
        return block + 1, merge(done, attend_block(scaled, ids, visible, pool))

    blocks = (-(-(end_page - first_page) // pages)).max()
    empty = empty_partial((1, kv_heads, scaled.shape[2]), head_dim)
    _, done = lax.while_loop(lambda state: state[0] < blocks, body, (jnp.int32(0), empty))
    sinks = pool.sink_logits
    if sinks is not None:
        sinks = jnp.repeat(sinks.reshape(kv_heads, -1), tile, axis=1)
    out = finish(done, sinks).reshape(kv_heads, heads // kv_heads, tile, head_dim)
    return out.transpose(2, 0, 1, 3).reshape(tile, heads, head_dim)
