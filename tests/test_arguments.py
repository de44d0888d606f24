"""Mistakes of the caller's: what is known when a program is traced is refused, what is not is reported."""

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import DECODE, HEADS, PREFILL, SPEC, advance, assert_same, ids, leaves, table, twin_of

import kvjax
from kvjax.cache import Cache, Status, init_cache
from kvjax.errors import InputError
from kvjax.invariants import check

pytestmark = pytest.mark.usefixtures("as_a_user")
PAGES, SEQS, END = SPEC.num_pages, SPEC.max_seqs, 2**31 - 1


@pytest.fixture(scope="module")
def cache() -> Cache:
    """20, 16, 3 and 0 tokens; pages 1 and 2 hold the first two of the first sequence in layer 0."""
    return twin_of([20, 0, 3, 0], [0, 16, 0, 0]).cache


def refused(message, function, *arguments, **options):
    """The call raises one line that says `message`, compiled and not."""
    for call in (function, lambda *given: jax.eval_shape(lambda: function(*given, **options))):
        with pytest.raises(InputError, match=message) as error:
            call(*arguments, **(options if call is function else {}))
        assert "\n" not in str(error.value)


# Page ids


@pytest.mark.parametrize("bad", [PAGES, PAGES + 1, END, -1, -PAGES + 1, -(2**31), 2**40, 2**32 + 1], ids=str)
@pytest.mark.parametrize("operation", [kvjax.drop, kvjax.retain], ids=lambda operation: operation.__name__)
def test_page_ids_out_of_the_pool_change_nothing_and_are_reported(cache, operation, bad):
    for given in ([bad], [1, bad]):
        after = operation(cache, given)
        assert int(after.status) == Status.DOUBLE_FREE
        assert_same(after, leaves(cache))


@pytest.mark.parametrize("bad", [PAGES, END, -1, -PAGES + 1], ids=str)
def test_pages_out_of_the_pool_are_not_shared(cache, bad):
    page_ids = table(cache)[:, :, 0, :2].copy()
    for place in (0, 1):
        wrong = page_ids.copy()
        wrong[0, 0, place] = bad
        after, ok = kvjax.share(cache, 3, wrong, 0)
        assert not bool(ok)
        assert_same(after, leaves(cache), but=())


# Sequence numbers


@pytest.mark.parametrize("bad", [SEQS, END, -1, -SEQS, 2**32], ids=str)
def test_sequences_out_of_range_change_nothing_and_are_reported(cache, bad):
    before = leaves(cache)
    for given in ([bad], [0, bad], [bad, 3]):
        after = kvjax.release(cache, given)
        assert int(after.status) == Status.BAD_SEQUENCE
        assert_same(after, before)
        after = kvjax.truncate(cache, given, [1] * len(given))
        assert int(after.status) == Status.TRUNCATE_REFUSED
        assert_same(after, before)
    calls = [kvjax.fork(cache, [bad], [3]), kvjax.fork(cache, [0], [bad]), kvjax.fork(cache, [0, 1], [3, bad])]
    for after, ok in (*calls, kvjax.share(cache, bad, table(cache)[:, :, 0, :1], 0)):
        assert not bool(ok)
        assert_same(after, before, but=())


# Shapes and kinds


WRONG = [[1], 1, [[1, 0, 0, 0]], [1.0, 0, 0, 0], [True, False, False, False], [1, None, 0, 0], [[1], [0, 0]], "1000",
         None, [], jnp.zeros(3, jnp.int32), jnp.zeros((4, 1), jnp.int32), np.zeros(4, np.float32),
         [2**70] * 4]  # fmt: skip


@pytest.mark.parametrize("lengths", WRONG, ids=str)
def test_query_lengths_are_integers_one_for_each_sequence(cache, lengths):
    refused(r"^query_lengths .*give integers of shape \[4\]", kvjax.begin_step, cache, lengths, **DECODE)


@pytest.mark.parametrize(
    "kind", [list, tuple, np.int64, np.uint8, jnp.int16, jnp.uint32], ids=lambda kind: kind.__name__
)
def test_query_lengths_may_be_any_integers(cache, kind):
    lengths = kind([1, 0, 2, 0]) if kind in (list, tuple) else np.array([1, 0, 2, 0], np.dtype(kind))
    lengths = jnp.asarray(lengths) if kind in (jnp.int16, jnp.uint32) else lengths
    _, step = kvjax.begin_step(cache, lengths, **PREFILL)
    assert bool(step.ok) and step.lengths.tolist() == [1, 0, 2, 0] and step.lengths.dtype == jnp.int32


