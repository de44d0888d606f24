"""The invariants of a cache, tested on the host (`check`) and, for `debug=True`, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from kvjax.cache import EMPTY_SPAN, STATUS_MEANING, Cache, PooledCache, Status
from kvjax.errors import InputError, shown, whole_number
from kvjax.spec import CacheSpec


class CacheError(RuntimeError):
    """The cache's status names a fault, or an invariant of the allocator does not hold."""


def broken_on_device(cache: Cache) -> Bool[Array, ""]:
    """Return whether an invariant that needs no knowledge of the host's references is broken. O(pages)."""
    spec, allocator = cache.spec, cache.allocator
    stack = jnp.arange(spec.num_pages) < allocator.num_free
    on_stack = (
        jnp.zeros(spec.num_pages, jnp.int32).at[jnp.where(stack, allocator.free_pages, 0)].add(stack.astype(jnp.int32))
    )
    # Ids that no page has are named by BAD_PAGE_ID.
    known = (cache.page_table >= 0) & (cache.page_table < spec.num_pages)
    named = jnp.zeros(spec.num_pages, jnp.int32).at[jnp.where(known, cache.page_table, 0).reshape(-1)].add(1)
    named = named.at[0].set(0)
    free = (allocator.refcounts == 0).at[0].set(False).astype(jnp.int32)
    return (
        (on_stack != free).any()
        | (named > allocator.refcounts).any()
        | (cache.positions[0] != -1).any()
        | (jnp.maximum(cache.first - spec.pinned, 0) * spec.page_size > cache.next_slot).any()
    )


def check(cache: Cache | PooledCache, *, held: dict[int, int] | Sequence[dict[int, int]] | None = None) -> None:
    """Verify a cache on the host.

    Args:
        cache: the cache (read, not consumed).
        held: references that the host holds by page id (from `retain` and indexed full pages); if given, reference
            counts must be exact, else they must be at least what the tables name. Of a cache of several pools, a list
            of those of each.

    Raises: CacheError with what `status` says or the invariant that does not hold; InputError for references of pages
        that the pool does not have.
    """
    if isinstance(cache, PooledCache):
        _check_pools(cache, held)
        return
    if held is not None and not isinstance(held, dict):
        raise InputError(f"held is {shown(held)}: give references by page id")
    references = None if held is None else _references(cache.spec, held)
    status = Status(int(cache.status))
    if status:
        raise CacheError("; ".join(f"{bit.name}: {STATUS_MEANING[bit]}" for bit in status))
    spec = cache.spec
    _check_allocator(cache, references)
    next_slot, first, table = (np.asarray(a) for a in (cache.next_slot, cache.first, cache.page_table))
    positions, span = np.asarray(cache.positions), np.asarray(cache.page_span)
    start, next_position = np.asarray(cache.start_position), np.asarray(cache.next_position)
    _require((positions[0] == -1).all(), "page 0 is trash and holds no positions")
    for layer, group, seq in np.ndindex(next_slot.shape):
        row = (layer, group, seq)
        expected = _expected_row(spec, layer, int(first[row]), int(next_slot[row]))
        _require((table[row] > 0).tolist() == [page is not None for page in expected], f"row {row} has its pages")
        if spec.policy.edits and (next_slot[row] != next_position[seq] - start[seq] or _hole(cache, row) is not None):
            _check_shortened(cache, row)
            continue
        for entry, page in enumerate(expected):
            if page is None:
                continue
            slots = page * spec.page_size + np.arange(spec.page_size)
            wanted = np.where(slots < next_slot[row], slots + (next_position[seq] - next_slot[row]), -1)
            page_id = table[row][entry]
            _require((positions[page_id] == wanted).all(), f"page {page_id} of row {row} has its positions")
            _require(tuple(span[page_id]) == _span_of(wanted), f"page {page_id} has the span of its positions")
        _require(next_slot[row] == next_position[seq] - start[seq], f"row {row} has seen every token")


def _span_of(positions: np.ndarray) -> tuple[int, int]:
    kept = positions[positions >= 0]
    return (int(kept.min()), int(kept.max())) if kept.size else EMPTY_SPAN


def _hole(cache: Cache, row: tuple[int, int, int]) -> int | None:
    """The slot of a row that its policy has emptied, for the next token."""
    if cache.write_slot is None or int(cache.write_slot[row]) == int(cache.next_slot[row]):
        return None
    return int(cache.write_slot[row])


