"""Attention as work for a chip: tiles of queries, blocks of slots, one list of blocks cut into equal runs.

A *tile* is a few consecutive query tokens of one sequence, all query heads of one KV head. The blocks of all tiles form
one list, of which each worker takes a run, whatever tiles it meets (stream-K): a short sequence never waits for a long
one, and a lone long one is shared by all. Where a run and a tile meet there is a *fragment*; walking along the list,
each new fragment has a new tile or a new worker, so `tile + worker` numbers the fragments without a table.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kvjax.kernels.paged_attention.arguments import MASKED, Queries, Rows
from kvjax.kernels.pytree import pytree

LOG2E = 1.4426950408889634


@pytree
class Tiles:
    """Runs of query tokens.

    Attributes:
        sequence: int32 [tiles].
        offset: int32 [tiles], of the first token among the sequence's tokens of this step.
        tokens: int32 [tiles], 0 for a tile that is not used.
        places: int32 [tiles, most tokens of a tile], in the packed queries; any place for what is no token.
    """

    sequence: Int32[Array, " tiles"]
    offset: Int32[Array, " tiles"]
    tokens: Int32[Array, " tiles"]
    places: Int32[Array, "tiles tile_tokens"]


@pytree
class Work:
    """Who reads which blocks, for each head group.

    Attributes:
        first_piece: int32 [groups, tiles], where the pieces of pages that a tile can see begin.
        end_piece: int32 [groups, tiles].
        begin_block, end_block: int32 [groups, tiles], a tile's place in the list of blocks.
        per_worker: int32 [groups], blocks of one worker.
        first_tile, end_tile: int32 [groups, workers], the tiles a worker meets.
    """

    first_piece: Int32[Array, "groups tiles"]
    end_piece: Int32[Array, "groups tiles"]
    begin_block: Int32[Array, "groups tiles"]
    end_block: Int32[Array, "groups tiles"]
    per_worker: Int32[Array, " groups"]
    first_tile: Int32[Array, "groups workers"]
    end_tile: Int32[Array, "groups workers"]


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
    return Tiles(sequence, offset, tokens, jnp.clip(places, 0, num_tokens - 1))


def row_limits(tiles: Tiles, queries: Queries, window: Int32[Array, ""]) -> Int32[Array, "tiles 2 tile_tokens"]:
    """First and last position that each token of a tile sees; what is no token sees none."""
    within = jnp.arange(tiles.places.shape[1], dtype=jnp.int32)[None]
    latest = (queries.positions[tiles.sequence] + tiles.offset)[:, None] + within
    earliest = jnp.maximum(queries.start_positions[tiles.sequence][:, None], latest - window + 1)
    return jnp.stack([earliest, jnp.where(within < tiles.tokens[:, None], latest, -1)], axis=1)


def share_work(
    rows: Rows, queries: Queries, tiles: Tiles, *, page_size: int, piece: int, block: int,
    workers: int,
) -> Work:  # fmt: skip
    """Share the blocks of all tiles among workers; a block is `block` slots, read in pieces of pages of `piece` slots.

    What lies wholly outside a tile's window is left out: the tokens of a step stand at the end of their row, and a row
    of a windowed layer holds consecutive positions, so distances of slots are distances of positions.
    """
    sequence, window = tiles.sequence, rows.windows[rows.layer]
    first_slot = rows.end_slot[rows.layer][:, sequence] - (queries.lengths[sequence] - tiles.offset)[None]
    oldest_slot = jnp.maximum(first_slot - jnp.minimum(window - 1, first_slot), 0)
    first_piece = jnp.maximum(rows.first_page[rows.layer][:, sequence] * (page_size // piece), oldest_slot // piece)
    end_piece = -(-(first_slot + tiles.tokens[None]) // piece)
    blocks = jnp.maximum(-(-(end_piece - first_piece) // (block // piece)), 0)
    blocks = jnp.where(tiles.tokens[None] > 0, blocks, 0)
    end_block = jnp.cumsum(blocks, axis=1, dtype=jnp.int32)
    total = end_block[:, -1:]
    per_worker = jnp.maximum(-(-total // workers), 1)
    begin = jnp.arange(workers, dtype=jnp.int32)[None] * per_worker
    end = jnp.minimum(begin + per_worker, total)
    # A worker meets the tiles that end behind its begin and begin before its end.
    first_tile = (end_block[:, None] <= begin[..., None]).sum(-1, dtype=jnp.int32)
    end_tile = ((end_block - blocks)[:, None] < end[..., None]).sum(-1, dtype=jnp.int32)
    return Work(first_piece, end_piece, end_block - blocks, end_block, per_worker[:, 0], first_tile, end_tile)


def join_fragments(
    out: Float32[Array, "kv_heads fragments parts rows head_dim"],
    maximum: Float32[Array, "kv_heads fragments parts rows"],
    total: Float32[Array, "kv_heads fragments parts rows"],
    work: Work,
    sink_logits: Float[Array, "kv_heads rows"] | None,
) -> tuple[Float32[Array, "kv_heads tiles rows head_dim"], Float32[Array, "kv_heads tiles rows"]]:
    """Join the unnormalised parts of each tile, maxima and logits in base 2.

    Fragments that no worker has written may hold anything.

    Returns: outputs, 0 for rows that see nothing, and log-sum-exp (natural), -inf there.
    """
    num_tiles, parts = work.end_block.shape[1], out.shape[2]
    tile, fragment = (jnp.arange(n, dtype=jnp.int32) for n in (num_tiles, out.shape[1]))
    first = tile[None] + work.begin_block // work.per_worker[:, None]
    last = tile[None] + (work.end_block - 1) // work.per_worker[:, None]
    mine = (fragment[None, :, None] >= first[:, None]) & (fragment[None, :, None] <= last[:, None])
    mine = mine & (work.end_block > work.begin_block)[:, None]
    mine = jnp.repeat(jnp.repeat(mine, out.shape[0] // mine.shape[0], axis=0), parts, axis=1)
    flat = lambda array: array.reshape(array.shape[0], -1, *array.shape[3:])  # noqa: E731
    out, maximum, total = flat(out), flat(maximum), flat(total)
    written, owner = mine.any(-1)[..., None], mine.argmax(-1).astype(jnp.int32)
    maximum, total = jnp.where(written, maximum, MASKED), jnp.where(written, total, 0)
    best = jax.vmap(lambda m, o: jax.ops.segment_max(m, o, num_tiles))(maximum, owner)
    best = jnp.maximum(best, MASKED / 2)
    factor = jnp.exp2(maximum - jnp.take_along_axis(best, owner[..., None], axis=1))
    sums = jax.vmap(lambda x, o: jax.ops.segment_sum(x, o, num_tiles))
    total = sums(total * factor, owner)
    out = sums(jnp.where(written[..., None], out * factor[..., None], 0), owner)
    sees_nothing = total == 0
    if sink_logits is not None:
        sinks = sink_logits.astype(jnp.float32)[:, None] * LOG2E
        higher = jnp.maximum(best, sinks)
        shrink = jnp.exp2(best - higher)
        total, out = total * shrink + jnp.exp2(sinks - higher), out * shrink[..., None]
        best = higher
    total = jnp.where(total > 0, total, 1)
    return out / total[..., None], jnp.where(sees_nothing, -jnp.inf, best / LOG2E + jnp.log(total))
