"""Codes of pages as numbers, and the products of attention with them, in XLA."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Shaped

from kvjax.kernels.formats import Format


def widen(codes: Shaped[Array, "*shape"], form: Format, dtype) -> tuple[Float[Array, "*shape"], ...]:
    """Return the numbers that codes stand for before scale and minimum, as `formats.numbers` has them.

    Where two share a byte there are two arrays, of the low and of the high halves: joined they would be written value
    by value on CPUs, and a product with each costs less. 8-bit floats are numbers of float16 with other exponents,
    which processors convert, subnormal ones too; XLA's own conversion is seven times slower there.
    """
    if form.per_code == 2:
        # Through int32, which all of XLA's backends shift in vectors.
        wide = codes.astype(jnp.int32)
        return (wide & 15).astype(dtype), (wide >> 4).astype(dtype)
    if form.bits_of is None:
        return (codes.astype(dtype),)
    bits = codes.astype(jnp.uint16)
    if form.bits_of == "float8_e5m2":
        return (lax.bitcast_convert_type(bits << jnp.uint16(8), jnp.float16).astype(dtype),)
    sign, magnitude = (bits & jnp.uint16(0x80)) << jnp.uint16(8), (bits & jnp.uint16(0x7F)) << jnp.uint16(7)
    half = lax.bitcast_convert_type(sign | magnitude, jnp.float16)
    # The exponents of e4m3 are biased by 7, those of float16 by 15.
    return ((half.astype(jnp.float32) * jnp.float32(2.0**8)).astype(dtype),)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Keys or values of some slots.

    Attributes:
        parts: numbers of consecutive channels, [n, kv_heads, slots, head_dim / len(parts)] each.
        scales: float32, none, scale, or scale and minimum: of slots [n, kv_heads, 1, slots], or of the channels of
            pages [n, kv_heads, pages, 1, head_dim].
        form: how they were stored.
    """

    parts: tuple[Float[Array, "n kv_heads slots width"], ...]
    scales: tuple[Float32[Array, "n kv_heads ..."], ...]
    form: Format

    def logits(self, q: Float[Array, "n kv_heads queries head_dim"]) -> Float32[Array, "n kv_heads queries slots"]:
        """Products of queries and keys."""
        if not self.form.is_per_channel:
            logits = _product("nkqd,nksd->nkqs", jnp.split(q, len(self.parts), axis=-1), self.parts)
            if self.scales:
                logits = logits * self.scales[0]
            return logits if len(self.scales) < 2 else logits + _sum(q) * self.scales[1]
        scale, minimum = self.scales
        of_pages = q.astype(jnp.float32)[:, :, None]
        # The scales join the queries, once a page.
        parts = jnp.split((of_pages * scale).astype(q.dtype), len(self.parts), axis=-1)
        logits = _product("nkpqd,nkpsd->nkpqs", parts, self._by_page) + _sum(of_pages * minimum)
        return logits.swapaxes(2, 3).reshape(*q.shape[:3], -1)

    def weighted(
        self, weights: Float32[Array, "n kv_heads queries slots"]
    ) -> Float32[Array, "n kv_heads queries head_dim"]:
        """Sums of values."""
        if not self.form.is_per_channel:
            # Scales join the weights, but not their sum.
            scaled = weights * self.scales[0] if self.scales else weights
            out = _joined("nkqs,nksd->nkqd", scaled, self.parts)
            return out if len(self.scales) < 2 else out + _sum(weights * self.scales[1])
        scale, minimum = self.scales
        of_pages = weights.reshape(*weights.shape[:3], scale.shape[2], -1).swapaxes(2, 3)
        return (_joined("nkpqs,nkpsd->nkpqd", of_pages, self._by_page) * scale + _sum(of_pages) * minimum).sum(2)

    @property
    def _by_page(self) -> tuple[Float[Array, "n kv_heads pages page_size width"], ...]:
        pages = self.scales[0].shape[:3]
        return tuple(part.reshape(*pages, -1, part.shape[-1]) for part in self.parts)


def _product(indices: str, parts, others) -> Array:
    """The sum of the products of parts."""
    products = [
        jnp.einsum(indices, a, b, preferred_element_type=jnp.float32) for a, b in zip(parts, others, strict=True)
    ]
    return sum(products[1:], products[0])


def _joined(indices: str, weights: Array, parts) -> Array:
    """The products with every part, side by side."""
    products = [jnp.einsum(indices, weights, part, preferred_element_type=jnp.float32) for part in parts]
    return jnp.concatenate(products, axis=-1) if len(products) > 1 else products[0]


def _sum(x: Array) -> Array:
    return x.astype(jnp.float32).sum(-1, keepdims=True)
