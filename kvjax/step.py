"""A step: allocation before the layers run, bookkeeping after them. The host is not asked for anything."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int8, Int32, Integer

from kvjax import pages
from kvjax.arguments import array, integers
from kvjax.cache import POSITION_END, Cache, PooledCache, Status, on_all_pools, raise_status
from kvjax.errors import InputError, whole_number
from kvjax.eviction import evict
from kvjax.invariants import broken_on_device
from kvjax.kernels.pytree import pytree
from kvjax.placement import (
    Writes,
    allocate_pages,
    drop_pages,
    end_slot,
    entry_ids,
    scrub,
    touched_pages,
    write_positions,
    writes_of,
)
from kvjax.spec import CacheSpec


@pytree
class Step:
    """Where the tokens of one step belong; closed over by the layers, never carried from step to step.

    Tokens are packed: those of sequence 0, then those of sequence 1, ..., and padding at the end.

    Attributes:
        ok: bool [], whether the step could be served; if not, all lengths are 0 and every write goes to trash.
        lengths: int32 [seqs], tokens each sequence brings.
        starts: int32 [seqs], place of its first token.
        sequence, position: int32 [tokens], owner and position of each token (0 where padded).
        valid: bool [tokens].
        writes: the pages that receive keys and values; those of each pool where the cache has several.
        index: bool [seqs], sequences whose full pages get a reference for the prefix index.
        prompt_ends: bool [seqs], sequences that the step leaves with no prompt unfinished; None for all.
        token_kinds: int8 [tokens], what policies want to know of tokens; None if nobody says.
        max_query_length: most tokens of one sequence (static).
        plan: what `plan_step` worked out for a kernel; for each pool where the cache has several.
    """

    ok: Bool[Array, ""]
    lengths: Int32[Array, " seqs"]
    starts: Int32[Array, " seqs"]
    sequence: Int32[Array, " tokens"]
    position: Int32[Array, " tokens"]
    valid: Bool[Array, " tokens"]
    writes: Writes | tuple[Writes, ...]
    index: Bool[Array, " seqs"]
    max_query_length: int = dataclasses.field(metadata=dict(static=True))
    plan: Any = None
    prompt_ends: Bool[Array, " seqs"] | None = None
    token_kinds: Int8[Array, " tokens"] | None = None

    def of_pool(self, number: int) -> Step:
        """The step of one of several pools."""
        if not isinstance(self.writes, tuple):
            raise InputError(
                "step is of a cache with one pool, and this cache has several: give the step that it began"
            )
        return dataclasses.replace(self, writes=self.writes[number], plan=self.plan[number])

    @property
    def is_decode(self) -> bool:
        """Whether every sequence brings one token at most, and nobody said that it ends a prompt (static)."""
        return self.max_query_length == 1 and self.prompt_ends is None

    @property
    def ends(self) -> Bool[Array, " seqs"]:
        """Sequences that bring tokens and leave no prompt unfinished."""
        brings = self.lengths > 0
        return brings if self.prompt_ends is None else brings & self.prompt_ends

    @property
    def last_token(self) -> Int32[Array, " seqs"]:
        """Place of each sequence's last token (0 for a sequence that brings none)."""
        return jnp.maximum(self.starts + self.lengths - 1, 0)


@pytree
class Report:
    """What the host reads of a step; small and not donated.

    Attributes:
        ok: bool [].
        status: int32 [], bits of `Status`.
        num_free: int32 [], free pages; int32 [pools] where the cache has several.
        lengths: int32 [seqs], tokens seen.
        full_pages: int32 [layers, groups, seqs, ceil(max_query_length / page_size)], pages that became full in this
            step and are still in the table, else 0; those of indexed sequences carry one more reference, the caller's.
            One array for each pool where the cache has several.
    """

    ok: Bool[Array, ""]
    status: Int32[Array, ""]
    num_free: Int32[Array, "*pools"]
    lengths: Int32[Array, " seqs"]
    full_pages: Int32[Array, "layers groups seqs full"] | tuple[Array, ...]


