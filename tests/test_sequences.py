"""Operations on whole sequences: what is shared, copied, refused and returned."""

import copy
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import (
    DECODE,
    PREFILL,
    ROLLBACK,
    SIZE,
    SPEC,
    advance,
    assert_same,
    fork,
    ids,
    leaves,
    release,
    retain,
    table,
    truncate,
    twin_of,
)

from kvjax.cache import Status, init_cache
from kvjax.invariants import check


def forked(twin, source, target):
    twin.cache, ok = fork(twin.cache, ids(source), ids(target))
    if bool(ok):
        old = [list(tokens) for tokens in twin.tokens]
        for one, other in zip(source, target, strict=True):
            twin.tokens[other] = list(old[one])
    check(twin.cache, held={})
    return bool(ok)


# fork


@pytest.mark.parametrize("length", range(SIZE, 2 * SIZE))
def test_fork_then_diverge_equals_independent_runs(length):
    # The twin compares every output with float64 attention over each sequence's own tokens.
    twin = twin_of([length, 0, 0, 0])
    assert forked(twin, [0], [2])
    for lengths in ([1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 1, 0], [1, 0, 1, 0]):
        assert bool(twin.step(lengths, **DECODE).ok)
    twin.step([3, 0, 5, 0], **PREFILL)
    check(twin.cache, held={})


def test_fork_shares_full_pages_and_copies_the_open_one():
    twin = twin_of([20, 0, 0, 0])
    used = int(twin.cache.pages_used)
    forked(twin, [0], [1])
    rows = table(twin.cache)[0, 0]
    assert rows[0, :2].tolist() == rows[1, :2].tolist() and rows[0, 2] != rows[1, 2]
    assert int(twin.cache.pages_used) == used + SPEC.num_layers
    forked(twin, [1], [1])
    assert int(twin.cache.pages_used) == used + SPEC.num_layers, "a fork onto itself changes nothing"


def test_fork_of_full_pages_takes_no_page():
    twin = twin_of([16, 0, 0, 0])
    free = int(twin.cache.allocator.num_free)
    assert forked(twin, [0, 0, 0], [1, 2, 3]) and int(twin.cache.allocator.num_free) == free


@pytest.mark.parametrize("source, target", [([1, 0], [0, 1]), ([1, 2, 3, 0], [0, 1, 2, 3]), ([2, 2, 0], [0, 1, 2])],
                         ids=["swap", "rotation", "beams"])  # fmt: skip
def test_fork_reads_all_sources_before_it_writes(source, target):
    twin = twin_of([3, 9, 4, 5])
    assert forked(twin, source, target)
    assert np.asarray(twin.cache.lengths).tolist() == [len(tokens) for tokens in twin.tokens]
    twin.step([1, 1, 1, 1], **DECODE)
    check(twin.cache, held={})


def test_beams_survive_many_reorderings():
    twin, rng = twin_of([5, 0, 0, 0]), np.random.default_rng(0)
    assert forked(twin, [0] * 4, range(4))
    for _ in range(12):
        assert bool(twin.step([1, 1, 1, 1], **DECODE).ok)
        assert forked(twin, rng.integers(0, 4, 4).tolist(), range(4))


@pytest.mark.parametrize("source, target", [([0, 1], [2, 2]), ([0], [4]), ([0], [-1]), ([4], [1]), ([-1], [1])],
                         ids=str)  # fmt: skip
def test_fork_refuses_repeated_targets_and_ids_out_of_range(source, target):
    twin = twin_of([9, 4, 3, 0])
    before = leaves(twin.cache)
    cache, ok = fork(twin.cache, ids(source), ids(target))
    assert not bool(ok)
    assert_same(cache, before, but=())


def test_fork_out_of_pages_changes_nothing():
    twin = twin_of([20, 0, 0, 0], [0, 20, 0, 0], [0, 0, 20, 0], [0, 0, 0, 16])
    assert int(twin.cache.allocator.num_free) == 1
    held = np.unique(table(twin.cache)[:, 0, 3])[1:]
    kept = retain(twin.cache, ids(held))
    before = leaves(kept)
    cache, ok = fork(kept, ids([0]), ids([3]))
    assert not bool(ok), "two open pages need two copies"
    assert_same(cache, before, but=())
    assert forked(twin, [0], [3]), "where the target's own pages come back they are enough"


# release


def test_release_empties_sequences_however_often_they_are_named():
    twin = twin_of([9, 4, 3, 1])
    cache = release(twin.cache, ids([1, 3, 1, 3, 1]))
    assert np.asarray(cache.lengths).tolist() == [9, 0, 3, 0]
    assert not table(cache)[:, :, [1, 3]].any()
    check(cache, held={})
    cache = release(cache, ids([0, 1, 2, 3]))
    assert int(cache.allocator.num_free) == SPEC.num_pages - 1
    check(cache, held={})


