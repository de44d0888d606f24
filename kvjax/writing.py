"""Storing a step's keys and values in their pages, in the formats of the cache."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool

from kvjax.cache import Cache, Status, raise_status
from kvjax.errors import InputError
from kvjax.kernels.formats import Stored, encode
from kvjax.kernels.write_pages import write_full_pages, write_pages, write_scales
from kvjax.placement import Writes


def write(cache: Cache, writes: object, valid: Bool[Array, " tokens"], layer, new, *, in_kernel: bool) -> Cache:
    """Store keys and values in the slots that a step has for them in a layer.

    Args:
        cache: the cache, after `begin_step`.
        writes: where the step's tokens go.
        valid: which of the packed tokens are no padding.
        layer: the layer, which may be traced.
        new: keys [tokens, kv_heads, head_dim], rotated, with scales for their heads or None; the same of values.
        in_kernel: whether the kernel for Hopper writes, or XLA.
    """
    spec, ((k, k_scale), (v, v_scale)) = cache.spec, new
    shape = (k.shape[0], spec.groups, spec.heads_per_group, spec.head_dim)
    new_keys, new_values = (new.reshape(shape).swapaxes(0, 1) for new in (k, v))
    (keys, values), open_keys = cache.stored, cache.open_keys
    if not isinstance(writes, Writes):
        raise InputError("step is of a cache with several pools, and this cache has one: give the step that it began")
    if open_keys is None:
        both = ((keys, new_keys, k_scale), (values, new_values, v_scale))
        keys, values = _write_slots(both, writes, layer, in_kernel)
    else:
        place = (jnp.asarray(layer, jnp.int32), writes.sequence[layer])
        keys, open_keys = write_full_pages(keys, open_keys, new_keys, *place, *writes.of_layer(layer))
        (values,) = _write_slots(((values, new_values, v_scale),), writes, layer, in_kernel)
    cache = dataclasses.replace(
        cache, keys=keys.codes, values=values.codes, key_scales=keys.scales, value_scales=values.scales,
        open_keys=open_keys,
    )  # fmt: skip
    if spec.debug or spec.is_quantized:
        finite = (jnp.isfinite(k) & jnp.isfinite(v)).all((1, 2)) | ~valid
        cache = raise_status(cache, Status.NONFINITE_INPUT, ~finite.all())
    return cache


def _write_slots(given, writes: Writes, layer, in_kernel: bool) -> list[Stored]:
    """Store tokens in formats with scales per slot; `given` are pages, what is new, and its scale or None."""
    where = writes.of_layer(layer)
    encoded = [encode(new, pages.form, scale) for pages, new, scale in given]
    pools, new = tuple(pages.codes for pages, *_ in given), tuple(codes for codes, _ in encoded)
    if in_kernel:
        from kvjax.kernels import write_pages_hopper

        codes = write_pages_hopper.write_pages(pools, new, *writes.where, jnp.asarray(layer, jnp.int32))
    else:
        codes = [write_pages(pool, of, *where) for pool, of in zip(pools, new, strict=True)]
    scales = [write_scales(pages.scales, of, *where) for (pages, *_), (_, of) in zip(given, encoded, strict=True)]
    forms = [pages.form for pages, *_ in given]
    return [Stored(*of) for of in zip(codes, scales, forms, strict=True)]
