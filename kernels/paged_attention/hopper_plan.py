"""What the Hopper kernel works out before it runs: the tiles of a step's queries, and who reads which blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from kvjax.kernels.paged_attention.arguments import Queries, Rows
from kvjax.kernels.paged_attention.hopper_shared import ROWS, Shape
from kvjax.kernels.paged_attention.tiles import Tiles, Work, share_work, tiles_of
from kvjax.kernels.pytree import pytree

_PROCESSORS = 132  # of an H100 or H200


@pytree
class Plan:
    """A plan for all layers of a step, so that it need be made only once.

    Attributes:
        tiles, work: which queries and blocks.
        rings, windows: int32 [layers], of the rows.
        shape, tile_tokens: the static choices that it was made for.
    """

    tiles: Tiles
    work: Work
    rings: Int32[Array, " layers"]
    windows: Int32[Array, " layers"]
    shape: Any = dataclasses.field(metadata=dict(static=True))
    tile_tokens: int = dataclasses.field(metadata=dict(static=True))


def make_plan(
    rows: Rows, queries: Queries, *, num_tokens: int, page_size: int, shape: Shape, tile_tokens: int,
    is_ordered: bool = True,
) -> Plan:  # fmt: skip
    """Plan a step of `num_tokens` packed tokens."""
    tiles = tiles_of(queries, num_tokens, tile_tokens)
    work = share_work(
        rows, queries, tiles, page_size=page_size, piece=shape.piece(page_size), block=shape.block,
        workers=shape.workers, is_ordered=is_ordered,
    )  # fmt: skip
    # Or XLA would make constants anew in every layer.
    rings, windows = lax.optimization_barrier((rows.rings, rows.windows))
    return Plan(tiles, work, rings, windows, shape, tile_tokens)


def shape_of(head_dim: int, kv_heads: int, *, is_decode: bool) -> Shape:
    """Choose blocks and stages that fit 227 KB of shared memory and the registers, and CTAs that fill the chip."""
    workers = max(_PROCESSORS // kv_heads, 1)
    if head_dim == 256:
        # The accumulator alone takes 128 registers of a thread, so that there is room for one consumer.
        return Shape(64, 2, workers, 1, not is_decode)
    return Shape(64, 4 if is_decode else 2, workers, 2, not is_decode)


def tokens_of_tile(shape: Shape, heads: int, *, is_decode: bool) -> int:
    """Tokens of a tile whose KV head has `heads` query heads."""
    return 1 if is_decode else (shape.consumers if shape.shares_blocks else 1) * ROWS // heads


def listed_rows(rows: Rows, page_list: Int32[Array, "kv_heads seqs n"], page_size: int) -> Rows:
    """Rows of one layer, and of each KV head, that hold the listed pages."""
    count = page_list.shape[-1]
    used = jnp.where(page_list > 0, jnp.arange(1, count + 1, dtype=jnp.int32)[None, None], 0).max(-1)
    ring, window = jnp.full(1, count, jnp.int32), rows.windows[rows.layer][None]
    return Rows(page_list[None], jnp.zeros_like(used)[None], used[None] * page_size, ring, window, jnp.int32(0))
