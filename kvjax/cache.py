"""The cache as a value: an immutable pytree of the page pool, the page tables and the allocator."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int32, Integer, Shaped

from kvjax import sizes
from kvjax.arguments import array
from kvjax.errors import InputError, shown
from kvjax.kernels.formats import Stored
from kvjax.kernels.pytree import pytree
from kvjax.pages import Allocator, init_allocator
from kvjax.spec import CacheSpec

POSITION_END = 2**31 - 1
EMPTY_SPAN = (POSITION_END, -1)


class Status(enum.IntFlag):
    """Bits of `Cache.status`; all but OUT_OF_PAGES stay set until `clear_status`."""

    OUT_OF_PAGES = 1
    DOUBLE_FREE = 2
    POSITION_LIMIT = 4
    NONFINITE_INPUT = 8
    TRUNCATE_REFUSED = 16
    BAD_LENGTHS = 32
    BROKEN_INVARIANT = 64
    BAD_SEQUENCE = 128
    BAD_PAGE_ID = 256


STATUS_MEANING = {
    Status.OUT_OF_PAGES: "the last step did not fit the pool or a page table: release sequences or raise num_pages",
    Status.DOUBLE_FREE: "a page was dropped or retained that nobody held or the pool lacks: the call changed nothing",
    Status.POSITION_LIMIT: f"a sequence reached position {POSITION_END}: release it and start again",
    Status.NONFINITE_INPUT: "keys or values with inf or NaN were written",
    Status.TRUNCATE_REFUSED: "truncate changed nothing: a window has passed the tokens (raise rollback), a length is "
    "negative, a sequence out of range or repeated, its policy has dropped tokens, or no page is free for a copy",
    Status.BAD_LENGTHS: "query lengths were negative, above max_query_length or more than num_tokens together, or a "
    "decode step met a prompt that is longer than its policy keeps: name its end with prompt_ends",
    Status.BROKEN_INVARIANT: "the allocator's invariants do not hold: this is a fault of kvjax, please report it",
    Status.BAD_SEQUENCE: "release named a sequence out of range: it changed nothing",
    Status.BAD_PAGE_ID: "a page table names a page that the pool does not have (ids are 0 to num_pages - 1): the steps "
    "since then changed nothing; build the table anew",
}


@pytree
class Cache:
    """Keys and values of all sequences, in pages of one pool shared by all layers.

    Logical page i of a row (one layer, group and sequence) stands at table entry i for `i < pinned`, else at
    `pinned + (i - pinned) % ring`; rows hold the pinned pages and those from `first` to the one of `next_slot - 1`.
    A row whose policy has dropped tokens is shorter than its sequence, and its tokens may stand in any order.

    Attributes:
        keys, values: [pages, heads_per_group, page_size, head_dim] in the page format, codes in quantised ones; keys
            are rotated by position.
        key_scales, value_scales: float [pages, heads_per_group, page_size] each: none, the scale of each vector, or
            its scale and minimum; [pages, heads_per_group, head_dim] where these are of the channels of a page.
        open_keys: bfloat16 [layers, groups, seqs, heads_per_group, page_size, head_dim], for formats that are per
            channel: keys of every row's open page, which has codes only when it is full. None for others.
        positions: int32 [pages, page_size], position of the token in each slot, -1 where empty.
        page_span: int32 [pages, 2], least and greatest position of a page, EMPTY_SPAN where it holds none.
        page_table: int32 [layers, groups, seqs, pages_per_seq], 0 where there is no page.
        first: int32 [layers, groups, seqs], oldest logical page held behind the pinned ones.
        next_slot: int32 [layers, groups, seqs], logical slot after the last appended token.
        write_slot: int32 [layers, groups, seqs], logical slot of the next token where that comes alone: one that the
            policy has emptied, or `next_slot`. None for policies that empty none.
        next_position, start_position: int32 [seqs].
        policy_state: what the policy keeps: of slots [pages, page_size] each, of pages [pages, ...] each, and of rows
            [layers, groups, seqs] each.
        allocator: the free pages and reference counts.
        status: int32 [], bits of `Status`.
        spec: the static description.
    """

    keys: Shaped[Array, "pages heads_per_group page_size key_width"]
    values: Shaped[Array, "pages heads_per_group page_size value_width"]
    key_scales: tuple[Float[Array, "pages heads_per_group vectors"], ...]
    value_scales: tuple[Float[Array, "pages heads_per_group page_size"], ...]
    open_keys: Float[Array, "layers groups seqs heads_per_group page_size head_dim"] | None
    positions: Int32[Array, "pages page_size"]
    page_span: Int32[Array, "pages 2"]
    page_table: Int32[Array, "layers groups seqs pages_per_seq"]
    first: Int32[Array, "layers groups seqs"]
    next_slot: Int32[Array, "layers groups seqs"]
    write_slot: Int32[Array, "layers groups seqs"] | None
    next_position: Int32[Array, " seqs"]
    start_position: Int32[Array, " seqs"]
    policy_state: dict[str, dict[str, Array]]
    allocator: Allocator
    status: Int32[Array, ""]
    spec: CacheSpec = dataclasses.field(metadata=dict(static=True))

    @property
    def lengths(self) -> Int32[Array, " seqs"]:
        """Tokens seen by each sequence."""
        return self.next_position - self.start_position

    @property
    def of_pools(self) -> tuple[Cache, ...]:
        """The caches of all pools: this one."""
        return (self,)

    @property
    def stored(self) -> tuple[Stored, Stored]:
        """Keys and values as kernels take them."""
        keys = Stored(self.keys, self.key_scales, self.spec.key_form)
        return keys, Stored(self.values, self.value_scales, self.spec.value_form)

    def map_pages(self, function: Callable[[Array], Array]) -> Cache:
        """Apply a function to every array that holds something by page, whatever it holds of one."""
        kept = dict(pages=jax.tree.map(function, self.policy_state["pages"]))
        cache = self.map_pool(function)
        return dataclasses.replace(cache, policy_state=cache.policy_state | kept)

    def map_pool(self, function: Callable[[Array], Array]) -> Cache:
        """Apply a function to every array that holds keys, values, their scales or what a policy keeps of slots."""
        pool = {name: jax.tree.map(function, getattr(self, name)) for name in sizes.POOL}
        # As if of one head, so that slots stand where they do in pages of vectors.
        of_slots = lambda array: function(array[:, None])[:, 0]  # noqa: E731
        kept = self.policy_state | dict(slots=jax.tree.map(of_slots, self.policy_state["slots"]))
        return dataclasses.replace(self, **pool, policy_state=kept)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays of the cache, metadata included."""
        return sizes.cache_bytes(self.spec)

    @property
    def pages_used(self) -> Int32[Array, ""]:
        """Pages held by somebody."""
        return self.spec.num_pages - 1 - self.allocator.num_free


