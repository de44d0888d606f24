"""From the logits of tiles and blocks, as the Hopper kernel stores them, to those of sequences and slots."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from kvjax.kernels.paged_attention.arguments import Queries, Rows
from kvjax.kernels.paged_attention.hopper_block import EMPTY
from kvjax.kernels.paged_attention.hopper_shared import ROWS, Config
from kvjax.kernels.paged_attention.tiles import LOG2E, Work


def logits_by_slot(
    logits: Float32[Array, "kv_heads tiles parts blocks copies rows columns"],
    rows: Rows,
    queries: Queries,
    work: Work,
    config: Config,
    last: int,
) -> Float32[Array, "seqs last heads slots"]:
    """Arrange the logits of each sequence's `last` last queries as `Attention.slot_logits` wants them.

    Args:
        logits: in base 2, EMPTY where masked; blocks that nobody read may hold anything.
        rows, queries, work, config: of the call.
        last: how many (static).
    """
    tile, row, is_query = _rows_of_queries(queries, config, last)
    part, within = row // ROWS, row % ROWS
    kv_head = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None, None, None]
    # [kv_heads, seqs, last, heads, blocks * 64]
    of_rows = logits[kv_head, tile[None, ..., None], part[None], :, :, within[None]]
    of_rows = of_rows.reshape(*of_rows.shape[:4], -1)
    place, is_read = _places_of_slots(rows, work, config, tile)
    per_head = lambda of: jnp.repeat(of, logits.shape[0] // of.shape[0], axis=0)[:, :, :, None]  # noqa: E731
    taken = jnp.take_along_axis(of_rows, per_head(place), axis=-1)
    seen = per_head(is_read & is_query[None, ..., None]) & (taken > EMPTY / 2)
    by_slot = jnp.where(seen, taken / LOG2E, -jnp.inf).transpose(1, 2, 0, 3, 4)
    return by_slot.reshape(*by_slot.shape[:2], -1, by_slot.shape[-1])


def _rows_of_queries(
    queries: Queries, config: Config, last: int
) -> tuple[Int32[Array, "seqs last"], Int32[Array, "seqs last heads"], Bool[Array, "seqs last"]]:
    """The tile and the row of each query head, and whether there is such a query."""
    tiles = -(-queries.lengths // config.tile_tokens)
    first_tile = jnp.cumsum(tiles, dtype=jnp.int32) - tiles
    index = queries.lengths[:, None] - last + jnp.arange(last, dtype=jnp.int32)[None]
    is_query, index = index >= 0, jnp.maximum(index, 0)
    head = jnp.arange(config.heads, dtype=jnp.int32)[None, None]
    row = (index % config.tile_tokens * config.heads)[..., None] + head
    return jnp.where(is_query, first_tile[:, None] + index // config.tile_tokens, 0), row, is_query


def _places_of_slots(
    rows: Rows, work: Work, config: Config, tile: Int32[Array, "seqs last"]
) -> tuple[Int32[Array, "groups seqs last slots"], Bool[Array, "groups seqs last slots"]]:
    """Where the slots of a row's table entries stand in the blocks of a tile, and whether they do."""
    entry = jnp.arange(rows.page_table.shape[-1], dtype=jnp.int32)[None, None]
    pinned, ring = rows.pinned(config.page_size), rows.rings[rows.layer]
    first_page = rows.first_page[rows.layer][..., None]
    logical = first_page + (entry - first_page) % ring
    logical = jnp.where(entry < pinned, entry, jnp.where(entry < pinned + ring, logical, -1))
    within = jnp.arange(config.page_size, dtype=jnp.int32)[None, None, None]
    slot = (logical[..., None] * config.page_size + within).reshape(*logical.shape[:2], 1, -1)
    first, end = (of[rows.layer][:, tile][..., None] * config.piece for of in (work.first_piece, work.end_piece))
    is_sink = slot < config.sinks
    place = jnp.where(is_sink, slot, slot - first + config.sink_blocks * config.shape.block)
    is_read = (slot >= 0) & (slot < end) & (is_sink | (slot >= first))
    return jnp.where(is_read, place, 0), is_read
