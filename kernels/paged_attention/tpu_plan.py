"""What the TPU kernel reads: steps of its grid, each a tile of queries and the pages that it can see."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.kernels.paged_attention.arguments import Queries, Rows
from kvjax.kernels.paged_attention.tiles import Tiles
from kvjax.kernels.pytree import pytree

LANES = 128
_ENTRIES_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static choices.

    Attributes:
        heads: KV heads of a step, a divisor of those of a page.
        pages: pages of a block.
        tile_tokens: most query tokens of a tile.
        stages: blocks in flight.
    """

    heads: int
    pages: int
    tile_tokens: int
    stages: int = 2


@dataclasses.dataclass(frozen=True)
class Choices:
    """What is static in the kernel.

    Attributes:
        shape: of steps and blocks.
        page_size: slots of a page.
        query_heads: of a KV head.
        piece: entries of the page table that one copy brings.
        sinks: first tokens that every query sees.
        scale, soft_cap: of the logits.
        has_sink_query, has_sink_logits: whether these are given.
        has_logits: whether the logits of all slots are returned too.
        full_only: whether open pages are left out; queries may then have no page to read.
        is_listed: whether the table holds lists of pages, for each KV head; any page may have sinks or empty slots.
    """

    shape: Shape
    page_size: int
    query_heads: int
    piece: int
    sinks: int
    scale: float
    soft_cap: float | None
    has_sink_query: bool
    has_sink_logits: bool
    has_logits: bool
    full_only: bool
    is_listed: bool

    @property
    def pinned(self) -> int:
        """Pages that are read before the ring's."""
        return 0 if self.is_listed else -(-self.sinks // self.page_size)


@pytree
class Plan:
    """Steps of the kernel's grid: the tiles of one slice of the heads after those of another.

    A step's pages are those pinned that it reads, then consecutive ones.

    Attributes:
        steps: int32 [2, steps]: the first logical page behind the pinned ones; all pages, 0 for a step without work.
        tiles: int32 [5, tiles]: sequence, query tokens, position of the first, position of the sequence's first token,
            and which of the kernel's blocks of queries holds them.
        limits: int32 [3]: ring and window of the layer, and where the table has the layer.
    """

    steps: Int32[Array, "2 steps"]
    tiles: Int32[Array, "5 tiles"]
    limits: Int32[Array, " 3"]


# Rows of `Plan.steps` and of `Plan.tiles`.
FIRST, PAGES = range(2)
SEQUENCE, TOKENS, POSITION, START, PLACE = range(5)


def plan_steps(
    rows: Rows, queries: Queries, tiles: Tiles | None, layer: Int32[Array, ""], places: Int32[Array, " tiles"], *,
    page_size: int, slices: int, listed: int | None,
) -> Plan:  # fmt: skip
    """Plan the steps of the kernel.

    XLA does this again in every layer, so it is little: a few sums where, without `tiles`, each sequence has one. What
    lies wholly outside a tile's window is left out: the tokens of a step stand at the end of their row, and a row of a
    windowed layer holds consecutive positions, so distances of slots are distances of positions.

    Args:
        rows, queries: as for `reference.paged_attention`.
        tiles: of the queries, or None.
        layer: where the table has it.
        places: of the tiles among the kernel's blocks of queries, rising.
        page_size: slots of a page.
        slices: of the heads of each group, a step each.
        listed: pages of the lists that take the table's place.
    """
    window, ring, pinned = rows.windows[rows.layer], rows.rings[rows.layer], rows.pinned(page_size)
    ends, firsts = rows.end_slot[rows.layer], rows.first_page[rows.layer]
    lengths, position, start = queries.lengths, queries.positions, queries.start_positions
    number = jnp.arange(lengths.shape[0] if tiles is None else tiles.tokens.shape[0], dtype=jnp.int32)
    if tiles is None:
        sequence, tokens, left = number, lengths, lengths
    else:
        sequence, tokens = tiles.sequence, tiles.tokens
        left, position, start = lengths[sequence] - tiles.offset, position[sequence] + tiles.offset, start[sequence]
        ends, firsts = ends[:, sequence], firsts[:, sequence]
    first_slot = ends - left[None]
    oldest_slot = jnp.maximum(first_slot - jnp.minimum(window - 1, first_slot), 0)
    first = jnp.maximum(jnp.maximum(firsts, oldest_slot // page_size), pinned)
    end = jnp.minimum(-(-(first_slot + tokens[None]) // page_size), rows.end_page(ends, page_size))
    pages = jnp.minimum(end, pinned) + jnp.maximum(end - first, 0)
    if listed is not None:
        first, pages, ring = jnp.zeros_like(first), jnp.full_like(first, listed), jnp.int32(listed)
    pages = jnp.where(tokens[None] > 0, pages, 0)
    return Plan(
        jnp.stack([jnp.repeat(of, slices, axis=0).reshape(-1) for of in (first, pages)]),
        jnp.stack([sequence, tokens, position, start, places]),
        jnp.stack([ring, window, layer]),
    )


def table_of(
    rows: Rows, page_list: Int32[Array, "kv_heads seqs listed"] | None
) -> tuple[Int32[Array, "layers groups seqs entries"], Int32[Array, ""], int]:
    """What holds the ids of pages: the page table, or the lists in its form; the layer there; entries of one copy.

    A copy brings a whole row, or an equal part of one that copies can address. Rows that have no such part are padded,
    which copies one layer of the table.
    """
    if page_list is not None:
        return page_list[None], jnp.int32(0), page_list.shape[-1]
    entries = rows.page_table.shape[-1]
    if entries <= _ENTRIES_AT_ONCE:
        return rows.page_table, rows.layer, entries
    piece = next((n for n in (1024, 512, 256, LANES) if entries % n == 0), None)
    if piece is not None:
        return rows.page_table, rows.layer, piece
    padded = jnp.pad(rows.page_table[rows.layer], ((0, 0), (0, 0), (0, -entries % LANES)))
    return padded[None], jnp.int32(0), LANES
