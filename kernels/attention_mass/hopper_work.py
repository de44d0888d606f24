"""Attention mass as work for a chip: blocks of keys, the tiles of queries that see them, one list cut into equal runs.

A *block* is some slots of one row, or the sinks of a row, whose queries and visibility are others. A *step* is one
block, one query head and one tile of that head's tokens. The steps of all blocks form one list, of which each worker
takes a run. Where a run and a block meet there is a *fragment*, numbered `block + worker` as in
`paged_attention/tiles.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from kvjax.kernels.paged_attention.arguments import Queries, Rows
from kvjax.kernels.pytree import pytree

ALIGNMENT = 8  # tokens: rows of a swizzled tile
# What the kernel knows of a block: see `Work.info`.
PLACE, TOKENS, TILES, POSITION, LOWEST, HIGHEST, WINDOW, FULL_FROM, FULL_TO = range(9)
_FAR = 2**30  # beyond every distance of slots


@pytree
class Packing:
    """The queries of each sequence moved to places that are multiples of `ALIGNMENT`.

    Attributes:
        starts: int32 [seqs], of a sequence's first token.
        sources: int32 [places], where the token of a place comes from; any token for a place without one.
    """

    starts: Int32[Array, " seqs"]
    sources: Int32[Array, " places"]


@pytree
class Row:
    """The pages of a row in order: the pinned ones, then those held behind them.

    Attributes:
        pinned: int32 [groups, seqs], pages held that are pinned.
        first: int32 [groups, seqs], logical page of the first one behind them.
        pages: int32 [groups, seqs], all pages held.
        query_slot: int32 [groups, seqs], slot of the first query's token, counted over the pages held.
    """

    pinned: Int32[Array, "groups seqs"]
    first: Int32[Array, "groups seqs"]
    pages: Int32[Array, "groups seqs"]
    query_slot: Int32[Array, "groups seqs"]


@pytree
class Work:
    """Who computes which steps, for each head group.

    Attributes:
        sequence: int32 [groups, blocks].
        pages: int32 [groups, blocks, pages of a block], ids, 0 for none.
        info: int32 [groups, blocks, 9]. PLACE: of the first query token that is computed, in units of `ALIGNMENT`;
            TOKENS: how many there are; TILES: of a head; POSITION: of the first; LOWEST, HIGHEST: positions of the
            slots that count; WINDOW: of these slots; a tile from token FULL_FROM on that ends at FULL_TO or before
            needs no mask.
        begin, end: int32 [groups, blocks], a block's place in the list of steps.
        per_worker: int32 [groups], steps of one worker.
        first_block, end_block: int32 [groups, workers], the blocks that a worker meets.
        sink_blocks, first_of_row: int32 [groups, seqs], how many of a row's blocks are of sinks, and its first block.
    """

    sequence: Int32[Array, "groups blocks"]
    pages: Int32[Array, "groups blocks pages"]
    info: Int32[Array, "groups blocks 9"]
    begin: Int32[Array, "groups blocks"]
    end: Int32[Array, "groups blocks"]
    per_worker: Int32[Array, " groups"]
    first_block: Int32[Array, "groups workers"]
    end_block: Int32[Array, "groups workers"]
    sink_blocks: Int32[Array, "groups seqs"]
    first_of_row: Int32[Array, "groups seqs"]


def align_queries(queries: Queries, num_tokens: int, tile_tokens: int) -> Packing:
    """Lay the tokens of every sequence at a multiple of `ALIGNMENT`, with room for a whole tile behind each."""
    lengths = -(-queries.lengths // ALIGNMENT) * ALIGNMENT
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    seqs = lengths.shape[0]
    places = -(-(num_tokens + (ALIGNMENT - 1) * min(seqs, num_tokens)) // ALIGNMENT) * ALIGNMENT + tile_tokens
    place = jnp.arange(places, dtype=jnp.int32)
    owner = jnp.minimum((ends[None] <= place[:, None]).sum(1, dtype=jnp.int32), seqs - 1)
    sources = queries.starts[owner] + place - (ends - lengths)[owner]
    return Packing(ends - lengths, jnp.clip(sources, 0, num_tokens - 1))


def rows_in_order(rows: Rows, positions: Int32[Array, "pages page_size"], queries: Queries) -> Row:
    """Count the pages that each row holds, and find the queries among their slots."""
    size = positions.shape[1]
    end_slot, pinned = rows.end_slot[rows.layer], jnp.int32(rows.pinned(size))
    end_page = -(-end_slot // size)
    held, first = jnp.minimum(end_page, pinned), jnp.maximum(rows.first_page[rows.layer], pinned)
    behind = jnp.maximum(end_page - first, 0)
    # The last tokens of a row have consecutive positions, whatever stands before them.
    last_page = jnp.maximum(end_page - 1, 0)
    of_last = _ids(rows, last_page[..., None], pinned)[..., 0]
    last_position = positions[of_last, jnp.maximum(end_slot - 1, 0) % size]
    end = (held + behind) * size - (end_page * size - end_slot)
    return Row(held, first, held + behind, end - 1 - (last_position - queries.positions[None]))


def _ids(rows: Rows, logical, pinned):
    """Ids of logical pages [groups, seqs, n]."""
    entry = jnp.where(logical < pinned, logical, pinned + (logical - pinned) % rows.rings[rows.layer])
    return jnp.take_along_axis(rows.page_table[rows.layer], entry, axis=2, mode="promise_in_bounds")


def share_work(
    rows: Rows, row: Row, queries: Queries, packing: Packing, *, page_size: int, block: int, tile_tokens: int,
    heads: int, workers: int, has_sink_query: bool,
) -> Work:  # fmt: skip
    """List the blocks of all rows that have queries, and share their steps among workers.

    The tokens of a step stand at the end of their row, and a row of a windowed layer holds consecutive positions behind
    its pinned pages, at least all that a query sees: so distances of slots tell which tiles a block is seen by, and
    which of them need no mask.
    """
    in_block = block // page_size
    has_queries = queries.lengths[None] > 0
    sink_blocks, blocks = (-(-jnp.where(has_queries, pages, 0) // in_block) for pages in (row.pinned, row.pages))
    of_row = sink_blocks + blocks
    ends = jnp.cumsum(of_row, axis=1, dtype=jnp.int32)
    entries, seqs = rows.page_table.shape[-1], ends.shape[1]
    bound = seqs * (-(-entries // in_block) + -(-rows.pinned(page_size) // in_block))
    index = jnp.arange(bound, dtype=jnp.int32)
    sequence = jnp.minimum((ends[:, None] <= index[None, :, None]).sum(-1, dtype=jnp.int32), seqs - 1)
    of_owner = lambda of: jnp.take_along_axis(jnp.broadcast_to(of, ends.shape), sequence, 1)  # noqa: E731
    within = index[None] - of_owner(ends - of_row)
    is_sink = within < of_owner(sink_blocks)
    first_page = (within - jnp.where(is_sink, 0, of_owner(sink_blocks))) * in_block
    is_used = index[None] < ends[:, -1:]
    pages = _pages_of(rows, row, of_owner, sequence, first_page, in_block, is_sink, is_used, page_size)
    place = packing.starts[None], packing.sources.shape[0] if has_sink_query else 0
    info = _info_of(rows, row, queries, place, of_owner, first_page * page_size, block, is_sink, tile_tokens)
    steps = jnp.where(is_used, info[..., TILES] * heads, 0)
    end = jnp.cumsum(steps, axis=1, dtype=jnp.int32)
    total = end[:, -1:]
    per_worker = jnp.maximum(-(-total // workers), 1)
    begin = jnp.arange(workers, dtype=jnp.int32)[None] * per_worker
    first_block = (end[:, None] <= begin[..., None]).sum(-1, dtype=jnp.int32)
    last = jnp.minimum(begin + per_worker, total)
    end_block = ((end - steps)[:, None] < last[..., None]).sum(-1, dtype=jnp.int32)
    return Work(
        sequence, pages, info, end - steps, end, per_worker[:, 0], first_block, end_block, sink_blocks, ends - of_row
    )  # fmt: skip


def _pages_of(rows, row, of_owner, sequence, first_page, in_block, is_sink, is_used, page_size):
    """Ids of the pages of every block [groups, blocks, pages]."""
    page = first_page[..., None] + jnp.arange(in_block, dtype=jnp.int32)[None, None]
    held, first = of_owner(row.pinned)[..., None], of_owner(row.first)[..., None]
    end = jnp.where(is_sink[..., None], held, of_owner(row.pages)[..., None])
    logical, pinned = jnp.where(page < held, page, first + page - held), jnp.int32(rows.pinned(page_size))
    entry = jnp.where(logical < pinned, logical, pinned + (logical - pinned) % rows.rings[rows.layer])
    group = jnp.arange(page.shape[0], dtype=jnp.int32)[:, None, None]
    there = (page < end) & is_used[..., None]
    ids = rows.page_table[rows.layer].at[group, sequence[..., None], jnp.where(there, entry, 0)]
    return jnp.where(there, ids.get(mode="promise_in_bounds"), 0)


def _info_of(rows, row, queries, place, of_owner, first_slot, block, is_sink, tile_tokens):
    """The fields of every block [groups, blocks, 9]."""
    lengths, starts = of_owner(queries.lengths[None]), of_owner(queries.start_positions[None])
    window = jnp.where(is_sink, 2**31 - 1, rows.windows[rows.layer])
    near = jnp.minimum(window, _FAR)
    # Slots before the block's first and last, seen from the first query.
    first = first_slot - of_owner(row.query_slot)
    last = first + block - 1
    first_token = jnp.clip(first, 0, lengths) // ALIGNMENT * ALIGNMENT
    tokens = jnp.maximum(jnp.where(is_sink, lengths, jnp.minimum(lengths, last + near)) - first_token, 0)
    starts_of_queries, to_sink_queries = place
    place = of_owner(starts_of_queries) + first_token + jnp.where(is_sink, to_sink_queries, 0)
    fields = {
        PLACE: place // ALIGNMENT,
        TOKENS: tokens,
        TILES: -(-tokens // tile_tokens),
        POSITION: of_owner(queries.positions[None]) + first_token,
        LOWEST: starts + jnp.where(is_sink, 0, rows.sinks),
        HIGHEST: jnp.where(is_sink, starts + rows.sinks - 1, 2**31 - 1),
        WINDOW: window,
        FULL_FROM: last - first_token,
        FULL_TO: jnp.minimum(tokens, first - first_token + near),
    }
    return jnp.stack([fields[i] for i in range(len(fields))], axis=-1)


def blocks_of_fragments(of_fragments: Float32[Array, "heads fragments *rest"], work: Work):
    """Add up what the fragments of each block hold: float32 [heads, blocks, *rest].

    Fragments that no worker has written may hold anything.
    """
    blocks, fragments = work.begin.shape[1], of_fragments.shape[1]
    index = jnp.arange(blocks, dtype=jnp.int32)[None]
    first = index + work.begin // work.per_worker[:, None]
    last = jnp.where(work.end > work.begin, index + (work.end - 1) // work.per_worker[:, None], -1)
    # First fragments rise from block to block, so counting them tells the block of any fragment.
    marks = jax.vmap(lambda at: jnp.zeros(fragments, jnp.int32).at[at].add(1, mode="drop"))(first)
    owner = jnp.maximum(jnp.cumsum(marks, axis=1, dtype=jnp.int32) - 1, 0)
    written = jnp.arange(fragments, dtype=jnp.int32)[None] <= jnp.take_along_axis(last, owner, 1)
    heads = of_fragments.shape[0] // owner.shape[0]
    owner, written = (jnp.repeat(of, heads, axis=0) for of in (owner, written))
    shape = written.shape + (1,) * (of_fragments.ndim - 2)
    kept = jnp.where(written.reshape(shape), of_fragments, 0)
    return jax.vmap(lambda x, o: jax.ops.segment_sum(x, o, blocks, indices_are_sorted=True))(kept, owner)
