"""A decoder of Llama-3.1-8B's shape without any weights, on one device or spread over several."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.models.config import DecoderConfig, rotary
from kvjax.models.decoder import Decoder

AXIS = "x"
_EVERYWHERE = PartitionSpec()
_POOL = PartitionSpec(None, AXIS)
# By the name of the map that holds a weight, [layers, out, in] or [out, in]: which of its rows or columns lie apart.
_SPREAD = dict(
    qkv=PartitionSpec(None, AXIS), gate_up=PartitionSpec(None, AXIS), o=PartitionSpec(None, None, AXIS),
    down=PartitionSpec(None, None, AXIS), head=PartitionSpec(AXIS),
)  # fmt: skip


def llama_8b(num_layers: int = 32) -> DecoderConfig:
    """The configuration of Llama-3.1-8B.

    Source: Grattafiori et al., The Llama 3 Herd of Models (arXiv 2407.21783), table 3.
    """
    return DecoderConfig(
        model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=num_layers,
        num_heads=32, num_kv_heads=8, head_dim=128, norm_eps=1e-5, activation="silu", tie_word_embeddings=False,
        attention_scale=128**-0.5, windows=(None,) * num_layers, rope_theta=500000.0, max_position=131072,
    )  # fmt: skip


def abstract_decoder(config: DecoderConfig, dtype: str = "bfloat16") -> Decoder:
    """Return a decoder that scans over its layers, with shapes in the place of its weights."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = dict(q=(q, hidden), k=(kv, hidden), v=(kv, hidden), o=(hidden, q), gate=(inner, hidden))
    matrices |= dict(up=(inner, hidden), down=(hidden, inner), attn_norm=(hidden,), mlp_norm=(hidden,))
    of: Any = lambda shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # noqa: E731
    layer = {name: of(shape) for name, shape in matrices.items()}
    vocabulary = of((config.vocab_size, hidden))
    weights = dict(embed=vocabulary, lm_head=vocabulary, final_norm=of((hidden,)), layers=[layer] * config.num_layers)
    decoder = nnx.eval_shape(lambda weights: Decoder(config, weights, scan=True, features_major=False), weights)
    # nnx takes shapes outside of a Param for static.
    decoder.rotary = nnx.data(rotary(config))
    return decoder


class Summed(nnx.Module):
    """A linear map whose inputs lie on different devices: every device adds the others' parts."""

    def __init__(self, linear: nnx.Module):
        self.linear = linear

    def __call__(self, x):
        return jax.lax.psum(self.linear(x), AXIS)


class Gathered(nnx.Module):
    """A linear map whose outputs lie on different devices: every device gets all of them."""

    def __init__(self, linear: nnx.Module):
        self.linear = linear

    def __call__(self, x, weight=None):
        return jax.lax.all_gather(self.linear(x, weight), AXIS, axis=1, tiled=True)


class TensorParallel(nnx.Module):
    """A decoder over the devices of the mesh in use, as `kvjax.generate` takes it.

    Query and KV heads with their pages, the columns of the feed-forward part and the vocabulary of the head lie on
    different devices; page tables, the allocator, embeddings and norms on all of them. The whole model is one
    `shard_map`: every device runs its share of each layer, and adds up with the others twice a layer. `begin_step`,
    sampling and `end_step` stay outside: every device does all of that.

    Args:
        decoder: scanned, with a head of its own (no tied embeddings). The rows of its joined maps stand device by
            device: q, k and v heads of the first device, those of the second, ...; gate and up likewise.
        devices: size of the mesh's axis "x", by which the KV heads can be divided.
    """

    def __init__(self, decoder: Decoder, devices: int):
        self.config, self.devices = decoder.config, devices
        whole: Any = decoder
        layer, config = whole.layers[0], decoder.config
        layer.config = dataclasses.replace(
            config, num_heads=config.num_heads // devices, num_kv_heads=config.num_kv_heads // devices
        )
        layer.o, layer.down, whole.head = Summed(layer.o), Summed(layer.down), Gathered(whole.head)
        self.decoder = decoder

    def __call__(self, cache, step, tokens):
        """Run one step; see `Decoder.__call__`."""
        structure, weights = nnx.split(self.decoder)
        spec = cache.spec
        own = dataclasses.replace(spec, num_kv_heads=spec.num_kv_heads // self.devices)

        def run(weights, cache, step, tokens):
            logits, cache = nnx.merge(structure, weights)(dataclasses.replace(cache, spec=own), step, tokens)
            return logits, dataclasses.replace(cache, spec=spec)

        pools, step_specs = spread_of_state(cache), jax.tree.map(lambda _: _EVERYWHERE, step)
        specs = (spread_of_weights(weights), pools, step_specs, _EVERYWHERE)
        return jax.shard_map(run, in_specs=specs, out_specs=(_EVERYWHERE, pools), check_vma=False)(
            weights, cache, step, tokens
        )


def spread_of_weights(weights):
    """Return the PartitionSpec of every weight of a `TensorParallel` decoder."""

    def of(path, _):
        names = {str(getattr(entry, "key", "")) for entry in path}
        return next((spread for name, spread in _SPREAD.items() if name in names), _EVERYWHERE)

    return jax.tree_util.tree_map_with_path(of, weights)


def spread_of_state(state):
    """Return the PartitionSpec of every array of a cache, or of a state with a cache: keys and values by KV heads."""

    def of(path, _):
        return _POOL if getattr(path[-1], "name", "") in ("keys", "values") else _EVERYWHERE

    return jax.tree_util.tree_map_with_path(of, state)


def placed_by(spread, tree, mesh: Mesh):
    """Give the shapes of `tree` a place on the devices of `mesh`, by a tree of PartitionSpec."""

    def place(spec, shape):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, spread, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
