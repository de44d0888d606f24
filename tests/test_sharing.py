"""Pages that several hold: shared prefixes, the host's references, and scrubbing of what comes back."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import (
    DECODE,
    PREFILL,
    SIZE,
    SPEC,
    Twin,
    advance,
    assert_same,
    drop,
    fork,
    ids,
    leaves,
    release,
    retain,
    share,
    table,
    truncate,
    twin_of,
)

from kvjax.cache import Status, init_cache
from kvjax.invariants import check

END = 2**31 - 1

# share, retain, drop


def prefix(twin, sequence, pages):
    """Ids [layers, groups, pages] of a sequence's first pages, 0 where a window has passed."""
    cache, page = twin.cache, np.arange(pages)
    entry = page % np.array(SPEC.rings)[:, None, None]
    rows = np.take_along_axis(table(cache)[:, :, sequence], entry, axis=2)
    return np.where(page >= np.asarray(cache.first)[:, :, sequence, None], rows, 0)


@pytest.mark.parametrize("pages", [1, 2])
def test_a_shared_prefix_serves_a_new_sequence(pages):
    twin = twin_of([17, 0, 0, 0])
    used = int(twin.cache.pages_used)
    twin.cache, ok = share(twin.cache, jnp.int32(2), ids(prefix(twin, 0, pages)), jnp.int32(0))
    assert bool(ok) and int(twin.cache.pages_used) == used
    twin.tokens[2] = twin.tokens[0][: pages * SIZE]
    check(twin.cache, held={})
    assert bool(twin.step([1, 0, 5, 0], **PREFILL).ok)
    twin.cache = release(twin.cache, ids([0]))
    twin.tokens[0] = []
    twin.step([0, 0, 1, 0], **DECODE)
    check(twin.cache, held={})


def test_a_shared_prefix_may_lack_what_its_windows_have_passed():
    twin = twin_of([20, 0, 0, 0], [20, 0, 0, 0])
    page_ids = prefix(twin, 0, 5)
    assert (page_ids[1, 0] > 0).tolist() == [False] * 3 + [True] * 2
    twin.cache, ok = share(twin.cache, jnp.int32(1), ids(page_ids), jnp.int32(0))
    assert bool(ok)
    twin.tokens[1] = list(twin.tokens[0])
    twin.step([1, 1, 0, 0], **DECODE)
    check(twin.cache, held={})


def test_shared_prefixes_start_where_they_started():
    cache, _, _ = advance(init_cache(SPEC, start_positions=ids([600, 0, 0, 0])), [16, 0, 0, 0])
    cache, ok = share(cache, jnp.int32(1), ids(table(cache)[:, :, 0, :2]), jnp.int32(600))
    assert bool(ok) and np.asarray(cache.lengths).tolist() == [16, 16, 0, 0]
    cache, step, _ = advance(cache, [0, 1, 0, 0])
    assert int(step.position[0]) == 616
    check(cache, held={})


def test_refused_shares_change_nothing():
    twin = twin_of([20, 3, 0, 0], [20, 0, 0, 0])
    before, good = leaves(twin.cache), prefix(twin, 0, 5)
    hole, short, free = good.copy(), good[..., :4], good.copy()
    hole[0, 0, 2] = 0
    free[0, 0, 1] = 23
    window_passed = good.copy()
    window_passed[1, 0, 3] = 0
    # One page more than a table has entries; the same page may be named again.
    long = np.concatenate([np.broadcast_to(np.unique(good)[1], (*good.shape[:2], 2)), good], -1)
    long[1] = np.where(np.arange(7) < 5, 0, long[1])
    cases = dict(
        occupied=(1, good, 0), outside=(4, good, 0), below=(-1, good, 0), hole=(2, hole, 0), free=(2, free, 0),
        negative_start=(2, good, -1), passed=(2, window_passed, 0), long=(2, long, 0),
    )  # fmt: skip
    assert int(twin.cache.allocator.refcounts[23]) == 0 and short.shape[-1] == 4
    for name, (sequence, page_ids, start) in cases.items():
        cache, ok = share(twin.cache, jnp.int32(sequence), ids(page_ids), jnp.int32(start))
        assert not bool(ok), name
        assert_same(cache, before, but=())


