"""Shapes and bytes of a cache, from its static description alone; `init_cache` builds exactly these arrays."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.spec import CacheSpec, pages_for

# What holds keys and values.
POOL = ("keys", "values", "key_scales", "value_scales")


def cache_shapes(spec: CacheSpec) -> dict[str, Any]:
    """Return shape and dtype of every array of a cache, or of a tuple of arrays, by name."""
    slots, form = (spec.num_pages, spec.heads_per_group, spec.page_size), spec.form
    rows = (spec.num_layers, spec.groups, spec.max_seqs)
    codes = jax.ShapeDtypeStruct((*slots, spec.head_dim // form.per_code), spec.dtype)
    scales = (jax.ShapeDtypeStruct(slots, jnp.dtype(form.scale_dtype)),) * form.num_scales
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
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.dtype("int32")) for name, shape in integers.items()}
    return dict(keys=codes, values=codes, key_scales=scales, value_scales=scales) | shapes


def _bytes(*arrays: Any) -> int:
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(arrays))


def cache_bytes(spec: CacheSpec) -> int:
    """Bytes of all arrays of a cache."""
    return _bytes(cache_shapes(spec))


def pool_bytes(spec: CacheSpec) -> int:
    """Bytes of the keys and values of a cache, their scales included."""
    shapes = cache_shapes(spec)
    return _bytes(*(shapes[name] for name in POOL))


def page_bytes(spec: CacheSpec) -> int:
    """Bytes that one page takes: keys, values, scales and its share of the per-page arrays."""
    shapes = cache_shapes(spec)
    per_page = (*POOL, "positions", "page_span", "free_pages", "refcounts")
    return _bytes(*(shapes[name] for name in per_page)) // spec.num_pages


def most_pages(spec: CacheSpec, tokens: int) -> int:
    """Pages that a sequence of `tokens` tokens holds at most, windows respected."""
    full = pages_for(tokens, spec.page_size)
    return spec.groups * sum(
        min(full, ring) if window else full for ring, window in zip(spec.rings, spec.layer_windows, strict=True)
    )
