"""The allocator against a plain list of free pages and a dictionary of counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import ids, ints, jit
from hypothesis import given
from hypothesis import strategies as st

from kvjax import pages
from kvjax.pages import Allocator, init_allocator

NUM_PAGES, WIDTH = 8, 6
pop, retain, drop = jit(pages.pop), jit(pages.retain), jit(pages.drop)


def free_list(allocator: Allocator) -> list[int]:
    return np.asarray(allocator.free_pages)[: int(allocator.num_free)].tolist()


def counts(allocator: Allocator) -> list[int]:
    return np.asarray(allocator.refcounts).tolist()


def taken(count: int) -> Allocator:
    """An allocator with pages 1..count held once."""
    return pop(init_allocator(NUM_PAGES), jnp.asarray(np.arange(WIDTH) < count))[0]


def padded(values) -> jax.Array:
    return ids([*values, *[0] * (WIDTH - len(values))])


def test_a_new_allocator_has_every_page_but_trash():
    allocator = init_allocator(5)
    assert free_list(allocator) == [4, 3, 2, 1] and counts(allocator) == [0] * 5


def test_pop_hands_out_in_rising_order_and_skips_what_is_not_wanted():
    allocator, popped = pop(init_allocator(NUM_PAGES), jnp.asarray([False, True, True, False, True, False]))
    assert popped.tolist() == [0, 1, 2, 0, 3, 0]
    assert free_list(allocator) == [7, 6, 5, 4] and counts(allocator) == [0, 1, 1, 1, 0, 0, 0, 0]


def test_pop_can_empty_the_pool():
    allocator = taken(WIDTH)
    allocator, popped = pop(allocator, jnp.asarray(np.arange(WIDTH) == 5))
    assert popped.tolist() == [0, 0, 0, 0, 0, 7] and free_list(allocator) == []


def test_retain_counts_repeats_and_ignores_page_zero():
    allocator, ok = retain(taken(3), padded([2, 0, 2, 3]))
    assert bool(ok) and counts(allocator)[:4] == [0, 1, 3, 2]


def test_retaining_a_free_page_changes_nothing():
    allocator, ok = retain(taken(3), padded([1, 5]))
    assert not bool(ok) and counts(allocator) == counts(taken(3))


def test_drop_returns_a_page_at_its_last_reference_only():
    allocator, _ = retain(taken(3), padded([2]))
    allocator, freed, ok = drop(allocator, padded([1, 2]))
    assert bool(ok) and sorted(freed.tolist())[-2:] == [0, 1] and counts(allocator)[:4] == [0, 0, 1, 1]
    assert free_list(allocator) == [7, 6, 5, 4, 1]


def test_a_page_dropped_twice_in_one_call_is_pushed_once():
    allocator, _ = retain(taken(3), padded([2]))
    allocator, freed, ok = drop(allocator, padded([2, 0, 2]))
    assert bool(ok) and free_list(allocator) == [7, 6, 5, 4, 2] and sorted(freed.tolist()) == [0] * 5 + [2]


@pytest.mark.parametrize("dropped", [[5], [1, 2, 1], [1, 7], [3, 3]], ids=str)
def test_a_double_free_changes_nothing(dropped):
    allocator, freed, ok = drop(taken(3), padded(dropped))
    assert not bool(ok) and not freed.any()
    assert counts(allocator) == counts(taken(3)) and free_list(allocator) == free_list(taken(3))


def test_every_page_can_come_back():
    allocator = taken(WIDTH)
    allocator, popped = pop(allocator, jnp.asarray(np.arange(WIDTH) == 0))
    allocator, _, _ = drop(allocator, ids(range(1, 7)))
    allocator, _, ok = drop(allocator, padded([int(popped[0])]))
    assert bool(ok) and sorted(free_list(allocator)) == list(range(1, NUM_PAGES))


class Model:
    """The allocator's definition."""

    def __init__(self):
        self.free = list(range(NUM_PAGES - 1, 0, -1))
        self.counts = [0] * NUM_PAGES

    def pop(self, wanted):
        popped = [self.free.pop() if want else 0 for want in wanted]
        for page in popped:
            self.counts[page] += page > 0
        return popped

    def retain(self, named):
        ok = all(page == 0 or self.counts[page] for page in named)
        for page in named if ok else ():
            self.counts[page] += page > 0
        return ok

    def drop(self, named):
        ok = all(named.count(page) <= self.counts[page] for page in named if page)
        for page in named if ok else ():
            self.counts[page] -= page > 0
        freed = sorted({page for page in named if page and not self.counts[page]}) if ok else []
        self.free += freed
        return ok


NAMED = st.lists(st.integers(0, NUM_PAGES - 1), min_size=WIDTH, max_size=WIDTH)
WANTED = st.lists(st.booleans(), min_size=WIDTH, max_size=WIDTH)
CALLS = st.one_of(st.tuples(st.just("pop"), WANTED), st.tuples(st.sampled_from(["retain", "drop", "drop"]), NAMED))


@given(st.lists(CALLS, max_size=20))
def test_any_calls_keep_the_definition(calls):
    allocator, model = init_allocator(NUM_PAGES), Model()
    for name, argument in calls:
        if name == "pop":
            wanted = [want and sum(argument[:i]) < len(model.free) for i, want in enumerate(argument)]
            allocator, popped = pop(allocator, jnp.asarray(wanted))
            assert popped.tolist() == model.pop(wanted)
        elif name == "retain":
            allocator, ok = retain(allocator, ids(argument))
            assert bool(ok) == model.retain(argument)
        else:
            allocator, _, ok = drop(allocator, ids(argument))
            assert bool(ok) == model.drop(argument)
        assert free_list(allocator) == model.free and counts(allocator) == model.counts


def test_ragged_lays_out_runs_and_marks_the_rest():
    owner, index, used = jit(pages.ragged, static_argnums=1)(ints(0, 3, 0, 1, 0), 6)
    assert owner.tolist() == [1, 1, 1, 3, 0, 0]
    assert index.tolist() == [0, 1, 2, 0, 0, 0]
    assert used.tolist() == [True] * 4 + [False] * 2


@given(st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_ragged_is_repeat(lengths):
    owner, index, used = jit_ragged(ids(lengths))
    expected = [(who, i) for who, length in enumerate(lengths) for i in range(length)]
    assert list(zip(owner.tolist(), index.tolist(), strict=True)) == expected + [(0, 0)] * (15 - len(expected))
    assert used.tolist() == [True] * len(expected) + [False] * (15 - len(expected))


jit_ragged = jit(lambda lengths: pages.ragged(lengths, 15))