def test_a_released_place_starts_again_at_position_zero():
    cache, _, _ = advance(init_cache(SPEC, start_positions=ids([5, 900, 0, 0])), [3, 3, 0, 0])
    cache, step, _ = advance(release(cache, ids([1])), [1, 2, 0, 0])
    assert step.position.tolist()[:3] == [8, 0, 1]
    check(cache, held={})


# truncate


def truncated(twin, sequence, length):
    """Truncate one sequence of the twin; returns whether it was done."""
    before = leaves(twin.cache)
    twin.cache = truncate(twin.cache, ids([sequence]), ids([length]))
    refused = bool(int(twin.cache.status) & Status.TRUNCATE_REFUSED)
    if refused:
        assert_same(twin.cache, before)
        twin.cache = dataclasses.replace(twin.cache, status=jnp.int32(0))
    else:
        twin.truncated(sequence, length)
    check(twin.cache, held={})
    return not refused


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 12, 13])
def test_truncate_then_go_on(length):
    twin = twin_of([13, 3, 0, 0])
    assert truncated(twin, 0, length)
    assert np.asarray(twin.cache.lengths).tolist() == [length, 3, 0, 0]
    assert (table(twin.cache)[:, :, 0] > 0).sum() == 2 * -(-length // SIZE)
    twin.step([1, 1, 0, 0], **DECODE)
    twin.step([9, 0, 0, 0], **PREFILL)


def test_truncate_to_more_than_there_is_keeps_all():
    twin = twin_of([13, 0, 0, 0])
    before = leaves(twin.cache)
    cache = truncate(twin.cache, ids([0, 1]), ids([20, 3]))
    assert_same(cache, before, but=())


@pytest.mark.parametrize("length", [1, 7, 9, 15])
def test_truncate_into_a_shared_page_copies_it(length):
    twin = twin_of([16, 0, 0, 0])
    forked(twin, [0], [1])
    used = int(twin.cache.pages_used)
    assert truncated(twin, 0, length)
    assert int(twin.cache.pages_used) == used + SPEC.num_layers
    twin.step([1, 1, 0, 0], **DECODE)
    twin.step([5, 5, 0, 0], **PREFILL)
    check(twin.cache, held={})


def test_truncate_to_a_page_edge_of_shared_pages_copies_nothing():
    twin = twin_of([16, 0, 0, 0])
    forked(twin, [0], [1])
    used = int(twin.cache.pages_used)
    assert truncated(twin, 0, 8) and int(twin.cache.pages_used) == used
    twin.step([2, 1, 0, 0], **PREFILL)


def test_rollback_tokens_can_be_taken_back_from_every_length():
    twin = twin_of([20, 0, 0, 0], [8, 0, 0, 0])
    for _ in range(12):
        assert bool(twin.step([1, 0, 0, 0], **DECODE).ok)
        again = copy.copy(twin)
        again.tokens, again.rng = [list(tokens) for tokens in twin.tokens], np.random.default_rng(1)
        again.cache = dataclasses.replace(twin.cache, keys=twin.cache.keys + 0)
        length = len(twin.tokens[0])
        assert truncated(again, 0, length - ROLLBACK)
        again.cache, _, report = advance(again.cache, [1, 0, 0, 0], **DECODE)
        assert bool(report.ok)
        check(again.cache, held={})


def test_tokens_after_a_rollback_see_what_they_should():
    for length in range(20, 29):
        twin = twin_of([20, 0, 0, 0], [8, 0, 0, 0])
        for _ in range(length - 20):
            twin.step([1, 0, 0, 0], **DECODE)
        assert truncated(twin, 0, len(twin.tokens[0]) - ROLLBACK)
        assert bool(twin.step([1, 0, 0, 0], **DECODE).ok)
        assert bool(twin.step([3, 0, 0, 0], **PREFILL).ok)


@pytest.mark.parametrize("sequences, lengths", [([0], [5]), ([0], [-1]), ([4], [1]), ([-1], [1]), ([1, 1], [2, 2]),
                                                ([1, 0], [2, 3])], ids=str)  # fmt: skip
def test_refused_truncations_change_nothing(sequences, lengths):
    twin = twin_of([20, 4, 0, 0], [20, 0, 0, 0])
    before = leaves(twin.cache)
    cache = truncate(twin.cache, ids(sequences), ids(lengths))
    assert int(cache.status) == Status.TRUNCATE_REFUSED
    assert_same(cache, before)


def test_truncate_without_a_page_for_the_copy_changes_nothing():
    twin = twin_of([16, 0, 0, 0])
    forked(twin, [0], [1])
    cache = twin.cache
    for lengths in ([0, 0, 20, 0], [0, 0, 0, 20], [0, 0, 12, 0], [0, 0, 0, 12], [0, 0, 1, 0]):
        cache, _, report = advance(cache, lengths, index=[2, 3])
    assert bool(report.ok) and int(report.num_free) == 1, "the host's references keep what windows pass"
    before = leaves(cache)
    cache = truncate(cache, ids([0]), ids([3]))
    assert int(cache.status) == Status.TRUNCATE_REFUSED
    assert_same(cache, before)
