"""check passes on good caches and names each planted fault."""

import dataclasses

import numpy as np
import pytest
from helpers.driver import SPEC, advance, fork, ids, init, truncate

from kvjax.cache import STATUS_MEANING, Status
from kvjax.invariants import CacheError, check


@pytest.fixture(scope="module")
def cache():
    """Sequences of 20 + 13, 9 (forked from it in part), 3 and 0 tokens."""
    cache, _, _ = advance(init(), [20, 0, 3, 0])
    cache, _, _ = advance(cache, [13, 9, 0, 0])
    return cache


def test_good_caches_pass(cache):
    check(init(), held={})
    check(cache, held={})
    check(cache)
    forked, ok = fork(cache, ids([0, 2]), ids([3, 1]))
    assert bool(ok)
    check(forked, held={})
    check(truncate(forked, ids([3]), ids([31])), held={})


def test_references_of_the_host_must_be_known(cache):
    counted = dataclasses.replace(cache.allocator, refcounts=cache.allocator.refcounts.at[1].add(2))
    held = dataclasses.replace(cache, allocator=counted)
    check(held, held={1: 2})
    check(held)
    for wrong in ({}, {1: 1}, {1: 3}, {1: 2, 2: 1}):
        with pytest.raises(CacheError, match="reference counts are exact"):
            check(held, held=wrong)


@pytest.mark.parametrize("bit", list(Status), ids=lambda bit: bit.name)
def test_every_status_bit_is_explained(cache, bit):
    raised = dataclasses.replace(cache, status=cache.status | int(bit))
    with pytest.raises(CacheError, match=f"^{bit.name}: {STATUS_MEANING[bit][:20]}"):
        check(raised)


def test_all_status_bits_are_named_at_once(cache):
    raised = dataclasses.replace(cache, status=cache.status | sum(Status))
    with pytest.raises(CacheError) as error:
        check(raised)
    assert all(bit.name and bit.name in str(error.value) for bit in Status)


def table_set(value, *where):
    return lambda cache: dict(page_table=cache.page_table.at[where].set(value))


def allocator_set(name, index, value):
    def plant(cache):
        array = getattr(cache.allocator, name)
        array = array + value if index is None else array.at[index].set(value)
        return dict(allocator=dataclasses.replace(cache.allocator, **{name: array}))

    return plant


FAULTS = {
    "id below the pool": (table_set(-1, 0, 0, 0, 0), "within the pool"),
    "id beyond the pool": (table_set(SPEC.num_pages, 0, 0, 0, 0), "within the pool"),
    "another row's page": (lambda c: table_set(int(c.page_table[0, 0, 2, 0]), 0, 0, 0, 0)(c), "counts are exact"),
    "a page where none belongs": (table_set(1, 0, 0, 3, 0), "counts are exact"),
    "a page missing": (table_set(0, 0, 0, 0, 0), "counts are exact"),
    "page on the stack twice": (
        lambda c: allocator_set("free_pages", 0, int(c.allocator.free_pages[1]))(c), "on the stack once",
    ),
    "used page on the stack": (
        lambda c: allocator_set("free_pages", 0, int(c.page_table[0, 0, 0, 0]))(c), "partition the pool",
    ),
    "page lost from the stack": (allocator_set("num_free", None, -1), "partition the pool"),
    "count of trash": (allocator_set("refcounts", 0, 1), "page 0 is never held"),
    "count too low": (lambda c: allocator_set("refcounts", int(c.page_table[0, 0, 0, 0]), 0)(c), "partition"),
    "count too high": (lambda c: allocator_set("refcounts", int(c.page_table[0, 0, 0, 0]), 2)(c), "counts are exact"),
    "position in trash": (lambda c: dict(positions=c.positions.at[0, 3].set(5)), "page 0 is trash"),
    "wrong position": (
        lambda c: dict(positions=c.positions.at[c.page_table[0, 0, 0, 0], 3].add(1)), "has its positions",
    ),
    "position behind the end": (
        lambda c: dict(positions=c.positions.at[c.page_table[0, 0, 2, 0], 3].set(3)), "has its positions",
    ),
    "wrong span": (lambda c: dict(page_span=c.page_span.at[c.page_table[1, 0, 1, 0], 1].add(1)), "has the span"),
    "length too short": (lambda c: dict(next_slot=c.next_slot.at[0, 0, 2].add(-1)), "has its positions"),
    "length without pages": (lambda c: dict(next_slot=c.next_slot.at[0, 0, 3].add(1)), "has its pages"),
    "layers disagree": (lambda c: dict(next_position=c.next_position.at[3].add(1)), "has seen every token"),
    "first too late": (lambda c: dict(first=c.first.at[0, 0, 0].add(1)), "has its pages"),
    "first too early": (lambda c: dict(first=c.first.at[1, 0, 0].add(-1)), "has its pages"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_named(cache, name):
    plant, message = FAULTS[name]
    with pytest.raises(CacheError, match=f"broken invariant: .*{message}"):
        check(dataclasses.replace(cache, **plant(cache)), held={})
    check(cache, held={})


def test_pages_in_the_wrong_order_are_noticed(cache):
    row = np.asarray(cache.page_table)[0, 0, 0].copy()
    row[[0, 1]] = row[[1, 0]]
    with pytest.raises(CacheError, match="has its positions"):
        check(dataclasses.replace(cache, page_table=cache.page_table.at[0, 0, 0].set(row)), held={})