@pytree
class PooledCache:
    """A cache whose layers store in different formats: a `Cache` of its own for those that share a pool of pages.

    All sequences are in all pools, and an operation that one of the pools refuses changes none.

    Attributes:
        of_pools: the caches, of the layers that `spec.pools` names.
        spec: the static description of all.
    """

    of_pools: tuple[Cache, ...]
    spec: CacheSpec = dataclasses.field(metadata=dict(static=True))

    def with_pools(self, caches: Iterable[Cache]) -> PooledCache:
        """The same with other caches in the pools."""
        return dataclasses.replace(self, of_pools=tuple(caches))

    @property
    def lengths(self) -> Int32[Array, " seqs"]:
        """Tokens seen by each sequence."""
        return self.of_pools[0].lengths

    @property
    def next_position(self) -> Int32[Array, " seqs"]:
        """Position of the next token of each sequence."""
        return self.of_pools[0].next_position

    @property
    def status(self) -> Int32[Array, ""]:
        """Bits of `Status` that are set in some pool."""
        return functools.reduce(jnp.bitwise_or, [cache.status for cache in self.of_pools])

    @property
    def bytes(self) -> int:
        """Bytes of all arrays of the cache, metadata included."""
        return sizes.cache_bytes(self.spec)

    @property
    def pages_used(self) -> Int32[Array, ""]:
        """Pages held by somebody, of all pools."""
        return jnp.stack([cache.pages_used for cache in self.of_pools]).sum()


