"""What a CacheSpec accepts, refuses and derives."""

import dataclasses
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.kernels.formats import FORMATS
from kvjax.spec import CacheSpec, bucket, pages_for

pytestmark = pytest.mark.usefixtures("as_a_user")
GOOD: dict[str, Any] = dict(
    num_layers=3, num_kv_heads=2, head_dim=8, num_pages=20, max_seqs=2, pages_per_seq=8, max_query_length=16,
    page_size=8,
)  # fmt: skip


def spec(**changes) -> CacheSpec:
    return CacheSpec(**(GOOD | changes))


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "max_seqs", "pages_per_seq"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_below_one_are_refused(name, value):
    with pytest.raises(InputError, match=f"^{name} is {value}: it must be a whole number from 1 to 2147483647$"):
        spec(**{name: value})


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(max_query_length=0), "max_query_length is 0: it must be a whole number from 1"),
        (dict(rollback=-1), "rollback is -1: it must be a whole number from 0"),
        (dict(page_size=0), "page_size is 0: it must be a whole number from 8"),
        (dict(page_size=-8), "page_size is -8: it must be a whole number from 8"),
        (dict(page_size=7), "page_size is 7: it must be a whole number from 8"),
        (dict(page_size=12), "page_size 12 is not a multiple of 8.*use 8, 16"),
        (dict(head_dim=7), "head_dim 7 is odd"),
        (dict(groups=3), r"groups 3 is neither 1 nor num_kv_heads \(2\)"),
        (dict(groups=0), "groups is 0: it must be a whole number from 1"),
        (dict(num_pages=3), "num_pages 3 cannot hold one sequence.*use at least 4"),
        (dict(num_pages=6, groups=2), "num_pages 6 cannot hold one sequence.*use at least 7"),
        (dict(num_pages=-5), "num_pages is -5: it must be a whole number from 1"),
        (dict(windows=(4, None)), "windows names 2 layers, the model has 3"),
        (dict(windows=()), "windows names 0 layers"),
        (dict(windows=(None, 0, None)), r"windows\[1\] is 0: it must be a whole number from 1"),
        (dict(windows=(None, None, -2)), r"windows\[2\] is -2"),
        (dict(windows=(None, 50, None)), "pages_per_seq 8 is too small for layer 1: window 50.*need 10"),
        (dict(windows=(None, 32, None), rollback=9), "pages_per_seq 8 is too small.*rollback 9 need 9"),
        (dict(format="int5"), "format 'int5' is not a page format: choose one of bfloat16, float16, float32, fp8_e4m3"),
        (
            dict(value_format="int4_per_channel"),
            "value_format 'int4_per_channel' is not a page format: choose one of b",
        ),
        (dict(key_format="int5"), "key_format 'int5' is not a page format: .*int4_per_channel, int4"),
        (dict(format=""), "format '' is not a page format"),
        (dict(format=[]), r"format \[\] is not a page format"),
        (dict(format=None), "format None is not a page format"),
        (dict(format=jnp.float32), "format .*float32.* is not a page format"),
        (dict(windows=5), "windows is 5: give a window or None for each of the 3 layers"),
        (dict(windows=np.array(5)), r"windows is array\(5\): give a window or None"),
        (dict(windows="888"), "windows is '888': give a window or None"),
        (dict(windows=[2.5, 8, 8]), r"windows\[0\] is 2.5: it must be a whole number"),
        (dict(windows=[None, True, 8]), r"windows\[1\] is True: it must be a whole number"),
        (dict(windows=["8"] * 3), r"windows\[0\] is '8': it must be a whole number"),
        (dict(windows={4, 5, 6}), r"windows is {4, 5, 6}: give a window or None for each"),
        (dict(scrub_on_free="no"), "scrub_on_free is 'no': it must be True or False"),
        (dict(debug=1), "debug is 1: it must be True or False"),
    ],
)
def test_mistakes_are_named_with_what_is_allowed(changes, message):
    with pytest.raises(InputError, match=message):
        spec(**changes)