@pytest.mark.parametrize("huge", [2**32 + 1, 2**40, -(2**40)], ids=str)
def test_lengths_beyond_32_bits_do_not_wrap(cache, huge):
    after, step = kvjax.begin_step(cache, [huge, 0, 0, 0], **DECODE)
    assert not bool(step.ok) and int(after.status) == Status.BAD_LENGTHS
    assert_same(after, leaves(cache))


@pytest.mark.parametrize("index", [[True], True, [1, 0, 0, 0], jnp.zeros(3, bool)], ids=str)
def test_index_is_a_bool_for_each_sequence(cache, index):
    refused(r"^index .*give bools of shape \[4\]", kvjax.begin_step, cache, ids([1, 0, 0, 0]), **DECODE, index=index)
    assert kvjax.begin_step(cache, [1, 0, 0, 0], **DECODE, index=[True] * 4)[1].index.tolist() == [True] * 4


@pytest.mark.parametrize("name", ["num_tokens", "max_query_length"])
@pytest.mark.parametrize("value", [1.0, "1", None, True], ids=str)
def test_static_sizes_of_a_step_are_integers(cache, name, value):
    options = DECODE | {name: value}
    refused(f"^{name} is {value!r}: it must be a whole number", kvjax.begin_step, cache, ids([1, 0, 0, 0]), **options)


def test_sizes_that_are_traced_are_refused(cache):
    def step(longest):
        kvjax.begin_step(cache, ids([1, 0, 0, 0]), num_tokens=4, max_query_length=longest)

    with pytest.raises(InputError, match="max_query_length is .*: it must be a whole number"):
        jax.eval_shape(step, 1)


SHAPES = {
    "truncate to one length": ("lengths", r"\[2\]", kvjax.truncate, [0, 1], [3]),
    "truncate to two lengths": ("lengths", r"\[1\]", kvjax.truncate, [0], [3, 3]),
    "truncate to a scalar": ("lengths", r"\[2\]", kvjax.truncate, [0, 1], 3),
    "truncate to half a token": ("lengths", r"\[1\]", kvjax.truncate, [0], [0.5]),
    "truncate a scalar": ("sequences", r"\[n\]", kvjax.truncate, 0, 3),
    "fork one into two": ("target", r"\[1\]", kvjax.fork, [0], [1, 3]),
    "fork two into one": ("target", r"\[2\]", kvjax.fork, [0, 1], [3]),
    "fork scalars": ("source", r"\[n\]", kvjax.fork, 0, 3),
    "fork a scalar": ("target", r"\[1\]", kvjax.fork, [0], 3),
    "fork a table": ("source", r"\[n\]", kvjax.fork, np.zeros((1, 1), np.int32), [3]),
    "release a scalar": ("sequences", r"\[n\]", kvjax.release, jnp.int32(1)),
    "release a mask": ("sequences", r"\[n\]", kvjax.release, [True, False, False, False]),
    "drop a scalar": ("ids", r"\[n\]", kvjax.drop, 1),
    "drop floats": ("ids", r"\[n\]", kvjax.drop, jnp.ones(2)),
    "retain a table": ("ids", r"\[n\]", kvjax.retain, np.ones((2, 1, 1), np.int32)),
    "share with two": ("sequence", r"\[\]", kvjax.share, [2, 3], np.ones((2, 1, 1), np.int32), 0),
    "share a list": ("page_ids", r"\[2, 1, n\]", kvjax.share, 3, [1, 2], 0),
    "share one layer": ("page_ids", r"\[2, 1, n\]", kvjax.share, 3, [[[1]]], 0),
    "share from half a token": ("start_position", r"\[\]", kvjax.share, 3, np.ones((2, 1, 1), np.int32), 0.5),
}


@pytest.mark.parametrize("case", SHAPES)
def test_arrays_of_the_wrong_shape_or_kind_are_refused(cache, case):
    name, shape, operation, *given = SHAPES[case]
    refused(rf"^{name} .*: give integers of shape {shape}", operation, cache, *given)


