"""Dropping what a policy does not keep, at the end of a step: tokens one by one, whole pages, or most of a prompt.

A decode step that is over budget empties one slot of a row, which the next token fills (`Cache.write_slot`), or takes
one page out of a row. Steps of several tokens move what a row keeps to its first pages: codes and scales as they are.
All of it acts on layers without a window, and nothing asks the host.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from kvjax import hooks
from kvjax.cache import Cache
from kvjax.placement import drop_pages, scrub, set_positions
from kvjax.policy import Held

_NONE = 2**31 - 1
_LOWEST = float(np.finfo(np.float32).min)
_ALL = slice(None)


def evict(cache: Cache, lengths: Int32[Array, " seqs"], ends: Bool[Array, " seqs"], *, is_decode: bool) -> Cache:
    """Drop what the policy does not keep.

    Args:
        cache: the cache, with all tokens of the step.
        lengths: tokens that the step has brought.
        ends: sequences of which the step has not left a prompt unfinished.
        is_decode: whether every sequence brought one token at most, and none of those ended a prompt (static).
    """
    policy = cache.spec.policy
    if not policy.edits:
        return cache
    rows = cache.policy_state["rows"]
    if not is_decode and rows:
        free = [layer for layer, window in enumerate(cache.spec.layer_windows) if window is None]
        kept = hooks.settled(policy, rows, ends & (lengths > 1), free)
        cache = dataclasses.replace(cache, policy_state=cache.policy_state | dict(rows=kept))
    ends = (ends | policy.in_chunks) & (lengths > 0)
    if not is_decode:
        cache = _compact(cache, lengths, ends)
    if not policy.in_decode:
        return cache
    alone = (ends & (lengths == 1))[None, None]
    return _drop_page(cache, alone) if policy.by_page else _empty_slot(cache, lengths, alone)


def _held(cache: Cache, layers: slice | Int32[Array, " 1"], entries: int) -> Held:
    """What the rows of some layers hold in their first table entries."""
    ids = cache.page_table[layers, :, :, :entries]
    take = lambda of_slots: of_slots.at[ids].get(mode="promise_in_bounds").reshape(*ids.shape[:-1], -1)  # noqa: E731
    positions, slots = _gathered_once((take(cache.positions), jax.tree.map(take, cache.policy_state["slots"])))
    number = jnp.arange(cache.first.size, dtype=jnp.int32).reshape(cache.first.shape)
    rows, number = jax.tree.map(lambda of: of[layers], (cache.policy_state["rows"], number))
    next_position, start = cache.next_position[None, None], cache.start_position[None, None]
    return Held(positions, slots, rows, number, next_position, start, cache.spec.page_size)


def _gathered_once(gathered: Any) -> Any:
    """Keep XLA on CPUs from gathering anew for every reduction; elsewhere that costs little, and arrays memory."""
    return lax.platform_dependent(gathered, cpu=lax.optimization_barrier, default=lambda gathered: gathered)


def _ranked(cache: Cache, held: Held, layers: slice | Int32[Array, " 1"]):
    """Ranks of slots, infinite where nothing can be dropped, and how many tokens of each row are too many."""
    rank, allowed = hooks.ranked(cache.spec.policy, held)
    # A token whose score overflowed or is NaN is the first to go, not one that stays.
    rank = jnp.where(rank == jnp.inf, rank, jnp.maximum(jnp.nan_to_num(rank, nan=_LOWEST), _LOWEST))
    has_none = jnp.asarray(np.array([window is None for window in cache.spec.layer_windows]))
    rank = jnp.where(held.used & has_none[layers, None, None, None], rank, jnp.inf)
    return rank, jnp.maximum(jnp.isfinite(rank).sum(-1, dtype=jnp.int32) - allowed, 0)


def _first_of_least(rank: Float32[Array, "*rows n"], age: Int32[Array, "*rows n"]) -> Int32[Array, "*rows"]:
    """Index of the lowest rank, of the greatest age among equal ones."""
    # XLA on CPUs vectorises minima, but not the index of one.
    lowest = jnp.where(rank == rank.min(-1, keepdims=True), age, -1)
    number = jnp.arange(rank.shape[-1], dtype=jnp.int32)
    return jnp.where(lowest == lowest.max(-1, keepdims=True), number, rank.shape[-1] - 1).min(-1)


def _at(of_rows: Array, index: Int32[Array, "*rows"]) -> Array:
    return jnp.take_along_axis(of_rows, index[..., None], axis=-1, mode="promise_in_bounds")[..., 0]


def _empty_slot(cache: Cache, lengths: Int32[Array, " seqs"], alone: Bool[Array, "1 1 seqs"]) -> Cache:
    """Empty the slot of lowest rank, but not the newest token's, of rows that are over budget after one more token."""
    size, held = cache.spec.page_size, _held(cache, _ALL, cache.spec.decode_entries)
    rank, excess = _ranked(cache, held, _ALL)
    rank = jnp.where(held.age > 1, rank, jnp.inf)
    emptied = alone & (excess > 0) & jnp.isfinite(rank).any(-1)
    slot = _first_of_least(rank, held.age)
    ids = jnp.where(emptied, _at(cache.page_table, slot // size), 0)
    of_page = jnp.arange(size, dtype=jnp.int32)[None, None, None]
    left = jnp.where(of_page == (slot % size)[..., None], -1, cache.positions.at[ids].get(mode="promise_in_bounds"))
    cache = set_positions(cache, ids.reshape(-1), left.reshape(-1, size))
    assert cache.write_slot is not None
    brought = lengths[None, None]
    # What several tokens have not filled is still empty, unless the row has been compacted.
    still_empty = (brought > 1) & (cache.write_slot < cache.next_slot - brought)
    write_slot = jnp.where(emptied, slot, jnp.where(still_empty, cache.write_slot, cache.next_slot))
    return dataclasses.replace(cache, write_slot=jnp.where(brought > 0, write_slot, cache.write_slot))


def _drop_page(cache: Cache, alone: Bool[Array, "1 1 seqs"]) -> Cache:
    """Take the page of lowest rank out of rows whose last page is full; those behind it move up, to stay in order."""
    size, table, entries = cache.spec.page_size, cache.page_table, cache.spec.decode_entries
    full = alone & (cache.next_slot % size == 0)

    def drop(table, next_slot, allocator, status):
        held = _held(cache, _ALL, entries)
        by_page = lambda of_slots: of_slots.reshape(*table.shape[:-1], entries, size)  # noqa: E731
        rank, excess = _ranked(cache, held, _ALL)
        # Divided first: the lowest number there is, summed, would be none.
        of_pages = jnp.where(jnp.isinf(by_page(rank)).any(-1), jnp.inf, (by_page(rank) / size).sum(-1))
        victim = _first_of_least(of_pages, by_page(held.age).max(-1))
        dropping = full & (excess > 0) & jnp.isfinite(of_pages).any(-1)
        old = jnp.where(dropping, _at(table, victim), 0)
        behind = jnp.concatenate([table[..., 1:], jnp.zeros_like(table[..., :1])], -1)
        entry = jnp.arange(table.shape[-1], dtype=jnp.int32)[None, None, None]
        table = jnp.where(dropping[..., None] & (entry >= victim[..., None]), behind, table)
        next_slot = next_slot - jnp.where(dropping, size, 0)
        return (table, next_slot, *drop_pages(allocator, status, old.reshape(-1)))

    def keep(*parts):
        return *parts, jnp.zeros(full.size, jnp.int32)

    parts = (table, cache.next_slot, cache.allocator, cache.status)
    table, next_slot, allocator, status, freed = lax.cond(full.any(), drop, keep, *parts)
    cache = dataclasses.replace(cache, page_table=table, allocator=allocator, status=status, next_slot=next_slot)
    return scrub(cache, freed)


def _compact(cache: Cache, lengths: Int32[Array, " seqs"], ends: Bool[Array, " seqs"]) -> Cache:
    """Drop all that is too much of rows, and move what is left to the row's first pages; layer by layer."""
    policy, several = cache.spec.policy, lengths > 1
    # What one more token makes too much is for the decode step's way, which moves nothing.
    spare = cache.spec.page_size if policy.by_page else 1

    def of_layer(layer, cache: Cache) -> Cache:
        here = layer[None]
        held = _held(cache, here, cache.spec.pages_per_seq)
        rank, excess = _ranked(cache, held, here)
        is_over = several[None, None] | (policy.in_decode & (excess > spare))
        chosen = ends[None, None] & (excess > 0) & is_over

        def compact(cache: Cache) -> Cache:
            kept = held.used & ~_lowest(rank, held.positions, excess)
            number = jnp.arange(rank.shape[-1], dtype=jnp.int32)[None, None, None]
            source = jnp.sort(jnp.where(kept & chosen[..., None], number, _NONE))
            return _cut(_move(cache, here, source), here, chosen, kept.sum(-1, dtype=jnp.int32))

        return lax.cond(chosen.any(), compact, lambda cache: cache, cache)

    def of_all(cache: Cache) -> Cache:
        return lax.fori_loop(jnp.int32(0), jnp.int32(cache.spec.num_layers), of_layer, cache)

    wanted = ends & (several | policy.in_decode)
    return lax.cond(wanted.any(), of_all, lambda cache: cache, cache)


def _lowest(rank: Float32[Array, "*rows n"], positions: Int32[Array, "*rows n"], count: Int32[Array, "*rows"]):
    """Mark the `count` lowest ranks of each row, of equal ones the older tokens."""
    number = jnp.broadcast_to(jnp.arange(rank.shape[-1], dtype=jnp.int32), rank.shape)
    *_, order = lax.sort((rank, positions, number), num_keys=2)
    return jnp.put_along_axis(jnp.zeros(rank.shape, bool), order, number < count[..., None], axis=-1, inplace=False)


def _move(cache: Cache, layer: Int32[Array, " 1"], source: Int32[Array, "1 groups seqs slots"]) -> Cache:
    """Fill rows of a layer from the front with what stands in slots `source`, rising and _NONE behind the last.

    Page by page: every slot comes from one that is no nearer to the front, so none is overwritten before it is read.
    """
    size, table = cache.spec.page_size, cache.page_table[layer]
    pages = (source < _NONE).any((0, 1, 2)).reshape(-1, size).any(-1).sum(dtype=jnp.int32)

    def fill(page, cache: Cache) -> Cache:
        taken = lax.dynamic_slice_in_dim(source, page * size, size, axis=3)
        live = taken < _NONE
        slot = jnp.where(live, taken, 0)
        ids = jnp.take_along_axis(table, slot // size, axis=-1, mode="promise_in_bounds")
        target = jnp.where(live.any(-1), lax.dynamic_index_in_dim(table, page, axis=3, keepdims=False), 0)

        def move(pool: Array) -> Array:
            # The barrier: fused with the scatter this would read the array that it writes, and XLA would copy it all.
            tile = lax.optimization_barrier(pool.at[ids, :, slot % size].get(mode="promise_in_bounds"))
            tile = jnp.where(live.reshape(*live.shape, *(1,) * (pool.ndim - 2)), tile, 0)
            return pool.at[target].set(jnp.moveaxis(tile, 3, 4), mode="promise_in_bounds")

        cache = cache.map_pool(move)
        positions = cache.positions.at[ids, slot % size].get(mode="promise_in_bounds")
        return set_positions(cache, target.reshape(-1), jnp.where(live, positions, -1).reshape(-1, size))

    return lax.fori_loop(0, pages, fill, cache)


def _cut(
    cache: Cache,
    layer: Int32[Array, " 1"],
    chosen: Bool[Array, "1 groups seqs"],
    count: Int32[Array, "1 groups seqs"],
) -> Cache:
    """Let chosen rows of a layer end after `count` tokens, and return their other pages."""
    size = cache.spec.page_size
    entry = jnp.arange(cache.spec.pages_per_seq, dtype=jnp.int32)[None, None, None]
    emptied = chosen[..., None] & (entry * size >= count[..., None])
    dropped = jnp.where(emptied, cache.page_table[layer], 0)
    allocator, status, freed = drop_pages(cache.allocator, cache.status, dropped.reshape(-1))
    cut = lambda of_rows: of_rows.at[layer].set(jnp.where(chosen, count, of_rows[layer]))  # noqa: E731
    cache = dataclasses.replace(
        cache, page_table=cache.page_table.at[layer].add(-dropped), next_slot=cut(cache.next_slot),
        write_slot=jax.tree.map(cut, cache.write_slot), allocator=allocator, status=status,
    )  # fmt: skip
    return scrub(cache, freed)
