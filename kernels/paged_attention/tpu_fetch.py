"""The copies of the TPU kernel: page ids into scalar memory, pages into vector memory."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.paged_attention.tpu_block import Buffers
from kvjax.kernels.paged_attention.tpu_codes import Pages
from kvjax.kernels.paged_attention.tpu_plan import FIRST, PAGES, SEQUENCE, Choices, Plan


class Pool(NamedTuple):
    """What stays in HBM: the pool and the page table, or lists of pages in its form."""

    keys: Pages
    values: Pages
    positions: Any
    table: Any


@dataclasses.dataclass(frozen=True)
class Fetch:
    """The copies of page ids and pages, by step and block."""

    choices: Choices
    plan: Plan
    pool: Pool
    at: Buffers

    def live(self, step, i):
        """Pages of a block."""
        return jnp.minimum(self.plan.steps[PAGES, step] - i * self.choices.shape.pages, self.choices.shape.pages)

    def start_ids(self, step, row) -> None:
        """Start to copy the part of the page table that a step needs, into a row of scalar memory."""
        self._for_each_piece(step, row, lambda copy: copy.start())

    def wait_ids(self, step, row) -> None:
        """Wait for it."""
        self._for_each_piece(step, row, lambda copy: copy.wait())

    def start(self, step, i, slot, row) -> None:
        """Start to copy the pages of block i of a step into a buffer, by the ids in a row of scalar memory."""
        plan, choices = self.plan, self.choices
        pinned = jnp.minimum(plan.steps[PAGES, step], choices.pinned)

        def page(j):
            number = i * choices.shape.pages + j
            in_ring = lax.rem(plan.steps[FIRST, step] - choices.pinned + number - pinned, plan.limits[0])
            return self.at.ids[row, jnp.where(number < pinned, number, choices.pinned + in_ring)]

        self._for_each_page(step, i, slot, page, lambda copy: copy.start())

    def wait(self, step, i, slot) -> None:
        """Wait for them."""
        at, is_full = self.at, self.live(step, i) == self.choices.shape.pages

        @pl.when(is_full)
        def _():
            for of in (*at.keys.arrays, *at.values.arrays, at.positions):
                pltpu.make_async_copy(of.at[slot], of.at[slot], at.pages_in.at[slot]).wait()

        @pl.when(jnp.logical_not(is_full))
        def _():
            self._for_each_page(step, i, slot, lambda j: 0, lambda copy: copy.wait())

    def first_head(self, step):
        """The first of a step's KV heads among those of a page."""
        slices = self._slices()
        return 0 if slices == 1 else lax.rem(self._part(step)[0], slices) * self.choices.shape.heads

    def _part(self, step):
        """Slice of the heads that a step computes, and its tile."""
        num_tiles = self.plan.tiles.shape[1]
        return lax.div(step, num_tiles), lax.rem(step, num_tiles)

    def _slices(self) -> int:
        """Slices of the heads of a page."""
        return self.pool.keys.codes.shape[1] // self.choices.shape.heads

    def _for_each_piece(self, step, row, do) -> None:
        choices, plan, entries = self.choices, self.plan, self.pool.table.shape[-1]
        part, tile = self._part(step)
        group = part if choices.is_listed else lax.div(part, self._slices())
        ring, pages = plan.limits[0], plan.steps[PAGES, step] - choices.pinned
        begin = lax.rem(plan.steps[FIRST, step] - choices.pinned, ring)
        is_whole = (begin + pages > ring) | (choices.pinned > 0)
        begin, end = jnp.where(is_whole, 0, begin), jnp.where(is_whole, choices.pinned + ring, begin + pages)

        def copy(i, _):
            # A whole row need not be of a size that copies can address parts of.
            begin = 0 if choices.piece == entries else pl.multiple_of(i * choices.piece, choices.piece)
            here = pl.ds(begin, choices.piece)
            source = self.pool.table.at[plan.limits[2], group, plan.tiles[SEQUENCE, tile], here]
            do(pltpu.make_async_copy(source, self.at.ids.at[row, here], self.at.ids_in.at[row]))
            return 0

        lax.fori_loop(lax.div(begin, choices.piece), pl.cdiv(end, choices.piece), copy, 0)

    def _for_each_page(self, step, i, slot, page_of, do) -> None:
        size, heads = self.choices.page_size, self.choices.shape.heads
        pool, at, scales = self.pool, self.at, self.at.keys.scales + self.at.values.scales
        here = pl.ds(self.first_head(step), heads)

        def copy(j, _):
            page, there = page_of(j), pl.ds(pl.multiple_of(j * size, size), size)
            semaphore = at.pages_in.at[slot]
            do(pltpu.make_async_copy(pool.keys.codes.at[page, here], at.keys.codes.at[slot, :, there], semaphore))
            do(pltpu.make_async_copy(pool.values.codes.at[page, here], at.values.codes.at[slot, :, there], semaphore))
            # Heads are rows of a tile, which copies cannot cut: the scales of all come along.
            for source, target in zip(pool.keys.scales + pool.values.scales, scales, strict=True):
                do(pltpu.make_async_copy(source.at[page], target.at[slot, j], semaphore))
            source, target = pool.positions.at[pl.ds(page, 1)], at.positions.at[slot, pl.ds(j, 1)]
            do(pltpu.make_async_copy(source, target, semaphore))
            return 0

        lax.fori_loop(0, self.live(step, i), copy, 0)