@pytest.mark.parametrize("none", [[], np.zeros(0, np.int64), jnp.zeros(0, jnp.int32)], ids=repr)
def test_calls_that_name_nothing_do_nothing(cache, none):
    after, ok = kvjax.fork(cache, none, none)
    assert bool(ok)
    results = [after, kvjax.release(cache, none), kvjax.truncate(cache, none, none)]
    for after in (*results, kvjax.drop(cache, none), kvjax.retain(cache, none)):
        assert_same(after, leaves(cache), but=())


def test_no_shared_pages_leave_an_empty_sequence_at_its_start(cache):
    nothing = np.zeros((2, 1, 0), np.int32)
    after, ok = kvjax.share(cache, 3, nothing, 0)
    assert bool(ok)
    assert_same(after, leaves(cache), but=())
    after, ok = kvjax.share(cache, 3, nothing, 600)
    assert bool(ok) and after.lengths.tolist() == cache.lengths.tolist()
    after, step, _ = advance(after, [0, 0, 0, 1])
    assert int(step.position[0]) == 600
    check(after, held={})
    for start in (-1, END, 2**40):
        assert not bool(kvjax.share(cache, 3, nothing, start)[1])


def test_lists_do_what_arrays_do(cache):
    of_lists, ok = kvjax.fork(cache, [0, 1], [3, 2])
    of_arrays, _ = kvjax.fork(cache, ids([0, 1]), ids([3, 2]))
    assert bool(ok)
    assert_same(of_lists, leaves(of_arrays), but=())
    for operation, *given in ((kvjax.release, [1, 3]), (kvjax.truncate, [0, 1], [9, 3]), (kvjax.retain, [1, 2, 1])):
        of_arrays = operation(of_arrays, *map(ids, given))
        of_lists = operation(of_lists, *given)
        assert int(of_lists.status) == 0
        assert_same(of_lists, leaves(of_arrays), but=())


# attend


def attend(cache, layer: Any = 0, *, tokens=None, **options):
    draw = np.random.default_rng(0).standard_normal((4, HEADS, SPEC.head_dim)).astype(np.float32)
    given = dict(q=draw, k=draw[:, :2], v=draw[:, 2:]) | (tokens or {})
    cache, step = kvjax.begin_step(cache, [1, 1, 0, 0], **DECODE)
    return kvjax.attend(cache, step, layer, **given, rotary=None, **options)[0]


@pytest.mark.parametrize("layer", [2, -1, 2**40, np.int64(5), jnp.int32(2)], ids=str)
def test_layers_that_the_cache_does_not_have_are_refused(cache, layer):
    refused("^layer is .*: it must be a whole number from 0 to 1", attend, cache, layer)


@pytest.mark.parametrize("layer", [0.0, "0", None, True, [0]], ids=str)
def test_layers_are_integers(cache, layer):
    refused("^layer is .*: it must be a whole number", attend, cache, layer)


def test_traced_layers_are_integers(cache):
    with pytest.raises(InputError, match=r"^layer .*give integers of shape \[\]"):
        jax.eval_shape(lambda layer: attend(cache, layer), 0.0)


def test_numpy_arrays_are_attended(cache):
    sinks = np.linspace(-1, 1, HEADS).astype(np.float32)
    with_numpy = attend(cache, np.int64(1), sink_logits=sinks, scale=np.float32(0.5), soft_cap=np.float64(3))
    draw = jnp.asarray(np.random.default_rng(0).standard_normal((4, HEADS, SPEC.head_dim)).astype(np.float32))
    tokens = dict(q=draw, k=draw[:, :2], v=draw[:, 2:])
    with_jax = attend(cache, 1, tokens=tokens, sink_logits=jnp.asarray(sinks), scale=0.5, soft_cap=3.0)
    np.testing.assert_array_equal(np.asarray(with_numpy), np.asarray(with_jax))


