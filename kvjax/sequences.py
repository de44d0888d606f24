"""Operations on whole sequences: fork, truncate and release.

They run between steps, once per request or per beam step, and cost O(table rows they name).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int32, Integer

from kvjax import pages
from kvjax.arguments import integers
from kvjax.cache import Cache, PooledCache, Status, entry_of, on_all_pools, raise_status, ring_of
from kvjax.kernels.formats import decode
from kvjax.placement import drop_pages, scrub, set_positions
from kvjax.step import first_needed_page

Integers = Integer[ArrayLike, " n"] | Sequence[int]


def inside_of(cache: Cache, sequences: Int32[Array, " n"]) -> tuple[Int32[Array, " n"], Bool[Array, ""]]:
    """Return the ids with 0 for those out of range, and whether there are none such."""
    inside = (sequences >= 0) & (sequences < cache.spec.max_seqs)
    return jnp.where(inside, sequences, 0), inside.all()


def _first_named(sequences: Int32[Array, " n"]) -> Bool[Array, " n"]:
    """Mark the ids that no earlier one repeats."""
    place = jnp.arange(sequences.shape[0])
    return ~((sequences[None] == sequences[:, None]) & (place[None] < place[:, None])).any(1)


def _open_entry(cache: Cache, next_slot: Int32[Array, "layers groups n"]) -> Bool[Array, "layers groups n entries"]:
    """Mark the table entry of the page that `next_slot` lies in, for rows whose last page is not full."""
    entries = jnp.arange(cache.spec.pages_per_seq, dtype=jnp.int32)[None, None, None]
    entry = entry_of(cache.spec, next_slot // cache.spec.page_size)
    return (entries == entry[..., None]) & (next_slot % cache.spec.page_size > 0)[..., None]


def copy_pages(cache: Cache, source: Int32[Array, " n"], target: Int32[Array, " n"], positions) -> Cache:
    """Copy what pages hold (0 to 0 for none) and set the targets' positions [n, page_size]."""
    cache = cache.map_pages(lambda pool: pool.at[target].set(pool.at[source].get(mode="promise_in_bounds")))
    return set_positions(cache, target, jnp.where((target > 0)[:, None], positions, -1))


def select(ok: Bool[Array, ""], new, old):
    return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)


def fork[C: (Cache, PooledCache)](cache: C, source: Integers, target: Integers) -> tuple[C, Bool[Array, ""]]:
    """Make each target sequence a copy of its source: full pages are shared, open pages and their keys are copied.

    Under a policy that drops tokens or pages nothing is shared: all pages are copied, with what it keeps of them.
    All sources are read before any target is written, so permutations are allowed; what a target held is released.
    All or nothing.

    Args:
        cache: the cache; donate it.
        source, target: integers [n], sequence ids; targets are distinct.

    Returns: the cache, and False where pages ran out, an id is out of range or a target is repeated: then nothing has
        changed.

    Raises: InputError for ids of the wrong shape or kind.
    """
    source = integers("source", source, ("n",))
    target = integers("target", target, source.shape)
    if not source.size:
        return cache, jnp.bool_(True)
    cache, _, ok = on_all_pools(cache, functools.partial(_fork, source, target))
    return cache, ok


