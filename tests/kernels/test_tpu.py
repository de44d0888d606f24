"""The TPU kernel in the interpreter, races detected and memory poisoned, against the definition."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import ids
from helpers.paged import NO_WINDOW, Paged, with_rows
from helpers.tpu import BLOCK, DIM, attend, check
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.paged_attention import tpu

SIZE = 8
PLAIN: dict[str, Any] = dict(head_dim=DIM)
FOUR_HEADS: dict[str, Any] = dict(kv_heads=2, heads=4)
EDGES = [0, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 150]
LEARNED: dict[str, Any] = dict(soft_cap=2.5, sink_logits=np.array([0.5, -1], np.float32))
LEARNED_6: dict[str, Any] = dict(soft_cap=2.5, sink_logits=np.linspace(-1, 1, 6).astype(np.float32))
MODES = ["eager", "on_wait"]


@pytest.fixture(autouse=True)
def fresh_interpreter():
    """After an exception the interpreter keeps its state."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


def in_both_modes(cases, fast):
    """List parameters (name, mode); those in `fast` are not slow in the mode named there."""
    slow = lambda name, mode: [] if fast.get(name) in (mode, "both") else pytest.mark.slow  # noqa: E731
    return [pytest.param(name, mode, marks=slow(name, mode)) for name, mode in itertools.product(cases, MODES)]


DECODES: dict[str, dict[str, Any]] = {
    "edges": dict(lengths=EDGES),
    "heads": dict(lengths=[70, 3], kv_heads=2, heads=12),
    "groups": dict(lengths=[70, 3], kv_heads=2, heads=2, groups=2),
    "mqa of 16": dict(lengths=[17, 66], heads=16),
    "learned": dict(lengths=[70, 3], options=LEARNED),
    "far": dict(lengths=[70, 3], start=2_000_000_000),
    "float32": dict(lengths=[70, 3], dtype=jnp.float32),
    "turned ring": dict(lengths=[150, 3], window=20, ring=4),
    "sinks": dict(lengths=[150, 9, 3], window=20, ring=4, sinks=11),
    "sink query": dict(lengths=[150, 9, 3], window=20, ring=4, sinks=11, has_sink_query=True, options=LEARNED),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    f"page {size}, head_dim {dim}": dict(lengths=[size + 1, 150], page_size=size, head_dim=dim)
    for size, dim in itertools.product(tpu.PAGE_SIZES, tpu.HEAD_DIMS)
}


@pytest.mark.parametrize(
    "name, mode",
    in_both_modes(
        DECODES | LAYOUTS,
        {
            "edges": "both",
            "groups": "eager",
            "sink query": "on_wait",
            "heads": "on_wait",
            "turned ring": "eager",
            "page 128, head_dim 256": "eager",
        },
    ),
)
def test_decode_equals_the_reference(name, mode):
    case = Paged(**PLAIN | (DECODES | LAYOUTS)[name])
    check(attend(case, mode=mode), case)


@pytest.mark.parametrize(
    "window, mode",
    in_both_modes([1, SIZE - 1, SIZE, SIZE + 1, 65, 128], {SIZE: "on_wait"}),
)
def test_windows_around_page_edges(window, mode):
    case = Paged(lengths=[5, 70, 152], head_dim=DIM, window=window)
    check(attend(case, mode=mode), case)


