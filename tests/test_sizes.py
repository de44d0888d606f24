"""Bytes and shapes are those of the arrays that init_cache builds."""

import dataclasses

import jax
import pytest

from kvjax.cache import init_cache
from kvjax.policies import H2O, Entropy, Quest, Streaming
from kvjax.sizes import cache_bytes, cache_shapes, most_pages, page_bytes, pool_bytes, sequence_bytes, token_bytes
from kvjax.spec import CacheSpec

BASE = CacheSpec(
    num_layers=2, num_kv_heads=2, head_dim=8, num_pages=20, max_seqs=3, pages_per_seq=6, max_query_length=16,
    page_size=8,
)  # fmt: skip
SPECS = {
    "bfloat16": BASE,
    "float32": dataclasses.replace(BASE, format="float32"),
    "groups": dataclasses.replace(BASE, groups=2, format="float16"),
    "windows": dataclasses.replace(BASE, windows=(None, 9)),
    "int8": dataclasses.replace(BASE, format="int8"),
    "int4": dataclasses.replace(BASE, format="int4_hadamard", groups=2),
    "int4 per channel": dataclasses.replace(BASE, format="int4", groups=2),
    "mixed": dataclasses.replace(BASE, key_format="float32", value_format="int8"),
    "scores of slots": dataclasses.replace(BASE, groups=2, policy=H2O(budget=20)),
    "figures of rows": dataclasses.replace(BASE, policy=Entropy(total_budget=80)),
    "bounds of pages": dataclasses.replace(BASE, format="int8", policy=Quest(top_pages=2)),
    "pinned pages": dataclasses.replace(BASE, policy=Streaming(window=9)),
    "large pages": dataclasses.replace(BASE, page_size=32, head_dim=6, num_pages=7),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_bytes_are_those_of_the_arrays(spec):
    cache = init_cache(spec)
    assert cache_bytes(spec) == cache.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    pool = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    assert pool_bytes(spec) == sum(leaf.nbytes for leaf in jax.tree.leaves(pool))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_shapes_are_those_of_the_arrays(spec):
    cache = init_cache(spec)
    parts = {field.name: getattr(cache, field.name) for field in dataclasses.fields(cache)}
    parts |= {field.name: getattr(cache.allocator, field.name) for field in dataclasses.fields(cache.allocator)}
    for name, shape in cache_shapes(spec).items():
        got, wanted = ([(of.shape, of.dtype) for of in jax.tree.leaves(part)] for part in (parts[name], shape))
        assert got == wanted, name
    assert len(jax.tree.leaves(cache_shapes(spec))) == len(jax.tree.leaves(cache))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_page_more_costs_page_bytes(spec):
    more = dataclasses.replace(spec, num_pages=spec.num_pages + 1)
    assert cache_bytes(more) - cache_bytes(spec) == page_bytes(spec)


def test_most_pages_of_a_sequence():
    # Ring of the window 9: ceil((9 + 16) / 8) + 1 = 5 pages.
    windows = SPECS["windows"]
    assert [most_pages(BASE, tokens) for tokens in (0, 1, 8, 9, 48)] == [0, 2, 2, 4, 12]
    assert [most_pages(windows, tokens) for tokens in (8, 40, 41, 48)] == [2, 10, 11, 11]
    assert most_pages(SPECS["groups"], 9) == 2 * most_pages(BASE, 9)


def test_bytes_of_tokens_and_of_a_sequence():
    # A page of 8 slots, 2 heads of 8 values: int8 codes and 2-byte scales of keys and values, positions, and 4 numbers.
    page = 2 * (8 * 2 * 8 + 8 * 2 * 2) + 8 * 4 + 4 * 4
    assert page_bytes(SPECS["int8"]) == page and token_bytes(SPECS["int8"]) == 2 * page / 8
    assert sequence_bytes(SPECS["int8"], 9) == 2 * 2 * page
    int4 = SPECS["int4 per channel"]
    assert sequence_bytes(int4, 9) == 2 * 2 * 2 * page_bytes(int4) + 2 * 2 * 8 * 8 * 2
