"""Causal attention over one contiguous sequence, without a cache: for training, and to compare with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def attend(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    *,
    window: Int32[Array, ""],
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Attend every token to itself and the `window - 1` tokens before it; differentiable, O(tokens^2) memory."""
    tokens, heads, head_dim = q.shape
    grouped = q.reshape(tokens, k.shape[1], -1, head_dim)
    logits = jnp.einsum("tkgd,skd->kgts", grouped, k, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    place = jnp.arange(tokens, dtype=jnp.int32)
    distance = place[:, None] - place[None]
    visible = ((distance >= 0) & (distance < window))[None, None]
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), axis=-1)
    out = jnp.einsum("kgts,skd->tkgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(tokens, heads, head_dim).astype(q.dtype)
