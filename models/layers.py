"""The small parts of a decoder: linear maps, norms and activations."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

# Measured on CPUs: below this many tokens `W @ x.T` reads [out, in] weights up to twice as fast as `x @ W.T`.
FEATURES_MAJOR_BELOW = 64


class Linear(nnx.Module):
    """A linear map with its weight in the checkpoint's layout, [out, in]."""

    def __init__(self, weight: ArrayLike | None, bias: ArrayLike | None, features_major: bool):
        self.weight = None if weight is None else nnx.Param(jnp.asarray(weight))
        self.bias = None if bias is None else nnx.Param(jnp.asarray(bias))
        self.features_major = features_major

    def __call__(
        self, x: Float[Array, "tokens in"], weight: Float[Array, "out in"] | None = None
    ) -> Float[Array, "tokens out"]:
        """Map the tokens, by a weight that the caller owns where this map has none."""
        if weight is None:
            assert self.weight is not None
            weight = self.weight[...]
        if self.features_major and x.shape[0] < FEATURES_MAJOR_BELOW:
            # Without the barriers XLA folds the transposes into the product and loses the layout.
            y = jax.lax.optimization_barrier(weight @ jax.lax.optimization_barrier(x.T)).T
        else:
            y = x @ weight.T
        return y if self.bias is None else y + self.bias[...][None]


class Norm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, weight: ArrayLike, epsilon: float):
        self.weight = nnx.Param(jnp.asarray(weight))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "... features"]) -> Float[Array, "... features"]:
        """Normalise; the result has the dtype of `x`."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.epsilon)
        weight = self.weight[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * weight).astype(x.dtype)


def activation_of(name: str) -> Callable[[Array], Array]:
    """Return the activation function of the feed-forward part."""
    functions = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu, "gelu": lambda x: jax.nn.gelu(x, approximate=False)}
    return functions[name]
