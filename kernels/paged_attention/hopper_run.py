"""What a CTA of the Hopper kernel works on: its tiles and blocks, their pages, and what may be seen in them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.paged_attention.hopper_shared import ROWS, Config, Inputs, Scratch

_FAR = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Run:
    """A CTA's run of blocks.

    Attributes:
        config: static choices.
        given, at: references.
        worker, head: place in the grid.
        layer, row: which row of the tables, and of the plan, the CTA reads.
    """

    config: Config
    given: Inputs
    at: Scratch
    worker: Any
    head: Any
    row: Any
    layer: Any

    def of(self, array, *index):
        """An element of what there is for each layer and row."""
        return array[self.layer, self.row, *index]

    def for_each_fragment(self, body):
        """Call body(tile, its first block here, blocks, blocks before) for its tiles; returns all blocks."""
        begin = self.worker * self.of(self.given.per_worker)
        end = begin + self.of(self.given.per_worker)

        def of_tile(tile, before):
            tile_begin = self.of(self.given.begin_block, tile)
            first = jnp.maximum(begin, tile_begin)
            count = jnp.maximum(jnp.minimum(end, self.of(self.given.end_block, tile)) - first, 0)
            pl.when(count > 0)(lambda: body(tile, first - tile_begin, count, before))
            return before + count

        first_tile, end_tile = (self.of(of, self.worker) for of in (self.given.first_tile, self.given.end_tile))
        return lax.fori_loop(first_tile, end_tile, of_tile, jnp.int32(0))

    def pieces_of(self, tile, block):
        """First piece of a block, and the piece behind the last that it may read."""
        first, end = self.of(self.given.first_piece, tile), self.of(self.given.end_piece, tile)
        config = self.config
        if not config.sinks:
            return first + block * config.pieces, end
        is_sink = block < config.sink_blocks
        own = jnp.where(is_sink, 0, first - config.sink_blocks * config.pieces) + block * config.pieces
        return own, jnp.where(is_sink, jnp.minimum(end, -(-config.sinks // config.piece)), end)

    def page_of(self, tile, block, j):
        """Page id and number of the piece in the page; page 0, whose positions are -1, behind the end."""
        first, end = self.pieces_of(tile, block)
        config, piece = self.config, first + j
        pieces_per_page = config.page_size // config.piece
        logical, ring = lax.div(piece, pieces_per_page), self.given.rings[self.layer]
        entry = lax.rem(logical, ring)
        if config.pinned:
            behind = config.pinned + lax.rem(jnp.maximum(logical - config.pinned, 0), ring)
            entry = jnp.where(logical < config.pinned, logical, behind)
        page = jnp.where(piece < end, self.of(self.given.page_table, self.given.sequence[tile], entry), 0)
        return page, lax.rem(piece, pieces_per_page)

    def _positions_of_rows(self, tile, part):
        """The position of each row's token, -1 for none; in decode the one that all rows have."""
        config, position = self.config, self.given.position[tile]
        if config.tile_tokens == 1:
            return position
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        token = lax.div(row + part * ROWS, jnp.full_like(row, config.heads))
        return jnp.where(token < self.given.tokens[tile], position + token, -1)

    def limits(self, tile, part):
        """A function of a block: which query reads it, and the first and last position that it sees there."""
        latest = self._positions_of_rows(tile, part)
        start, reach = self.given.start[tile], self.given.windows[self.layer] - 1
        if not self.config.sinks:
            seen = (jnp.maximum(latest - reach, start), latest)
            return lambda block: (0, seen)

        def of_block(block):
            is_sink, end = block < self.config.sink_blocks, start + self.config.sinks
            earliest = jnp.maximum(latest - jnp.where(is_sink, _FAR, reach), jnp.where(is_sink, start, end))
            kind = jnp.where(is_sink, self.config.kinds - 1, 0)
            return kind, (earliest, jnp.minimum(latest, jnp.where(is_sink, end - 1, _FAR)))

        return of_block

    def may_be_empty(self, tile):
        """A function of a block: whether it may have empty slots."""
        if self.config.is_listed:
            return lambda block: block >= 0
        full = self.of(self.given.empty_slot, tile) - self.of(self.given.first_piece, tile) * self.config.piece
        first = lax.div(full, jnp.int32(self.config.shape.block)) + self.config.sink_blocks
        if not self.config.sinks:
            return lambda block: block >= first
        return lambda block: (block >= first) | (block < self.config.sink_blocks)