def shared(cache, page_ids, start=0):
    after, ok = share(cache, jnp.int32(3), ids(page_ids), jnp.int32(start))
    if bool(ok):
        check(after, held={})
    else:
        assert_same(after, leaves(cache), but=())
    return bool(ok)


def test_pages_are_shared_only_where_their_positions_are_those_of_their_place():
    cache = twin_of([20, 0, 0, 0]).cache
    rows = table(cache)[:, :, 0]
    assert shared(cache, rows[..., :2])
    cases = {
        "an open page": rows[..., :3],
        "in reversed order": rows[..., [1, 0]],
        "twice": rows[..., [0, 0]],
        "from the middle": rows[..., [1]],
        "of two layers the same": np.broadcast_to(rows[:1, :, :2], (2, 1, 2)),
    }
    for name, page_ids in cases.items():
        assert not shared(cache, page_ids), name
    for start in (SIZE, 1, -SIZE, END - SIZE, END):
        assert not shared(cache, rows[..., :2], start), start


def test_pages_up_to_the_last_position_are_shared():
    cache, _, _ = advance(init_cache(SPEC, start_positions=ids([END - 2 * SIZE, 0, 0, 0])), [2 * SIZE, 0, 0, 0])
    rows = table(cache)[:, :, 0]
    assert shared(cache, rows[..., :2], END - 2 * SIZE)
    assert not shared(cache, rows[..., 1:2], END - 2 * SIZE) and shared(cache, rows[..., 1:2], END - SIZE)


def test_retain_and_drop_are_the_hosts_references():
    twin = twin_of([16, 0, 0, 0])
    held = table(twin.cache)[0, 0, 0, :2].tolist()
    cache = retain(twin.cache, ids([*held, held[0]]))
    check(cache, held={held[0]: 2, held[1]: 1})
    cache = release(cache, ids([0]))
    assert int(cache.pages_used) == 2
    cache = drop(cache, ids([held[0], 0, held[1]]))
    check(cache, held={held[0]: 1})
    cache = drop(cache, ids([held[0]]))
    assert int(cache.pages_used) == 0
    check(cache, held={})


@pytest.mark.parametrize("operation", [retain, drop])
def test_double_frees_set_the_status_and_change_nothing(operation):
    twin = twin_of([16, 0, 0, 0])
    before = leaves(twin.cache)
    cache = operation(twin.cache, ids([1, 20]))
    assert int(cache.status) == Status.DOUBLE_FREE
    assert_same(cache, before)


# scrub_on_free


def test_scrubbing_zeroes_freed_pages_and_no_others():
    twin = Twin(dataclasses.replace(SPEC, scrub_on_free=True))
    twin.step([12, 9, 3, 0], **PREFILL)
    twin.cache, ok = fork(twin.cache, ids([0]), ids([3]))
    keys, values, held = (np.asarray(a) for a in (twin.cache.keys, twin.cache.values, twin.cache.allocator.refcounts))
    cache = release(twin.cache, ids([0, 1]))
    freed = np.flatnonzero((held > 0) & (np.asarray(cache.allocator.refcounts) == 0))
    assert freed.size == 6, "two pages of sequence 1 and the open one of sequence 0, in two layers"
    kept = np.setdiff1d(np.arange(1, SPEC.num_pages), freed)
    for old, new in ((keys, cache.keys), (values, cache.values)):
        assert not np.asarray(new)[freed].any()
        np.testing.assert_array_equal(np.asarray(new)[kept], old[kept])


def test_scrubbing_reaches_pages_that_windows_truncate_and_fork_free():
    twin = Twin(dataclasses.replace(SPEC, scrub_on_free=True))

    def scrubbed(cache, before):
        freed = np.setdiff1d(np.unique(table(before)), np.unique(table(cache)))
        assert freed.size and not np.asarray(cache.keys)[freed].any() and not np.asarray(cache.values)[freed].any()

    twin.step([20, 0, 0, 0], **PREFILL)
    before = twin.cache
    scrubbed(truncate(before, ids([0]), ids([15])), before)
    scrubbed(fork(before, ids([1]), ids([0]))[0], before)
    cache, _, _ = advance(before, [20, 0, 0, 0])
    scrubbed(cache, before)
