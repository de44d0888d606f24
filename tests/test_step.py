"""begin_step and end_step: allocation, bookkeeping, refusals, windows and the report."""

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
    WINDOW,
    Twin,
    advance,
    assert_same,
    drop,
    ids,
    jit,
    leaves,
    release,
)

from kvjax.cache import Status, clear_status, init_cache
from kvjax.errors import InputError
from kvjax.invariants import CacheError, check
from kvjax.placement import touched_bound
from kvjax.spec import CacheSpec, pages_for
from kvjax.step import begin_step, end_step

END = 2**31 - 1


def pages_held(cache, layer, sequence):
    return int((np.asarray(cache.page_table)[layer, :, sequence] > 0).sum())


def filled(*steps, spec=SPEC, **options):
    """A cache after steps without layers."""
    cache = init_cache(spec)
    for lengths in steps:
        cache, _, report = advance(cache, lengths, **options)
        assert bool(report.ok)
    return cache


@pytest.mark.parametrize("length", range(20 + 1))
def test_pages_of_one_prefill_are_the_length_over_the_page_size_rounded_up(length):
    cache = filled([0, length, 0, 0])
    assert pages_held(cache, 0, 1) == -(-length // SIZE)
    check(cache, held={})


def test_pages_of_a_growing_sequence_are_the_length_over_the_page_size_rounded_up():
    cache = init_cache(SPEC)
    for length in range(1, 4 * SIZE + 1):
        cache, _, report = advance(cache, [0, 0, 1, 0], **DECODE)
        assert bool(report.ok) and report.lengths.tolist() == [0, 0, length, 0]
        assert pages_held(cache, 0, 2) == -(-length // SIZE), length
        check(cache, held={})


def test_packed_layout():
    cache = filled([3, 0, 5, 1])
    _, step, _ = advance(cache, [2, 0, 3, 0])
    assert bool(step.ok) and step.lengths.tolist() == [2, 0, 3, 0] and step.starts.tolist() == [0, 2, 2, 5]
    assert step.sequence.tolist() == [0, 0, 2, 2, 2] + [0] * 19
    assert step.position.tolist() == [3, 4, 5, 6, 7] + [0] * 19
    assert step.valid.tolist() == [True] * 5 + [False] * 19
    assert step.last_token.tolist() == [1, 1, 4, 4]


def test_positions_start_where_the_sequence_starts():
    cache, step, report = advance(init_cache(SPEC, start_positions=ids([0, 700, 5, 0])), [1, 2, 0, 0])
    assert step.position.tolist()[:3] == [0, 700, 701] and report.lengths.tolist() == [1, 2, 0, 0]
    check(cache, held={})


def test_out_of_pages_changes_nothing_and_is_recomputed():
    cache = filled([20, 0, 0, 0], [0, 20, 0, 0], [0, 0, 20, 0])
    before, free = leaves(cache), int(cache.allocator.num_free)
    assert free == 23 - 18
    cache, step, report = advance(cache, [0, 0, 0, 20])
    assert not bool(step.ok) and not bool(report.ok) and int(report.status) == Status.OUT_OF_PAGES
    assert step.lengths.tolist() == [0] * 4 and not step.valid.any() and not report.full_pages.any()
    assert_same(cache, before)
    with pytest.raises(CacheError, match="OUT_OF_PAGES: the last step did not fit.*release sequences or raise"):
        check(cache)
    cache, _, report = advance(cache, [0, 0, 0, SIZE])
    assert bool(report.ok) and int(report.status) == 0
    check(cache, held={})


def test_a_step_that_fits_exactly_is_served():
    cache = filled([20, 0, 0, 0], [0, 20, 0, 0], [0, 0, 20, 0], [0, 0, 0, 16])
    assert int(cache.allocator.num_free) == 1
    cache, _, report = advance(cache, [1, 1, 1, 0], **DECODE)
    assert bool(report.ok) and int(report.num_free) == 1
    cache, _, report = advance(cache, [0, 0, 0, 1], **DECODE)
    assert not bool(report.ok), "a page in each layer is needed and one is left"
    check(advance(release(cache, ids([0])), [0, 0, 0, 1], **DECODE)[0], held={})


def test_a_full_row_refuses_the_step_with_pages_left():
    cache = filled([20, 0, 0, 0], [20, 0, 0, 0], [8, 0, 0, 0])
    before = leaves(cache)
    cache, _, report = advance(cache, [1, 1, 0, 0])
    assert int(report.status) == Status.OUT_OF_PAGES and int(report.num_free) > 4
    assert_same(cache, before)
    assert bool(advance(cache, [0, 1, 0, 0])[2].ok)


@pytest.mark.parametrize("lengths", [[0, -1, 0, 0], [21, 0, 0, 0], [20, 5, 0, 0], [END, 0, 0, 0]], ids=str)
def test_bad_lengths_change_nothing_and_stay_known(lengths):
    cache = filled([3, 2, 1, 0])
    before = leaves(cache)
    cache, step, report = advance(cache, lengths)
    assert not bool(step.ok) and int(report.status) == Status.BAD_LENGTHS
    assert_same(cache, before)
    cache, _, report = advance(cache, [1, 0, 0, 0])
    assert bool(report.ok) and int(report.status) == Status.BAD_LENGTHS
    assert int(clear_status(cache).status) == 0


def test_position_limit_ends_a_sequence_and_no_other():
    cache = init_cache(SPEC, start_positions=ids([0, END - 5, 0, 0]))
    cache, step, report = advance(cache, [0, 5, 0, 0])
    assert bool(report.ok) and step.position.tolist()[:5] == [END - 5 + i for i in range(5)]
    check(cache, held={})
    before = leaves(cache)
    cache, _, report = advance(cache, [1, 1, 0, 0], **DECODE)
    assert not bool(report.ok) and int(report.status) == Status.POSITION_LIMIT
    assert_same(cache, before)
    cache, _, report = advance(cache, [1, 0, 0, 0], **DECODE)
    assert bool(report.ok)
    cache = clear_status(release(cache, ids([1])))
    assert bool(advance(cache, [0, 1, 0, 0], **DECODE)[2].ok)


@pytest.mark.parametrize("static", [dict(num_tokens=4, max_query_length=21), dict(num_tokens=4, max_query_length=0),
                                    dict(num_tokens=0, max_query_length=1)], ids=str)  # fmt: skip
def test_static_sizes_the_cache_was_not_built_for_are_refused(static):
    with pytest.raises(InputError, match="it must be a whole number from 1 to"):
        begin_step(init_cache(SPEC), ids([1, 0, 0, 0]), **static)


@pytest.mark.parametrize("start", [[0, 0, 0], [0, -1, 0, 0], [0, 0, END, 0]], ids=str)
def test_start_positions_are_checked(start):
    with pytest.raises(InputError, match="must be 4 positions from 0 to 2147483646"):
        init_cache(SPEC, start_positions=ids(start))


@pytest.mark.parametrize("size", [8, 16, 32], ids=["half", "window", "twice"])
def test_windows_return_pages_while_the_sequence_runs(size):
    window = 16
    spec = CacheSpec(
        num_layers=1, num_kv_heads=1, head_dim=2, num_pages=8, max_seqs=1, pages_per_seq=5, max_query_length=1,
        page_size=size, windows=(window,), debug=True,
    )  # fmt: skip
    cache, shape, most = init_cache(spec), dict(num_tokens=1, max_query_length=1), 0
    for length in range(1, 6 * max(size, window)):
        cache, _, report = advance(cache, [1], **shape)
        most = max(most, pages_held(cache, 0, 0))
        # The next token sees the window - 1 tokens before it.
        seen = range(max(length - window + 1, 0), length)
        assert pages_held(cache, 0, 0) == len({slot // size for slot in [*seen, length - 1]}), length
        assert bool(report.ok) and int(report.status) == 0
        if length % 7 == 0:
            check(cache, held={})
    assert most <= min(spec.rings[0], pages_for(window, size) + 1)
    assert int(cache.pages_used) == pages_held(cache, 0, 0)


def test_rollback_keeps_pages_beyond_the_window():
    cache = filled([20, 0, 0, 0], [20, 0, 0, 0])
    oldest = 40 - (WINDOW - 1) - ROLLBACK
    assert int(cache.first[1, 0, 0]) == oldest // SIZE == 3 and int(cache.first[0, 0, 0]) == 0
    assert pages_held(cache, 1, 0) == 2 and pages_held(cache, 0, 0) == 5


def test_report_names_full_pages_and_indexed_ones_gain_a_reference():
    cache, _, report = advance(init_cache(SPEC), [9, 9, 0, 0], index=[1])
    table, full = np.asarray(cache.page_table), np.asarray(report.full_pages)
    assert full.shape == (2, 1, 4, 3)
    np.testing.assert_array_equal(full[:, 0, :2, 0], table[:, 0, :2, 0])
    assert not full[:, :, 2:].any() and not full[..., 1:].any()
    held = dict.fromkeys(full[:, 0, 1, 0].tolist(), 1)
    check(cache, held=held)
    cache = release(cache, ids([0, 1]))
    check(cache, held=held)
    assert int(cache.pages_used) == 2
    cache, _, report = advance(drop(cache, ids(list(held))), [0, 0, 7, 0])
    assert not np.asarray(report.full_pages).any(), "no page is full"
    cache, _, report = advance(cache, [0, 0, 1, 0], **DECODE)
    np.testing.assert_array_equal(np.asarray(report.full_pages)[:, 0, 2, 0], np.asarray(cache.page_table)[:, 0, 2, 0])
    check(cache, held={})


def test_full_pages_that_a_window_has_passed_are_not_reported():
    spec = dataclasses.replace(SPEC, windows=(None, 1), rollback=0)
    cache, _, report = advance(init_cache(spec), [20, 0, 0, 0], index=[0])
    full = np.asarray(report.full_pages)
    assert (full[0, 0, 0] > 0).tolist() == [True, True, False] and not full[1].any()
    check(cache, held=dict.fromkeys(full[full > 0].tolist(), 1))


def test_a_report_outlives_the_donated_cache():
    run = jit(
        lambda cache, lengths: end_step(*begin_step(cache, lengths, num_tokens=4, max_query_length=1)),
        donate_argnums=0,
    )
    cache, first = run(init_cache(SPEC), ids([1, 0, 0, 1]))
    pointer = cache.keys.unsafe_buffer_pointer()
    cache, second = run(cache, ids([1, 0, 0, 0]))
    assert first.lengths.tolist() == [1, 0, 0, 1] and second.lengths.tolist() == [2, 0, 0, 1]
    assert int(first.status) == 0 and bool(first.ok) and int(first.num_free) == 19
    assert cache.keys.unsafe_buffer_pointer() == pointer


@pytest.mark.parametrize("fault", ["refcounts", "free_pages", "page_table", "first", "positions"])
def test_debug_detects_a_corrupted_cache(fault):
    cache = filled([9, 9, 0, 0])
    allocator = cache.allocator
    broken = dict(
        refcounts=lambda: dict(allocator=dataclasses.replace(allocator, refcounts=allocator.refcounts.at[20].add(1))),
        free_pages=lambda: dict(allocator=dataclasses.replace(allocator, free_pages=allocator.free_pages.at[0].set(1))),
        page_table=lambda: dict(page_table=cache.page_table.at[0, 0, 2, 0].set(1)),
        first=lambda: dict(first=cache.first.at[0, 0, 3].set(1)),
        positions=lambda: dict(positions=cache.positions.at[0, 0].set(3)),
    )[fault]()
    _, _, report = advance(dataclasses.replace(cache, **broken), [0, 0, 0, 0])
    # begin_step clears page 0's positions itself, so that fault heals.
    assert int(report.status) == (0 if fault == "positions" else Status.BROKEN_INVARIANT)


@pytest.mark.parametrize("page", [-1, SPEC.num_pages, 2**31 - 1])
def test_debug_refuses_a_table_with_ids_out_of_range(page):
    cache = filled([9, 9, 0, 0])
    cache = dataclasses.replace(cache, page_table=cache.page_table.at[0, 0, 1, 0].set(page))
    before = leaves(cache)
    after, _, report = advance(cache, [1, 1, 0, 0])
    assert Status(int(report.status)) == Status.BAD_PAGE_ID and not report.ok
    assert_same(after, before)
    with pytest.raises(CacheError, match="names a page that the pool does not have"):
        check(after)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("which", [1, 2], ids=["key", "value"])
def test_nonfinite_input_is_noticed_but_not_in_padding(value, which):
    twin = Twin()
    qkv = twin.draw_tokens(3)
    _, report = twin.run([2, 1, 0, 0], qkv, **PREFILL)
    assert int(report.status) == 0, "padding is NaN"
    qkv[which][1, 2, 0, 3] = value
    _, report = twin.run([2, 1, 0, 0], qkv, **PREFILL)
    assert int(report.status) == Status.NONFINITE_INPUT and bool(report.ok)


def test_no_index_is_ever_out_of_range():
    rng, cache = np.random.default_rng(0), init_cache(SPEC)
    for count in range(40):
        lengths = rng.integers(-1, 9, 4)
        cache, step, report = advance(cache, lengths)
        writes = {name: np.asarray(getattr(step.writes, name)) for name in ("pages", "first_tokens", "begins", "ends")}
        table, used = np.asarray(cache.page_table), writes["pages"] > 0
        assert table.min() >= 0 and table.max() < SPEC.num_pages
        assert writes["pages"].min() >= 0 and writes["pages"].max() < SPEC.num_pages
        assert ((writes["begins"] >= 0) & (writes["begins"] < writes["ends"]) & (writes["ends"] <= SIZE))[used].all()
        assert ((writes["first_tokens"] >= 0) & (writes["first_tokens"] < 24))[used].all()
        assert (np.asarray(step.sequence) < 4).all() and (np.asarray(step.position) >= 0).all()
        assert used.any() == (bool(report.ok) and lengths.sum() > 0)
        assert np.asarray(report.full_pages).max() < SPEC.num_pages
        if not bool(report.ok):
            cache = release(clear_status(cache), ids([count % 4]))


@pytest.mark.parametrize("num_tokens, longest", [(4, 1), (24, 20), (3, 20), (9, 8), (24, 2), (2, 1)])
def test_touched_bound_is_enough_and_not_lavish(num_tokens, longest):
    spec, worst = dataclasses.replace(SPEC, max_seqs=3), 0
    # The most pages a sequence touches: its tokens begin in the last slot of a page.
    most = [0 if n == 0 else 1 + pages_for(n - 1, SIZE) for n in range(longest + 1)]
    for a in range(longest + 1):
        for b in range(longest + 1):
            for c in range(min(longest, num_tokens - a - b) + 1):
                worst = max(worst, most[a] + most[b] + most[c])
    assert worst <= touched_bound(spec, num_tokens, longest) <= worst + 2


def test_status_bits_of_a_refused_step_do_not_hide_each_other():
    cache, _, report = advance(init_cache(SPEC, start_positions=ids([END - 1, 0, 0, 0])), [2, -1, 0, 0])
    assert Status(int(report.status)) == Status.BAD_LENGTHS | Status.POSITION_LIMIT
    assert int(jnp.abs(cache.lengths).sum()) == 0
