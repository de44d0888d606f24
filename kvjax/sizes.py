"""Shapes and bytes of a cache, from its static description alone; `init_cache` builds exactly these arrays."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from kvjax.spec import CacheSpec, pages_for


def cache_shapes(spec: CacheSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of every array of a cache, by name."""
    pool = (spec.num_pages, spec.heads_per_group, spec.page_size, spec.head_dim)
    rows = (spec.num_layers, spec.groups, spec.max_seqs)
    shapes = {name: (pool, spec.dtype) for name in ("keys", "values")}
    integers = {
        "positions": (spec.num_pages, spec.page_size),
        "page_span": (spec.num_pages, 2),
        "page_table": (*rows, spec.pages_per_seq),
        "first": rows,
        "next_slot": rows,
        "next_position": (spec.max_seqs,),
        "start_position": (spec.max_seqs,),
        "free_pages": (spec.num_pages,),
        "num_free": (),
        "refcounts": (spec.num_pages,),
        "status": (),
    }
    shapes |= {name: (shape, jnp.dtype("int32")) for name, shape in integers.items()}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()}


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def cache_bytes(spec: CacheSpec) -> int:
    """Bytes of all arrays of a cache."""
    return sum(_bytes(array) for array in cache_shapes(spec).values())


def pool_bytes(spec: CacheSpec) -> int:
    """Bytes of the keys and values of a cache."""
    shapes = cache_shapes(spec)
    return _bytes(shapes["keys"]) + _bytes(shapes["values"])


def page_bytes(spec: CacheSpec) -> int:
    """Bytes that one page takes: keys, values and its share of the per-page arrays."""
    shapes = cache_shapes(spec)
    per_page = ("keys", "values", "positions", "page_span", "free_pages", "refcounts")
    return sum(_bytes(shapes[name]) for name in per_page) // spec.num_pages


def most_pages(spec: CacheSpec, tokens: int) -> int:
    """Pages that a sequence of `tokens` tokens holds at most, windows respected."""
    full = pages_for(tokens, spec.page_size)
    return spec.groups * sum(
        min(full, ring) if window else full for ring, window in zip(spec.rings, spec.layer_windows, strict=True)
    )
