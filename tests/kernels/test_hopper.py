"""The Hopper kernel in the interpreter, races detected and memory poisoned, against the definition."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import ids
from helpers.hopper import PREFILL, SMALL, attend, check, forget_state
from helpers.paged import NO_WINDOW, Paged, with_rows

from kvjax.kernels.paged_attention import hopper, hopper_plan

SIZE = 8
EDGES = [0, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 150]


@pytest.fixture(autouse=True)
def fresh_interpreter():
    yield
    forget_state()


DECODES: dict[str, dict[str, Any]] = {
    "edges": dict(lengths=EDGES),
    "heads": dict(lengths=[70, 3], kv_heads=2, heads=12),
    "groups": dict(lengths=[70, 3], kv_heads=2, heads=2, groups=2),
    "mqa of 16": dict(lengths=[17, 66], heads=16),
    "options": dict(lengths=[70, 3], options=dict(soft_cap=2.5, sink_logits=np.array([0.5, -1], np.float32))),
    "far": dict(lengths=[70, 3], start=2_000_000_000),
    "fp16": dict(lengths=[70, 3], dtype=jnp.float16),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    f"page {size}, head_dim {dim}": dict(lengths=[size + 1, 70], page_size=size, head_dim=dim)
    for size, dim in itertools.product(hopper.PAGE_SIZES, hopper.HEAD_DIMS)
}
SLOW = [name for name in LAYOUTS if name not in ("page 128, head_dim 256", "page 16, head_dim 96")]


@pytest.mark.parametrize(
    "name", [*DECODES, *(pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS)]
)
def test_decode_equals_the_oracle(name):
    case = Paged(**(DECODES | LAYOUTS)[name])
    shape = dataclasses.replace(hopper.shape_of(case.head_dim, 44, is_decode=True), workers=3)
    check(attend(case, shape=shape), case)


@pytest.mark.parametrize("window", [pytest.param(1, marks=pytest.mark.slow), SIZE - 1, SIZE, SIZE + 1, 65])
def test_windows_around_page_edges(window):
    case = Paged(lengths=[5, 70, 130], window=window)
    check(attend(case), case)


def test_pages_outside_the_window_are_not_read():
    # Their ids lead to poison: every page before the window's first is of NaN and seemingly in the window.
    case = Paged(lengths=[130], window=SIZE)
    q, keys, values, positions, rows, queries = case.arguments
    trap = int(rows.page_table[1, 0, 0, 0])
    rows = with_rows(rows, page_table=rows.page_table[1].at[0, 0, : (130 - SIZE) // SIZE - 1].set(trap))
    values = values.at[trap].set(jnp.nan)
    out = attend(case, arguments=(q, keys, values, positions.at[trap].set(129), rows, queries))
    check(out, case)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_workers_gives_the_same(workers):
    case = Paged(lengths=[200, 1, 70, 0, 64])
    check(attend(case, shape=dataclasses.replace(SMALL, workers=workers)), case)


PREFILLS: dict[str, dict[str, Any]] = {
    "chunks over a prefix": dict(lengths=[70, 100, 9], query_lengths=[20, 100, 9], heads=4),
    "mixed with decode": dict(lengths=[70, 40, 0, 9], query_lengths=[1, 40, 0, 9], heads=4),
    "two groups": dict(lengths=[33, 12], query_lengths=[33, 5], kv_heads=2, heads=6, groups=2),
    "options": dict(
        lengths=[70], query_lengths=[40], options=dict(soft_cap=2.5, sink_logits=np.array([0.5, -1], np.float32))
    ),
}


@pytest.mark.parametrize("name", PREFILLS)
@pytest.mark.parametrize("window", [NO_WINDOW, pytest.param(9, marks=pytest.mark.slow)])
def test_prefill_equals_the_oracle(name, window):
    case = Paged(**PREFILLS[name], window=window)
    check(attend(case, shape=PREFILL), case)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", hopper.HEAD_DIMS)
def test_prefill_of_all_head_dims(head_dim):
    case = Paged([100, 9], [70, 9], page_size=16, head_dim=head_dim, heads=4)
    shape = dataclasses.replace(hopper.shape_of(head_dim, 44, is_decode=False), workers=3)
    check(attend(case, shape=shape), case)


SINKS: dict[str, Any] = dict(lengths=[150, 30, 3], window=20, ring=4)
EXTRAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "logits": (dict(lengths=[70, 3, 150, 0], kv_heads=2, heads=4, groups=2), dict(last_logits=1)),
    "logits of a window and its ring": (dict(lengths=[150, 30], window=20, ring=4), dict(last_logits=2)),
    "logits of the last queries": (
        dict(lengths=[70, 40, 0, 9], query_lengths=[1, 40, 0, 9], heads=4), dict(last_logits=3)
    ),
    "sinks": (SINKS | dict(sinks=5), dict(last_logits=1)),
    "sinks with a query of their own": (
        SINKS | dict(sinks=11, has_sink_query=True, heads=4, options=dict(sink_logits=np.arange(4.0))),
        dict(last_logits=1),
    ),
    "sinks of a prefill": (
        dict(lengths=[100, 30], query_lengths=[40, 30], window=20, sinks=5, has_sink_query=True), dict(last_logits=2)
    ),
    "sinks without a window": (dict(lengths=[70, 9], sinks=3, has_sink_query=True, groups=2, kv_heads=2), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", EXTRAS)
def test_logits_and_sinks(name):
    changes, options = EXTRAS[name]
    case = Paged(**changes)
    check(attend(case, shape=SMALL if case.longest == 1 else PREFILL, **options), case, **options)


@pytest.mark.parametrize("groups", [1, 2])
def test_only_listed_pages_are_read(groups):
    case = Paged(lengths=[150, 30, 0], kv_heads=2, heads=4, groups=groups)
    table = np.asarray(case.arguments[4].page_table[1])
    # The newest page, which is not full, among others, and gaps; each KV head has a list of its own.
    listed = np.zeros((2, 3, 11), np.int32)
    for head in range(2):
        of_head = table[head % groups]
        listed[head, 0, [0, 3, 4, 9]] = of_head[0, [18, 2 + head, 7, 11]]
        listed[head, 1, 1 : 2 + head] = of_head[1, [3, 0]][: 1 + head]
    options: dict[str, Any] = dict(page_list=ids(listed), last_logits=1)
    check(attend(case, **options), case, **options)


def test_a_plan_made_before_the_layers_serves_every_layer():
    case = Paged(lengths=[150, 30], window=20)
    rows, queries = case.arguments[4:]
    plan = hopper_plan.make_plan(
        dataclasses.replace(rows, layer=jnp.int32(0)), queries, num_tokens=case.q.shape[0], page_size=SIZE, shape=SMALL,
        tile_tokens=1,
    )  # fmt: skip
    stale = dataclasses.replace(rows, end_slot=rows.end_slot * 0)  # not looked at: the plan is
    check(attend(case, plan=plan, arguments=(*case.arguments[:4], stale, queries)), case)


def test_a_plan_for_other_tiles_is_not_used():
    case = Paged(lengths=[150, 30])
    plan = hopper.plan(
        *case.arguments[4:], num_tokens=case.q.shape[0], heads=2, head_dim=64, heads_per_group=1, page_size=SIZE,
        max_query_length=8,
    )  # fmt: skip
    check(attend(case, plan=plan), case)


def test_a_page_list_is_refused_for_longer_queries_and_with_sinks():
    listed = ids(np.ones((1, 1, 2)))
    with pytest.raises(ValueError, match="page_list goes with max_query_length 1, not 128"):
        attend(Paged([9], [9]), page_list=listed)
    with pytest.raises(NotImplementedError, match="a page list and sinks"):
        attend(Paged([9], sinks=2), page_list=listed)


def test_nothing_to_see_gives_zeros():
    case = Paged(lengths=[70, 3])
    hidden = dataclasses.replace(case.arguments[5], start_positions=ids([1000, 1000]))
    attention = attend(case, arguments=(*case.arguments[:5], hidden))
    assert not attention.out.any()
    assert (attention.lse == -np.inf).all()


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(head_dim=80), "head_dim 80 is not one of 64, 96, 128, 256"),
        (dict(page_size=12), "page_size 12 is not one of 8, 16, 32, 64, 128"),
        (dict(dtype=jnp.float32), "queries of float32"),
        (dict(heads=17), "17 query heads of a KV head"),
    ],
)
def test_what_the_kernel_cannot_serve_is_refused(changes, reason):
    with pytest.raises(NotImplementedError, match=reason):
        attend(Paged(lengths=[4], **changes))


def test_pages_of_another_dtype_are_refused():
    case = Paged(lengths=[4])
    with pytest.raises(NotImplementedError, match="pages of float16 are not of the queries' bfloat16"):
        attend(case, arguments=(case.q, *(a.astype(jnp.float16) for a in case.arguments[1:3]), *case.arguments[3:]))
