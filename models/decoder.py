"""One decoder that serves the Llama family by configuration, written on the three calls of the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

import kvjax.attention
from kvjax.cache import Cache, PooledCache
from kvjax.kernels import dense_attention
from kvjax.models.config import DecoderConfig, rotary
from kvjax.models.layers import Linear, Norm, activation_of
from kvjax.rotary import apply
from kvjax.step import Step

Attention = Callable[..., tuple[Array, Any]]


class Layer(nnx.Module):
    """Attention and feed-forward part of one layer, or of all layers with a leading axis on every parameter."""

    def __init__(self, config: DecoderConfig, weights: dict[str, Any], *, features_major: bool):
        self.config = config
        # One product each for q, k, v and for gate and up: fewer, larger products stream the weights faster.
        self.qkv = Linear(
            _joined(weights, "q", "k", "v"), _joined(weights, "q_bias", "k_bias", "v_bias"), features_major
        )
        self.o = Linear(weights["o"], None, features_major)
        self.gate_up = Linear(_joined(weights, "gate", "up"), None, features_major)
        self.down = Linear(weights["down"], None, features_major)
        self.attn_norm = Norm(weights["attn_norm"], config.norm_eps)
        self.mlp_norm = Norm(weights["mlp_norm"], config.norm_eps)
        self.q_norm, self.k_norm, self.post_attn_norm, self.post_mlp_norm = (
            Norm(weights[name], config.norm_eps) if name in weights else None
            for name in ("q_norm", "k_norm", "post_attn_norm", "post_mlp_norm")
        )
        self.k_scale, self.v_scale = (
            nnx.Param(jnp.asarray(weights[name])) if name in weights else None for name in ("k_scale", "v_scale")
        )

    def __call__(self, x: Float[Array, "tokens hidden"], layer, attention: Attention, state):
        """Run one layer.

        `attention(state, layer, q, k, v, k_scale, v_scale)` returns the attended heads and the new state; the scales
        are None if the checkpoint brings none.
        """
        config, tokens = self.config, x.shape[0]
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = self.qkv(self.attn_norm(x))
        q, k, v = jnp.split(qkv, (q_size, q_size + kv_size), axis=1)
        q, k, v = (part.reshape(tokens, -1, config.head_dim) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        scales = (None if of is None else of[...] for of in (self.k_scale, self.v_scale))
        attended, state = attention(state, layer, q, k, v, *scales)
        x = x + _optional(self.post_attn_norm, self.o(attended.reshape(tokens, q_size)))
        gate, up = jnp.split(self.gate_up(self.mlp_norm(x)), 2, axis=1)
        x = x + _optional(self.post_mlp_norm, self.down(activation_of(config.activation)(gate) * up))
        return x, state


def _optional(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


def _joined(weights: dict[str, Any], *names: str):
    if names[0] not in weights:
        return None
    # Rows are outputs: the last axis but one of a matrix, the last of a bias.
    parts = [weights[name] for name in names]
    return _numpy_of(parts).concatenate(parts, axis=-1 if names[0].endswith("bias") else -2)


def _numpy_of(arrays: list[Any]):
    """numpy for arrays in the host's memory, jax.numpy for those on a device and for shapes (`nnx.eval_shape`)."""
    return np if isinstance(arrays[0], np.ndarray) else jnp


