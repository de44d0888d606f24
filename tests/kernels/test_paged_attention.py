"""Both backends of paged attention over shuffled page tables: a worked example, an oracle, and planted errors."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import ids
from helpers.oracle import dense_attention
from helpers.paged import DIM, LENGTHS, NO_WINDOW, SIZE, assert_equal, by_xla, case_of, rows_of, with_rows

from kvjax.kernels.paged_attention import Queries, reference, xla

DECODES, PREFILLS, MIXED = [0, 1, 1, 1, 1, 1, 1], [0, 1, 7, 3, 9, 16, 20], [0, 1, 1, 8, 1, 5, 1]


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_worked_example(backend):
    # One sequence of two tokens in slots 0 and 1 of page 2; values 1 and 2; the last token queries with 2, the keys
    # are 0 and ln 3 / 2: logits 0 and ln 3, weights 1/4 and 3/4, output 1/4 + 6/4 = 1.75.
    keys, values = (np.full((3, 1, 8, 2), np.nan, np.float32) for _ in range(2))
    values[2], positions = 0, np.full((3, 8), -1, np.int32)
    keys[2, 0, :2], values[2, 0, :2], positions[2, :2] = [[0, 0], [math.log(3) / 2, 0]], [[1, 1], [2, 2]], [0, 1]
    rows = rows_of([[[2]]], [[0]], [[2]], window=9)
    queries = Queries(ids([0]), ids([1]), ids([1]), ids([0]))
    arguments: tuple[Any, ...] = (
        jnp.asarray([[[2.0, 0.0]]]),
        *map(jnp.asarray, (keys, values, positions)),
        rows,
        queries,
    )
    implementation: Any = xla if backend == "xla" else reference
    attention = implementation.paged_attention(*arguments, scale=1.0, max_query_length=1)
    np.testing.assert_allclose(attention.out, [[[1.75, 1.75]]], rtol=1e-6)
    np.testing.assert_allclose(attention.lse, [[math.log(4)]], rtol=1e-6)


@pytest.mark.parametrize("query_lengths", [DECODES, PREFILLS, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize(
    "changes",
    [
        dict(), dict(window=SIZE), dict(window=SIZE + 1, start=500), dict(window=1), dict(groups=2),
        dict(sinks_learned=True), dict(window=9, sinks=11, has_sink_query=True, ring=4),
    ],
    ids=str,
)  # fmt: skip
def test_ragged_rows_equal_the_oracle(query_lengths, changes):
    case = case_of(query_lengths, **changes)
    attention = by_xla(case)
    np.testing.assert_allclose(attention.out, case.expected(), atol=2e-5)
    assert_equal(attention, case.reference(), 2e-5)


@pytest.mark.parametrize(
    "changes",
    [
        dict(), dict(window=9, start=500), dict(groups=2, sinks_learned=True), dict(window=9, sinks=3),
        dict(window=9, sinks=11, has_sink_query=True, ring=4), dict(sinks=4, has_sink_query=True),
    ],
    ids=str,
)  # fmt: skip
def test_the_reference_equals_the_oracle(changes):
    case = case_of(MIXED, **changes)
    np.testing.assert_allclose(case.reference().out, case.expected(), atol=1e-12)


@pytest.mark.parametrize("query_lengths", [DECODES, MIXED], ids=["decode", "mixed"])
def test_rings_that_have_turned(query_lengths):
    # 37 tokens lie in the last three pages of a ring of three: the window of 16 needs no more.
    case = case_of([*query_lengths[:-1], 1], ring=3, window=16)
    np.testing.assert_allclose(by_xla(case).out, case.expected(), atol=2e-5)


def test_values_that_encode_the_token_show_the_weights():
    # Values are one-hot in the token's number, so an output is the softmax itself: zero where nothing may be seen.
    case = case_of(PREFILLS, window=5)
    values = np.array(case.arguments[2])
    for seq, length in enumerate(LENGTHS):
        for slot in range(length):
            page = int(case.arguments[4].page_table[1, 0, seq, slot // SIZE])
            values[page, :, slot % SIZE] = np.eye(DIM)[slot % DIM]
    arguments = (*case.arguments[:2], jnp.asarray(values), *case.arguments[3:])
    out, place = by_xla(case, arguments).out, 0
    for length, count in zip(LENGTHS, PREFILLS, strict=True):
        for i in range(count):
            position = length - count + i
            seen = {slot % DIM for slot in range(max(position - 4, 0), position + 1)}
            for head in range(case.heads):
                assert set(np.flatnonzero(out[place + i, head])) == seen
        place += count


def test_nothing_to_see_gives_zeros():
    case = case_of(MIXED)
    hidden = dataclasses.replace(case.arguments[5], start_positions=ids(np.full(len(LENGTHS), 1000)))
    for learned in (None, np.ones(case.heads, np.float32)):
        if learned is not None:
            case.options["sink_logits"] = learned
        attention = by_xla(case, (*case.arguments[:5], hidden))
        assert not attention.out.any()
        assert (attention.lse == -np.inf).all()


def swapped_pages(case):
    table = case.arguments[4].page_table[1]
    return dict(page_table=table.at[0, 6, 0].set(table[0, 6, 1]).at[0, 6, 1].set(table[0, 6, 0]))


# Mistakes of the caller's: each must be seen in the outputs.
ROW_MUTATIONS = {
    "page of another sequence": lambda rows: dict(
        page_table=rows.page_table[1].at[0, 6, 0].set(rows.page_table[1, 0, 5, 0])
    ),
    "page missing": lambda rows: dict(page_table=rows.page_table[1].at[0, 6, 2].set(0)),
    "first page + 1": lambda rows: dict(first_page=rows.first_page[1] + 1),
    "end a page early": lambda rows: dict(end_slot=rows.end_slot[1] - SIZE),
    "ring - 3": lambda rows: dict(rings=rows.rings[1] - 3),
    "window + 1": lambda rows: dict(windows=rows.windows[1] + 1),
    "window - 1": lambda rows: dict(windows=rows.windows[1] - 1),
}
QUERY_MUTATIONS = {
    "starts + 1": lambda queries: dict(starts=queries.starts + 1),
    "positions - 1": lambda queries: dict(positions=queries.positions - 1),
    "start position + 1": lambda queries: dict(start_positions=queries.start_positions + 1),
}


def differs(case, arguments):
    return np.abs(np.nan_to_num(by_xla(case, arguments).out, nan=1e3) - case.expected()).max() > 1e-2


@pytest.mark.parametrize("query_lengths", [DECODES, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", [*ROW_MUTATIONS, *QUERY_MUTATIONS, "heads", "position", "layer"])
def test_planted_errors_are_noticed(query_lengths, name):
    case = case_of(query_lengths, window=SIZE + 1 if name.startswith("window") else NO_WINDOW)
    q, keys, values, positions, rows, queries = case.arguments
    assert not differs(case, case.arguments)
    if name in ROW_MUTATIONS:
        changed = with_rows(rows, **ROW_MUTATIONS[name](rows))
        assert differs(case, (q, keys, values, positions, changed, queries))
    elif name in QUERY_MUTATIONS:
        changed = dataclasses.replace(queries, **QUERY_MUTATIONS[name](queries))
        assert differs(case, (q, keys, values, positions, rows, changed))
    elif name == "layer":
        assert differs(case, (q, keys, values, positions, dataclasses.replace(rows, layer=jnp.int32(2)), queries))
    elif name == "heads":
        # The head map: query heads 1 and 2 belong to different KV heads.
        assert differs(case, (q[:, ::-1], *case.arguments[1:]))
    else:
        page = int(rows.page_table[1, 0, 6, 1])
        assert differs(case, (q, keys, values, positions.at[page, 3].set(-1), rows, queries))


def test_order_of_pages_does_not_matter_where_positions_say_the_truth():
    case = case_of(DECODES)
    rows = with_rows(case.arguments[4], **swapped_pages(case))
    assert not differs(case, (*case.arguments[:4], rows, case.arguments[5]))


def test_all_backends_take_the_same_arguments():
    for query_lengths in (DECODES, PREFILLS):
        case = case_of(query_lengths, window=11, sinks_learned=True)
        assert_equal(by_xla(case), case.reference(), 2e-5)


@pytest.mark.parametrize("entries", [1, 3, 5, 17])
@pytest.mark.slow
def test_table_widths_that_no_block_divides(entries):
    size, rng = 64, np.random.default_rng(entries)
    length = entries * size - 5
    k, v = (rng.standard_normal((length, 1, DIM)).astype(np.float32) for _ in range(2))
    order = rng.permutation(np.arange(1, entries + 1))
    keys, values = (
        np.full((entries + 1, 1, size, DIM), np.nan, np.float32),
        np.zeros((entries + 1, 1, size, DIM), np.float32),
    )
    values[0], positions = np.nan, np.full((entries + 1, size), -1, np.int32)
    for slot in range(length):
        page, at = order[slot // size], slot % size
        keys[page, 0, at], values[page, 0, at], positions[page, at] = k[slot, 0], v[slot, 0], slot
    for count in (1, 33):
        q = rng.standard_normal((count, 2, DIM)).astype(np.float32)
        rows = rows_of(order[None, None], [[0]], [[length]])
        queries = Queries(ids([0]), ids([count]), ids([length - count]), ids([0]))
        run = jax.jit(lambda *a, m=count: xla.paged_attention(*a, scale=0.5, max_query_length=m).out)
        out = run(jnp.asarray(q), *map(jnp.asarray, (keys, values, positions)), rows, queries)
        at = np.arange(length)
        np.testing.assert_allclose(out, dense_attention(q, k, v, at[-count:], at, scale=0.5), atol=2e-5)
