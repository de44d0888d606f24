"""Quantised pages in the TPU kernel: their scales, brought to where the block computation has its slots or channels.

Codes and scales come into vector memory as they are stored. Scales of 2 bytes lie there page by page, heads in the
sublanes; the computation wants float32 in the lanes of its logits, one head at a time:

    of slots      [pages, heads, page_size] -> [heads, 1, slots], times the logits' and the weights' columns
    of channels   [pages, heads, head_dim]  -> [heads, pages, 1, head_dim], times the codes of each page
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from kvjax.kernels.formats import Format, numbers
from kvjax.kernels.pytree import pytree


@pytree
class Pages:
    """References to keys or values: those of the pool, or buffers for a few blocks.

    Attributes:
        codes: [pages, heads, page_size, width]; in buffers [stages, heads, slots, width].
        scales: as in `Stored`, float16 as the uint16 of its bits: [pages, heads, vectors]; in buffers with stages
            before that.
        form: of the pages (static).
    """

    codes: Any
    scales: tuple[Any, ...]
    form: Format = dataclasses.field(metadata=dict(static=True))

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Codes and scales."""
        return (self.codes, *self.scales)


def may_be_nan(form: Format) -> bool:
    """Whether what was never written may read as NaN; integers do not."""
    return not form.is_quantized or form.bits_of is not None


def read_scales(pages: Pages, rows: tuple[Any, ...], slot, used) -> None:
    """Bring the scales of the block in a buffer into float32 rows; those of slots that are not used become 0.

    Args:
        pages: buffers.
        rows: for each of the scales [heads, 1, slots], or [heads, pages, 1, head_dim] where they belong to channels.
        slot: where the block is.
        used: bool [1, slots]; the scales of other slots may be NaN.
    """
    for scale, target in zip(pages.scales, rows, strict=True):
        num_pages, heads, _ = scale.shape[1:]
        of_pages = [float32_of(scale[slot, page]) for page in range(num_pages)]
        if pages.form.is_per_channel:
            for page, head in ((page, head) for page in range(num_pages) for head in range(heads)):
                target[head, page] = of_pages[page][head : head + 1]
            continue
        of_slots = jnp.where(used, jnp.concatenate(of_pages, axis=1), 0)
        for head in range(heads):
            target[head] = of_slots[head : head + 1]


def float32_of(scale):
    """Scales as they stand in a buffer. Mosaic knows no float16, so its bits are read here; none are infinite."""
    if scale.dtype != jnp.uint16:
        return scale.astype(jnp.float32)
    bits = scale.astype(jnp.int32)
    exponent, fraction = bits & 0x7C00, bits & 0x3FF
    # Exponents are 112 higher in float32; there a subnormal number is normal.
    normal = lax.bitcast_convert_type(((exponent | fraction) << 13) + (112 << 23), jnp.float32)
    value = jnp.where(exponent == 0, fraction.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(bits >= 0x8000, -value, value)


def numbers_of(codes, pages: Pages, rows: tuple[Any, ...], heads, dtype):
    """What codes [heads, slots, width] stand for, but for scales of slots: [heads, slots, head_dim] in `dtype`."""
    if not pages.form.is_quantized:
        return codes
    if not pages.form.is_per_channel:
        return numbers(codes, pages.form, dtype)
    values = numbers(codes, pages.form, jnp.float32)
    scale, minimum = (of[heads] for of in rows)
    of_pages = values.reshape(values.shape[0], scale.shape[1], -1, values.shape[2]) * scale + minimum
    return of_pages.reshape(values.shape).astype(dtype)


def scale_logits(products, query, pages: Pages, rows: tuple[Any, ...], heads):
    """Products of queries and numbers [heads, rows, slots] with the scale and the minimum of every slot's key."""
    if pages.form.is_per_channel or not pages.scales:
        return products
    logits = products * rows[0][heads]
    if len(rows) == 2:
        logits = logits + query.astype(jnp.float32).sum(axis=2, keepdims=True) * rows[1][heads]
    return logits


def scale_weights(weights, pages: Pages, rows: tuple[Any, ...], heads):
    """Weights [heads, rows, slots] of numbers in the place of values, and what the minima add to every channel."""
    if not pages.scales:
        return weights, 0
    minima = (weights * rows[1][heads]).sum(axis=2, keepdims=True) if len(rows) == 2 else 0
    return weights * rows[0][heads], minima