class Decoder(nnx.Module):
    """A decoder-only language model over a paged cache.

    Args:
        config: shapes and family.
        weights: canonical arrays as `kvjax.models.checkpoint` returns them, in the compute dtype.
        scan: stack all layers and scan over them (fast to compile, best on GPU and TPU) or unroll them with one leaf a
            layer (on CPUs a scan copies each layer's slice of the weights every step). Both give the same logits.
        features_major: compute small batches as `W @ x.T`, which reads [out, in] weights fastest on CPUs.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: dict[str, Any],
        *,
        scan: bool | None = None,
        features_major: bool | None = None,
    ):
        on_cpu = jax.default_backend() == "cpu"
        self.config = config
        self.scan = not on_cpu if scan is None else scan
        features_major = on_cpu if features_major is None else features_major
        self.embed = nnx.Param(jnp.asarray(weights["embed"]))
        self.final_norm = Norm(weights["final_norm"], config.norm_eps)
        head = None if config.tie_word_embeddings else weights["lm_head"]
        self.head = Linear(head, None, features_major)
        self.rotary = nnx.data(rotary(config))
        layers = weights["layers"]
        if self.scan:
            of_all = {name: [layer[name] for layer in layers] for name in layers[0]}
            layers = [{name: _numpy_of(arrays).stack(arrays) for name, arrays in of_all.items()}]
        self.layers = nnx.List([Layer(config, layer, features_major=features_major) for layer in layers])

    def hidden(self, tokens: Int32[Array, " tokens"], attention: Attention, state):
        """Return the normalised output of the last layer, [tokens, hidden], and the state that `attention` carries."""
        x = self.embed[tokens]
        x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        if self.scan and len(getattr(state, "of_pools", ())) < 2:
            structure, weights = nnx.split(self.layers[0])

            def body(carry, scanned):
                layer, slices = scanned
                return nnx.merge(structure, slices)(carry[0], layer, attention, carry[1]), None

            numbers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
            (x, state), _ = jax.lax.scan(body, (x, state), (numbers, weights))
        else:
            for number in range(self.config.num_layers):
                x, state = self._layer(number)(x, number, attention, state)
        return self.final_norm(x), state

    def _layer(self, number: int) -> Layer:
        """One layer, cut out of the stack where the layers are stacked."""
        if not self.scan:
            return self.layers[number]
        structure, weights = nnx.split(self.layers[0])
        return nnx.merge(structure, jax.tree.map(lambda of_all: of_all[number], weights))

    def logits(self, hidden: Float[Array, "n hidden"]) -> Float[Array, "n vocab"]:
        """Return float32 logits of hidden states."""
        tied = self.embed[...] if self.config.tie_word_embeddings else None
        logits = self.head(hidden, tied).astype(jnp.float32)
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def __call__[C: (Cache, PooledCache)](
        self, cache: C, step: Step, tokens: Int32[Array, " tokens"], *, all_tokens: bool = False
    ) -> tuple[Float[Array, "n vocab"], C]:
        """Run the packed tokens of one step through the model.

        Returns: float32 logits of every sequence's last token [seqs, vocab] (of no meaning for a sequence that brings
            none), or of all tokens [tokens, vocab]; and the cache, before `end_step`.
        """
        step = kvjax.attention.plan_step(cache, step, self.config.num_heads)

        def attention(cache, layer, q, k, v, k_scale, v_scale):
            return kvjax.attention.attend(
                cache, step, layer, q, k, v, rotary=self.rotary, scale=self.config.attention_scale,
                soft_cap=self.config.attention_soft_cap, k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip

        hidden, cache = self.hidden(tokens, attention, cache)
        return self.logits(hidden if all_tokens else hidden[step.last_token]), cache

    def dense(self, tokens: Int32[Array, " tokens"]) -> Float[Array, "tokens vocab"]:
        """Return the logits of one whole sequence without a cache (for training and as a reference)."""
        position = jnp.arange(tokens.shape[0], dtype=jnp.int32)

        def attention(state, layer, q, k, v, *_):
            q, k = (apply(self.rotary, x, position, layer) for x in (q, k))
            return dense_attention.attend(
                q, k, v, window=self._window(layer), scale=self.config.attention_scale,
                soft_cap=self.config.attention_soft_cap,
            ), state  # fmt: skip

        return self.logits(self.hidden(tokens, attention, ())[0])

    def _window(self, layer) -> Int32[Array, ""]:
        windows = [2**31 - 1 if window is None else window for window in self.config.windows]
        return jnp.array(windows, jnp.int32)[layer]
