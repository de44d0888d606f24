"""Page formats: how a vector of `head_dim` values is stored, and what comes back.

A vector has codes and, in quantised formats, a scale of its own (bfloat16) or a scale and a minimum (float16); or every
channel of a page has them (`is_per_channel`), in full pages only. Codes are computed with the scale as it is stored, so
that who writes and who reads agree. Definitions: FP8 (OCP e4m3 and e5m2); symmetric int8; asymmetric int4 with a float
minimum, a vector's own, after an orthonormal Hadamard rotation (QuaRot) or without, or a channel's (KIVI's keys).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped

from kvjax.kernels.pytree import pytree


@dataclasses.dataclass(frozen=True)
class Format:
    """A page format.

    Attributes:
        name: of the format.
        dtype: of the codes.
        bits_of: of the 8-bit floats that the codes are the bits of: XLA on CPUs gathers and scatters arrays of such
            floats by converting all of them, so pages hold bytes.
        per_code: values in one code; two share a byte half-split: value i is the low nibble of byte i, value
            i + head_dim / 2 the high one.
        largest: of a code; None for formats that are not quantised.
        scale_dtype: of the metadata.
        num_scales: numbers that a vector, or a channel of a page, has beside its codes: 0, 1 (scale), 2 (scale and
            minimum).
        is_rotated: whether vectors are rotated before, and queries and outputs with them.
        is_per_channel: whether scales belong to the channels of a page, not to its slots. For keys only: a page gets
            its codes when it is full.
    """

    name: str
    dtype: str
    bits_of: str | None = None
    per_code: int = 1
    largest: float | None = None
    scale_dtype: str = "bfloat16"
    num_scales: int = 0
    is_rotated: bool = False
    is_per_channel: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether codes need a scale."""
        return self.largest is not None


_INT4: dict[str, Any] = dict(per_code=2, largest=15, scale_dtype="float16", num_scales=2)
FORMATS = {
    of.name: of
    for of in (
        Format("bfloat16", "bfloat16"),
        Format("float16", "float16"),
        Format("float32", "float32"),
        Format("fp8_e4m3", "uint8", bits_of="float8_e4m3fn", largest=448, num_scales=1),
        Format("fp8_e5m2", "uint8", bits_of="float8_e5m2", largest=57344, num_scales=1),
        Format("int8", "int8", largest=127, num_scales=1),
        Format("int4_per_token", "uint8", **_INT4),
        Format("int4_hadamard", "uint8", **_INT4, is_rotated=True),
        Format("int4_per_channel", "uint8", **_INT4, is_per_channel=True),
    )
}


@pytree
class Stored:
    """Keys or values of all pages, in a format.

    Attributes:
        codes: [pages, heads, page_size, width], of the format's dtype.
        scales: none, scale, or scale and minimum: of every vector [pages, heads, page_size], of every channel
            [pages, heads, head_dim] where the format is per channel.
        form: the format (static).
    """

    codes: Shaped[Array, "pages heads page_size width"]
    scales: tuple[Float[Array, "pages heads vectors"], ...]
    form: Format = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def of(cls, pages: Shaped[Array, "pages heads page_size width"] | Stored) -> Stored:
        """Take plain arrays as what they are."""
        return pages if isinstance(pages, Stored) else cls(pages, (), Format(str(pages.dtype), str(pages.dtype)))


_LARGEST = 1e30  # so that products and sums of what is stored stay finite in float32


