"""Compile a loop that writes pages and attends to them in every layer, for a TPU on a machine without one.

python tests/deviceless/tpu_loop.py v5e|v6e, in an environment with the TPU compiler; prints its memory.
"""

import json
import math
import os
import sys
from typing import Any

# Else the plugins look for devices.
os.environ |= dict(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.benchmarks.compile_checks import bytes_on_a_device, whole_pool_operations
from kvjax.benchmarks.deviceless import mesh_of, placed
from kvjax.kernels.paged_attention import Queries, Rows, tpu
from kvjax.kernels.write_pages import write_pages

SEQS, HEADS, KV_HEADS, DIM, SIZE, LAYERS, ENTRIES = 8, 32, 8, 128, 16, 4, 512
PAGES = 1 + (512 << 20) // (KV_HEADS * SIZE * DIM * 2)  # 512 MB of keys, as many of values


def step(keys, values, positions, lengths, x, rows):
    """One token a sequence through all layers: [seqs, heads, head_dim] -> the same."""
    number, one = jnp.arange(SEQS, dtype=jnp.int32), jnp.ones(SEQS, jnp.int32)
    pages = rows.page_table[:, :, number, lengths // SIZE]
    slot = (lengths % SIZE)[None]
    positions = positions.at[pages[:, 0], slot].set(lengths[None])
    queries = Queries(number, one, lengths, 0 * one)

    def layer(carry, index):
        keys, values, x = carry
        new = x[None, :, :: HEADS // KV_HEADS]
        keys, values = (
            write_pages(of, new, pages[index], number[None], slot, *[slot + 1] * 2) for of in (keys, values)
        )
        here = Rows(rows.page_table, rows.first_page, rows.end_slot + 1, rows.rings, rows.windows, index)
        attention = tpu.paged_attention(x, keys, values, positions, here, queries, scale=0.1, max_query_length=1)
        return (keys, values, attention.out), None

    (keys, values, x), _ = lax.scan(layer, (keys, values, x), jnp.arange(LAYERS, dtype=jnp.int32))
    return keys, values, positions, lengths + 1, x


def loop(state, rows, steps):
    """As many steps as asked for."""
    one_more: Any = lambda of: (of[0] + 1, step(*of[1], rows=rows))  # noqa: E731
    return lax.while_loop(lambda of: of[0] < steps, one_more, (jnp.int32(0), state))


def main(target: str) -> None:
    mesh = mesh_of(target)
    ints: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    floats: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    pool = floats(PAGES, KV_HEADS, SIZE, DIM)
    state = (pool, pool, ints(PAGES, SIZE), ints(SEQS), floats(SEQS, HEADS, DIM))
    of_rows = ints(LAYERS, 1, SEQS)
    rows = Rows(ints(LAYERS, 1, SEQS, ENTRIES), of_rows, of_rows, ints(LAYERS), ints(LAYERS), ints())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(loop, donate_argnums=0).trace(*placed((state, rows, ints()), mesh))
        compiled = traced.lower().compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    report = dict(
        device=mesh.devices.flat[0].device_kind,
        pool_bytes=bytes_on_a_device([pool, pool]),
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        pool_copies=whole_pool_operations(text, math.prod(pool.shape)),
        kernels=text.count('custom_call_target="tpu_custom_call"'),
    )
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
