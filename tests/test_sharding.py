"""Attention under `shard_map` over KV heads: every device holds its heads of every page."""

import dataclasses
import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import ids
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import kvjax
from kvjax.cache import Cache

DEVICES = 8


def one_step(cache: Cache, lengths, q, k, v, *, implementation):
    cache, step = kvjax.begin_step(cache, lengths, num_tokens=q.shape[0], max_query_length=8)
    out, cache = kvjax.attend(cache, step, 0, q, k, v, rotary=None, implementation=implementation)
    return out, kvjax.end_step(cache, step)[0]


def with_heads(cache: Cache, heads: int) -> Cache:
    return dataclasses.replace(cache, spec=dataclasses.replace(cache.spec, num_kv_heads=heads))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_heads_of_a_page_may_lie_on_several_devices(implementation):
    shape: dict[str, Any] = dict(num_layers=1, num_kv_heads=DEVICES, head_dim=8, num_pages=9, max_seqs=2)
    cache = kvjax.init_cache(
        kvjax.CacheSpec(**shape, pages_per_seq=4, max_query_length=8, page_size=8, format="float32")
    )
    rng = np.random.default_rng(0)
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("heads",), axis_types=(AxisType.Auto,))
    of_heads = jax.tree.map(lambda _: PartitionSpec(), cache)
    of_heads = dataclasses.replace(
        of_heads, keys=PartitionSpec(None, "heads"), values=PartitionSpec(None, "heads")
    )  # fmt: skip
    tokens, everywhere = PartitionSpec(None, "heads"), PartitionSpec()

    def local(cache, lengths, q, k, v):
        out, cache = one_step(with_heads(cache, 1), lengths, q, k, v, implementation=implementation)
        return out, with_heads(cache, DEVICES)

    sharded = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(of_heads, everywhere, tokens, tokens, tokens), out_specs=(tokens, of_heads),
            check_vma=False,
        ),
        donate_argnums=0,
    )  # fmt: skip
    whole = jax.jit(functools.partial(one_step, implementation=implementation))
    parts = jax.device_put(cache, jax.tree.map(lambda spec: NamedSharding(mesh, spec), of_heads))
    for lengths in ([8, 3], [1, 8], [1, 1]):
        draw = lambda heads: jnp.asarray(rng.normal(size=(16, heads, 8)), jnp.float32)  # noqa: E731
        q, k, v = draw(2 * DEVICES), draw(DEVICES), draw(DEVICES)
        expected, cache = whole(cache, ids(lengths), q, k, v)
        out, parts = sharded(parts, ids(lengths), q, k, v)
        np.testing.assert_allclose(out, expected, atol=1e-6)
    assert {shard.data.shape[1] for shard in parts.keys.addressable_shards} == {1}
    kvjax.check(cache)


@pytest.mark.slow
def test_a_step_over_eight_h200s_is_in_place(kernels_python):
    script = Path(__file__).parent / "deviceless" / "sharded_step.py"
    result = subprocess.run([kernels_python, script], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["devices"] == DEVICES and report["kernels"] > 0 and not report["faults"], report
