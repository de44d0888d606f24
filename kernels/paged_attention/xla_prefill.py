"""The prefill loop: tiles of consecutive queries of one sequence, block after block of its pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from kvjax.kernels.paged_attention.arguments import Queries
from kvjax.kernels.paged_attention.xla_pages import Pool, attend_block, empty_partial, finish, merge

TILE = 128
BLOCK_SLOTS = 512


def prefill(
    q: Float[Array, "tokens heads head_dim"], pool: Pool, queries: Queries, *, max_query_length: int
) -> tuple[Float[Array, "tokens heads head_dim"], Float32[Array, "tokens heads"]]:
    """Attend the queries of all sequences that bring more than one token; places of other tokens hold 0 and -inf."""
    tile = min(TILE, -(-max_query_length // 8) * 8)
    tiles = jnp.where(queries.lengths > 1, -(-queries.lengths // tile), 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    # A tile may reach beyond the last token.
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def body(state):
        i, done = state
        sequence = (ends <= i).sum(dtype=jnp.int32)
        offset = (i - (ends - tiles)[sequence]) * tile
        start = queries.starts[sequence] + offset
        count = jnp.minimum(queries.lengths[sequence] - offset, tile)
        attended = _attend_tile(lax.dynamic_slice_in_dim(padded, start, tile), pool, queries, sequence, offset, count)
        is_mine = jnp.arange(tile, dtype=jnp.int32) < count

        def put(all_tokens, new):
            mine = is_mine.reshape(-1, *(1,) * (new.ndim - 1))
            old = lax.dynamic_slice_in_dim(all_tokens, start, tile)
            return lax.dynamic_update_slice_in_dim(all_tokens, jnp.where(mine, new.astype(old.dtype), old), start, 0)

        return i + 1, jax.tree.map(put, done, attended)

    nothing = (jnp.zeros_like(padded), jnp.full(padded.shape[:2], -jnp.inf, jnp.float32))
    _, done = lax.while_loop(lambda state: state[0] < ends[-1], body, (jnp.int32(0), nothing))
    return jax.tree.map(lambda all_tokens: all_tokens[: q.shape[0]], done)


def _attend_tile(q: Float[Array, "tile heads head_dim"], pool: Pool, queries: Queries, sequence, offset, count):
    """Attend the queries `offset`.. of a sequence to its pages, from the first visible one on."""
    tile, heads, head_dim = q.shape
    size, kv_heads = pool.page_size, pool.kv_heads
    pages = max(1, BLOCK_SLOTS // size)
    position = queries.positions[sequence] + offset + jnp.arange(tile, dtype=jnp.int32)
    start = queries.start_positions[sequence]
    # Slots of the tokens of this step stand at the end of a row, so the tile's own are known from there.
    first_slot = pool.end_slot[:, sequence] - queries.lengths[sequence] + offset
    # Rows of layers with a window have no holes, so slots are as far apart as positions.
    oldest = jnp.maximum(first_slot - jnp.minimum(pool.window - 1, first_slot), 0) // size
    first_page = jnp.maximum(pool.first_page[:, sequence], jnp.where(pool.window <= first_slot, oldest, 0))
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
    out, lse = finish(done, sinks)
    out = out.reshape(kv_heads, heads // kv_heads, tile, head_dim).transpose(2, 0, 1, 3)
    return out.reshape(tile, heads, head_dim), lse.reshape(heads, tile).T
