"""A compiled decode step edits the donated cache in place and touches nothing of the size of pool or table."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import DECODE, HEADS, SPEC, Twin

from kvjax.attention import attend
from kvjax.cache import init_cache
from kvjax.sizes import cache_bytes, pool_bytes
from kvjax.step import begin_step, end_step

# A pool of 256 MB, of which no array is ever made, and a long table, in sizes that no other array has.
NUM_PAGES, ENTRIES = 2**18 + 5, 6 * 16 + 1
LARGE = dataclasses.replace(SPEC, num_pages=NUM_PAGES, pages_per_seq=ENTRIES, debug=False)
# What may name an array of that size: its way through loops, and updates in place. A fusion's own operations are
# listed too, so an operation over the whole pool cannot hide in one.
IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "fusion", "scatter", "dynamic-update-slice", "conditional"}
OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = \w+\[([\d,]*)\]\S* ([\w\-]+)\(", re.MULTILINE)


def decode_step(cache, lengths, q, k, v):
    cache, step = begin_step(cache, lengths, **DECODE)

    def body(cache, of_layer):
        layer, q, k, v = of_layer
        out, cache = attend(cache, step, layer, q, k, v, rotary=None)
        return cache, out

    cache, out = jax.lax.scan(body, cache, (jnp.arange(SPEC.num_layers, dtype=jnp.int32), q, k, v))
    return *end_step(cache, step), out


def compiled(**options):
    tokens = lambda heads: jax.ShapeDtypeStruct((SPEC.num_layers, 4, heads, SPEC.head_dim), jnp.float32)  # noqa: E731
    lengths, cache = jax.ShapeDtypeStruct((4,), jnp.int32), jax.eval_shape(lambda: init_cache(LARGE))
    arguments = (cache, lengths, tokens(HEADS), tokens(SPEC.num_kv_heads), tokens(SPEC.num_kv_heads))
    return jax.jit(decode_step, **options).lower(*arguments).compile()


def large_operations(text: str) -> collections.Counter[str]:
    """Operations whose result has the pool's or the table's long axis and that are no update in place."""
    found = collections.Counter()
    for shape, operation in OPERATION.findall(text):
        sizes = [int(size) for size in shape.split(",") if size]
        one_layer = ENTRIES in sizes and int(np.prod(sizes)) == SPEC.max_seqs * ENTRIES
        # A layer's own table may be sliced out.
        if (NUM_PAGES in sizes or ENTRIES in sizes) and operation not in IN_PLACE and not one_layer:
            found[f"{operation} [{shape}]"] += 1
    return found


@pytest.fixture(scope="module")
def donated():
    return compiled(donate_argnums=0)


def test_a_decode_step_has_no_operation_of_the_size_of_pool_or_table(donated):
    assert not large_operations(donated.as_text() or "")


def test_copies_would_be_found():
    assert any(name.startswith("copy [") for name in large_operations(compiled().as_text() or ""))


def test_the_pool_is_aliased_and_temporaries_are_small(donated):
    memory = donated.memory_analysis()
    assert pool_bytes(LARGE) > 256e6 and memory.alias_size_in_bytes >= cache_bytes(LARGE)
    assert memory.temp_size_in_bytes < 0.05 * pool_bytes(LARGE)


def test_donated_arrays_keep_their_buffers():
    twin = Twin()

    def pointers():
        cache = twin.cache
        arrays = (cache.keys, cache.values, cache.positions, cache.page_table, cache.allocator.refcounts)
        return [array.unsafe_buffer_pointer() for array in arrays]

    qkv = twin.draw_tokens(3)
    before = pointers()
    for _ in range(3):
        _, report = twin.run([1, 1, 0, 1], qkv, **DECODE)
        assert bool(report.ok) and pointers() == before
