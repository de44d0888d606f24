"""Attention mass on NVIDIA Hopper (sm_90a), in Pallas Mosaic GPU: see `hopper_kernel.py` and `docs/kernels.md`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kvjax.kernels.attention_mass.hopper_kernel import mass_of_fragments
from kvjax.kernels.attention_mass.hopper_tile import Shape
from kvjax.kernels.attention_mass.hopper_work import (
    Row,
    Work,
    align_queries,
    blocks_of_fragments,
    rows_in_order,
    share_work,
)
from kvjax.kernels.paged_attention.arguments import Queries, Rows
from kvjax.kernels.paged_attention.hopper import HEAD_DIMS as HEAD_DIMS
from kvjax.kernels.paged_attention.hopper import PAGE_SIZES as PAGE_SIZES
from kvjax.kernels.paged_attention.hopper import refuses
from kvjax.kernels.paged_attention.tiles import LOG2E

_PROCESSORS = 132  # of an H100 or H200


def shape_of(head_dim: int, kv_heads: int, max_query_length: int) -> Shape:
    """Choose tiles and stages that fit 227 KB of shared memory and the registers, and CTAs that fill the chip."""
    tile_tokens = 8 if max_query_length <= 8 else -(-max_query_length // 16) * 16
    workers = max(_PROCESSORS // kv_heads, 1)
    if tile_tokens <= 64:
        # Memory is the limit then: the more keys in flight the better.
        return Shape(128, tile_tokens, 2 if head_dim == 256 else 4, 2, workers)
    if head_dim == 256:
        return Shape(128, 64, 2, 2, workers)
    # Twice the slots halve the traffic of queries from L2.
    return Shape(256, min(tile_tokens, 96), 2, 3, workers)


def attention_mass(
    q: Float[Array, "tokens heads head_dim"],
    lse: Float32[Array, "tokens heads"],
    keys: Float[Array, "pages heads_per_group page_size head_dim"],
    positions: Int32[Array, "pages page_size"],
    rows: Rows,
    queries: Queries,
    *,
    scale: float,
    soft_cap: float | None = None,
    band: int | None = None,
    sink_query: Float[Array, "tokens heads head_dim"] | None = None,
    max_query_length: int,
    shape: Shape | None = None,
    interpret: Any = None,
) -> tuple[Float32[Array, "kv_heads seqs slots"], Float32[Array, "heads seqs"]]:
    """Sum the attention probabilities of a step's queries over the queries; see `reference.attention_mass`.

    The tokens of the step must stand in order at the end of their row, as `attend` leaves them.

    Args:
        max_query_length: static bound of `queries.lengths`.
        shape: static choices, `shape_of` by default.
        interpret: `plgpu.InterpretGPUParams` to run without a GPU.

    Returns: column sums, 0 for slots that hold nothing, and entropy.

    Raises: NotImplementedError for what the kernel cannot serve.
    """
    kv_heads = keys.shape[1] * rows.page_table.shape[1]
    heads, head_dim, page_size = q.shape[1] // kv_heads, q.shape[2], keys.shape[2]
    reason = refuses(
        head_dim=head_dim,
        page_size=page_size,
        dtype=str(q.dtype),
        key_format=str(keys.dtype),
        value_format=str(keys.dtype),
        heads_per_kv_head=heads,
    )
    if reason is not None:
        raise NotImplementedError(f"the Hopper kernel cannot serve this call: {reason}")
    shape = shape or shape_of(head_dim, kv_heads, max_query_length)
    packing = align_queries(queries, q.shape[0], shape.tile_tokens)
    row = rows_in_order(rows, positions, queries)
    work = share_work(
        rows, row, queries, packing, page_size=page_size, block=shape.block, tile_tokens=shape.tile_tokens,
        heads=heads, workers=shape.workers, has_sink_query=sink_query is not None,
    )  # fmt: skip
    both = (q,) if sink_query is None else (q, sink_query)
    aligned = jnp.concatenate([of.at[packing.sources].get(mode="promise_in_bounds") for of in both]).swapaxes(0, 1)
    base_2 = jnp.tile(lse.at[packing.sources].get(mode="promise_in_bounds").T * LOG2E, (1, len(both)))
    sums, products = mass_of_fragments(
        aligned, base_2, keys, positions, work, kv_heads=kv_heads, shape=shape, scale=scale, soft_cap=soft_cap,
        band=band, interpret=interpret,
    )  # fmt: skip
    sums = blocks_of_fragments(sums.reshape(*sums.shape[:2], shape.block), work)
    entropy = -math.log(2) * blocks_of_fragments(products.sum((2, 4)), work)
    return _by_entry(sums, rows, row, queries, work, page_size), _by_sequence(entropy, queries, work)


def _by_entry(sums, rows: Rows, row: Row, queries: Queries, work: Work, page_size: int):
    """Column sums of blocks [kv_heads, blocks, slots of a block] to the slots of the rows' table entries."""
    ring, pinned = rows.rings[rows.layer], jnp.int32(rows.pinned(page_size))
    entry = jnp.arange(rows.page_table.shape[-1], dtype=jnp.int32)[None, None]
    held, first, pages = (of[..., None] for of in (row.pinned, row.first, row.pages))
    page = jnp.where(entry < pinned, entry, held + (entry - first) % ring)
    is_live = jnp.where(entry < pinned, entry < held, (entry - pinned < ring) & (page < pages))
    is_live = is_live & (queries.lengths > 0)[None, :, None]
    in_block = sums.shape[2] // page_size
    place = (work.first_of_row + work.sink_blocks)[..., None] * in_block + page
    of_pages = sums.reshape(work.begin.shape[0], -1, work.begin.shape[1] * in_block, page_size)

    def take(place, is_there):
        of_group = jax.vmap(lambda of, at: of.at[:, at].get(mode="promise_in_bounds"))
        taken = of_group(of_pages, jnp.where(is_there, place, 0))
        return jnp.where(is_there[:, None, ..., None], taken, 0)

    out = take(place, is_live)
    if rows.sinks:
        out = out + take(work.first_of_row[..., None] * in_block + entry, is_live & (entry < pinned))
    return out.reshape(sums.shape[0], out.shape[2], -1)


def _by_sequence(entropy, queries: Queries, work: Work):
    """Entropies of blocks [kv_heads, blocks, heads of one] to [heads, seqs]."""
    seqs, groups = queries.lengths.shape[0], work.sequence.shape[0]
    of_group = jax.vmap(lambda x, owner: jax.ops.segment_sum(x, owner, seqs, indices_are_sorted=True))
    by_block = entropy.reshape(groups, -1, *entropy.shape[1:]).swapaxes(1, 2)
    return of_group(by_block, work.sequence).transpose(0, 2, 3, 1).reshape(-1, seqs)
