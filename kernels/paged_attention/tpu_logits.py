"""The logits that the TPU kernel returns, brought from the order in which it reads into that of a row's entries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from kvjax.kernels.paged_attention.tpu_plan import FIRST, PAGES, Plan


def slot_logits(
    of_blocks: Float32[Array, "steps blocks heads rows slots"],
    plan: Plan,
    lengths: Int32[Array, " seqs"],
    *,
    entries: int,
    pinned: int,
    page_size: int,
    query_heads: int,
    last: int,
) -> Float32[Array, "seqs last all_heads all_slots"]:
    """Return the logits of every sequence's last queries by slots of the row, -inf where nothing is seen.

    Args:
        of_blocks: what the kernel returned, one tile a sequence.
        plan: of that call.
        lengths: query tokens of each sequence's tile.
        entries: of the page table, or pages of a list.
        pinned: entries that stand before the ring.
        page_size: slots of a page.
        query_heads: of a KV head.
        last: queries to return; query w of a sequence is its `last - w`th from the end.
    """
    seqs, (_, _, heads, rows, _), width = lengths.shape[0], of_blocks.shape, entries * page_size
    as_read = of_blocks.reshape(-1, seqs, *of_blocks.shape[1:]).transpose(1, 0, 3, 4, 2, 5)
    as_read = as_read.reshape(seqs, -1, rows, as_read.shape[4] * as_read.shape[5])[..., :width]
    # A page is too narrow to be moved by itself: whole rows are turned, as the ring is.
    turn, is_read = _entries(plan, seqs, entries, pinned)
    is_read = jnp.repeat(jnp.repeat(is_read, heads, axis=1), page_size, axis=2)[:, :, None]
    in_ring = as_read[..., pinned * page_size :]
    turned = _turned(in_ring, turn * page_size, plan.limits[0] * page_size)
    ordered = jnp.where(is_read, jnp.concatenate([as_read[..., : pinned * page_size], turned], axis=-1), -jnp.inf)
    tile_tokens = rows // query_heads
    ordered = ordered[:, :, : tile_tokens * query_heads].reshape(seqs, -1, tile_tokens, query_heads, width)
    ordered = ordered.swapaxes(1, 2).reshape(seqs, tile_tokens, -1, width)
    token = jnp.arange(last, dtype=jnp.int32)[None] - last + lengths[:, None]
    chosen = jnp.take_along_axis(ordered, jnp.clip(token, 0, tile_tokens - 1)[:, :, None, None], axis=1)
    return jnp.where((token >= 0)[:, :, None, None], chosen, -jnp.inf)


def _entries(plan: Plan, seqs: int, entries: int, pinned: int):
    """How far each sequence's ring has turned [seqs], and which entries a step reads [seqs, parts, entries]."""
    first, pages = (plan.steps[of].reshape(-1, seqs).T for of in (FIRST, PAGES))
    entry, ring = jnp.arange(entries, dtype=jnp.int32)[None, None], plan.limits[0]
    turn = jnp.maximum(first - pinned, 0) % ring
    number = jnp.minimum(pages, pinned)[..., None] + (entry - pinned - turn[..., None]) % ring
    is_read = jnp.where(entry < pinned, entry, number) < pages[..., None]
    return turn, is_read & (entry < pinned + ring)


def _turned(of_ring, by, ring):
    """[seqs, heads, rows, slots] with slot 0 at slot `by` [seqs, parts] of a ring of `ring` slots."""
    width = of_ring.shape[-1]
    by = jnp.repeat(by, of_ring.shape[1] // by.shape[1], axis=1)
    twice = jnp.concatenate([of_ring, of_ring], axis=-1)
    cut = jax.vmap(jax.vmap(lambda row, begin: jax.lax.dynamic_slice_in_dim(row, begin, width, axis=-1)))
    is_behind = jnp.arange(width, dtype=jnp.int32)[None, None, None] >= by[:, :, None, None]
    return jnp.where(is_behind, cut(twice, width - by), cut(twice, ring - by))