def encode(
    x: Float[Array, "*rows slots head_dim"], form: Format, scale: Float[Array, "*vectors"] | None = None
) -> tuple[Shaped[Array, "*rows slots width"], tuple[Float[Array, "*rows vectors"], ...]]:
    """Store vectors.

    In quantised formats values beyond 1e30, or beyond what the scale can express (65504 with a scale in float16),
    saturate; NaN becomes 0, so that no reader meets one.

    Args:
        x: the vectors.
        form: the format.
        scale: in place of each vector's own, in formats that have just a scale; to be broadcast. What it is too small
            for saturates.

    Returns: codes, and no, one (scale) or two (scale, minimum) numbers for each vector; for each channel of the `slots`
        of a page where the format is per channel.
    """
    if form.largest is None:
        return x.astype(form.dtype), ()
    x = finite(x.astype(jnp.float32))
    axis = -2 if form.is_per_channel else -1
    if form.is_rotated:
        x = rotate(x)
    if form.num_scales == 1:
        own = jnp.abs(x).max(axis) / form.largest if scale is None else scale.astype(jnp.float32)
        scale = _stored_scale(jnp.broadcast_to(own, x.shape[:-1]), form)
        codes = jnp.clip(x / _of_values(scale, form), -form.largest, form.largest)
        if form.bits_of is None:
            return jnp.round(codes).astype(form.dtype), (scale,)
        return lax.bitcast_convert_type(codes.astype(form.bits_of), form.dtype), (scale,)
    limit = float(jnp.finfo(form.scale_dtype).max)
    minimum = rounded_down(jnp.clip(x.min(axis), -limit, limit), form.scale_dtype)
    scale = _stored_scale((x.max(axis) - minimum.astype(jnp.float32)) / form.largest, form)
    codes = (x - _of_values(minimum, form)) / _of_values(scale, form)
    codes = jnp.clip(jnp.round(codes), 0, form.largest).astype(jnp.uint8)
    low, high = jnp.split(codes, 2, axis=-1)
    return low | (high << jnp.uint8(4)), (scale, minimum)


def rounded_down(x: Float[Array, "*shape"], dtype: str) -> Float[Array, "*shape"]:
    """The greatest number of a dtype that is not above: no value lies below its minimum."""
    near = x.astype(dtype)
    return jnp.where(near.astype(jnp.float32) > x, jnp.nextafter(near, jnp.full_like(near, -jnp.inf)), near)


def finite(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """What of values can be stored: NaN becomes 0, and what is beyond 1e30 saturates (in float16 at its largest)."""
    most = min(_LARGEST, float(jnp.finfo(x.dtype).max))
    return jnp.clip(jnp.nan_to_num(x, nan=0.0), -most, most)


def _of_values(scale: Float[Array, "*rows vectors"], form: Format) -> Float[Array, "*rows slots head_dim"]:
    """A scale for each value, to be broadcast over the slots or over the channels."""
    return jnp.expand_dims(scale.astype(jnp.float32), -2 if form.is_per_channel else -1)


def _stored_scale(scale: Array, form: Format) -> Array:
    """A scale as it is stored: never 0, never more than its dtype holds."""
    info = jnp.finfo(form.scale_dtype)
    # Subnormal numbers of float16 are normal in float32, where XLA computes; those of bfloat16 become 0 there.
    least = info.smallest_subnormal if form.scale_dtype == "float16" else info.tiny
    scale = jnp.nan_to_num(scale, nan=float(least))
    return jnp.clip(scale, float(least), float(info.max)).astype(form.scale_dtype)


def numbers(codes: Shaped[Array, "*rows width"], form: Format, dtype) -> Float[Array, "*rows head_dim"]:
    """What codes stand for before scale and minimum: 8-bit floats, or integers; exact in bfloat16."""
    if form.per_code == 2:
        codes = jnp.concatenate([codes & jnp.uint8(15), codes >> jnp.uint8(4)], axis=-1)
    if form.bits_of is not None:
        codes = lax.bitcast_convert_type(codes, form.bits_of)
    return codes.astype(dtype)


def decode(
    codes: Shaped[Array, "*rows slots width"], scales: tuple[Float[Array, "*rows vectors"], ...], form: Format
) -> Float[Array, "*rows slots head_dim"]:
    """What readers see of stored vectors, float32 for quantised formats; rotated where the format rotates."""
    if not scales:
        return codes
    values = numbers(codes, form, jnp.float32) * _of_values(scales[0], form)
    return values if len(scales) == 1 else values + _of_values(scales[1], form)


def rotate(x: Float[Array, "*rows head_dim"]) -> Float[Array, "*rows head_dim"]:
    """Rotate vectors by an orthonormal Hadamard matrix, which is its own inverse.

    Sizes that are no power of two are rotated in blocks of the largest power of two that divides them.
    """
    size = x.shape[-1] & -x.shape[-1]
    blocks = x.reshape(*x.shape[:-1], -1, size)
    matrix = jnp.asarray(_hadamard(size), x.dtype)
    return jnp.einsum("...i,ij->...j", blocks, matrix, precision="highest").reshape(x.shape)


@functools.cache
def _hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)