def on_all_pools[C: (Cache, PooledCache), T](
    cache: C, operation: Callable[[int, Cache, Bool[Array, ""]], tuple[Cache, T, Bool[Array, ""]]]
) -> tuple[C, list[T], Bool[Array, ""]]:
    """Apply an operation to the caches of all pools if none of them refuses it.

    Args:
        operation: takes the number of a pool, its cache and whether it is allowed; returns the cache, unchanged where
            it is not allowed or does not serve, a result, and whether it would serve.

    Returns: the cache, the results of all pools, and whether all serve.
    """
    if not isinstance(cache, PooledCache):
        cache, result, ok = operation(0, cache, jnp.bool_(True))
        return cache, [result], ok
    # What this computes beside the verdicts is dead code to a compiler.
    verdicts = [operation(i, of, jnp.bool_(True))[2] for i, of in enumerate(cache.of_pools)]
    allowed = jnp.stack(verdicts).all()
    caches, results, _ = zip(*(operation(i, of, allowed) for i, of in enumerate(cache.of_pools)), strict=True)
    return cache.with_pools(caches), list(results), allowed


def init_cache(spec: CacheSpec, *, start_positions: Integer[ArrayLike, " seqs"] | Sequence[int] | None = None) -> Any:
    """Build an empty cache.

    Args:
        spec: the static description.
        start_positions: position of the first token of each sequence, 0 by default.

    Returns: a `Cache`, or a `PooledCache` where the spec has several pools; the operations take either.

    Raises: InputError for start positions that are negative, too large, traced, no integers or of the wrong shape.
    """
    caches = [_init_pool(pool.spec, start_positions) for pool in spec.pools]
    return caches[0] if len(caches) == 1 else PooledCache(tuple(caches), spec)


def _init_pool(spec: CacheSpec, start_positions) -> Cache:
    """Build the empty cache of one pool."""
    shapes = sizes.cache_shapes(spec)
    start = _start_positions(spec, start_positions)
    zeros: dict[str, Any] = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), shapes)
    zeros["positions"] = zeros["positions"] - 1
    zeros["first"] = zeros["first"] + spec.pinned
    zeros["page_span"] = jnp.broadcast_to(jnp.array(EMPTY_SPAN, jnp.int32), shapes["page_span"].shape)
    arrays = {name: zeros[name] for name in shapes if name not in ("free_pages", "num_free", "refcounts")}
    allocator = init_allocator(spec.num_pages)
    # next_position is a copy: one buffer must not be donated twice.
    positions: dict[str, Any] = dict(next_position=start + 0, start_position=start)
    return Cache(**(arrays | positions), allocator=allocator, spec=spec)


def _start_positions(spec: CacheSpec, start_positions) -> Int32[Array, " seqs"]:
    if start_positions is None:
        return jnp.zeros(spec.max_seqs, jnp.int32)
    allowed = f"must be {spec.max_seqs} positions from 0 to {POSITION_END - 1}"
    try:
        start = np.asarray(array("start_positions", start_positions, (spec.max_seqs,)))
    except (InputError, TypeError):
        raise InputError(f"start_positions {shown(start_positions)} {allowed}, none of them traced") from None
    if start.min() < 0 or start.max() >= POSITION_END:
        raise InputError(f"start_positions {shown(start.tolist())} {allowed}")
    return jnp.array(start, jnp.int32)


def clear_status[C: (Cache, PooledCache)](cache: C) -> C:
    """Forget all status bits."""
    if isinstance(cache, PooledCache):
        return cache.with_pools(map(clear_status, cache.of_pools))
    return dataclasses.replace(cache, status=jnp.zeros_like(cache.status))


def raise_status[C: (Cache, PooledCache)](cache: C, bit: Status, when) -> C:
    """Set a status bit where `when` (a traced bool) holds."""
    if isinstance(cache, PooledCache):
        return cache.with_pools(raise_status(of, bit, when) for of in cache.of_pools)
    return dataclasses.replace(cache, status=cache.status | jnp.where(when, int(bit), 0).astype(jnp.int32))


def ring_of(spec: CacheSpec) -> Int32[Array, "layers 1 1"]:
    """Table entries of a row that are used as a ring, for every layer (an array, as a layer may be traced)."""
    return jnp.array(spec.rings, jnp.int32)[:, None, None]


def entry_of(spec: CacheSpec, page: Int32[Array, "layers groups n"]) -> Int32[Array, "layers groups n"]:
    """Table entries of logical pages."""
    in_ring = (page - spec.pinned) % ring_of(spec)
    return jnp.where(page < spec.pinned, page, spec.pinned + in_ring) if spec.pinned else in_ring
