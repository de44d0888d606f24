"""Compile generation with a decoder of Llama-3.1-8B's shape for devices that are not there, and read its memory.

`python -m kvjax.benchmarks.compile_loop --target h200` prints a JSON row a line; `kvjax compile-kernels --loop` runs
it in the environment that has the compilers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from typing import Any

# Before jax reads them: without a platform the plugins look for devices.
if __name__ == "__main__":
    os.environ |= dict(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax import sizes
from kvjax.benchmarks import compile_model
from kvjax.benchmarks.compile_checks import bytes_on_a_device, whole_pool_operations
from kvjax.benchmarks.deviceless import TARGETS, mesh_of, placed
from kvjax.cache import Cache, init_cache
from kvjax.decoding import Chosen, State, decode_scan, decode_while, prefill_step
from kvjax.formats import best_page_size
from kvjax.policies import parse_policy
from kvjax.sampling import sampling
from kvjax.spec import CacheSpec

POOL_BYTES = 4 << 30  # on each device
TEMP_SHARE = 0.03  # of the pool
SEQS, CHUNK, TOKENS, STEPS = 32, 512, 128, 8
# A v5e has 16 GB, too little for 8 billion weights beside the pool; the program is the same, as it scans over layers.
_LAYERS = dict(v5e=8)
_DEVICES = dict(h200=(1, 8))
_QUANTIZED = dict(h200=("int8", "int4"))
_H2O = "h2o:budget=2048"
_POLICIES = dict(
    h200=(
        ("generate", "streaming:window=2044"),
        ("prefill", _H2O),
        ("generate", _H2O),
        ("generate", "quest:top_pages=64"),
    )
)


def faults(row: dict[str, Any], donated_bytes: int) -> list[str]:
    """Say what is wrong with a row whose program was given `donated_bytes` on a device to update in place."""
    pool = row["pool_bytes"]
    limits = {
        f"updates {row['alias_bytes']} of {donated_bytes} donated bytes in place": row["alias_bytes"] < donated_bytes,
        f"needs {row['temp_bytes']} bytes for itself, 3 % of the pool or more": row["temp_bytes"] >= TEMP_SHARE * pool,
        "makes an array as large as all keys, values or their scales": row["pool_copies"] > 0,
        "has a pool below 4 GB": pool < POOL_BYTES,
        "runs no attention kernel of its own": row["kernels"] == 0,
    }
    return [fault for fault, is_broken in limits.items() if is_broken]


def spec_of(config, devices: int, form: str = "bfloat16", policy: str = "full") -> CacheSpec:
    """Return a cache for the model with POOL_BYTES of keys and values on each device."""
    kept = parse_policy(policy)
    shape: dict[str, Any] = dict(
        num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, max_seqs=SEQS,
        pages_per_seq=512, max_query_length=CHUNK, format=form, page_size=best_page_size(form), policy=kept,
        groups=config.num_kv_heads if kept.by_head else 1,
    )  # fmt: skip
    page = sizes.pool_bytes(CacheSpec(**shape, num_pages=1024)) // 1024
    return CacheSpec(**shape, num_pages=-(-POOL_BYTES * devices // page))


def state_of(spec: CacheSpec) -> State:
    """The state of a generation, as `kvjax.batch` makes it."""
    zeros = lambda: jnp.zeros(spec.max_seqs, jnp.int32)  # noqa: E731
    return State(
        cache=init_cache(spec), finish=zeros(), token=zeros(), generated=zeros(), limit=zeros(),
        stop_ids=jnp.zeros(4, jnp.int32), sampling=sampling(spec.max_seqs), key=jax.random.key(0), seen=None,
        peak_pages=jnp.zeros(1, jnp.int32),
    )  # fmt: skip


def compile_program(
    name: str, target: str, devices: int, form: str = "bfloat16", policy: str = "full"
) -> dict[str, Any]:
    """Compile one program and return its row; all bytes are those of one device.

    Args:
        name: prefill (a chunk of prompt tokens), generate (the loop until all sequences have ended) or stream (the scan
            over a few steps).
        target: a name in `deviceless.TARGETS`.
        form: of the pages.
        policy: what the cache keeps, as the command line says it.
        devices: more than one lets the heads lie on different devices (`compile_model.TensorParallel`).
    """
    config = compile_model.llama_8b(_LAYERS.get(target, 32))
    model: Any = compile_model.abstract_decoder(config)
    if devices > 1:
        model = compile_model.TensorParallel(model, devices)
    mesh, spec = mesh_of(target, devices), spec_of(config, devices, form, policy)
    graph, weights = nnx.split(model)
    state = jax.eval_shape(lambda: state_of(spec))
    weights = compile_model.placed_by(compile_model.spread_of_weights(weights), weights, mesh)
    state = compile_model.placed_by(compile_model.spread_of_state(state), state, mesh)
    whole: Any = lambda dtype, *shape: placed(jax.ShapeDtypeStruct(shape, dtype), mesh)  # noqa: E731
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if name == "generate":
            out = Chosen(whole(jnp.int32, TOKENS, SEQS), whole(bool, TOKENS, SEQS))
            donated = (state, out)
            traced = decode_while.trace(graph, weights, state, out, whole(jnp.int32))
        elif name == "stream":
            donated = state
            traced = decode_scan.trace(graph, weights, state, steps=STEPS)
        else:
            donated = state
            chunk = whole(jnp.int32, CHUNK), whole(jnp.int32, SEQS), whole(bool, SEQS), whole(bool)
            traced = prefill_step.trace(graph, weights, state, *chunk)
        compiled = traced.lower().compile()
    return _row(name, dict(devices=devices, format=form, policy=policy), compiled, (state.cache, donated))


def _row(name: str, of: dict[str, Any], compiled: Any, given: tuple[Cache, Any]) -> dict[str, Any]:
    memory, text, (cache, donated) = compiled.memory_analysis(), compiled.as_text(), given
    pools = jax.tree.leaves([getattr(cache, of) for of in sizes.POOL])
    smallest = min(math.prod(of.sharding.shard_shape(of.shape)) for of in (*pools, *jax.tree.leaves(cache.open_keys)))
    row = dict(
        program=name,
        **of,
        pool_bytes=bytes_on_a_device(pools),
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        pool_copies=len(whole_pool_operations(text, smallest)),
        kernels=len(re.findall(r'custom_call_target="(?:mosaic_gpu|tpu_custom_call)', text)),
    )
    return row | dict(faults=faults(row, bytes_on_a_device(donated)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, required=True)
    chosen = parser.parse_args().target
    for count in _DEVICES.get(chosen, (1,)):
        for program in ("prefill", "generate", "stream"):
            print(json.dumps(compile_program(program, chosen, count)), flush=True)
    for name in _QUANTIZED.get(chosen, ()):
        for program in ("prefill", "generate"):
            print(json.dumps(compile_program(program, chosen, 1, name)), flush=True)
    for program, kept in _POLICIES.get(chosen, ()):
        print(json.dumps(compile_program(program, chosen, 1, policy=kept)), flush=True)