def test_pages_outside_the_window_are_not_read():
    # Their ids lead to poison: every page before the window's first is of NaN and seemingly in the window.
    case = Paged(lengths=[130], head_dim=DIM, window=SIZE)
    q, keys, values, positions, rows, queries = case.arguments
    trap = int(rows.page_table[1, 0, 0, 0])
    rows = with_rows(rows, page_table=rows.page_table[1].at[0, 0, : (130 - SIZE) // SIZE - 1].set(trap))
    values = values.at[trap].set(jnp.nan)
    check(attend(case, arguments=(q, keys, values, positions.at[trap].set(129), rows, queries)), case)


PREFILLS: dict[str, dict[str, Any]] = {
    "chunks over a prefix": dict(lengths=[70, 100, 9], query_lengths=[20, 100, 9], heads=4),
    "mixed with decode": dict(lengths=[70, 40, 0, 9], query_lengths=[1, 40, 0, 9], heads=3),
    "two groups": dict(lengths=[33, 12], query_lengths=[33, 5], kv_heads=2, heads=6, groups=2),
    "learned": dict(lengths=[70], query_lengths=[40], options=LEARNED),
    "sink query": dict(
        lengths=[150, 9, 3], query_lengths=[12, 9, 1], ring=6, sinks=11, has_sink_query=True, options=LEARNED
    ),
}


@pytest.mark.parametrize("name, mode", in_both_modes(PREFILLS, {"mixed with decode": "eager"}))
@pytest.mark.parametrize("window", [9, pytest.param(NO_WINDOW, marks=pytest.mark.slow)])
def test_prefill_equals_the_reference(name, mode, window):
    # Without a window nothing may leave the ring.
    ring: dict[str, Any] = dict(ring=None) if window == NO_WINDOW else {}
    case = Paged(**PLAIN | PREFILLS[name] | ring, window=window)
    check(attend(case, mode=mode), case)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_any_slice_of_the_heads_gives_the_same(heads):
    case = Paged(lengths=[150, 0, 9, 0], head_dim=DIM, kv_heads=4, heads=8)
    check(attend(case, shape=tpu.Shape(heads, BLOCK, 1)), case)


@pytest.mark.parametrize(
    "entries, mode", in_both_modes([1500, 2048], {2048: "eager"})
)  # fmt: skip
def test_rows_that_are_read_in_pieces(entries, mode):
    # The ring turns at the row's end: the last page stands in the first piece, the one before it in the last.
    case = Paged(lengths=[150, 9], head_dim=DIM, window=30, ring=6)
    q, keys, values, positions, rows, queries = case.arguments
    narrow, wide = np.asarray(rows.page_table), np.zeros((3, 1, 2, entries), np.int32)
    shift = entries * SIZE * 3  # every page was `shift` slots later in a row that has turned
    last = -(-150 // SIZE) - 1
    for logical in range(last - 5, last + 1):
        wide[1, 0, 0, (logical - last) % entries] = narrow[1, 0, 0, logical % 6]
    wide[1, 0, 1, :2] = narrow[1, 0, 1, :2]
    end_slot = ids([[150 + shift - last * SIZE, 9]])
    first_page = ids([[shift // SIZE - 5, 0]])
    rows = dataclasses.replace(rows, page_table=jnp.asarray(wide))
    rows = with_rows(rows, rings=entries, end_slot=end_slot, first_page=first_page)
    check(attend(case, mode=mode, arguments=(q, keys, values, positions, rows, queries)), case)


@pytest.mark.parametrize("name, mode", in_both_modes(["plain", "sink query"], {"sink query": "eager"}))
def test_lists_of_pages(name, mode):
    more: dict[str, Any] = dict(window=20, sinks=11, has_sink_query=True) if name == "sink query" else {}
    case = Paged(lengths=[150, 9, 0, 1], head_dim=DIM, kv_heads=2, heads=4, **more)
    row = np.asarray(case.arguments[4].page_table[1, 0])
    # The heads read different pages, in another order than the row's, with gaps; the last page is not full.
    listed = np.zeros((2, 4, 7), np.int32)
    listed[0, 0, :6], listed[1, 0, 2:4] = row[0, [18, 0, 17, 3, 16, 1]], row[0, [1, 18]]
    listed[0, 1, 1:3], listed[1, 1, 6] = row[1, [1, 0]], row[1, 0]
    listed[:, 3, 0] = row[3, 0]
    options: dict[str, Any] = dict(last_logits=1) if name == "sink query" else {}
    check(attend(case, mode=mode, page_list=jnp.asarray(listed), **options), case, page_list=listed, **options)


LOGITS: dict[str, tuple[dict[str, Any], int]] = {
    "decode": (dict(lengths=[70, 3, 0]), 2),
    "turned ring": (dict(lengths=[150, 9, 3], window=20, ring=4, sinks=11, has_sink_query=True, groups=2), 1),
    "mixed with decode": (dict(lengths=[70, 40, 0, 9], query_lengths=[1, 40, 0, 2], heads=6, options=LEARNED_6), 3),
    "turned rings": (dict(lengths=[150, 9, 3], query_lengths=[12, 9, 1], window=9, ring=6), 4),
}


@pytest.mark.parametrize("name, mode", in_both_modes(LOGITS, {"turned ring": "on_wait"}))
def test_logits_of_slots(name, mode):
    changes, count = LOGITS[name]
    case = Paged(**PLAIN | FOUR_HEADS | changes)
    check(attend(case, mode=mode, last_logits=count), case, last_logits=count)


@pytest.mark.parametrize("learned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nothing_to_see_gives_zeros(learned):
    case = Paged(lengths=[70, 3], head_dim=DIM, options=LEARNED if learned else {})
    hidden = dataclasses.replace(case.arguments[5], start_positions=ids([1000, 1000]))
    attention = attend(case, arguments=(*case.arguments[:5], hidden))
    assert not attention.out.any()
    assert (attention.lse == -np.inf).all()


@pytest.mark.parametrize("longest", [1, 2])
def test_a_step_without_queries_gives_zeros(longest):
    case = Paged(lengths=[70, 3], query_lengths=[0, 0], head_dim=DIM)
    queries = case.arguments[5]
    case.counts = [longest]  # a step that could have had queries
    attention = attend(case, arguments=(*case.arguments[:5], queries))
    assert not attention.out.any()
    assert (attention.lse == -np.inf).all()


@pytest.mark.parametrize(
    "changes, options, reason",
    [
        (dict(head_dim=64), {}, "head_dim 64 is not one of 128, 256"),
        (dict(page_size=12), {}, "page_size 12 is not one of 8, 16, 32, 64, 128"),
        (dict(dtype=jnp.float16), {}, "queries of float16 are not bfloat16 or float32"),
        (dict(heads=17), {}, "17 query heads of a KV head are not 1 to 16"),
        (
            dict(lengths=[4, 3], query_lengths=[4, 3]),
            dict(last_logits=200),
            "200 queries of 2 heads are more than 256 rows",
        ),
    ],
)
def test_what_the_kernel_cannot_serve_is_refused(changes, options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        attend(Paged(**dict(lengths=[4]) | PLAIN | changes), shape=tpu.Shape(1, BLOCK, 1), **options)


def test_pages_of_another_dtype_are_refused():
    case = Paged(lengths=[4], head_dim=DIM)
    with pytest.raises(NotImplementedError, match="pages of float32 are not of the queries' bfloat16"):
        attend(case, arguments=(case.q, *(a.astype(jnp.float32) for a in case.arguments[1:3]), *case.arguments[3:]))


def test_rows_too_long_for_scalar_memory_are_refused():
    case = Paged(lengths=[4], head_dim=DIM)
    entries = tpu.MOST_ENTRIES + 1024
    rows = dataclasses.replace(case.arguments[4], page_table=jnp.zeros((3, 1, 1, entries), jnp.int32))
    with pytest.raises(NotImplementedError, match=f"rows of {entries} pages are more than {tpu.MOST_ENTRIES}"):
        attend(case, arguments=(*case.arguments[:4], rows, case.arguments[5]))


def test_steps_too_many_for_scalar_memory_are_refused():
    case, seqs = Paged(lengths=[4], head_dim=DIM), tpu.MOST_STEPS + 1
    queries = jax.tree.map(lambda of: jnp.zeros(seqs, of.dtype), case.arguments[5])
    rows = jax.tree.map(lambda of: jnp.zeros((3, 1, seqs, 1)[: of.ndim], of.dtype), case.arguments[4])
    with pytest.raises(NotImplementedError, match=f"{seqs} tiles and slices of heads are more than {tpu.MOST_STEPS}"):
        attend(case, arguments=(*case.arguments[:4], rows, queries))


@pytest.mark.parametrize("is_decode", [True, False])
def test_chosen_shapes_divide_pages_and_fit(is_decode):
    choices = itertools.product([1, 2, 6, 8, 32], [1, 3, 4, 16], tpu.PAGE_SIZES, tpu.HEAD_DIMS, [2, 4])
    for in_group, query_heads, size, dim, itemsize in choices:
        shape = tpu.shape_of(in_group, query_heads, size, dim, 2 * dim * itemsize, is_decode=is_decode)
        rows = -(-shape.tile_tokens * query_heads // 8) * 8
        assert in_group % shape.heads == 0 and shape.pages * size % 128 == 0
        block = 2 * shape.stages * shape.heads * shape.pages * size * dim * itemsize
        # Queries and outputs twice, the accumulator, and three columns that take 128 lanes, one of them twice.
        tile = shape.heads * rows * (dim * (4 * itemsize + 4) + 128 * 4 * 4)
        assert block + tile < 14 << 20
