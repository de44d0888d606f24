"""Loops over tiles of consecutive queries of one sequence, and over the blocks of pages that a tile can see, in XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from kvjax.kernels.paged_attention.arguments import Queries
from kvjax.kernels.paged_attention.xla_pages import Block, Pool, Tokens

TILE = 128
BLOCK_SLOTS = 512


def tile_size(max_query_length: int) -> int:
    """Queries of a tile, for the longest that come."""
    return min(TILE, -(-max_query_length // 8) * 8)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Consecutive queries of one sequence.

    Attributes:
        tokens: scaled, [1, kv_heads, heads of a KV head x size, head_dim].
        sequence: int32 [].
        offset: int32 [], which of the sequence's queries is the first; negative if the tile begins before them.
        count: int32 [], queries up to the sequence's last one in the tile.
        size: queries up to the tile's end.
    """

    tokens: Tokens
    sequence: Int32[Array, ""]
    offset: Int32[Array, ""]
    count: Int32[Array, ""]
    size: int

    @property
    def heads(self) -> int:
        """Query heads of a KV head."""
        return self.tokens.q.shape[2] // self.size

    @property
    def is_mine(self) -> Bool[Array, "1 1 queries 1"]:
        """Which queries are the sequence's, for all heads of a KV head."""
        number = jnp.arange(self.size, dtype=jnp.int32)
        mine = (self.offset + number >= 0) & (number < self.count)
        return jnp.tile(mine, self.heads)[None, None, :, None]


def over_tiles[C](tiles: Int32[Array, " seqs"], body: Callable[[C, Array, Array], C], carry: C) -> C:
    """Call `body(carry, sequence, number)` for each of the `tiles[sequence]` tiles of all sequences in turn."""
    ends = jnp.cumsum(tiles, dtype=jnp.int32)

    def step(state):
        i, carry = state
        sequence = (ends <= i).sum(dtype=jnp.int32)
        return i + 1, body(carry, sequence, i - (ends - tiles)[sequence])

    return lax.while_loop(lambda state: state[0] < ends[-1], step, (jnp.int32(0), carry))[1]


def over_blocks[C](pool: Pool, queries: Queries, tile: Tile, body: Callable[[C, Block], C], carry: C) -> C:
    """Call `body(carry, block)` for the pinned pages of the tile's sequence, then from the first visible page on."""
    sequence, size = tile.sequence, pool.page_size
    position = queries.positions[sequence] + tile.offset + jnp.arange(tile.size, dtype=jnp.int32)
    position = position[None, None, :, None]
    start = queries.start_positions[sequence]
    if pool.pinned:
        pages = pool.locate_pinned(sequence[None], jnp.ones(1, bool))
        carry = body(carry, pool.view(pages, position, start, heads=tile.heads, sinks=True))
    if pool.is_open:
        return carry
    # Slots of the tokens of this step stand at the end of a row, so the tile's own are known from there.
    first_slot = pool.end_slot[:, sequence] - queries.lengths[sequence] + tile.offset
    # Rows of layers with a window have no holes, so slots are as far apart as positions.
    oldest = jnp.maximum(first_slot - jnp.minimum(pool.window - 1, first_slot), 0) // size
    first_page = jnp.maximum(pool.first_page[:, sequence], jnp.where(pool.window <= first_slot, oldest, 0))
    end_page = jnp.minimum(-(-(first_slot + tile.count) // size), pool.end_page[:, sequence])
    count = max(1, BLOCK_SLOTS // size)

    def step(state):
        number, carry = state
        logical = (first_page + number * count)[:, None, None] + jnp.arange(count, dtype=jnp.int32)[None, None]
        pages = pool.locate(sequence[None], logical, logical < end_page[:, None, None])
        return number + 1, body(carry, pool.view(pages, position, start, heads=tile.heads, sinks=False))

    blocks = (-(-(end_page - first_page) // count)).max()
    return lax.while_loop(lambda state: state[0] < blocks, step, (jnp.int32(0), carry))[1]


def cut(padded: Tokens, place: Int32[Array, ""], size: int, pool: Pool) -> Tokens:
    """Take `size` tokens from `place` on, scaled, [1, kv_heads, heads of a KV head x size, head_dim]."""

    def of(q):
        scaled = pool.scaled(lax.dynamic_slice_in_dim(q, place, size)).transpose(1, 2, 0, 3)
        return scaled.reshape(1, pool.kv_heads, -1, q.shape[-1])

    return padded.map(of)
