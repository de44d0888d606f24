"""The programs of generation, lowered for a pool of 256 MB that is never allocated, and what to look for in them.

Needs no pytest: the deviceless checks use it in another environment.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from helpers.decoders import tiny_decoder, unchecked_shapes

from kvjax import sizes
from kvjax.batch import Batch
from kvjax.benchmarks.compile_checks import whole_pool_operations
from kvjax.cache import init_cache
from kvjax.decoding import Chosen, decode_scan, decode_while, prefill_step
from kvjax.options import Options
from kvjax.policy import Policy
from kvjax.spec import CacheSpec
from kvjax.step import begin_step, end_step

POOL_BYTES = 1 << 30  # beside it the 32 MB of workspace that cuBLAS wants on an H200 are little
SEQS, CHUNK = 4, 64
KEEPS_ALL = Policy()


def _one_step(graph, weights, cache, token):
    """A decode step as the author of a model writes it, without sampling."""
    model = nnx.merge(graph, weights)
    cache, step = begin_step(cache, jnp.ones(SEQS, jnp.int32), num_tokens=SEQS, max_query_length=1)
    logits, cache = model(cache, step, token)
    return end_step(cache, step)[0], logits.argmax(-1)


def pool_spec(model, page_format: str, policy: Policy) -> CacheSpec:
    """A cache for `model` with 256 MB of keys and values."""
    config = model.config
    shape: dict[str, Any] = dict(
        num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, max_seqs=SEQS,
        pages_per_seq=32, max_query_length=CHUNK, format=page_format, windows=config.windows,
        policy=policy,
    )  # fmt: skip
    page = sizes.pool_bytes(CacheSpec(**shape, num_pages=1000)) // 1000
    return CacheSpec(**shape, num_pages=POOL_BYTES // page)


def model_for_programs(*, scan: bool, dtype: str = "float32"):
    """A model whose weights are small beside the pool; one of its layers has a window."""
    changes: dict[str, Any] = dict(hidden_size=128, intermediate_size=128, head_dim=64, vocab_size=256)
    return tiny_decoder(scan=scan, dtype=dtype, num_layers=3, windows=(None, 100, None), **changes)


def lowered(
    name: str, *, scan: bool, dtype: str = "float32", policy: Policy = KEEPS_ALL,
    place: Callable[[Any], Any] = lambda shapes: shapes,
):  # fmt: skip
    """Lower one program.

    Args:
        name: step, while, scan or prefill.
        scan: whether the model scans over its layers.
        dtype: of model and pages.
        policy: what the cache keeps.
        place: is applied to all arguments (as shapes), to give them a device.

    Returns: the lowered program, and the spec of its cache.
    """
    model = model_for_programs(scan=scan, dtype=dtype)
    spec = pool_spec(model, dtype, policy)
    run = Batch(model, [[1]] * SEQS, Options(max_new_tokens=8, format=dtype))
    with unchecked_shapes():
        state = dataclasses.replace(run.state, cache=jax.eval_shape(lambda: init_cache(spec)))
        graph, weights = nnx.split(model)
        weights, state = place(_shapes(weights)), place(_shapes(state))
        ints = lambda *shape: place(jax.ShapeDtypeStruct(shape, jnp.int32))  # noqa: E731
        bools = lambda *shape: place(jax.ShapeDtypeStruct(shape, bool))  # noqa: E731
        if name == "step":
            step = jax.jit(_one_step, static_argnums=0, donate_argnums=2)
            return step.lower(graph, weights, state.cache, ints(SEQS)), spec
        if name == "while":
            out = Chosen(ints(8, SEQS), bools(8, SEQS))
            return decode_while.lower(graph, weights, state, out, ints()), spec
        if name == "scan":
            return decode_scan.lower(graph, weights, state, steps=8), spec
        arguments = ints(CHUNK), ints(SEQS), bools(SEQS), bools()
        return prefill_step.lower(graph, weights, state, *arguments), spec


def _shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def faults(compiled, spec: CacheSpec) -> list[str]:
    """Return what is wrong with a compiled program that should update a pool of `spec` in place."""
    pool, memory = sizes.pool_bytes(spec), compiled.memory_analysis()
    found = []
    if memory.alias_size_in_bytes < pool:
        found.append(f"alias {memory.alias_size_in_bytes} bytes are less than the pool's {pool}")
    if memory.temp_size_in_bytes >= 0.05 * pool:
        found.append(f"temp {memory.temp_size_in_bytes} bytes are 5 % of the pool's {pool} or more")
    elements = sizes.cache_shapes(spec)["keys"].size
    return found + [f"touches the whole pool: {line}" for line in whole_pool_operations(compiled.as_text(), elements)]