def _fork(source: Int32[Array, " n"], target: Int32[Array, " n"], number: int, cache: Cache, allowed: Bool[Array, ""]):
    """Fork the sequences of one pool."""
    (source, known_source), (target, known_target) = inside_of(cache, source), inside_of(cache, target)
    known = known_source & known_target & _first_named(target).all()
    moved = (source != target)[None, None, :, None]
    rows = cache.page_table[:, :, source]
    old_rows = cache.page_table[:, :, target]
    owned = cache.spec.policy.edits
    copied = (rows > 0 if owned else _open_entry(cache, cache.next_slot[:, :, source])) & moved
    allocator, _ = pages.retain(cache.allocator, jnp.where(moved & ~copied, rows, 0).reshape(-1))
    allocator, status, freed = drop_pages(allocator, cache.status, jnp.where(moved, old_rows, 0).reshape(-1))
    # At most one page of a row is open.
    of_row = lambda entries: entries if owned else entries.sum(-1, keepdims=True)  # noqa: E731
    wanted = of_row(copied).astype(bool)
    served = known & (wanted.sum() <= allocator.num_free)
    ok = served & allowed
    allocator, copies = pages.pop(allocator, (wanted & ok).reshape(-1))

    sources = of_row(jnp.where(copied & ok, rows, 0)).reshape(-1)
    positions = cache.positions.at[sources].get(mode="promise_in_bounds")
    freed_by_fork = jnp.where(ok, freed, 0)
    forked = copy_pages(cache, sources, copies, positions)
    forked = scrub(forked, jnp.where((freed_by_fork[:, None] == copies[None]).any(1), 0, freed_by_fork))
    rows = jnp.where(copied, copies.reshape(wanted.shape), rows)
    allocator, status = select(ok, (allocator, status), (cache.allocator, cache.status))

    def moved_rows(array, axis_rows):
        index = (slice(None),) * axis_rows + (target,)
        taken = (slice(None),) * axis_rows + (source,)
        return array.at[index].set(jnp.where(ok, array[taken], array[index]))

    of_rows = (cache.next_slot, cache.write_slot, cache.open_keys, cache.policy_state["rows"])
    next_slot, write_slot, open_keys, kept = jax.tree.map(lambda array: moved_rows(array, 2), of_rows)
    forked = dataclasses.replace(
        forked,
        page_table=cache.page_table.at[:, :, target].set(jnp.where(ok, rows, old_rows)),
        first=moved_rows(cache.first, 2),
        next_slot=next_slot,
        write_slot=write_slot,
        open_keys=open_keys,
        policy_state=forked.policy_state | dict(rows=kept),
        next_position=moved_rows(cache.next_position, 0),
        start_position=moved_rows(cache.start_position, 0),
        allocator=allocator,
        status=status,
    )
    return forked, None, served


def release[C: (Cache, PooledCache)](cache: C, sequences: Integers) -> C:
    """Empty sequences: their references are dropped, and a later sequence in their place starts at position 0.

    An id may be repeated. All or nothing: BAD_SEQUENCE is set and nothing changes if one is out of range.

    Raises: InputError for ids of the wrong shape or kind.
    """
    sequences = integers("sequences", sequences, ("n",))
    if not sequences.size:
        return cache
    if isinstance(cache, PooledCache):
        return cache.with_pools(release(of, sequences) for of in cache.of_pools)
    sequences, inside = inside_of(cache, sequences)
    known = inside & _first_named(sequences)
    kept = known[None, None, :, None]
    rows = jnp.where(kept, cache.page_table[:, :, sequences], 0)
    allocator, status, freed = drop_pages(cache.allocator, cache.status, rows.reshape(-1))
    released = jnp.zeros(cache.spec.max_seqs, bool).at[sequences].max(known)
    zero = lambda of_rows: jnp.where(released[None, None], jnp.zeros((), of_rows.dtype), of_rows)  # noqa: E731
    cache = dataclasses.replace(
        cache,
        page_table=cache.page_table.at[:, :, sequences].add(-rows),
        first=jnp.where(released[None, None], cache.spec.pinned, cache.first),
        next_slot=zero(cache.next_slot),
        write_slot=jax.tree.map(zero, cache.write_slot),
        policy_state=cache.policy_state | dict(rows=jax.tree.map(zero, cache.policy_state["rows"])),
        next_position=jnp.where(released, 0, cache.next_position),
        start_position=jnp.where(released, 0, cache.start_position),
        allocator=allocator,
        open_keys=_scrub_open(cache, released),
        status=status,
    )
    return raise_status(scrub(cache, freed), Status.BAD_SEQUENCE, ~inside)


def _scrub_open(cache: Cache, released: Bool[Array, " seqs"]):
    """Zero the keys of open pages of sequences, if the spec asks for it."""
    if not cache.spec.scrub_on_free:
        return cache.open_keys
    return jax.tree.map(lambda of: jnp.where(released[None, None, :, None, None, None], 0, of), cache.open_keys)


def truncate[C: (Cache, PooledCache)](cache: C, sequences: Integers, lengths: Integers) -> C:
    """Keep the first `lengths` tokens of sequences and return the pages that become empty.

    A page that becomes open again and is shared is copied first; where keys have scales per channel, those of the page
    are decoded, and coded anew when it is full. A length beyond the sequence keeps all of it. All or nothing:
    TRUNCATE_REFUSED is set and nothing changes if a window has passed tokens that would be visible again (see
    `CacheSpec.rollback`), a policy has dropped tokens of a sequence that would be shorter, a length is negative, an id
    is out of range or repeated, or a copy finds no free page.

    Raises: InputError for ids or lengths of the wrong shape or kind.
    """
    sequences = integers("sequences", sequences, ("n",))
    lengths = integers("lengths", lengths, sequences.shape)
    if not sequences.size:
        return cache
    cache, _, ok = on_all_pools(cache, functools.partial(_truncate, sequences, lengths))
    return raise_status(cache, Status.TRUNCATE_REFUSED, ~ok)