def begin_step[C: (Cache, PooledCache)](
    cache: C,
    query_lengths: Integer[ArrayLike, " seqs"] | Sequence[int],
    *,
    num_tokens: int,
    max_query_length: int,
    index: Bool[ArrayLike, " seqs"] | Sequence[bool] | None = None,
    prompt_ends: Bool[ArrayLike, " seqs"] | Sequence[bool] | None = None,
    token_kinds: Integer[ArrayLike, " tokens"] | Sequence[int] | None = None,
) -> tuple[C, Step]:
    """Allocate the slots of a step's tokens in all layers.

    When pages run out nothing is allocated: `step.ok` is False, all lengths count as 0 and the step changes nothing.

    Args:
        cache: the cache; donate it.
        query_lengths: integers [seqs], new tokens of each sequence.
        num_tokens: places for packed tokens (static).
        max_query_length: most tokens of one sequence (static); 1 is decode.
        index: bool [seqs], sequences whose pages the host's prefix index will hold. A policy that drops tokens or pages
            changes pages in place: its caches index none.
        prompt_ends: bool [seqs], False for sequences of which a part of the prompt follows: policies that compress a
            prompt at its end wait for that. None if no prompt goes on, as in decode.
        token_kinds: integers [num_tokens], 0, 1 for special tokens, 2 for punctuation, for policies that tell them
            apart.

    Raises: InputError for static sizes the cache was not built for, and arrays of the wrong shape or kind.
    """
    spec = cache.spec
    num_tokens = whole_number("num_tokens", num_tokens, 1)
    max_query_length = whole_number("max_query_length", max_query_length, 1, spec.max_query_length)
    lengths = integers("query_lengths", query_lengths, (spec.max_seqs,))
    index = np.zeros(spec.max_seqs, bool) if index is None else array("index", index, (spec.max_seqs,), np.bool_)
    if prompt_ends is not None:
        prompt_ends = jnp.asarray(array("prompt_ends", prompt_ends, (spec.max_seqs,), np.bool_))
    if token_kinds is not None:
        token_kinds = integers("token_kinds", token_kinds, (num_tokens,)).astype(jnp.int8)
    said: dict[str, Any] = dict(index=jnp.asarray(index), prompt_ends=prompt_ends, token_kinds=token_kinds)
    begin = functools.partial(_begin, lengths, said, num_tokens, max_query_length)
    cache, steps, _ = on_all_pools(cache, begin)
    if len(steps) == 1:
        return cache, steps[0]
    plans = (None,) * len(steps)
    return cache, dataclasses.replace(steps[0], writes=tuple(step.writes for step in steps), plan=plans)


def _begin(lengths, said: dict[str, Any], num_tokens: int, max_query_length: int, _: int, cache: Cache, allowed):
    """Begin a step of one pool; returns whether it can be served too."""
    is_decode = max_query_length == 1 and said["prompt_ends"] is None
    cache, lengths, ok = _accept(cache, lengths, num_tokens, max_query_length, is_decode)
    touched = touched_pages(cache, lengths, num_tokens, max_query_length)
    cache, ids, served = allocate_pages(cache, touched, ok, allowed)
    ok = served & allowed
    lengths = jnp.where(ok, lengths, 0)
    cache = write_positions(cache, lengths, touched, ids)
    sequence, offset, valid = pages.ragged(lengths, num_tokens)
    position = jnp.where(valid, cache.next_position.at[sequence].get(mode="promise_in_bounds") + offset, 0)
    starts = jnp.cumsum(lengths, dtype=jnp.int32) - lengths
    writes = writes_of(cache, lengths, starts, touched, ids)
    of_tokens: dict[str, Any] = dict(starts=starts, sequence=sequence, position=position, valid=valid, writes=writes)
    return cache, Step(ok=ok, lengths=lengths, max_query_length=max_query_length, **of_tokens, **said), served


def _accept(cache: Cache, lengths, num_tokens: int, longest: int, is_decode: bool):
    """Refuse lengths no step may have, positions past the last one and, for `debug`, ids that no page has."""
    spec = cache.spec
    bad = (lengths < 0).any() | (lengths > longest).any() | (lengths.sum() > num_tokens)
    if is_decode and (most := spec.decode_slots) is not None:
        # Decode steps drop one token and read no more than the policy keeps: what is longer has not been compressed.
        has_none = np.array([window is None for window in spec.layer_windows])[:, None, None]
        bad |= ((end_slot(cache, lengths) > most) & (lengths > 0)[None, None] & has_none).any()
    lengths = jnp.clip(lengths, 0, longest)
    at_end = (cache.next_position > POSITION_END - lengths).any()
    cache = dataclasses.replace(cache, status=cache.status & ~int(Status.OUT_OF_PAGES))
    cache = raise_status(raise_status(cache, Status.BAD_LENGTHS, bad), Status.POSITION_LIMIT, at_end)
    if spec.debug:
        # Kernels do not look: on a GPU such an id reads a neighbour's memory.
        unknown = ((cache.page_table < 0) | (cache.page_table >= spec.num_pages)).any()
        cache, bad = raise_status(cache, Status.BAD_PAGE_ID, unknown), bad | unknown
    return cache, lengths, ~(bad | at_end)


