"""The TPU kernel over quantised pages, in the interpreter against the definition; what is unused is poisoned."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paged import Paged
from helpers.tpu import attend, check, quantized
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.formats import FORMATS
from kvjax.kernels.paged_attention import tpu, tpu_codes

BYTES = ("fp8_e4m3", "fp8_e5m2", "int8")
NIBBLES = ("int4_per_token", "int4_hadamard")
DECODE: dict[str, Any] = dict(lengths=[150, 0, 1, 129])
PREFILL: dict[str, Any] = dict(lengths=[150, 70, 1], query_lengths=[1, 40, 1], heads=6)
SINKS: dict[str, Any] = dict(
    lengths=[300, 64, 3], window=70, ring=3, sinks=11, has_sink_query=True, groups=2, kv_heads=4, heads=8
)
LEARNED: dict[str, Any] = dict(soft_cap=2.5, sink_logits=np.linspace(-1, 1, 4).astype(np.float32))


@pytest.fixture(autouse=True)
def fresh_interpreter():
    """After an exception the interpreter keeps its state."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


FAST = [
    (("int8", "fp8_e4m3"), PREFILL, "eager"),
    (("int4_hadamard", "int4_per_token"), SINKS, "on_wait"),
    (("int4_per_channel", "int4_hadamard"), DECODE, "eager"),
]
PAIRS = [
    *((form, form) for form in (*BYTES, *NIBBLES)), ("int4_per_channel", "int8"), ("fp8_e5m2", "int4_hadamard"),
    ("bfloat16", "int8"), ("int8", "bfloat16"), ("int4_per_channel", "bfloat16"),
]  # fmt: skip
# Every pair with every case, in one mode or the other.
SLOW = [
    (*of, ("eager", "on_wait")[number // 2 % 2]) for number, of in enumerate(itertools.product(PAIRS, (PREFILL, SINKS)))
]


@pytest.mark.parametrize(
    "forms, changes, mode", FAST + [pytest.param(*of, marks=pytest.mark.slow) for of in SLOW], ids=str
)
def test_quantised_pages_equal_the_reference(forms, changes, mode):
    case = quantized(forms, **changes)
    check(attend(case, mode=mode), case)


@pytest.mark.slow
@pytest.mark.parametrize("forms", [("int8", "fp8_e4m3"), ("int4_per_channel", "int4_hadamard")], ids=str)
@pytest.mark.parametrize("changes", [dict(dtype=jnp.float32), dict(options=LEARNED)], ids=str)
def test_float32_queries_and_learned_sinks(forms, changes):
    case = quantized(forms, **DECODE, **changes)
    check(attend(case), case)


@pytest.mark.parametrize(
    "forms", [("int8", "fp8_e4m3"), pytest.param(("int4_per_channel", "int4_hadamard"), marks=pytest.mark.slow)]
)
def test_lists_of_quantised_pages(forms):
    case = quantized(forms, **DECODE)
    listed = case.some_pages(2)
    check(attend(case, page_list=jnp.asarray(listed), last_logits=1), case, page_list=listed, last_logits=1)


@pytest.mark.slow
@pytest.mark.parametrize("form, changes", [("fp8_e5m2", DECODE), ("int4_per_token", PREFILL)], ids=str)
def test_logits_over_quantised_keys(form, changes):
    case = quantized((form, form), **changes)
    check(attend(case, last_logits=2), case, last_logits=2)


@pytest.mark.slow
@pytest.mark.parametrize("page_size, heads", [(32, 1), (64, 2), (128, 4)])
def test_any_slice_of_the_heads_finds_its_scales(page_size, heads):
    case = quantized(("int8", "fp8_e4m3"), page_size=page_size, kv_heads=4, heads=8, **DECODE)
    check(attend(case, shape=tpu.Shape(heads, 128 // page_size, 1)), case)


def test_every_float16_is_read_from_its_bits():
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = bits.view(np.float16).astype(np.float32)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(tpu_codes.float32_of(jnp.asarray(bits))[finite], expected[finite])


@pytest.mark.parametrize(
    "forms, changes, reason",
    [
        (("int8", "int8"), dict(page_size=16), "page_size 16 of int8 is less than 32"),
        (("int4_hadamard", "int8"), dict(page_size=32, head_dim=256), "page_size 32 of int4_hadamard is less than 64"),
        (("int8", "int4_hadamard"), dict(head_dim=128), "head_dim 128 of int4_hadamard takes 64 bytes, less than 128"),
        (("bfloat16", "fp8_e4m3"), dict(page_size=8), "page_size 8 of fp8_e4m3 is less than 32"),
    ],
)
def test_quantised_pages_that_cannot_be_copied_are_refused(forms, changes, reason):
    with pytest.raises(NotImplementedError, match=reason):
        attend(quantized(forms, lengths=[4], **changes))


def test_small_pages_of_one_head_are_refused():
    reason = "page_size 64 of fp8_e4m3 is less than 128 where a page has one head"
    with pytest.raises(NotImplementedError, match=reason):
        attend(quantized(("bfloat16", "fp8_e4m3"), lengths=[4], page_size=64, kv_heads=1, heads=2))


def test_values_per_channel_are_refused():
    case = quantized(("int8", "int8"), lengths=[4])
    per_channel = dataclasses.replace(case.arguments[2], form=FORMATS["int4_per_channel"])
    with pytest.raises(NotImplementedError, match="pages of int4_per_channel are not of the queries' bfloat16"):
        attend(case, arguments=(*case.arguments[:2], per_channel, *case.arguments[3:]))


def test_plain_pages_are_of_the_queries_dtype():
    case = Paged(lengths=[4], head_dim=128, page_size=32, forms=("float32", "int8"))
    with pytest.raises(NotImplementedError, match="pages of float32 are not of the queries' bfloat16"):
        attend(case)
