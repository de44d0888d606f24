"""The page allocator: a stack of free pages and exact reference counts, vectorised and pure.

Page 0 is trash: never handed out, the target of every padded write. A page's reference count is the number of table
and index entries that name it; free pages have none, so free and used pages partition the pool.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from kvjax.kernels.pytree import pytree


@pytree
class Allocator:
    """State of the allocator.

    Attributes:
        free_pages: int32 [pages], the stack; entries from `num_free` on are meaningless.
        num_free: int32 [], pages on the stack.
        refcounts: int32 [pages].
    """

    free_pages: Int32[Array, " pages"]
    num_free: Int32[Array, ""]
    refcounts: Int32[Array, " pages"]


def init_allocator(num_pages: int) -> Allocator:
    """Return an allocator of `num_pages` pages, all free except page 0; pages are handed out in rising order."""
    free = jnp.concatenate([jnp.arange(num_pages - 1, 0, -1, dtype=jnp.int32), jnp.zeros(1, jnp.int32)])
    return Allocator(free, jnp.int32(num_pages - 1), jnp.zeros(num_pages, jnp.int32))


def pop(allocator: Allocator, wanted: Bool[Array, " n"]) -> tuple[Allocator, Int32[Array, " n"]]:
    """Take one page for every wanted entry, in order; the pages belong to the caller with one reference each.

    The caller has made sure that `wanted.sum() <= num_free`. Entries not wanted get page 0.
    """
    rank = jnp.cumsum(wanted, dtype=jnp.int32)
    stack_index = jnp.where(wanted, allocator.num_free - rank, 0)
    ids = jnp.where(wanted, allocator.free_pages.at[stack_index].get(mode="promise_in_bounds"), 0)
    refcounts = allocator.refcounts.at[ids].add(wanted.astype(jnp.int32), mode="promise_in_bounds")
    num_free = allocator.num_free - rank[-1]
    return dataclasses.replace(allocator, num_free=num_free, refcounts=refcounts), ids


def retain(allocator: Allocator, ids: Int32[Array, " n"]) -> tuple[Allocator, Bool[Array, ""]]:
    """Add one reference for every entry of `ids` (0 is ignored, repeats count); all or nothing.

    Returns: the allocator, and whether every page was held: a free page, or none of the pool, cannot be retained.
    """
    ids, inside = _inside(allocator, ids)
    held = (ids == 0) | (allocator.refcounts.at[ids].get(mode="promise_in_bounds") > 0)
    ok = inside & held.all()
    one = ((ids > 0) & ok).astype(jnp.int32)
    refcounts = allocator.refcounts.at[ids].add(one, mode="promise_in_bounds")
    return dataclasses.replace(allocator, refcounts=refcounts), ok


def _inside(allocator: Allocator, ids: Int32[Array, " n"]) -> tuple[Int32[Array, " n"], Bool[Array, ""]]:
    """Return the ids with 0 for those that no page has, and whether there are none such."""
    inside = (ids >= 0) & (ids < allocator.refcounts.shape[0])
    return jnp.where(inside, ids, 0), inside.all()


def drop(allocator: Allocator, ids: Int32[Array, " n"]) -> tuple[Allocator, Int32[Array, " n"], Bool[Array, ""]]:
    """Take one reference away for every entry of `ids` (0 is ignored, repeats count); all or nothing.

    Pages left without a reference return to the pool, each once.

    Returns: the allocator, the pages that became free (sorted among zeros), and whether every reference existed: a
    double free, or an id that no page has, changes nothing.
    """
    ids, inside = _inside(allocator, ids)
    ids = jnp.sort(ids)
    left = allocator.refcounts.at[ids].add(-(ids > 0).astype(jnp.int32), mode="promise_in_bounds")
    ok = inside & (left.at[ids].get(mode="promise_in_bounds") >= 0).all()
    last_of_run = jnp.concatenate([ids[1:] != ids[:-1], jnp.ones(1, bool)])
    freed = ok & (ids > 0) & last_of_run & (left.at[ids].get(mode="promise_in_bounds") == 0)
    # Add the references again where the call is refused, so that the counts are updated in place either way.
    refcounts = left.at[ids].add(((ids > 0) & ~ok).astype(jnp.int32), mode="promise_in_bounds")
    return _push(dataclasses.replace(allocator, refcounts=refcounts), ids, freed) + (ok,)


def _push(
    allocator: Allocator, ids: Int32[Array, " n"], freed: Bool[Array, " n"]
) -> tuple[Allocator, Int32[Array, " n"]]:
    rank = jnp.cumsum(freed, dtype=jnp.int32)
    # The last stack entry can never be in use (page 0 is never free), so it takes the padded writes.
    unused = allocator.free_pages.shape[0] - 1
    target = jnp.where(freed, allocator.num_free + rank - 1, unused)
    free_pages = allocator.free_pages.at[target].set(jnp.where(freed, ids, 0), mode="promise_in_bounds")
    pushed = dataclasses.replace(allocator, free_pages=free_pages, num_free=allocator.num_free + rank[-1])
    return pushed, jnp.where(freed, ids, 0)


def ragged(
    lengths: Int32[Array, " owners"], total: int
) -> tuple[Int32[Array, " total"], Int32[Array, " total"], Bool[Array, " total"]]:
    """Lay out `lengths` one after another in `total` places.

    Returns: for every place the owner whose run it lies in, its index within that run, and whether it is in use;
    unused places have owner 0 and index 0.
    """
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    place = jnp.arange(total, dtype=jnp.int32)
    used = place < ends[-1]
    owner = jnp.where(used, (ends[None, :] <= place[:, None]).sum(1, dtype=jnp.int32), 0)
    start = (ends - lengths).at[owner].get(mode="promise_in_bounds")
    return owner, jnp.where(used, place - start, 0), used
