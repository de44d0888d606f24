"""Shapes and bytes of a cache, from its static description alone; `init_cache` builds exactly these arrays."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.errors import InputError
from kvjax.kernels.formats import Format
from kvjax.policy import state_shapes
from kvjax.spec import CacheSpec, pages_for

# What holds keys and values.
POOL = ("keys", "values", "key_scales", "value_scales")


def cache_shapes(spec: CacheSpec) -> dict[str, Any]:
    """Return shape and dtype of every array of a cache, or of a tuple of arrays, by name.

    Raises: InputError for a cache of several pools, whose pages differ: `spec.pools` describes each.
    """
    if len(spec.pools) > 1:
        raise InputError("skip_layers makes several pools, whose pages differ in size: ask of each of spec.pools")
    rows = (spec.num_layers, spec.groups, spec.max_seqs)
    (keys, key_scales), (values, value_scales) = _stored(spec, spec.key_form), _stored(spec, spec.value_form)
    open_keys = None
    if spec.key_form.is_per_channel:
        shape = (*rows, spec.heads_per_group, spec.page_size, spec.head_dim)
        open_keys = jax.ShapeDtypeStruct(shape, jnp.dtype("bfloat16"))
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
    if spec.policy.in_decode and not spec.policy.by_page:
        integers["write_slot"] = rows
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.dtype("int32")) for name, shape in integers.items()}
    pool = dict(keys=keys, values=values, key_scales=key_scales, value_scales=value_scales)
    kept = dict(open_keys=open_keys, write_slot=None, policy_state=state_shapes(spec, spec.policy))
    return pool | kept | shapes


def _stored(spec: CacheSpec, form: Format) -> tuple[jax.ShapeDtypeStruct, tuple[jax.ShapeDtypeStruct, ...]]:
    """Codes and scales of all pages."""
    pages = (spec.num_pages, spec.heads_per_group)
    codes = jax.ShapeDtypeStruct((*pages, spec.page_size, spec.head_dim // form.per_code), jnp.dtype(form.dtype))
    vectors = spec.head_dim if form.is_per_channel else spec.page_size
    return codes, (jax.ShapeDtypeStruct((*pages, vectors), jnp.dtype(form.scale_dtype)),) * form.num_scales


def _bytes(*arrays: Any) -> int:
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(arrays))


def cache_bytes(spec: CacheSpec) -> int:
    """Bytes of all arrays of a cache."""
    return sum(_bytes(cache_shapes(pool.spec)) for pool in spec.pools)


def pool_bytes(spec: CacheSpec) -> int:
    """Bytes of the keys and values of a cache, their scales included."""
    of_pools = [cache_shapes(pool.spec) for pool in spec.pools]
    return _bytes(*(shapes[name] for shapes in of_pools for name in POOL))


def page_bytes(spec: CacheSpec) -> int:
    """Bytes that one page takes: keys, values, scales and its share of the per-page arrays."""
    shapes = cache_shapes(spec)
    per_page = (*POOL, "positions", "page_span", "free_pages", "refcounts")
    kept = [shapes["policy_state"][of] for of in ("slots", "pages")]
    return _bytes(*(shapes[name] for name in per_page), *kept) // spec.num_pages


def most_pages(spec: CacheSpec, tokens: int) -> int:
    """Pages that a sequence of `tokens` tokens holds at most, windows respected."""
    full = pages_for(tokens, spec.page_size)
    return spec.groups * sum(
        min(full, spec.pinned + ring) if window else full
        for ring, window in zip(spec.rings, spec.layer_windows, strict=True)
    )


def token_bytes(spec: CacheSpec) -> float:
    """Bytes that a token takes in full pages of all layers: keys, values, scales and its share of per-page arrays."""
    of_pools = [pool.spec for pool in spec.pools]
    return sum(page_bytes(of) * of.num_layers for of in of_pools) * spec.groups / spec.page_size


def sequence_bytes(spec: CacheSpec, tokens: int) -> int:
    """Bytes of what a sequence of `tokens` tokens holds: its pages and, for keys per channel, its open ones."""
    if len(spec.pools) > 1:
        return sum(sequence_bytes(pool.spec, tokens) for pool in spec.pools)
    open_keys = cache_shapes(spec)["open_keys"]
    return most_pages(spec, tokens) * page_bytes(spec) + _bytes(open_keys) // spec.max_seqs
