"""Names of page formats, and pages quantised outside a cache."""

import dataclasses
import re
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import PREFILL, SIZE, SPEC, Twin

import kvjax
from kvjax.formats import best_page_size, canonical_format
from kvjax.kernels.formats import FORMATS

pytestmark = pytest.mark.usefixtures("as_a_user")
PAGES = np.random.default_rng(0).standard_normal((3, 2, 8, 6)).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_pages_come_back_within_the_format_s_error(name):
    stored = kvjax.quantize_pages(PAGES, name)
    form = FORMATS[name]
    assert stored.form == form and stored.codes.dtype == jnp.dtype(form.dtype)
    assert stored.codes.shape == (3, 2, 8, 6 // form.per_code) and len(stored.scales) == form.num_scales
    most = dict(float32=0, float16=1e-3, bfloat16=1e-2, int8=0.02, fp8_e4m3=0.06, fp8_e5m2=0.13).get(name, 0.15)
    back = kvjax.dequantize_pages(stored)
    assert back.dtype == jnp.float32 and np.abs(np.asarray(back) - PAGES).max() <= most * np.abs(PAGES).max()


@pytest.mark.parametrize("name", ["int8", "int4_hadamard", "fp8"])
def test_they_are_the_pages_of_a_cache_with_that_format(name):
    twin = Twin(dataclasses.replace(SPEC, format=name, num_pages=80))
    q, k, v = twin.draw_tokens(SIZE)
    twin.step([SIZE, 0, 0, 0], **PREFILL, qkv=(q, k, v))
    for layer in range(SPEC.num_layers):
        page = int(twin.cache.page_table[layer, 0, 0, 0])
        for of_cache, new in zip(twin.cache.stored, (k, v), strict=True):
            made = kvjax.quantize_pages(new[layer].swapaxes(0, 1)[None], name)
            np.testing.assert_array_equal(of_cache.codes[page], made.codes[0])
            for got, wanted in zip(of_cache.scales, made.scales, strict=True):
                np.testing.assert_array_equal(got[page], wanted[0])


@pytest.mark.parametrize(
    "pages, name, words",
    [
        (PAGES[:0], "int4_hadamard", r"pages is of shape \[0, 2, 8, 6\]: there is nothing to store"),
        (PAGES, "int5", "format 'int5' is not a page format"),
        (PAGES, "int4", "format 'int4' stands for 'int4_per_channel' of keys and 'int4_hadamard' of values: name one"),
        (PAGES[..., :5], "int8", "head_dim 5 is odd"),
        (PAGES[0], "int8", r"pages is float32 of shape \[2, 8, 6\]: give floats of shape"),
        (PAGES.astype(int), "int8", "pages is int64 of shape"),
    ],
    ids=str,
)
def test_what_is_no_page_or_no_format_is_refused(pages, name, words):
    with pytest.raises(kvjax.InputError, match=words):
        kvjax.quantize_pages(pages, name)


@pytest.mark.parametrize("alias, name", [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"),
                                         ("fp32", "float32"), ("float", "float32"), ("fp8", "fp8_e4m3"),
                                         ("int8_per_token_head", "int8"), ("fp8_per_token_head", "fp8_e4m3"),
                                         ("int4_per_token_head", "int4_hadamard")])  # fmt: skip
def test_aliases_name_formats(alias, name):
    assert canonical_format(alias) == name
    assert dataclasses.replace(SPEC, format=alias) == dataclasses.replace(SPEC, format=name)


def test_large_pages_suit_keys_per_channel():
    assert [best_page_size(name) for name in ("int4", "int4_hadamard", "bf16")] == [64, 16, 16]


def test_what_is_not_stored_is_refused():
    stored = kvjax.quantize_pages(PAGES, "int8")
    with pytest.raises(kvjax.InputError, match="stored is a ndarray: give what quantize_pages returned"):
        kvjax.dequantize_pages(cast(Any, PAGES))
    for scales, shapes in (((), "[]"), ((stored.scales[0][:1],), "[[1, 2, 8]]")):
        with pytest.raises(kvjax.InputError, match=re.escape(f"stored has scales of shapes {shapes}: int8")):
            kvjax.dequantize_pages(dataclasses.replace(stored, scales=scales))


@pytest.mark.parametrize("name", ["int4_per_channel", "int4_per_token"])
@pytest.mark.parametrize("offset", [0, 300, -1000, 3000])
def test_an_offset_costs_what_its_own_rounding_does(name, offset):
    pages = np.random.default_rng(1).standard_normal((1, 1, 64, 64)).astype(np.float32) + offset
    stored = kvjax.quantize_pages(pages, name)
    # Minima are rounded down in float16, so that no value lies below; the span grows by what that is.
    half_step = (np.ptp(pages, axis=2 if "channel" in name else 3).max() + abs(offset) * 2**-10) / 30
    assert np.abs(np.asarray(kvjax.dequantize_pages(stored)) - pages).max() <= half_step * (1 + 2**-7)
