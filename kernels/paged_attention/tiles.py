"""Attention as work for a chip: tiles of queries, blocks of slots, one list of blocks cut into equal runs.

A *tile* is a few consecutive query tokens of one sequence, all query heads of one KV head. The blocks of all tiles form
one list, of which each worker takes a run, whatever tiles it meets (stream-K): a short sequence never waits for a long
one, and a lone long one is shared by all. Where a run and a tile meet there is a *fragment*; walking along the list,
each new fragment has a new tile or a new worker, so `tile + worker` numbers the fragments without a table.

A tile's list begins with blocks for the sinks, if there are any: in them only sinks are seen, in the others only what
is no sink, so that sinks can be seen by a query of their own.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.kernels.paged_attention.arguments import Queries, Rows
from kvjax.kernels.pytree import pytree

LOG2E = 1.4426950408889634


@pytree
class Tiles:
    """Runs of query tokens.

    Attributes:
        sequence: int32 [tiles].
        offset: int32 [tiles], of the first token among the sequence's tokens of this step.
        tokens: int32 [tiles], 0 for a tile that is not used.
        position: int32 [tiles], of the first token.
        start: int32 [tiles], position of the first token the sequence ever had.
        places: int32 [tiles, most tokens of a tile], in the packed queries; any place for what is no token.
    """

    sequence: Int32[Array, " tiles"]
    offset: Int32[Array, " tiles"]
    tokens: Int32[Array, " tiles"]
    position: Int32[Array, " tiles"]
    start: Int32[Array, " tiles"]
    places: Int32[Array, "tiles tile_tokens"]


@pytree
class Work:
    """Who reads which blocks, for each layer and head group.

    Attributes:
        first_piece: int32 [layers, groups, tiles], where the pieces of pages that a tile can see begin.
        end_piece: int32 [layers, groups, tiles].
        empty_slot: int32 [layers, groups, tiles], slots from here on may be empty.
        begin_block, end_block: int32 [layers, groups, tiles], a tile's place in the list of blocks.
        per_worker: int32 [layers, groups], blocks of one worker.
        first_tile, end_tile: int32 [layers, groups, workers], the tiles a worker meets.
    """

    first_piece: Int32[Array, "layers groups tiles"]
    end_piece: Int32[Array, "layers groups tiles"]
    empty_slot: Int32[Array, "layers groups tiles"]
    begin_block: Int32[Array, "layers groups tiles"]
    end_block: Int32[Array, "layers groups tiles"]
    per_worker: Int32[Array, "layers groups"]
    first_tile: Int32[Array, "layers groups workers"]
    end_tile: Int32[Array, "layers groups workers"]


def tiles_of(queries: Queries, num_tokens: int, tile_tokens: int) -> Tiles:
    """Cut the tokens of every sequence into tiles of `tile_tokens`."""
    seqs = queries.lengths.shape[0]
    count = min(num_tokens, num_tokens // tile_tokens + min(seqs, num_tokens))
    tiles = -(-queries.lengths // tile_tokens)
    end = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(count, dtype=jnp.int32)
    sequence = jnp.minimum((end[None] <= index[:, None]).sum(1, dtype=jnp.int32), seqs - 1)
    offset = (index - (end - tiles)[sequence]) * tile_tokens
    tokens = jnp.where(index < end[-1], jnp.minimum(queries.lengths[sequence] - offset, tile_tokens), 0)
    places = (queries.starts[sequence] + offset)[:, None] + jnp.arange(tile_tokens, dtype=jnp.int32)[None]
    position, start = queries.positions[sequence] + offset, queries.start_positions[sequence]
    return Tiles(sequence, offset, tokens, position, start, jnp.clip(places, 0, num_tokens - 1))


def share_work(
    rows: Rows, queries: Queries, tiles: Tiles, *, page_size: int, piece: int, block: int, workers: int,
    is_ordered: bool = True,
) -> Work:  # fmt: skip
    """Share the blocks of all tiles among workers; a block is `block` slots, read in pieces of pages of `piece` slots.

    For all layers, so that nothing of it depends on the layer and XLA makes the plan once a step. What lies wholly
    outside a tile's window is left out of ordered rows: the tokens of a step stand at the end of their row, and a row
    of a windowed layer holds consecutive positions, so distances of slots are distances of positions.
    """
    sequence = tiles.sequence
    window = rows.windows[:, None, None]
    pieces_per_page, pinned = page_size // piece, rows.pinned(page_size)
    first_slot = rows.end_slot[..., sequence] - (queries.lengths[sequence] - tiles.offset)[None, None]
    oldest_slot = jnp.maximum(first_slot - jnp.minimum(window - 1, first_slot), 0)
    oldest_piece = oldest_slot // piece if is_ordered else jnp.zeros_like(oldest_slot)
    first_piece = jnp.maximum(rows.first_page[..., sequence] * pieces_per_page, oldest_piece)
    if pinned:
        # A window that reaches into the pinned pages has lost nothing behind them.
        first_piece = jnp.where(oldest_piece < pinned * pieces_per_page, oldest_piece, first_piece)
    end_piece = -(-(first_slot + tiles.tokens[None, None]) // piece)
    if rows.full_only:
        end_piece = jnp.minimum(end_piece, rows.end_slot[..., sequence] // page_size * pieces_per_page)
    blocks = sink_blocks(rows.sinks, block) + jnp.maximum(-(-(end_piece - first_piece) // (block // piece)), 0)
    blocks = jnp.where(tiles.tokens[None, None] > 0, blocks, 0)
    # Pieces behind the tile's end are of page 0, slots behind the row's end were never written.
    empty_slot = jnp.minimum(rows.end_slot[..., sequence], end_piece * piece)
    end_block = jnp.cumsum(blocks, axis=-1, dtype=jnp.int32)
    total = end_block[..., -1:]
    per_worker = jnp.maximum(-(-total // workers), 1)
    begin = jnp.arange(workers, dtype=jnp.int32)[None, None] * per_worker
    end = jnp.minimum(begin + per_worker, total)
    # A worker meets the tiles that end behind its begin and begin before its end.
    first_tile = (end_block[..., None, :] <= begin[..., None]).sum(-1, dtype=jnp.int32)
    end_tile = ((end_block - blocks)[..., None, :] < end[..., None]).sum(-1, dtype=jnp.int32)
    return Work(
        first_piece, end_piece, empty_slot, end_block - blocks, end_block, per_worker[..., 0], first_tile, end_tile
    )


def sink_blocks(sinks: int, block: int) -> int:
    """Blocks for the sinks that a tile's list begins with."""
    return -(-sinks // block)
