"""Compile the TPU kernels for TPUs that are not there and read what the compiler made of them.

`python -m kvjax.benchmarks.compile_tpu --target v5e` prints a JSON row a line; `kvjax compile-kernels` runs it in the
environment that has the compiler.
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

from kvjax.benchmarks.compile_checks import whole_pool_operations
from kvjax.benchmarks.compile_kernels import some_of
from kvjax.benchmarks.deviceless import mesh_of, placed
from kvjax.kernels.paged_attention import Queries, Rows, tpu
from kvjax.kernels.shapes import ATTENTION_SHAPES, AttentionShape

BYTES_PER_SECOND = dict(v5e=819e9, v6e=1640e9)
VECTOR_MEMORY_LIMIT = 16 << 20  # of one kernel, by default
SCALAR_MEMORY_LIMIT = 1 << 20
POOL_BYTES = 1 << 30  # at least, so that a copy shows
TEMP_SHARE = 0.1  # of the pool


def faults(row: dict[str, Any], pool_bytes: int) -> list[str]:
    """Say which limits a row breaks, for a pool of `pool_bytes`."""
    limits = {
        f"needs more than {VECTOR_MEMORY_LIMIT} bytes of vector memory": not 0
        < row["vmem_bytes"]
        <= VECTOR_MEMORY_LIMIT,
        f"needs more than {SCALAR_MEMORY_LIMIT} bytes of scalar memory": not 0
        < row["smem_bytes"]
        <= SCALAR_MEMORY_LIMIT,
        "has fewer than 2 stages": row["stages"] < 2,
        "makes an array as large as all keys": row["pool_copies"] > 0,
        f"needs {row['temp_bytes']} bytes for itself, a tenth of the pool": row["temp_bytes"]
        >= TEMP_SHARE * pool_bytes,
    }
    return [fault for fault, is_broken in limits.items() if is_broken]


def served(shape: AttentionShape) -> bool:
    """Whether the kernel serves a shape."""
    return tpu.refuses(
        head_dim=shape.head_dim, page_size=shape.page_size, dtype="bfloat16", key_format="bfloat16",
        value_format="bfloat16",
        heads_per_kv_head=shape.heads // shape.kv_heads,
    ) is None  # fmt: skip


def compile_shape(shape: AttentionShape, target: str) -> dict[str, Any]:
    """Compile the kernel for one shape and target, and return its row."""
    mesh = mesh_of(target)
    ints: Any = lambda *of: jax.ShapeDtypeStruct(of, jnp.int32)  # noqa: E731
    page = (shape.kv_heads, shape.page_size, shape.head_dim)
    num_pages = 1 + max(shape.batch * shape.pages_per_seq, -(-POOL_BYTES // (4 * math.prod(page))))
    pool = jax.ShapeDtypeStruct((num_pages, *page), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((shape.batch * shape.queries, shape.heads, shape.head_dim), jnp.bfloat16)
    seqs = (1, 1, shape.batch)
    rows = Rows(ints(*seqs, shape.pages_per_seq), ints(*seqs), ints(*seqs), ints(1), ints(1), ints())
    queries = Queries(*(ints(shape.batch) for _ in range(4)))
    arguments = (q, pool, pool, ints(num_pages, shape.page_size), rows, queries)

    @jax.jit
    def attend(q, keys, values, positions, rows, queries):
        return tpu.paged_attention(
            q, keys, values, positions, rows, queries, scale=shape.head_dim**-0.5, max_query_length=shape.queries
        )

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = attend.trace(*placed(arguments, mesh)).lower().compile()
    return _row(shape, target, compiled, math.prod(pool.shape))


def _row(shape: AttentionShape, target: str, compiled: Any, elements: int) -> dict[str, Any]:
    text = compiled.as_text()
    call = next(line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line)
    used = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', call)
    chosen = tpu.shape_of(
        shape.kv_heads,
        shape.heads // shape.kv_heads,
        shape.page_size,
        shape.head_dim,
        4 * shape.head_dim,
        is_decode=shape.queries == 1,
    )
    row = dict(
        kernel=shape.kernel,
        format="bfloat16",
        shape=shape.label,
        vmem_bytes=int(used[1]) if used else 0,
        smem_bytes=scalar_bytes(call),
        stages=chosen.stages,
        bytes=shape.bytes_moved,
        floor_us=round(shape.bytes_moved / BYTES_PER_SECOND[target] * 1e6, 2),
        pool_copies=len(whole_pool_operations(text, elements)),
        temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
    )
    return row | dict(faults=faults(row, 4 * elements))


def scalar_bytes(call: str) -> int:
    """Bytes of scalar memory of a call of the kernel: its plan, and three rows of the page table, its last integers."""
    operands = re.search(r"operand_layout_constraints=\{(.*?\})\}", call)
    assert operands is not None
    shapes = [[int(size) for size in sizes.split(",")] for sizes in re.findall(r"s32\[([\d,]+)\]", operands[1])]
    return 4 * (sum(math.prod(sizes) for sizes in shapes[:3]) + 3 * shapes[-1][-1])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=BYTES_PER_SECOND, required=True)
    parser.add_argument("--shapes", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    options = _options()
    for _, attention_shape in some_of([shape for shape in ATTENTION_SHAPES if served(shape)], options.shapes):
        print(json.dumps(compile_shape(attention_shape, options.target)), flush=True)
