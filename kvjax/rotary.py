"""Rotary position embeddings with integer phases: exact relative angles at any position.

The phase of position p is `(p * F) mod 2^32` in uint32, where `F = round(2^32 * f)` is a frequency as a fixed-point
fraction of a turn. The product wraps exactly, so the angle between two positions depends on their distance alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, UInt32

from kvjax.errors import InputError
from kvjax.kernels.pytree import pytree

Layout = Literal["half", "interleaved"]
Frequencies = np.ndarray
_RADIANS_PER_UNIT = 2 * math.pi / 2**32


@pytree
class Rotary:
    """The rotary embedding of a model.

    Attributes:
        phases: uint32 [layers or 1, rotary_dim // 2], fraction of a turn a position adds, times 2^32. One row serves
            every layer.
        magnitude: factor of sine and cosine (1.0 except with yarn scaling).
        layout: "half" pairs component i with i + rotary_dim / 2, "interleaved" pairs 2i with 2i + 1.
    """

    phases: UInt32[Array, "rows pairs"]
    magnitude: float = dataclasses.field(default=1.0, metadata=dict(static=True))
    layout: Layout = dataclasses.field(default="half", metadata=dict(static=True))


def rotary(
    head_dim: int,
    theta: float,
    *,
    rotary_dim: int | None = None,
    scaling: Mapping[str, object] | None = None,
    layout: str = "half",
) -> Rotary:
    """Builds the rotary embedding of one base: one row of phases that serves every layer.

    Args:
        head_dim: components of a head.
        theta: the base; the slowest pair turns about once in `2 * pi * theta` positions.
        rotary_dim: leading components that are rotated, even; all of them by default.
        scaling: a Hugging Face `rope_scaling` mapping; `rope_type` (older: `type`) is one of `SCALINGS`.
        layout: "half" (Hugging Face checkpoints) or "interleaved".

    Raises:
        InputError: for a size, base, layout or scaling that is not supported.

    Source: RoFormer (arXiv 2104.09864); scalings as in transformers' `modeling_rope_utils.py`.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise InputError(f"rotary_dim {rotary_dim} is not allowed: give an even number from 2 to head_dim {head_dim}")
    if theta <= 1:
        raise InputError(f"rope theta {theta} is not allowed: give a base above 1, such as 10000")
    if layout not in ("half", "interleaved"):
        raise InputError(f"unknown rotary layout {layout!r}: use 'half' or 'interleaved'")
    plain = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    frequencies, magnitude = _scaled(plain, theta, scaling or {})
    turns = np.rint(frequencies / (2 * np.pi) * 2.0**32).astype(np.uint64)
    phases = (turns % 2**32).astype(np.uint32)
    return Rotary(jnp.asarray(phases[None]), magnitude, layout)


def per_layer(bases: Sequence[Rotary], choice: Sequence[int]) -> Rotary:
    """One row per layer, chosen among the one-row embeddings `bases`: layer i takes `bases[choice[i]]`.

    Gemma 3 uses it with a local and a global base. Raises InputError if the bases differ in size, magnitude or layout.
    """
    kinds = {(base.phases.shape, base.magnitude, base.layout) for base in bases}
    if len(kinds) != 1:
        raise InputError(f"rotary bases must agree in size, magnitude and layout, got {sorted(map(str, kinds))}")
    rows = jnp.concatenate([base.phases for base in bases])
    return dataclasses.replace(bases[0], phases=rows[np.asarray(choice)])


def angles(
    rotary: Rotary, positions: Int32[Array, " tokens"], layer: int | Int[Array, ""] = 0
) -> tuple[Float32[Array, "tokens pairs"], Float32[Array, "tokens pairs"]]:
    """Cosine and sine, times the magnitude, of every token's position: each float32 [tokens, rotary_dim // 2].

    `layer` may be traced; it is ignored where one row serves all layers. Compute them once a step and reuse them with
    `apply_angles` for every layer that shares a base.
    """
    row = rotary.phases[0] if rotary.phases.shape[0] == 1 else jnp.asarray(rotary.phases)[layer]
    phase = positions.astype(jnp.uint32)[:, None] * row[None, :]
    # As a signed number the phase is an angle in [-pi, pi): one bit more precise in float32 than [0, 2 pi).
    signed = jax.lax.bitcast_convert_type(phase, jnp.int32).astype(jnp.float32)
    radians = signed * jnp.float32(_RADIANS_PER_UNIT)
    magnitude = jnp.float32(rotary.magnitude)
    return jnp.cos(radians) * magnitude, jnp.sin(radians) * magnitude


def apply_angles(
    x: Float[Array, "tokens heads head_dim"],
    cos: Float32[Array, "tokens pairs"],
    sin: Float32[Array, "tokens pairs"],
    layout: Layout = "half",
) -> Float[Array, "tokens heads head_dim"]:
    """Rotates the first `2 * pairs` components of every head, in float32; the result has the dtype of `x`."""
    tokens, heads, head_dim = x.shape
    pairs = cos.shape[1]
    # The two components of a pair stand along one axis of length 2: reversing it is an index change that fuses into
    # the products, where the usual concatenation of halves is a copy.
    shape, axis = ((2, pairs), 2) if layout == "half" else ((pairs, 2), 3)
    turned = x[..., : 2 * pairs].reshape(tokens, heads, *shape).astype(jnp.float32)
    signs = jnp.expand_dims(jnp.asarray([-1.0, 1.0], jnp.float32), 1 if layout == "half" else 0)[None, None]
    cos, sin = (jnp.expand_dims(values[:, None, :], axis) for values in (cos, sin))
    turned = turned * cos + jnp.flip(turned, axis) * (sin * signs)
    turned = turned.astype(x.dtype).reshape(tokens, heads, 2 * pairs)
    return turned if 2 * pairs == head_dim else jnp.concatenate([turned, x[..., 2 * pairs :]], axis=2)


def apply(
    rotary: Rotary,
    x: Float[Array, "tokens heads head_dim"],
    positions: Int32[Array, " tokens"],
    layer: int | Int[Array, ""] = 0,
) -> Float[Array, "tokens heads head_dim"]:
    """Rotates queries or keys at their absolute positions; shape and dtype stay. `layer` may be traced."""
    cos, sin = angles(rotary, positions, layer)
    return apply_angles(x, cos, sin, rotary.layout)


def _scaled(plain: Frequencies, theta: float, scaling: Mapping) -> tuple[Frequencies, float]:
    """Frequencies in radians per position after scaling, and the magnitude."""
    name = scaling.get("rope_type", scaling.get("type", "default"))
    if name not in SCALINGS:
        raise InputError(f"rope scaling {name!r} is not supported: use one of {', '.join(SCALINGS)}")
    try:
        return SCALINGS[name](plain, theta, scaling)
    except KeyError as error:
        raise InputError(f"rope scaling {name!r} needs the value {error}: add it to rope_scaling") from None


def _default(plain: Frequencies, theta: float, scaling: Mapping) -> tuple[Frequencies, float]:
    return plain, 1.0


def _linear(plain: Frequencies, theta: float, scaling: Mapping) -> tuple[Frequencies, float]:
    return plain / _positive(scaling, "factor"), 1.0


def _llama3(plain: Frequencies, theta: float, scaling: Mapping) -> tuple[Frequencies, float]:
    """Llama 3.1: slow pairs are divided by the factor, fast ones kept, those between blended."""
    factor, context = _positive(scaling, "factor"), _positive(scaling, "original_max_position_embeddings")
    low, high = _positive(scaling, "low_freq_factor"), _positive(scaling, "high_freq_factor")
    if low == high:
        raise InputError(f"rope scaling 'llama3' needs low_freq_factor below high_freq_factor, got {low} for both")
    turns_in_context = context * plain / (2 * np.pi)
    keep = np.clip((turns_in_context - low) / (high - low), 0, 1)
    return (1 - keep) * plain / factor + keep * plain, 1.0


def _yarn(plain: Frequencies, theta: float, scaling: Mapping) -> tuple[Frequencies, float]:
    """YaRN (arXiv 2309.00071) with transformers' defaults and its inference of the attention factor."""
    factor, context = _positive(scaling, "factor"), _positive(scaling, "original_max_position_embeddings")
    rotary_dim = 2 * len(plain)

    def pair_with(rotations: float) -> float:
        return rotary_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.get("beta_fast") or 32), pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / ((high - low) or 0.001), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_magnitude(scaling, factor)


def _yarn_magnitude(scaling: Mapping, factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    gain = 0.1 * math.log(factor) if factor > 1 else 0.0
    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if numerator and denominator:
        return (1 + numerator * gain) / (1 + denominator * gain)
    return 1 + gain


def _divisors(plain: Frequencies, theta: float, scaling: Mapping) -> tuple[Frequencies, float]:
    """One divisor a pair: how a GGUF file states the scaling of Llama 3.1 (its tensor `rope_freqs.weight`)."""
    divisors = np.asarray(scaling["divisors"], np.float64)
    if divisors.shape != plain.shape or not (divisors > 0).all():
        raise InputError(f"rope divisors of shape {divisors.shape} do not fit: give {len(plain)} positive numbers")
    return plain / divisors, 1.0


def _positive(scaling: Mapping, key: str) -> float:
    value = scaling[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InputError(f"rope scaling {key} is {value!r}: give a number above 0")
    return float(value)


SCALINGS: dict[str, Callable[[Frequencies, float, Mapping], tuple[Frequencies, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "divisors": _divisors,
}
