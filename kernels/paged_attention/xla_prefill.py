"""The prefill loop: tiles of consecutive queries of one sequence, block after block of its pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from kvjax.kernels.paged_attention.arguments import Queries
from kvjax.kernels.paged_attention.xla_pages import Pool, Tokens
from kvjax.kernels.paged_attention.xla_slots import put_logits
from kvjax.kernels.paged_attention.xla_softmax import attend_block, empty_partial, finish, merge
from kvjax.kernels.paged_attention.xla_tiles import Tile, cut, over_blocks, over_tiles, tile_size


def prefill(
    tokens: Tokens, pool: Pool, queries: Queries, *, max_query_length: int
) -> tuple[Float[Array, "tokens heads head_dim"], Float32[Array, "tokens heads"]]:
    """Attend the queries of all sequences that bring more than one token; places of other tokens hold 0 and -inf."""
    size, count = tile_size(max_query_length), tokens.q.shape[0]
    # A tile may reach beyond the last token.
    padded = tokens.map(lambda q: jnp.pad(q, ((0, size), (0, 0), (0, 0))))

    def body(done, sequence, number):
        offset = number * size
        place = queries.starts[sequence] + offset
        left = jnp.minimum(queries.lengths[sequence] - offset, size)
        tile = Tile(cut(padded, place, size, pool), sequence, offset, left, size)
        attended = _attend_tile(tile, pool, queries)
        is_mine = jnp.arange(size, dtype=jnp.int32) < left

        def put(all_tokens, new):
            mine = is_mine.reshape(-1, *(1,) * (new.ndim - 1))
            old = lax.dynamic_slice_in_dim(all_tokens, place, size)
            return lax.dynamic_update_slice_in_dim(all_tokens, jnp.where(mine, new.astype(old.dtype), old), place, 0)

        return jax.tree.map(put, done, attended)

    nothing = (jnp.zeros_like(padded.q), jnp.full(padded.q.shape[:2], -jnp.inf, jnp.float32))
    tiles = jnp.where(queries.lengths > 1, -(-queries.lengths // size), 0)
    return jax.tree.map(lambda all_tokens: all_tokens[:count], over_tiles(tiles, body, nothing))


def _attend_tile(tile: Tile, pool: Pool, queries: Queries):
    """Attend a tile's queries: [tile, heads, head_dim] and their log-sum-exp."""
    q, heads = tile.tokens.q, pool.kv_heads * tile.heads
    empty = empty_partial(q.shape[:3], q.shape[3])
    done = over_blocks(
        pool, queries, tile, lambda done, block: merge(done, attend_block(tile.tokens, block, pool)[0]), empty
    )
    sinks = pool.sink_logits
    if sinks is not None:
        sinks = jnp.repeat(sinks.reshape(pool.kv_heads, -1), tile.size, axis=1)
    out, lse = finish(done, sinks)
    out = out.reshape(heads, tile.size, q.shape[3]).swapaxes(0, 1)
    return out, lse.reshape(heads, tile.size).T


def add_last_logits(
    tiles: Float32[Array, "tiles last heads page_size"], tokens: Tokens, pool: Pool, queries: Queries
) -> Float32[Array, "tiles last heads page_size"]:
    """Write the logits of the last queries of all sequences that bring more than one token, in a pass of their own."""
    last = tiles.shape[1]
    # The tile ends with the sequence's last query, so it may reach before the first token.
    padded = tokens.map(lambda q: jnp.pad(q, ((last, 0), (0, 0), (0, 0))))

    def body(tiles, sequence, _):
        length = queries.lengths[sequence]
        taken = cut(padded, queries.starts[sequence] + length, last, pool)
        tile = Tile(taken, sequence, length - last, jnp.int32(last), last)

        def write(tiles, block):
            logits = pool.cap(pool.logits(tile.tokens, block))
            return put_logits(tiles, logits, block.visible & tile.is_mine, pool, sequence[None], block.pages)

        return over_blocks(pool, queries, tile, write, tiles)

    return over_tiles((queries.lengths > 1).astype(jnp.int32), body, tiles)