@pytest.mark.parametrize("name", [*GOOD, "rollback", "groups"])
@pytest.mark.parametrize("value", [16.0, 2.5, "16", None, True, [16], float("nan"), 2**31], ids=repr)
def test_sizes_are_integers(name, value):
    with pytest.raises(InputError, match=rf"^{name} is {re.escape(repr(value))}: it must be a whole number from "):
        spec(**{name: value})


def test_numpy_integers_become_ints():
    of_numpy = spec(**{name: np.int64(value) for name, value in GOOD.items()}, windows=np.array([8, 9, 10], np.int16))
    assert of_numpy == spec(windows=(8, 9, 10)) and hash(of_numpy) == hash(spec(windows=(8, 9, 10)))
    assert (
        {type(getattr(of_numpy, name)) for name in GOOD} == {type(window) for window in of_numpy.layer_windows} == {int}
    )


def test_least_sizes_are_accepted():
    assert spec(num_pages=4).num_pages == 4
    assert spec(num_pages=7, groups=2).heads_per_group == 1
    assert spec(windows=(None, 40, None)).rings[1] == 8


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_gives_the_dtype_of_the_pages(name):
    if FORMATS[name].is_per_channel:
        with pytest.raises(InputError, match=f"format '{name}' is not a page format"):
            spec(format=name)
        return
    made = spec(format=name)
    assert made.key_form == made.value_form == FORMATS[name]
    assert made.query_dtype == ("bfloat16" if FORMATS[name].is_quantized else name)


def test_keys_and_values_may_have_formats_of_their_own():
    pair = spec(format="int4")
    assert (pair.format, pair.key_form.name, pair.value_form.name) == ("int4", "int4_per_channel", "int4_hadamard")
    mixed = spec(format="fp8", key_format="bf16", value_format="int4")
    assert (mixed.key_form.name, mixed.value_form.name) == ("bfloat16", "int4_hadamard")
    assert mixed.is_quantized and mixed.query_dtype == "bfloat16"
    assert dataclasses.replace(spec(), format="int8").value_form == FORMATS["int8"]


def test_a_spec_is_a_key():
    listed, named = spec(windows=[None, 4, None]), spec(windows=(None, 4, None))
    assert listed == named and hash(listed) == hash(named)
    assert len({listed, named, spec(), spec(debug=True)}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        named.page_size = 16  # pyright: ignore[reportAttributeAccessIssue]


def test_no_windows_is_a_window_of_none_for_each_layer():
    assert spec().windows == (None, None, None)
    assert spec().rings == (8, 8, 8) and spec().window_rings == ()


def test_rings_hold_window_query_and_rollback_from_any_slot_on():
    # ceil((9 + 16 + 3) / 8) + 1 = 5 and ceil((1 + 16 + 3) / 8) + 1 = 4.
    small = spec(windows=(None, 9, 1), rollback=3)
    assert small.rings == (8, 5, 4) and small.window_rings == (5, 4)


def test_max_tokens_is_the_table_of_a_full_layer_or_none():
    assert spec().max_tokens == spec(windows=(9, None, 9)).max_tokens == 64
    assert spec(windows=(9, 9, 9)).max_tokens is None


def test_pages_for_rounds_up():
    assert [pages_for(tokens, 8) for tokens in (0, 1, 7, 8, 9, 16, 17)] == [0, 1, 1, 1, 2, 2, 3]


def test_buckets_are_few_and_close():
    sizes = {bucket(count) for count in range(1, 4097)}
    assert len(sizes) <= 4 * 12
    for count in range(1, 4097):
        assert count <= bucket(count) <= max(count * 1.25, count + 0.5)
        assert bucket(bucket(count)) == bucket(count)
    assert [bucket(count) for count in (1, 7, 8, 9, 17, 33, 1000)] == [1, 7, 8, 10, 20, 40, 1024]
