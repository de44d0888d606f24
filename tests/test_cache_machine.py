"""Any order of operations: invariants, outputs against float64, NaN in every unused slot, after every step."""

import dataclasses
import sys
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import (
    DECODE,
    PREFILL,
    ROLLBACK,
    SIZE,
    SPEC,
    WINDOW,
    Twin,
    assert_same,
    drop,
    fork,
    ids,
    leaves,
    poison,
    release,
    retain,
    share,
    truncate,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvjax.cache import Status, clear_status
from kvjax.invariants import check
from kvjax.spec import pages_for

SEQUENCE = st.integers(0, SPEC.max_seqs - 1)
LENGTHS = st.lists(st.sampled_from([0, 0, 1, 2, 5, 7, 8, 9, 16, 20]), min_size=4, max_size=4)
MASK = st.lists(st.integers(0, 1), min_size=4, max_size=4)
INDEXED = st.sets(SEQUENCE, max_size=2)


class CacheMachine(RuleBasedStateMachine):
    """`twin` holds the tokens, `first` the oldest pages of the windowed layer, `held` the references of the host."""

    spec = SPEC

    def __init__(self):
        super().__init__()
        self.twin = Twin(self.spec, seed=0)
        self.first = [0] * SPEC.max_seqs
        self.longest = [0] * SPEC.max_seqs
        self.held: Counter[int] = Counter()

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.twin.tokens]

    @property
    def free(self) -> int:
        return int(self.twin.cache.allocator.num_free)

    def pass_windows(self, sequence):
        oldest = max(self.lengths[sequence] - (WINDOW - 1 + ROLLBACK), 0) // SIZE
        self.first[sequence] = max(self.first[sequence], oldest)
        self.longest[sequence] = max(self.longest[sequence], self.lengths[sequence])

    def changes_nothing(self, before, free):
        assert_same(self.twin.cache, before)
        assert self.free == free
        self.twin.cache = clear_status(self.twin.cache)

    def table_rows(self, sequence, pages):
        """Ids [layers, groups, pages] of a sequence's first pages, 0 where a window has passed."""
        page = np.arange(pages)
        entry = page % np.array(SPEC.rings)[:, None, None]
        rows = np.take_along_axis(np.asarray(self.twin.cache.page_table)[:, :, sequence], entry, axis=2)
        return np.where(page >= np.asarray(self.twin.cache.first)[:, :, sequence, None], rows, 0)

    def step(self, lengths, shape, indexed):
        new = [n + length for n, length in zip(self.lengths, lengths, strict=True)]
        wanted = sum(pages_for(a, SIZE) - pages_for(b, SIZE) for a, b in zip(new, self.lengths, strict=True))
        fits = all(pages_for(n, SIZE) <= SPEC.pages_per_seq for n in new)
        expected, before = fits and wanted * SPEC.num_layers <= self.free, leaves(self.twin.cache)
        report = self.twin.step(lengths, **shape, index=indexed)
        assert bool(report.ok) == expected
        if not expected:
            assert int(report.status) == Status.OUT_OF_PAGES
            # Poison has been put anew, and free positions are lies in any case.
            assert_same(self.twin.cache, before)
            self.twin.cache = clear_status(self.twin.cache)
            return
        assert int(report.status) == 0 and report.lengths.tolist() == self.lengths
        full = np.asarray(report.full_pages)[:, :, sorted(indexed)]
        self.held.update(full[full > 0].tolist())
        for sequence in range(SPEC.max_seqs):
            self.pass_windows(sequence)

    @initialize(lengths=st.permutations([20, 4, 0, 0]))
    def begin(self, lengths):
        self.step(lengths, PREFILL, set())

    @rule(sequence=SEQUENCE, length=st.integers(8, 20), indexed=INDEXED)
    def prefill_one(self, sequence, length, indexed):
        self.step([length * (i == sequence) for i in range(SPEC.max_seqs)], PREFILL, indexed)

    @rule(lengths=LENGTHS, indexed=INDEXED)
    def prefill(self, lengths, indexed):
        while sum(lengths) > PREFILL["num_tokens"]:
            lengths[int(np.argmax(lengths))] //= 2
        self.step(lengths, PREFILL, indexed)

    @rule(lengths=MASK, indexed=INDEXED, times=st.integers(1, 9))
    def decode(self, lengths, indexed, times):
        for _ in range(times):
            self.step(lengths, DECODE, indexed)

    @rule(pairs=st.dictionaries(SEQUENCE, SEQUENCE, min_size=1))
    def fork(self, pairs):
        # Shapes are shared: sequences that are not named are forked onto themselves.
        target, source = list(range(SPEC.max_seqs)), [pairs.get(i, i) for i in range(SPEC.max_seqs)]
        before, free = leaves(self.twin.cache), self.free
        self.twin.cache, ok = fork(self.twin.cache, ids(source), ids(target))
        if not bool(ok):
            opened = sum(one != i and self.lengths[one] % SIZE > 0 for i, one in enumerate(source))
            assert opened * SPEC.num_layers > free
            return self.changes_nothing(before, free)
        self.twin.tokens = [list(self.twin.tokens[one]) for one in source]
        self.first, self.longest = ([of[one] for one in source] for of in (self.first, self.longest))

    @rule(sequence=SEQUENCE, removed=st.sampled_from([0, 1, 2, 3, 4, 5, 8, 50]))
    def truncate(self, sequence, removed):
        length = max(self.lengths[sequence] - removed, 0)
        before, free = leaves(self.twin.cache), self.free
        self.twin.cache = truncate(self.twin.cache, ids([sequence]), ids([length]))
        passed = self.first[sequence] > max(length - (WINDOW - 1), 0) // SIZE
        if self.longest[sequence] - length <= ROLLBACK:
            assert not passed, "rollback tokens can always be taken back"
        if int(self.twin.cache.status):
            assert int(self.twin.cache.status) == Status.TRUNCATE_REFUSED
            assert passed or free < SPEC.num_layers
            return self.changes_nothing(before, free)
        assert not passed
        self.twin.truncated(sequence, length)

    @precondition(lambda self: self.free < SPEC.num_pages // 2)
    @rule(sequences=st.sets(SEQUENCE, min_size=1, max_size=2))
    def release(self, sequences):
        self.twin.cache = release(self.twin.cache, ids([*sequences, *sequences][:2]))
        for sequence in sequences:
            self.twin.tokens[sequence], self.first[sequence], self.longest[sequence] = [], 0, 0

    @precondition(lambda self: max(self.lengths) >= SIZE)
    @rule(data=st.data(), anywhere=st.integers(0, 9))
    def share(self, data, anywhere):
        source = data.draw(st.sampled_from([i for i, length in enumerate(self.lengths) if length >= SIZE]))
        empty = [i for i, length in enumerate(self.lengths) if length == 0]
        into = data.draw(st.sampled_from(empty) if empty and anywhere else SEQUENCE)
        pages = data.draw(st.sampled_from([n for n in (1, 2, 3) if n * SIZE <= self.lengths[source]]))
        before, free = leaves(self.twin.cache), self.free
        page_ids = self.table_rows(source, pages)
        self.twin.cache, ok = share(self.twin.cache, jnp.int32(into), ids(page_ids), jnp.int32(0))
        visible = max(pages * SIZE - (WINDOW - 1), 0) // SIZE
        first = min(self.first[source], pages)
        assert bool(ok) == (self.lengths[into] == 0 and first <= visible)
        if not bool(ok):
            return self.changes_nothing(before, free)
        self.twin.tokens[into] = list(self.twin.tokens[source][: pages * SIZE])
        # A prefix is served without the tokens that a rollback would need.
        self.first[into], self.longest[into] = first, sys.maxsize

    @rule(data=st.data(), page=st.integers(-2, SPEC.num_pages + 2).filter(bool))
    def hold_or_let_go(self, data, page):
        """The host retains a page or drops one of its own; of a page that is free or none, neither is allowed."""
        before, free = leaves(self.twin.cache), self.free
        if not 0 < page < SPEC.num_pages or before[".allocator.refcounts"][page] == 0:
            for operation in (drop, retain):
                self.twin.cache = operation(self.twin.cache, ids([page, 0]))
                assert int(self.twin.cache.status) == Status.DOUBLE_FREE
                self.changes_nothing(before, free)
        elif self.held and data.draw(st.booleans()):
            pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, max_size=2, unique=True))
            self.twin.cache = drop(self.twin.cache, ids((pages + [0])[:2]))
            self.held -= Counter(pages)
        else:
            self.twin.cache = retain(self.twin.cache, ids([page, 0]))
            self.held[page] += 1

    @invariant()
    def cache_is_sound(self):
        check(self.twin.cache, held=dict(self.held))
        assert self.twin.cache.lengths.tolist() == self.lengths
        assert np.asarray(self.twin.cache.first)[1, 0].tolist() == self.first
        self.twin.cache = poison(self.twin.cache)


def test_any_order_of_operations():
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=12, stateful_step_count=20, deadline=None))


@pytest.mark.parametrize(
    "changes",
    [dict(format="int8"), dict(format="fp8_e4m3"), dict(format="int4_hadamard"), dict(format="int4")],
    ids=str,
)
def test_any_order_of_operations_on_quantised_pages(changes):
    class Machine(CacheMachine):
        spec = dataclasses.replace(SPEC, **changes)

    run_state_machine_as_test(Machine, settings=settings(max_examples=4, stateful_step_count=15, deadline=None))


@pytest.mark.slow
def test_many_long_orders_of_operations():
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=150, stateful_step_count=50, deadline=None))
