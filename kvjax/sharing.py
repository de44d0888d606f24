"""Pages shared between sequences and with a prefix index on the host, which holds references of its own.

Like the operations on sequences, they run between steps and cost O(table rows they name).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int32, Integer

from kvjax import pages
from kvjax.arguments import integers
from kvjax.cache import POSITION_END, Cache, PooledCache, Status, on_all_pools, raise_status, ring_of
from kvjax.errors import InputError, shown
from kvjax.placement import drop_pages, entry_ids, scrub
from kvjax.sequences import Integers, copy_pages, inside_of, select
from kvjax.step import first_needed_page


def share[C: (Cache, PooledCache)](
    cache: C,
    sequence: Integer[ArrayLike, ""],
    page_ids: Integer[ArrayLike, "layers groups n"] | Sequence[Integer[ArrayLike, "layers groups n"]],
    start_position: Integer[ArrayLike, ""],
) -> tuple[C, Bool[Array, ""]]:
    """Put full pages that somebody holds at the front of an empty sequence; the sequence gets references of its own.

    Under a policy that drops tokens or pages it gets copies. With no pages (n = 0) the sequence stays empty and starts
    at `start_position`.

    Args:
        cache: the cache; donate it.
        sequence: integer [], id of an empty sequence.
        page_ids: integers [layers, groups, n]; 0 at the front of a row where a window has passed. One array for each
            pool where the cache has several.
        start_position: integer [], position of the first token of page 0 of every row.

    Returns: the cache, and False if the sequence is not empty, a page is free or not of the pool, named twice, not full
        or at other positions than its place asks for, a visible page is missing, a row does not fit the table or
        positions end before the row does: then nothing has changed. A page does not know its layer, its group or its
        tokens: that these are right is the caller's to know.

    Raises: InputError for arguments of the wrong shape or kind.
    """
    sequence, start_position = integers("sequence", sequence, ()), integers("start_position", start_position, ())
    named = _of_each_pool("page_ids", page_ids, cache)
    pairs = zip(named, cache.of_pools, strict=True)
    ids = [integers("page_ids", of, (pool.spec.num_layers, pool.spec.groups, "n")) for of, pool in pairs]
    if len({of.shape[-1] for of in ids}) > 1:
        raise InputError(f"page_ids name {[of.shape[-1] for of in ids]} pages of the pools' rows: give as many of each")
    cache, _, ok = on_all_pools(cache, functools.partial(_share, sequence, ids, start_position))
    return cache, ok


def _of_each_pool(name: str, given, cache: Cache | PooledCache) -> Sequence[Any]:
    """What is given for each pool of a cache: a list of as many, or what it is where there is one."""
    if not isinstance(cache, PooledCache):
        return [given]
    if not isinstance(given, list | tuple) or len(given) != len(cache.of_pools):
        raise InputError(
            f"{name} is {shown(given)}: give a list of {len(cache.of_pools)}, one for each pool of the cache"
        )
    return given


def _share(
    sequence, ids: Sequence[Int32[Array, "layers groups n"]], start_position, number: int, cache: Cache, allowed
):
    """Share pages of one pool."""
    spec, page_ids = cache.spec, ids[number]
    num_pages = page_ids.shape[-1]
    held = page_ids > 0
    page, pinned = jnp.arange(num_pages, dtype=jnp.int32)[None, None], spec.pinned
    passed = jnp.cumsum(held[..., pinned:], -1, dtype=jnp.int32) == 0
    first = pinned + passed.sum(-1, dtype=jnp.int32)
    next_slot = jnp.full_like(first, num_pages * spec.page_size)
    visible = first_needed_page(dataclasses.replace(spec, rollback=0), next_slot[..., None])[..., 0]
    complete = (held == ((page >= first[..., None]) | (page < pinned))).all() & (first <= visible).all()
    fits = (num_pages - first <= ring_of(spec)[..., 0]).all()
    last_start = min(POSITION_END - num_pages * spec.page_size, POSITION_END - 1)
    positioned = (start_position >= 0) & (start_position <= last_start) & _in_place(cache, page_ids, start_position)
    sequence, inside = inside_of(cache, sequence[None])
    sequence = sequence[0]
    empty = (cache.next_slot[:, :, sequence] == 0).all()
    ok = inside & empty & complete & fits & positioned
    allocator, all_held = pages.retain(cache.allocator, jnp.where(ok, page_ids, 0).reshape(-1))
    served = ok & all_held
    if spec.policy.edits:
        served &= held.sum() <= cache.allocator.num_free
    ok = served & allowed
    if spec.policy.edits:
        cache, page_ids = _copies(cache, jnp.where(ok, page_ids, 0))
        allocator = cache.allocator
    allocator = select(ok, allocator, cache.allocator)

    _, where = entry_ids(cache, *(jnp.broadcast_to(of_all, page_ids.shape) for of_all in (sequence, page)))
    table = cache.page_table.at[where].add(jnp.where(ok, page_ids, 0))
    added = lambda of_rows: of_rows.at[:, :, sequence].add(jnp.where(ok, next_slot, 0))  # noqa: E731
    shared = dataclasses.replace(
        cache,
        page_table=table,
        first=cache.first.at[:, :, sequence].set(jnp.where(ok, first, cache.first[:, :, sequence])),
        next_slot=added(cache.next_slot),
        write_slot=jax.tree.map(added, cache.write_slot),
        next_position=cache.next_position.at[sequence].set(
            jnp.where(ok, start_position + num_pages * spec.page_size, cache.next_position[sequence])
        ),
        start_position=cache.start_position.at[sequence].set(
            jnp.where(ok, start_position, cache.start_position[sequence])
        ),
        allocator=allocator,
    )
    return shared, None, served


def _copies(cache: Cache, page_ids: Int32[Array, "layers groups n"]):
    """Copies of pages, 0 for none, that belong to the caller."""
    sources = page_ids.reshape(-1)
    allocator, ids = pages.pop(cache.allocator, sources > 0)
    positions = cache.positions.at[sources].get(mode="promise_in_bounds")
    cache = copy_pages(dataclasses.replace(cache, allocator=allocator), sources, ids, positions)
    return cache, ids.reshape(page_ids.shape)


def _in_place(cache: Cache, page_ids: Int32[Array, "layers groups n"], start_position) -> Bool[Array, ""]:
    """Return whether every page is full of the positions of its place in the row, and none is named twice."""
    size = cache.spec.page_size
    known = jnp.where((page_ids > 0) & (page_ids < cache.spec.num_pages), page_ids, 0)
    place = jnp.arange(page_ids.shape[-1] * size, dtype=jnp.int32).reshape(1, 1, -1, size)
    stored = cache.positions.at[known].get(mode="promise_in_bounds")
    named = jnp.sort(page_ids.reshape(-1))
    twice = (named[1:] == named[:-1]) & (named[1:] > 0)
    return ((stored == start_position + place) | (page_ids <= 0)[..., None]).all() & ~twice.any()


def retain[C: (Cache, PooledCache)](cache: C, ids: Integers | Sequence[Integers]) -> C:
    """Add a reference of the host's to pages (0 is ignored, repeats count).

    All or nothing: DOUBLE_FREE is set and nothing changes if a page is free or an id is out of the pool.
    Where the cache has several pools, `ids` is a list of each one's, and that holds for each.

    Raises: InputError for ids of the wrong shape or kind.
    """
    if isinstance(cache, PooledCache):
        return cache.with_pools(map(retain, cache.of_pools, _of_each_pool("ids", ids, cache)))
    allocator, ok = pages.retain(cache.allocator, integers("ids", ids, ("n",)))
    return raise_status(dataclasses.replace(cache, allocator=allocator), Status.DOUBLE_FREE, ~ok)


def drop[C: (Cache, PooledCache)](cache: C, ids: Integers | Sequence[Integers]) -> C:
    """Take a reference of the host's to pages away (0 is ignored, repeats count).

    All or nothing: DOUBLE_FREE is set and nothing changes if a page has no reference left or an id is out of the pool.
    Where the cache has several pools, `ids` is a list of each one's, and that holds for each.

    Raises: InputError for ids of the wrong shape or kind.
    """
    if isinstance(cache, PooledCache):
        return cache.with_pools(map(drop, cache.of_pools, _of_each_pool("ids", ids, cache)))
    ids = integers("ids", ids, ("n",))
    if not ids.size:
        return cache
    allocator, status, freed = drop_pages(cache.allocator, cache.status, ids)
    return scrub(dataclasses.replace(cache, allocator=allocator, status=status), freed)