def end_step[C: (Cache, PooledCache)](cache: C, step: Step) -> tuple[C, Report]:
    """Advance lengths and positions, return pages that windows have passed, and report.

    Args:
        cache: as `attend` of the last layer returned it; donate it.
        step: as `begin_step` returned it.

    Returns: the cache, and a report of its own that the host may read late.
    """
    if isinstance(cache, PooledCache):
        caches, reports = zip(*(_end(of, step.of_pool(i)) for i, of in enumerate(cache.of_pools)), strict=True)
        cache = cache.with_pools(caches)
        num_free, full = jnp.stack([of.num_free for of in reports]), tuple(of.full_pages for of in reports)
        return cache, dataclasses.replace(reports[0], status=cache.status + 0, num_free=num_free, full_pages=full)
    return _end(cache, step)


def _end(cache: Cache, step: Step) -> tuple[Cache, Report]:
    """End a step of one pool."""
    spec = cache.spec
    # Nothing else tells XLA that the layers read the tables first: it would copy them to edit them early.
    tables, _ = jax.lax.optimization_barrier((cache.page_table, cache.keys))
    cache = dataclasses.replace(cache, page_table=tables)
    before, after = cache.next_slot, end_slot(cache, step.lengths)
    cache = dataclasses.replace(cache, next_slot=after, next_position=cache.next_position + step.lengths)
    cache = _drop_passed_pages(cache, step)
    cache, full = _full_pages(cache, step, before // spec.page_size, after // spec.page_size)
    cache = evict(cache, step.lengths, step.ends, is_decode=step.is_decode)
    if spec.debug:
        cache = raise_status(cache, Status.BROKEN_INVARIANT, broken_on_device(cache))
    # Sums with 0 so that the report shares no buffer with the donated cache.
    report = Report(step.ok, cache.status + 0, cache.allocator.num_free + 0, cache.lengths, full)
    return cache, report


def first_needed_page(spec: CacheSpec, next_slot: Int32[Array, "layers groups seqs"]):
    """Oldest logical page behind the pinned ones that the next token or a rollback can still see."""
    reach = jnp.array([POSITION_END if w is None else w - 1 + spec.rollback for w in spec.layer_windows], jnp.int32)
    return jnp.maximum(jnp.maximum(next_slot - reach[:, None, None], 0) // spec.page_size, spec.pinned)


def _drop_passed_pages(cache: Cache, step: Step) -> Cache:
    spec = cache.spec
    if not any(spec.layer_windows):
        return cache
    first = jnp.maximum(cache.first, first_needed_page(spec, cache.next_slot))
    most = -(-step.max_query_length // spec.page_size)
    page = cache.first[..., None] + jnp.arange(most, dtype=jnp.int32)[None, None, None]
    passed = page < first[..., None]

    def drop(table, allocator, status):
        shape = (*passed.shape[:2], spec.max_seqs * most)
        sequence = jnp.broadcast_to(jnp.arange(spec.max_seqs, dtype=jnp.int32)[None, None, :, None], passed.shape)
        ids, where = entry_ids(cache, sequence.reshape(shape), page.reshape(shape))
        ids = jnp.where(passed.reshape(shape), ids, 0)
        return (table.at[where].add(-ids, mode="promise_in_bounds"), *drop_pages(allocator, status, ids.reshape(-1)))

    def keep(table, allocator, status):
        return table, allocator, status, jnp.zeros(passed.size, jnp.int32)

    parts = (cache.page_table, cache.allocator, cache.status)
    table, allocator, status, freed = jax.lax.cond(passed.any(), drop, keep, *parts)
    cache = dataclasses.replace(cache, page_table=table, allocator=allocator, status=status, first=first)
    return scrub(cache, freed)


def _full_pages(cache: Cache, step: Step, begin, end):
    """Ids [layers, groups, seqs, n] that became full, with one more reference for indexed sequences."""
    most = -(-step.max_query_length // cache.spec.page_size)
    page = begin[..., None] + jnp.arange(most, dtype=jnp.int32)[None, None, None]
    held = (page >= cache.first[..., None]) | (page < cache.spec.pinned)
    full = (page < end[..., None]) & held & (not cache.spec.policy.edits)
    shape = (*full.shape[:2], -1)
    sequence = jnp.broadcast_to(jnp.arange(cache.spec.max_seqs, dtype=jnp.int32)[None, None, :, None], full.shape)
    ids, _ = entry_ids(cache, sequence.reshape(shape), page.reshape(shape))
    ids = jnp.where(full, ids.reshape(full.shape), 0)
    indexed = jnp.where(step.index[None, None, :, None], ids, 0).reshape(-1)
    allocator, _ = jax.lax.cond(
        (indexed > 0).any(), pages.retain, lambda same, _: (same, jnp.bool_(True)), cache.allocator, indexed
    )
    return dataclasses.replace(cache, allocator=allocator), ids
