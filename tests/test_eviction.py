"""Rows that policies shorten: forks, truncation, release, pools that run out, planted faults, any order of all that."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers.driver import DECODE, PREFILL, SIZE, assert_same, fork, ids, leaves, release, truncate
from helpers.policies import POLICY_SPEC, PolicyTwin, assert_bounded, h2o, knorm, run_mixed, tova
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvjax.cache import STATUS_MEANING, Status, clear_status
from kvjax.errors import InputError
from kvjax.invariants import CacheError, check
from kvjax.policies import H2O, TOVA, KNorm, PagedEviction
from kvjax.spec import CacheSpec, pages_for

BUDGET = 12
SPEC = dataclasses.replace(POLICY_SPEC, windows=None, groups=2, policy=H2O(budget=BUDGET), num_pages=45)
ROWS = SPEC.num_layers * SPEC.groups
ALL = [True] * SPEC.max_seqs
NONE = [False] * SPEC.max_seqs


def twin_of(*prompts: int, spec: CacheSpec = SPEC, decode: int = 0) -> PolicyTwin:
    """Sequences with prompts of these lengths, up to 20 tokens, and what lone tokens follow each."""
    twin = PolicyTwin(spec, rule=h2o(BUDGET))
    for i, length in enumerate(prompts):
        twin.step([length * (i == s) for s in range(SPEC.max_seqs)], **PREFILL, ends=ALL)
    for _ in range(decode):
        twin.step([int(s < len(prompts)) for s in range(SPEC.max_seqs)], **DECODE)
    return twin


def of_sequence(twin: PolicyTwin, sequence: int) -> dict:
    """Positions and scores that the cache holds for a sequence."""
    return {row: of for row, of in twin.held().items() if row[2] == sequence}


def test_memory_comes_back_and_stays():
    twin = PolicyTwin(SPEC, rule=h2o(BUDGET))
    for ends in (NONE, NONE, ALL):
        report = twin.step([14, 0, 0, 0], **PREFILL, ends=ends, index=[0])
        assert not np.asarray(report.full_pages).any(), "pages that change are not for an index of prefixes"
        assert int(twin.cache.pages_used) == ROWS * pages_for(BUDGET if ends is ALL else twin.seen[0], SIZE)
    for _ in range(4 * SIZE):
        twin.step([1, 0, 0, 0], **DECODE)
        assert int(twin.cache.pages_used) == ROWS * pages_for(BUDGET + 1, SIZE)
    assert twin.seen[0] == 42 + 4 * SIZE and len(twin.kept(0)) == BUDGET, "positions go on, what is kept does not grow"


def test_forks_lose_tokens_on_their_own():
    twin = twin_of(20, 6, decode=3)
    before = of_sequence(twin, 0)
    assert twin.fork(0, 2)
    assert of_sequence(twin, 2) == {(*row[:2], 2): of for row, of in before.items()}
    table = np.asarray(twin.cache.page_table)
    assert not set(table[:, :, 0].flat) & set(table[:, :, 2].flat) - {0}, "no page is shared"
    for _ in range(2 * BUDGET):
        twin.step([0, 1, 1, 0], **DECODE)
    assert of_sequence(twin, 0) == before
    twin.step([0, 0, 17, 0], **PREFILL, ends=ALL)
    assert of_sequence(twin, 0) == before and not set(range(14, 20)) <= set(twin.kept(2))
    # The copy's memory is its own: what is left of the first goes, and the second lives on.
    twin.release([0])
    twin.step([5, 1, 1, 0], **PREFILL, ends=ALL)
    assert twin.seen == [5, 34, 65, 0] and twin.kept(0) == [0, 1, 2, 3, 4], "a released sequence starts anew"


def test_shared_prefixes_are_copied():
    twin = twin_of(11)
    before = of_sequence(twin, 0)
    assert twin.share(0, 1, pages=1)
    assert of_sequence(twin, 0) == before
    for (layer, group, _), of in of_sequence(twin, 1).items():
        source = before[layer, group, 0]
        assert of == {position: source[position] for position in range(SIZE)}, "with the scores that they have"
    for _ in range(BUDGET):
        twin.step([0, 1, 0, 0], **DECODE)
    assert of_sequence(twin, 0) == before
    twin.release([0])
    twin.step([0, 3, 9, 0], **PREFILL, ends=ALL)


def test_shortened_rows_are_not_shared_or_truncated():
    twin = twin_of(20, 12, decode=1)
    before = leaves(twin.cache)
    assert not twin.share(0, 3, pages=1), "what is left has other positions than its place asks for"
    assert_same(twin.cache, before, but=())
    # The first has been compacted; the second has an empty slot alone.
    assert np.asarray(twin.cache.next_slot)[0, 0].tolist() == [13, 13, 0, 0]
    for sequence, length in ((0, 20), (1, 12), (0, 0)):
        assert not twin.truncate(sequence, length)
        assert int(twin.cache.status) == Status.TRUNCATE_REFUSED
        assert_same(twin.cache, before)
        twin.cache = clear_status(twin.cache)
    assert twin.truncate(0, 21) and twin.truncate(1, 50), "nothing is taken back"
    # A slot that has been emptied is not forgotten where several tokens follow.
    twin.step([0, 2, 0, 0], **PREFILL, ends=NONE)
    assert not twin.truncate(1, 14)


def test_rows_that_have_lost_nothing_are_truncated():
    twin = twin_of(11, decode=1)
    assert twin.is_whole(0) and twin.truncate(0, 7)
    assert np.asarray(twin.cache.write_slot)[0, 0, 0] == 7
    for _ in range(BUDGET):
        twin.step([1, 0, 0, 0], **DECODE)
    assert not twin.is_whole(0)


def test_what_does_not_fit_changes_nothing_not_even_scores():
    twin = twin_of(20, 20, 20, decode=2)
    # Three unfinished parts of a prompt take all that the pool has.
    for _ in range(2):
        twin.step([0, 0, 0, 20], **PREFILL, ends=NONE)
    used = int(twin.cache.pages_used)
    twin.cache, before = clear_status(twin.cache), leaves(twin.cache)
    for lengths in ([1, 2, 0, 20], [4, 0, 0, 20]):
        assert not bool(twin.step(lengths, **PREFILL, ends=ALL).ok)
        assert int(twin.cache.status) == Status.OUT_OF_PAGES and int(twin.cache.pages_used) == used
        assert_same(twin.cache, before)
    twin.step([1, 1, 1, 0], **DECODE)
    twin.release([1])
    assert bool(twin.step([3, 0, 1, 8], **PREFILL, ends=ALL).ok), "and it goes on where there is room"
    assert_bounded(twin)


def test_decode_waits_for_the_end_of_a_prompt():
    """Decode steps read no more than a row may keep: one that is longer must be compressed before."""
    twin = twin_of(4)
    twin.step([0, 20, 0, 0], **PREFILL, ends=NONE)
    assert bool(twin.step([1, 0, 0, 0], **DECODE).ok), "others decode meanwhile"
    before = leaves(twin.cache)
    assert not bool(twin.step([1, 1, 0, 0], **DECODE).ok)
    assert int(twin.cache.status) == Status.BAD_LENGTHS and "prompt_ends" in STATUS_MEANING[Status.BAD_LENGTHS]
    assert_same(twin.cache, before)
    twin.cache = clear_status(twin.cache)
    twin.step([1, 1, 0, 0], **PREFILL, ends=ALL)
    assert bool(twin.step([1, 1, 0, 0], **DECODE).ok)


def test_a_token_that_is_not_finite_goes_and_is_nothing_to_others():
    outs, draws = [], [PolicyTwin(SPEC).draw_tokens(2) for _ in range(BUDGET + 3)]
    for value in (0.0, np.nan):
        twin = twin_of(12, 12)
        for i, qkv in enumerate(draws):
            q, k, v = (np.array(of) for of in qkv)
            k[:, 0] = value if i == 0 else k[:, 0]
            out, _ = twin.run([1, 1, 0, 0], (q, k, v), **DECODE)
            twin.cache = clear_status(twin.cache)
            check(twin.cache, held={})
            outs.append(out)
    finite, broken = np.array(outs[: len(draws)]), np.array(outs[len(draws) :])
    np.testing.assert_array_equal(broken[:, :, 1], finite[:, :, 1])
    assert np.isnan(broken[0, :, 0]).all() and np.isfinite(broken[-1, :, 0]).all()
    assert all(len(of) == BUDGET and twin.seen[0] + len(draws) - 1 in of for of in of_sequence(twin, 0).values())


def row_set(name: str, change: int):
    return lambda cache: {name: getattr(cache, name).at[0, 0, 0].add(change)}


def at_position(position, value):
    """Give the slot of a position of row (0, 0, 0) another one."""

    def plant(cache):
        pages = cache.page_table[0, 0, 0]
        of = np.asarray(cache.positions)[pages]
        page, slot = np.argwhere(of == (of.max() if position is None else position))[-1]
        return dict(positions=cache.positions.at[pages[page], slot].set(value))

    return plant


def another_holder(cache) -> dict[str, Any]:
    counts = cache.allocator.refcounts.at[cache.page_table[0, 0, 0, 0]].add(1)
    return dict(allocator=dataclasses.replace(cache.allocator, refcounts=counts))


FAULTS = {
    "the empty slot is another": (row_set("write_slot", 1), "has its next slot empty"),
    "the empty slot is beyond": (lambda c: dict(write_slot=c.write_slot.at[0, 0, 0].set(99)), "next slot empty"),
    "a token twice": (at_position(None, 21), "has tokens of its sequence"),
    "a token of nobody": (at_position(None, 999), "has tokens of its sequence"),
    "no newest token": (at_position(None, -1), "has its newest token"),
    "an end too early": (row_set("next_slot", -1), "ends with its last token"),
    "a row longer than its sequence": (lambda c: dict(next_position=c.next_position.at[0].set(5)), "no longer than"),
    "a span that is wrong": (
        lambda c: dict(page_span=c.page_span.at[c.page_table[0, 0, 0, 0], 1].add(1)), "has its span",
    ),
    "a page that is not its own": (another_holder, "is its own"),
}  # fmt: skip


@pytest.fixture(scope="module")
def shortened():
    return twin_of(20, 5, decode=3).cache


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_in_shortened_rows_are_named(shortened, name):
    plant, message = FAULTS[name]
    check(shortened, held={})
    with pytest.raises(CacheError, match=f"broken invariant: .*{message}"):
        check(dataclasses.replace(shortened, **plant(shortened)))


def test_models_that_have_windows_in_all_layers_are_refused():
    for policy in (H2O(budget=8), TOVA(budget=8), KNorm(budget=8), PagedEviction(budget=24)):
        with pytest.raises(
            InputError, match=f"policy {policy.name} drops tokens of layers without a window, and every"
        ):
            dataclasses.replace(SPEC, windows=(11, 11), policy=policy)


SEQUENCE = st.integers(0, SPEC.max_seqs - 1)
LENGTHS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 7, 9, 13, 20]), min_size=4, max_size=4)
FLAGS = st.lists(st.booleans(), min_size=4, max_size=4)


class EvictionMachine(RuleBasedStateMachine):
    """Prompts in parts, decode, forks, shares, truncations and releases, of rows by `PolicyTwin`."""

    spec, definition, compare_scores = SPEC, h2o(BUDGET), True

    def __init__(self):
        super().__init__()
        self.twin = PolicyTwin(self.spec, rule=self.definition, compare_scores=self.compare_scores)
        self.rows = self.spec.num_layers * self.spec.groups

    @property
    def free(self) -> int:
        return int(self.twin.cache.allocator.num_free)

    def slots(self, sequence: int) -> np.ndarray:
        """Slots [layers, groups] that a sequence has, of tokens, emptied or passed by a window."""
        return np.asarray(self.twin.cache.next_slot)[:, :, sequence]

    def pages(self, sequence: int) -> int:
        return int((np.asarray(self.twin.cache.page_table)[:, :, sequence] > 0).sum())

    def passed(self, sequence: int, length: int) -> bool:
        """Whether a window has passed what a sequence of that length would see."""
        windows = np.array([2**30 if window is None else window for window in self.spec.windows or ()])
        visible = np.maximum(length - (windows - 1), 0) // SIZE
        return bool((np.asarray(self.twin.cache.first)[:, :, sequence] > visible[:, None]).any())

    def step(self, lengths, shape, ends):
        cache = self.twin.cache
        begin = [np.asarray(cache.write_slot if n == 1 else cache.next_slot)[:, :, i] for i, n in enumerate(lengths)]
        after = [np.maximum(b + n, self.slots(i)) for i, (b, n) in enumerate(zip(begin, lengths, strict=True))]
        pages = lambda slots: -(-slots // SIZE)  # noqa: E731
        wanted = sum((pages(of) - pages(self.slots(i))).sum() for i, of in enumerate(after))
        unbounded = [window is None for window in self.spec.windows or ()]
        fits = max(of[unbounded].max() for of in after) <= self.spec.pages_per_seq * SIZE
        if ends is None:
            unfinished = [n > 0 and of[unbounded].max() > BUDGET + 1 for n, of in zip(lengths, after, strict=True)]
            fits &= not any(unfinished)
        before = leaves(cache)
        report = self.twin.step(lengths, **shape, ends=ends)
        assert bool(report.ok) == bool(fits and wanted <= int(before[".allocator.num_free"]))
        if not bool(report.ok):
            assert int(report.status) in (Status.OUT_OF_PAGES, Status.BAD_LENGTHS)
            assert_same(self.twin.cache, before)
            self.twin.cache = clear_status(self.twin.cache)

    @initialize(lengths=st.permutations([20, 4, 0, 0]))
    def begin(self, lengths):
        self.step(lengths, PREFILL, ALL)

    @rule(lengths=LENGTHS, ends=FLAGS)
    def prefill(self, lengths, ends):
        while sum(lengths) > PREFILL["num_tokens"]:
            lengths[int(np.argmax(lengths))] //= 2
        self.step(lengths, PREFILL, ends)

    @rule(mask=FLAGS, times=st.integers(1, 9))
    def decode(self, mask, times):
        for _ in range(times):
            self.step([int(of) for of in mask], DECODE, None)

    @rule(source=SEQUENCE, into=SEQUENCE)
    def fork(self, source, into):
        before = leaves(self.twin.cache)
        room = self.free + self.pages(into) >= self.pages(source)
        assert self.twin.fork(source, into) == (source == into or room)
        if not room:
            assert_same(self.twin.cache, before, but=())

    @rule(sequence=SEQUENCE, removed=st.sampled_from([0, 1, 3, 8, 50]))
    def truncate(self, sequence, removed):
        before, seen = leaves(self.twin.cache), self.twin.seen[sequence]
        length = max(seen - removed, 0)
        whole = self.twin.is_whole(sequence) and not self.passed(sequence, length)
        assert self.twin.truncate(sequence, length) == (whole or length == seen)
        if int(self.twin.cache.status):
            assert int(self.twin.cache.status) == Status.TRUNCATE_REFUSED
            assert_same(self.twin.cache, before)
            self.twin.cache = clear_status(self.twin.cache)

    @rule(source=SEQUENCE, into=SEQUENCE)
    @precondition(lambda self: any(seen >= SIZE for seen in self.twin.seen))
    def share(self, source, into):
        before = leaves(self.twin.cache)
        first = all(set(range(SIZE)) <= set(of) for (*_, i), of in self.twin.held().items() if i == source)
        in_place = first and self.twin.is_whole(source)
        expected = in_place and self.twin.seen[into] == 0 and self.free >= self.rows
        if in_place or self.twin.seen[into]:
            assert self.twin.share(source, into, pages=1) == expected
            if not expected:
                assert_same(self.twin.cache, before, but=())

    @rule(sequence=SEQUENCE)
    def release(self, sequence):
        self.twin.release([sequence])


def test_any_order_of_operations():
    run_state_machine_as_test(
        EvictionMachine, settings=settings(max_examples=20, stateful_step_count=15, deadline=None)
    )


@pytest.mark.slow
def test_any_order_of_operations_where_heads_keep_the_same_and_a_layer_has_a_window():
    class Machine(EvictionMachine):
        spec = dataclasses.replace(POLICY_SPEC, policy=TOVA(budget=BUDGET))
        # The policy scores only where a prompt ends.
        definition, compare_scores = tova(BUDGET), False

    run_state_machine_as_test(Machine, settings=settings(max_examples=6, stateful_step_count=15, deadline=None))


@pytest.mark.slow
def test_many_long_orders_of_operations():
    run_state_machine_as_test(EvictionMachine, settings=settings(max_examples=6, stateful_step_count=40, deadline=None))


@pytest.mark.slow
def test_pages_of_a_policy_that_drops_whole_ones_are_not_shared_either():
    spec = dataclasses.replace(SPEC, groups=1, policy=PagedEviction(budget=3 * SIZE))
    twin = PolicyTwin(spec)
    for lengths, shape in (([20, 0, 0, 0], PREFILL), ([12, 0, 0, 0], PREFILL), *[([1, 0, 0, 0], DECODE)] * 3):
        twin.run(lengths, twin.draw_tokens(sum(lengths)), **shape, ends=None if shape is DECODE else ALL)
    before = of_sequence(twin, 0)
    twin.cache, ok = fork(twin.cache, ids([0]), ids([1]))
    assert bool(ok) and of_sequence(twin, 1) == {(*row[:2], 1): of for row, of in before.items()}
    for _ in range(3 * SIZE):
        twin.run([0, 1, 0, 0], twin.draw_tokens(1), **DECODE)
        check(twin.cache, held={})
    after = of_sequence(twin, 1)
    assert of_sequence(twin, 0) == before and all(set(after[0, 0, 1]) != set(of) for of in before.values())
    refused = truncate(twin.cache, ids([1]), ids([5]))
    assert int(refused.status) == Status.TRUNCATE_REFUSED


@pytest.mark.slow
def test_sequences_trade_places_in_a_pool_that_is_full():
    twin = twin_of(20, 14, decode=1)
    for lengths in ([0, 0, 20, 0], [0, 0, 20, 0], [0, 0, 8, 8]):
        assert bool(twin.step(lengths, **PREFILL, ends=NONE).ok)
    assert int(twin.cache.allocator.num_free) == 0
    first, second = of_sequence(twin, 0), of_sequence(twin, 1)
    twin.cache, ok = fork(twin.cache, ids([0, 1]), ids([1, 0]))
    assert bool(ok)
    for rows in (row for of_layer in twin.rows for row in of_layer):
        rows[0], rows[1] = rows[1], rows[0]
    twin.seen[:2] = reversed(twin.seen[:2])
    twin.assert_equal()
    assert list(of_sequence(twin, 0).values()) == list(second.values()) != list(first.values())
    twin.step([1, 1, 0, 0], **DECODE)


@pytest.mark.slow
def test_scrubbing_reaches_what_a_policy_keeps():
    twin = PolicyTwin(dataclasses.replace(SPEC, scrub_on_free=True), rule=h2o(BUDGET))
    twin.run([20, 4, 0, 0], twin.draw_tokens(24), **PREFILL, ends=NONE)
    held = np.asarray(twin.cache.allocator.refcounts) > 0
    assert (np.asarray(twin.cache.policy_state["slots"]["score"])[held] != 0).any(1).all()
    twin.run([4, 0, 0, 0], twin.draw_tokens(4), **PREFILL, ends=ALL)
    twin.cache = release(twin.cache, ids([1]))
    freed = held & (np.asarray(twin.cache.allocator.refcounts) == 0)
    assert freed.sum() == 2 * ROWS, "the third pages of the first sequence, and those of the second"
    for of_pages in (twin.cache.keys, twin.cache.values, twin.cache.policy_state["slots"]["score"]):
        assert not np.asarray(of_pages)[freed].any()


@pytest.mark.slow
def test_layers_in_another_format_and_windows_have_their_pools():
    spec = dataclasses.replace(
        POLICY_SPEC, num_layers=3, windows=(None, 11, None), num_pages=160, format="int8", skip_layers=(0,),
        skip_format="float32", policy=KNorm(budget=BUDGET, heads="mean"),
    )  # fmt: skip
    twin = PolicyTwin(spec, rule=knorm(BUDGET), static_layer=True)
    run_mixed(twin)
    assert twin.dropped > 200 and twin.kept(0, layer=0) != twin.kept(0, layer=2)
    assert twin.fork(0, 2)
    twin.release([0])
    twin.step([0, 3, 9, 0], **PREFILL, ends=ALL)