def _truncate(sequences: Int32[Array, " n"], lengths: Int32[Array, " n"], _: int, cache: Cache, allowed):
    """Truncate sequences of one pool."""
    spec = cache.spec
    sequences, inside = inside_of(cache, sequences)
    known = inside & _first_named(sequences).all()
    removed = jnp.maximum(cache.lengths[sequences] - lengths, 0)
    before, first = cache.next_slot[:, :, sequences], cache.first[:, :, sequences]
    after = before - removed[None, None]
    rows = cache.page_table[:, :, sequences]
    entries = jnp.arange(spec.pages_per_seq, dtype=jnp.int32)[None, None, None]
    page = first[..., None] + (entries - first[..., None]) % ring_of(spec)[..., None]
    page = jnp.where(entries < spec.pinned, entries, page)
    emptied = (rows > 0) & (page * spec.page_size >= after[..., None])
    is_open = _open_entry(cache, after) & (removed > 0)[None, None, :, None]
    opened = jnp.where(is_open, rows, 0).sum(-1)
    shared = cache.allocator.refcounts[opened] > 1

    dropped = jnp.where(emptied | (is_open & shared[..., None]), rows, 0)
    allocator, status, freed = drop_pages(cache.allocator, cache.status, dropped.reshape(-1))
    visible = first_needed_page(dataclasses.replace(spec, rollback=0), after)
    whole = ~_has_dropped(cache, sequences) | (removed == 0)[None, None]
    served = known & (lengths >= 0).all() & (first <= visible).all() & (shared.sum() <= allocator.num_free)
    served &= whole.all()
    ok = served & allowed
    allocator, copies = pages.pop(allocator, (shared & ok).reshape(-1))
    allocator, status = select(ok, (allocator, status), (cache.allocator, cache.status))

    copies = copies.reshape(shared.shape)
    kept_page = jnp.where(ok, jnp.where(shared, copies, opened), 0)
    within = jnp.arange(spec.page_size, dtype=jnp.int32)[None, None, None]
    slots = (after // spec.page_size * spec.page_size)[..., None] + within
    positions = jnp.where(slots < after[..., None], cache.positions[opened], -1)
    source = jnp.where(ok, opened, 0).reshape(-1)
    truncated = copy_pages(cache, source, kept_page.reshape(-1), positions.reshape(-1, spec.page_size))
    reopened = ok & is_open.any(-1) & (after // spec.page_size < before // spec.page_size)
    new_rows = jnp.where(emptied, 0, jnp.where(is_open, kept_page[..., None], rows))
    truncated = dataclasses.replace(
        truncated,
        page_table=cache.page_table.at[:, :, sequences].set(jnp.where(ok, new_rows, rows)),
        next_slot=cache.next_slot.at[:, :, sequences].set(jnp.where(ok, after, before)),
        write_slot=jax.tree.map(
            lambda of_rows: of_rows.at[:, :, sequences].add(jnp.where(ok, after - before, 0)), cache.write_slot
        ),
        open_keys=_reopen(cache, sequences, opened, reopened),
        next_position=cache.next_position.at[sequences].add(jnp.where(ok, -removed, 0)),
        allocator=allocator,
        status=status,
    )
    kept = ~ok | (freed[:, None] == copies.reshape(-1)[None]).any(1)
    return scrub(truncated, jnp.where(kept, 0, freed)), None, served


def _has_dropped(cache: Cache, sequences: Int32[Array, " n"]) -> Bool[Array, "layers groups n"]:
    """Return which rows have lost tokens to the policy."""
    next_slot = cache.next_slot[:, :, sequences]
    dropped = next_slot != cache.lengths[sequences][None, None]
    return dropped if cache.write_slot is None else dropped | (cache.write_slot[:, :, sequences] != next_slot)


def _reopen(cache: Cache, sequences, ids: Int32[Array, "layers groups n"], reopened: Bool[Array, "layers groups n"]):
    """Open keys of sequences whose full page `ids` is open again: what its codes stand for."""
    if cache.open_keys is None:
        return None
    keys = cache.stored[0]
    taken = jax.tree.map(lambda pool: pool.at[ids].get(mode="promise_in_bounds"), (keys.codes, keys.scales))
    decoded = decode(taken[0], taken[1], keys.form).astype(cache.open_keys.dtype)
    kept = jnp.where(reopened[..., None, None, None], decoded, cache.open_keys[:, :, sequences])
    return cache.open_keys.at[:, :, sequences].set(kept)