@pytest.mark.parametrize("options, message", [
    (dict(sink_logits=jnp.zeros(3)), r"sink_logits .* give floats of shape \[4\]"),
    (dict(sink_logits=jnp.zeros((4, 1))), r"sink_logits .* give floats of shape \[4\]"),
    (dict(sink_logits=[1, 2, 3, 4]), r"sink_logits is int64 .* give floats of shape \[4\]"),
    (dict(sink_logits=0.5), r"sink_logits .* give floats of shape \[4\]"),
    (dict(soft_cap=0.0), "soft_cap is 0.0: give a finite number above 0"),
    (dict(soft_cap=-2), "soft_cap is -2: give a finite number above 0"),
    (dict(soft_cap=float("inf")), "soft_cap is inf: give a finite number above 0"),
    (dict(soft_cap="big"), "soft_cap is 'big': give a finite number above 0"),
    (dict(scale=float("nan")), "scale is nan: give a finite number"),
    (dict(scale=float("-inf")), "scale is -inf: give a finite number"),
    (dict(scale=[1.0, 2.0]), r"scale is \[1.0, 2.0\]: give a finite number"),
    (dict(scale=10**400), "scale is 1000.*: give a finite number"),
    (dict(tokens=dict(q=np.zeros((4, 4, 8), np.int32))), r"q is int32 .* give floats of shape \[4, heads, 8\]"),
    (dict(tokens=dict(q=np.zeros((4, 0, 8), np.float32))), "q has 0 heads: give a multiple of the cache's 2 KV heads"),
    (dict(tokens=dict(k=np.zeros((4, 2, 8), np.int8))), r"k is int8 .* give floats of shape \[4, 2, 8\]"),
    (dict(tokens=dict(v=np.zeros((1, 2, 8), np.float32))), r"v is float32 .* give floats of shape \[4, 2, 8\]"),
    (dict(tokens=dict(v=None)), r"v .* give floats of shape \[4, 2, 8\]"),
], ids=str)  # fmt: skip
def test_what_cannot_be_attended_is_refused(cache, options, message):
    refused(f"^{message}", attend, cache, **options)


def test_a_traced_scale_is_refused(cache):
    with pytest.raises(InputError, match="scale is .*: give a finite number"):
        jax.eval_shape(lambda scale: attend(cache, scale=scale), 1.0)


# init_cache and check


@pytest.mark.parametrize("start", [[np.nan, 1, 2, 3], [0.5, 0, 0, 0], [0.0] * 4, 0, [[0] * 4], [0, 0], [True] * 4,
                                   [[0], [0, 0]], "0000", [0, 0, 0, 2**31 - 1], [2**32, 0, 0, 0], []],
                         ids=str)  # fmt: skip
def test_start_positions_are_positions(start):
    refused(
        "^start_positions .*must be 4 positions from 0 to 2147483646", lambda: init_cache(SPEC, start_positions=start)
    )


def test_start_positions_are_known():
    with pytest.raises(InputError, match="^start_positions .*must be 4 positions"):
        jax.eval_shape(lambda start: init_cache(SPEC, start_positions=start), ids([0] * 4))


@pytest.mark.parametrize("held", [{99: 1}, {PAGES: 1}, {-1: 1}, {0: 1}, {1: -1}, {1.5: 1}, {1: 0.5}, {"1": 1}], ids=str)
def test_references_are_held_of_pages_of_the_pool(cache, held):
    with pytest.raises(InputError, match=r"^(a page of held is .* 1 to 23|held\[1\] is .* 0 to 2147483647)$"):
        check(cache, held=held)


def test_numpy_numbers_are_held(cache):
    counts = Counter(np.array([1, 1, 2]))
    check(kvjax.retain(cache, [1, 1, 2]), held=dict(counts))


def test_a_refused_release_is_explained(cache):
    with pytest.raises(kvjax.CacheError, match="BAD_SEQUENCE: release named a sequence out of range"):
        check(kvjax.release(cache, [9]))
    check(dataclasses.replace(kvjax.clear_status(kvjax.release(cache, [9]))), held={})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_eight_bit_floats_are_no_queries_keys_or_values(name):
    cache = kvjax.init_cache(SPEC)
    cache, step = kvjax.begin_step(cache, [1, 1, 0, 0], **DECODE)
    given: dict[str, Any] = dict(q=jnp.ones((4, 4, 8)), k=jnp.ones((4, 2, 8)), v=jnp.ones((4, 2, 8)))
    given[name] = given[name].astype(jnp.float8_e4m3fn)
    with pytest.raises(kvjax.InputError, match=f"{name} has dtype float8_e4m3fn: give float32, bfloat16 or float16"):
        kvjax.attend(cache, step, 0, **given, rotary=None)
