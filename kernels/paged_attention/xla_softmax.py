"""Attention over a part of the slots, and how parts become one, in XLA."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from kvjax.kernels.paged_attention.arguments import MASKED
from kvjax.kernels.paged_attention.xla_pages import Block, Pool, Tokens
from kvjax.kernels.pytree import pytree


@pytree
class Partial:
    """Attention over a part of the slots, unnormalised: float32 [..., 1], [..., 1] and [..., head_dim]."""

    maximum: Float32[Array, ...]
    total: Float32[Array, ...]
    out: Float32[Array, ...]


def empty_partial(shape: tuple[int, ...], head_dim: int) -> Partial:
    """Return the partial result of no slots."""
    full = jnp.full((*shape, 1), MASKED / 2, jnp.float32)
    return Partial(full, jnp.zeros((*shape, 1), jnp.float32), jnp.zeros((*shape, head_dim), jnp.float32))


def attend_block(
    tokens: Tokens, block: Block, pool: Pool
) -> tuple[Partial, Float32[Array, "n kv_heads queries slots"]]:
    """Attend scaled queries [n, kv_heads, queries, head_dim] to the slots of a block.

    Returns: the partial result, and the capped logits, `MASKED` where nothing is visible.
    """
    logits = pool.logits(tokens, block)
    # The barriers: values are gathered while one core is busy with the softmax, and the mask is computed once.
    ids, logits = lax.optimization_barrier((block.pages.ids, logits))
    values = pool.read(pool.values, ids, tokens.q.dtype)
    logits = jnp.where(lax.optimization_barrier(block.visible), pool.cap(logits), MASKED)
    # Never near MASKED itself, so that the weights of a block without visible slots are exp(-huge) = 0.
    maximum = jnp.maximum(logits.max(-1, keepdims=True), MASKED / 2)
    weights = jnp.exp(logits - maximum)
    return Partial(maximum, weights.sum(-1, keepdims=True), values.weighted(weights)), logits


def merge(a: Partial, b: Partial) -> Partial:
    """Join two partial results over disjoint slots."""
    maximum = jnp.maximum(a.maximum, b.maximum)
    fa, fb = jnp.exp(a.maximum - maximum), jnp.exp(b.maximum - maximum)
    return Partial(maximum, a.total * fa + b.total * fb, a.out * fa + b.out * fb)


def finish(
    part: Partial, sink_logits: Float[Array, "kv_heads queries"] | None
) -> tuple[Float32[Array, ...], Float32[Array, ...]]:
    """Normalise [n, kv_heads, queries, head_dim], with a learned sink logit per query head.

    Returns: outputs, zeros for no slots, and log-sum-exp [n, kv_heads, queries], -inf for no slots.
    """
    maximum, total, out = part.maximum, part.total, part.out
    if sink_logits is not None:
        sink = sink_logits.astype(jnp.float32)[None, :, :, None]
        maximum = jnp.maximum(part.maximum, sink)
        factor = jnp.exp(part.maximum - maximum)
        total, out = total * factor + jnp.exp(sink - maximum), out * factor
    total = jnp.where(total > 0, total, 1)
    lse = jnp.where(part.total == 0, -jnp.inf, maximum + jnp.log(total))
    return out / total, lse[..., 0]
