"""Compile attention of a decode step, its KV heads spread over 8 H200s, and print what its memory looks like.

python tests/deviceless/sharded_step.py, in an environment with the GPU compilers.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

# Else the CUDA plugin looks for a driver.
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.append(str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from helpers.programs import faults
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
from kvjax.benchmarks.deviceless import h200_mesh

DEVICES, LAYERS, SEQS, HEADS, HEAD_DIM = 8, 4, 32, 32, 128


def main() -> None:
    mesh = h200_mesh(DEVICES)
    spec = kvjax.CacheSpec(
        num_layers=LAYERS, num_kv_heads=DEVICES, head_dim=HEAD_DIM, num_pages=20001, max_seqs=SEQS, pages_per_seq=64,
        max_query_length=64,
    )  # fmt: skip
    own = dataclasses.replace(spec, num_kv_heads=1)
    cache = jax.eval_shape(lambda: kvjax.init_cache(spec))
    everywhere, by_head = PartitionSpec(), PartitionSpec(None, "x")
    of_cache = jax.tree.map(lambda _: everywhere, cache)
    of_cache = dataclasses.replace(of_cache, keys=by_head, values=by_head)

    def decode(cache, lengths, q, k, v):
        cache = dataclasses.replace(cache, spec=own)
        cache, step = kvjax.begin_step(cache, lengths, num_tokens=SEQS, max_query_length=1)

        def layer(carry, number):
            return kvjax.attend(carry[1], step, number, carry[0], k, v, rotary=None), None

        (out, cache), _ = jax.lax.scan(layer, (q, cache), jnp.arange(LAYERS, dtype=jnp.int32))
        return out, dataclasses.replace(kvjax.end_step(cache, step)[0], spec=spec)

    specs = (of_cache, everywhere, by_head, by_head, by_head)
    sharded = jax.shard_map(decode, mesh=mesh, in_specs=specs, out_specs=(by_head, of_cache), check_vma=False)
    of_tokens = lambda heads: jax.ShapeDtypeStruct((SEQS, heads, HEAD_DIM), jnp.bfloat16)  # noqa: E731
    arguments = (cache, jax.ShapeDtypeStruct((SEQS,), jnp.int32), of_tokens(HEADS), *[of_tokens(DEVICES)] * 2)

    def place(spec, tree):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    placed = jax.tree.map(place, specs, arguments, is_leaf=lambda x: isinstance(x, PartitionSpec))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(sharded, donate_argnums=0).trace(*placed).lower().compile()
    kernels = (compiled.as_text() or "").count("mosaic_gpu")
    print(json.dumps(dict(devices=DEVICES, kernels=kernels, faults=faults(compiled, own))))


if __name__ == "__main__":
    main()
