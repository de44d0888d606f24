"""Page formats: how a vector of `head_dim` values is stored, and what comes back.

A vector has codes and, in quantised formats, a scale of its own (bfloat16) or a scale and a minimum (float16). Codes are
computed with the scale as it is stored, so that who writes and who reads agree. Definitions: FP8 (OCP e4m3 and e5m2);
symmetric int8; asymmetric int4 with a float minimum (KIVI), after an orthonormal Hadamard rotation (QuaRot).
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped


@dataclasses.dataclass(frozen=True)
class Format:
    """A page format.

    Attributes:
        name: of the format.
        dtype: of the codes.
        per_code: values in one code; two share a byte half-split: value i is the low nibble of byte i, value
            i + head_dim / 2 the high one.
        largest: of a code; None for formats that are not quantised.
        scale_dtype: of the metadata.
        num_scales: numbers that a vector has beside its codes: 0, 1 (scale), 2 (scale and minimum).
        is_rotated: whether vectors are rotated before, and queries and outputs with them.
    """

    name: str
    dtype: str
    per_code: int = 1
    largest: float | None = None
    scale_dtype: str = "bfloat16"
    num_scales: int = 0
    is_rotated: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether codes need a scale."""
        return self.largest is not None


FORMATS = {
    of.name: of
    for of in (
        Format("bfloat16", "bfloat16"),
        Format("float16", "float16"),
        Format("float32", "float32"),
        Format("fp8_e4m3", "float8_e4m3fn", largest=448, num_scales=1),
        Format("fp8_e5m2", "float8_e5m2", largest=57344, num_scales=1),
        Format("int8", "int8", largest=127, num_scales=1),
        Format("int4_hadamard", "uint8", per_code=2, largest=15, scale_dtype="float16", num_scales=2, is_rotated=True),
    )
}


def encode(
    x: Float[Array, "*rows head_dim"], form: Format
) -> tuple[Shaped[Array, "*rows width"], Float[Array, "*rows scales"] | None]:
    """Store vectors.

    Values beyond what the scale can express saturate; NaN becomes 0, so that no reader meets one.

    Returns: codes, and the scale or (scale, minimum) of each vector, None for formats that are not quantised.
    """
    if form.largest is None:
        return x.astype(form.dtype), None
    x = jnp.nan_to_num(x.astype(jnp.float32), nan=0.0)
    if form.is_rotated:
        x = rotate(x)
    if form.num_scales == 1:
        scales = _stored_scale(jnp.abs(x).max(-1, keepdims=True) / form.largest, form)
        codes = jnp.clip(x / scales.astype(jnp.float32), -form.largest, form.largest)
        return (jnp.round(codes) if form.dtype == "int8" else codes).astype(form.dtype), scales
    limit = float(jnp.finfo(form.scale_dtype).max)
    minimum = jnp.clip(x.min(-1, keepdims=True), -limit, limit).astype(form.scale_dtype)
    scale = _stored_scale((x.max(-1, keepdims=True) - minimum.astype(jnp.float32)) / form.largest, form)
    codes = (x - minimum.astype(jnp.float32)) / scale.astype(jnp.float32)
    codes = jnp.clip(jnp.round(codes), 0, form.largest).astype(jnp.uint8)
    low, high = jnp.split(codes, 2, axis=-1)
    return low | (high << jnp.uint8(4)), jnp.concatenate([scale, minimum], axis=-1)


def _stored_scale(scale: Array, form: Format) -> Array:
    """A scale as it is stored: never 0, never more than its dtype holds."""
    info = jnp.finfo(form.scale_dtype)
    return jnp.clip(scale, float(info.tiny), float(info.max)).astype(form.scale_dtype)


def decode(
    codes: Shaped[Array, "*rows width"], scales: Float[Array, "*rows scales"] | None, form: Format
) -> Float[Array, "*rows head_dim"]:
    """What readers see of stored vectors, float32 for quantised formats; rotated where the format rotates."""
    if form.largest is None or scales is None:
        return codes
    if form.per_code == 2:
        codes = jnp.concatenate([codes & jnp.uint8(15), codes >> jnp.uint8(4)], axis=-1)
    values = codes.astype(jnp.float32) * scales[..., :1].astype(jnp.float32)
    return values if form.num_scales == 1 else values + scales[..., 1:].astype(jnp.float32)


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
