"""Sinks, logits of slots, log-sum-exp and lists of pages: the definition against plain arrays, XLA against both."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import ids
from helpers.paged import SIZE, assert_equal, by_xla, case_of, with_rows

from kvjax.kernels.paged_attention import page_lse

# 100 tokens are 13 pages, of which windows have let most go.
LENGTHS = (0, 1, 9, 100)
QUERIES = {"decode": [0, 1, 1, 1], "prefill": [0, 1, 9, 20], "mixed": [0, 1, 5, 1]}
CASES = [
    dict(), dict(window=9, ring=5, sinks_learned=True), dict(window=9, sinks=3, ring=5, groups=2),
    dict(window=9, sinks=11, has_sink_query=True, ring=5, start=500, groups=2),
    dict(window=30, sinks=8, has_sink_query=True, ring=8, sinks_learned=True), dict(sinks=4, has_sink_query=True),
]  # fmt: skip
LAST = 7


def long_case(kind, changes):
    return case_of(QUERIES[kind], lengths=LENGTHS, **dict(ring=None) | changes)


@pytest.mark.parametrize("kind", QUERIES)
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_sinks_and_slot_logits(kind, changes):
    case = long_case(kind, changes)
    expected = case.reference(last_logits=LAST)
    assert_equal(by_xla(case, last_logits=LAST), expected, 2e-5)


@pytest.mark.parametrize("kind", QUERIES)
def test_half_precision(kind):
    case = long_case(kind, CASES[3] | dict(dtype=jnp.bfloat16))
    assert_equal(by_xla(case, last_logits=1), case.reference(last_logits=1), 3e-2)


@pytest.mark.parametrize("kind", QUERIES)
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_the_reference_equals_plain_arrays(kind, changes):
    case = long_case(kind, changes)
    attention: Any = case.reference(last_logits=LAST)
    lse, logits = (np.full(of.shape, -np.inf) for of in (attention.lse, attention.slot_logits))
    learned = np.asarray(case.options.get("sink_logits", np.full(case.heads, -np.inf)), np.float64)
    for seq, here, queries, at in case.each_sequence():
        of_slots = case.logits(seq, here, queries, at)
        lse[here] = np.log(np.exp(of_slots).sum(-1) + np.exp(learned)[:, None]).T
        shown = min(LAST, len(queries))
        logits[seq, LAST - shown :] = of_slots[:, len(queries) - shown :].swapaxes(0, 1)
        # What the pages get and what the learned sink gets is everything.
        of_pages = np.asarray(page_lse(jnp.asarray(attention.slot_logits[seq, LAST - shown :], jnp.float32), SIZE))
        newest = attention.lse[here][-shown:]
        mass = np.exp(of_pages - newest[..., None]).sum(-1) + np.exp(learned - newest)
        np.testing.assert_allclose(mass, np.ones_like(mass), atol=1e-5)
    np.testing.assert_allclose(attention.lse, lse, atol=1e-9)
    np.testing.assert_allclose(attention.slot_logits, logits, atol=1e-9)
    np.testing.assert_allclose(attention.out, case.expected(), atol=1e-9)


def test_log_sum_exp_of_pages():
    logits = jnp.full((3, 2 * SIZE), -jnp.inf).at[0, 1].set(2.0).at[1, :].set(1.0)
    infinite = -np.inf
    expected = [[2, infinite], [1 + np.log(SIZE)] * 2, [infinite, infinite]]
    np.testing.assert_allclose(page_lse(logits, SIZE), expected, rtol=1e-6)


@pytest.mark.parametrize("changes, count", [*((changes, 3) for changes in CASES), (CASES[0], 1), (CASES[3], 20)])
def test_page_lists(changes, count):
    case = long_case("decode", changes)
    options: dict[str, Any] = dict(page_list=jnp.asarray(case.some_pages(count)), last_logits=2)
    assert_equal(by_xla(case, **options), case.reference(**options), 2e-5)


def test_a_list_of_all_pages_is_the_row():
    case = long_case("decode", CASES[5])
    rows = case.arguments[4]
    listed = jnp.repeat(rows.page_table[1], case.kv_heads, axis=0)
    assert_equal(by_xla(case, page_list=listed, last_logits=1), case.reference(last_logits=1), 2e-5)


def test_only_listed_pages_are_read():
    case = long_case("decode", {})
    q, keys, values, positions, rows, queries = case.arguments
    listed = case.some_pages(4)
    # A row's last page stands where a list has none.
    spared = np.union1d(listed, np.asarray(rows.page_table[1])[0, range(len(LENGTHS)), (np.array(LENGTHS) - 1) // SIZE])
    others = jnp.asarray(np.setdiff1d(np.arange(keys.shape[0]), spared))
    poisoned = (q, keys.at[others].set(jnp.nan), values.at[others].set(jnp.nan), positions, rows, queries)
    options: dict[str, Any] = dict(page_list=jnp.asarray(listed), last_logits=1)
    assert_equal(by_xla(case, poisoned, **options), case.reference(**options), 2e-5)


def test_an_empty_list_sees_nothing():
    case = long_case("decode", {})
    attention = by_xla(case, page_list=jnp.zeros((case.kv_heads, len(LENGTHS), 3), jnp.int32), last_logits=1)
    assert not attention.out.any()
    assert (attention.lse == -np.inf).all() and (attention.slot_logits == -np.inf).all()


def test_lists_are_for_decode():
    case = long_case("mixed", {})
    with pytest.raises(ValueError, match="page_list is for steps of one query token.*max_query_length is 20"):
        by_xla(case, page_list=jnp.asarray(case.some_pages(3)))


# Mistakes of the caller's, (arguments of the rows, options) -> the same: each must be seen in what comes back.
def _without(row, entry):
    return lambda rows, options: (with_rows(rows, page_table=rows.page_table[1].at[:, row, entry].set(0)), options)


def _swapped(rows, options):
    table = rows.page_table[1]
    return with_rows(rows, page_table=table.at[:, 3, 2].set(table[:, 3, 3]).at[:, 3, 3].set(table[:, 3, 2])), options


def _sinks(change):
    return lambda rows, options: (dataclasses.replace(rows, sinks=rows.sinks + change), options)


MUTATIONS = {
    "sinks + 1": _sinks(1),
    "sinks - 1": _sinks(-1),
    "pinned page missing": _without(3, 1),
    "page missing": _without(3, 2),
    "pages swapped": _swapped,
    "first page + 1": lambda rows, options: (with_rows(rows, first_page=rows.first_page[1] + 1), options),
    "ring - 1": lambda rows, options: (with_rows(rows, rings=rows.rings[1] - 1), options),
    "window + 1": lambda rows, options: (with_rows(rows, windows=rows.windows[1] + 1), options),
    "no sink query": lambda rows, options: (rows, dict(sink_query=None)),
    "sink query of another": lambda rows, options: (rows, dict(sink_query=options["sink_query"][::-1])),
    "start position + 1": lambda rows, options: (rows, dict(start=501)),
}


@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_errors_are_noticed(kind, name):
    # All pages of the ring, entries 2 to 4, are visible, the oldest but for one slot.
    case = long_case(kind, dict(window=19, sinks=11, has_sink_query=True, ring=3, start=500))
    *before, rows, queries = case.arguments
    rows, options = MUTATIONS[name](rows, case.options)
    queries = dataclasses.replace(queries, start_positions=ids([options.pop("start", 500)] * len(LENGTHS)))
    assert _differs(case, case.arguments) == (False, False)
    assert any(_differs(case, (*before, rows, queries), **options))


def _differs(case, arguments, **options):
    """Whether outputs are others than the definition's, and whether logits are."""
    expected: Any = case.reference(last_logits=1)
    attention: Any = by_xla(case, arguments, last_logits=1, **options)
    pairs = ((attention.out, expected.out), (attention.slot_logits, expected.slot_logits))
    return tuple(not np.allclose(got, wanted, atol=1e-2) for got, wanted in pairs)


def test_swapped_pages_are_noticed_in_the_logits_alone():
    case = long_case("decode", dict(window=20, sinks=11, has_sink_query=True, ring=3))
    *before, rows, queries = case.arguments
    assert _differs(case, (*before, _swapped(rows, {})[0], queries)) == (False, True)


@pytest.mark.parametrize("name", ["page missing", "page of another", "heads swapped"])
def test_planted_errors_in_lists_are_noticed(name):
    case = long_case("decode", {})
    listed = case.some_pages(4)
    right = case.reference(page_list=listed)
    assert_equal(by_xla(case, page_list=jnp.asarray(listed)), right, 2e-5)
    wrong = listed.copy()
    at = tuple(np.argwhere(listed[:, 3] > 0)[0])
    if name == "heads swapped":
        wrong = listed[::-1]
    else:
        wrong[at[0], 3, at[1]] = 0 if name == "page missing" else listed[:, 2].max()
    assert not np.allclose(by_xla(case, page_list=jnp.asarray(wrong)).out, right.out, atol=1e-2)