def _check_shortened(cache: Cache, row: tuple[int, int, int]) -> None:
    """Verify a row whose policy has dropped tokens: what is left is of its sequence, each once, the newest among it."""
    spec, seq = cache.spec, row[2]
    ids, end = np.asarray(cache.page_table[row]), int(cache.next_slot[row])
    held = [np.asarray(cache.positions)[page] for page in ids[: -(-end // spec.page_size)]]
    positions, hole = np.concatenate([*held, np.zeros(0, np.int32)]), _hole(cache, row)
    start, following = int(cache.start_position[seq]), int(cache.next_position[seq])
    tokens = positions[positions >= 0]
    _require(end <= following - start, f"row {row} is no longer than its sequence")
    _require((positions[end:] == -1).all(), f"row {row} ends with its last token")
    _require(hole is None or (0 <= hole < end and positions[hole] == -1), f"row {row} has its next slot empty")
    in_sequence = (tokens >= start).all() and (tokens < following).all()
    _require(bool(in_sequence) and len(set(tokens.tolist())) == tokens.size, f"row {row} has tokens of its sequence")
    _require(hole is None or following - 1 in tokens, f"row {row} has its newest token")
    refcounts = np.asarray(cache.allocator.refcounts)
    for page, of_page in zip(ids, held, strict=False):
        _require(refcounts[page] == 1, f"page {page} of row {row}, which has dropped tokens, is its own")
        _require(tuple(np.asarray(cache.page_span)[page]) == _span_of(of_page), f"page {page} has its span")


def _check_pools(cache: PooledCache, held) -> None:
    """Verify the caches of all pools, and that all of them have seen the same tokens."""
    given = [None] * len(cache.of_pools) if held is None else held
    is_list = isinstance(given, list | tuple) and all(of is None or isinstance(of, dict) for of in given)
    if not is_list or len(given) != len(cache.of_pools):
        raise InputError(f"held is {shown(held)}: give a list of {len(cache.of_pools)}, one for each pool of the cache")
    for of, references in zip(cache.of_pools, given, strict=True):
        check(of, held=references)
    for name in ("next_position", "start_position"):
        of_each = [np.asarray(getattr(of, name)).tolist() for of in cache.of_pools]
        _require(all(of == of_each[0] for of in of_each), f"all pools have the same {name}s ({shown(of_each)})")


def _expected_row(spec: CacheSpec, layer: int, first: int, next_slot: int) -> list[int | None]:
    """Logical page of every table entry."""
    row: list[int | None] = [None] * spec.pages_per_seq
    end, pinned = -(-next_slot // spec.page_size), spec.pinned
    for page in (*range(min(pinned, end)), *range(first, end)):
        row[page if page < pinned else pinned + (page - pinned) % spec.rings[layer]] = page
    return row


def _references(spec: CacheSpec, held: dict[int, int]) -> np.ndarray:
    """How many references the host holds of every page."""
    references = np.zeros(spec.num_pages, np.int64)
    for page, count in held.items():
        page = whole_number("a page of held", page, 1, spec.num_pages - 1)
        references[page] = whole_number(f"held[{page}]", count, 0)
    return references


def _check_allocator(cache: Cache, references: np.ndarray | None) -> None:
    spec = cache.spec
    free = np.asarray(cache.allocator.free_pages)[: int(cache.allocator.num_free)]
    refcounts, table = np.asarray(cache.allocator.refcounts), np.asarray(cache.page_table)
    _require(table.min() >= 0 and table.max() < spec.num_pages, "table ids are within the pool")
    _require(len(set(free.tolist())) == free.size, "a free page is on the stack once")
    expected_free = np.flatnonzero(refcounts == 0)[1:]
    _require(refcounts[0] == 0, "page 0 is never held")
    _require(np.array_equal(np.sort(free), expected_free), "free and used pages partition the pool")
    named = np.bincount(table.reshape(-1), minlength=spec.num_pages)
    named[0] = 0
    exact = (named <= refcounts) if references is None else (named + references == refcounts)
    _require(exact.all(), f"reference counts are exact (pages {np.flatnonzero(~exact)[:8].tolist()} are not)")


def _require(holds: bool | np.bool, invariant: str) -> None:
    if not holds:
        raise CacheError(f"broken invariant: {invariant}")
