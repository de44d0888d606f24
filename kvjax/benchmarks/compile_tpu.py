"""Compile the TPU kernels for TPUs that are not there and read what the compiler made of them.

`python -m kvjax.benchmarks.compile_tpu --target v5e` prints a JSON row a line; `kvjax compile-kernels` runs it in the
environment that has the compiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
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

from kvjax.benchmarks.compile_checks import bytes_on_a_device, whole_pool_operations
from kvjax.benchmarks.compile_kernels import some_of
from kvjax.benchmarks.deviceless import mesh_of, placed
from kvjax.kernels.formats import FORMATS, Stored
from kvjax.kernels.paged_attention import Queries, Rows, tpu
from kvjax.kernels.shapes import ATTENTION_SHAPES, AttentionShape

BYTES_PER_SECOND = dict(v5e=819e9, v6e=1640e9)
VECTOR_MEMORY_LIMIT = 16 << 20  # of one kernel, by default
SCALAR_MEMORY_LIMIT = 1 << 20
POOL_BYTES = 1 << 30  # at least, so that a copy shows
QUANTIZED_POOL_BYTES = 8 << 30  # copies of the scales of a smaller one fit vector memory, and do not show
TEMP_SHARE = 0.1  # of the pool
PLAIN = ("bfloat16", "bfloat16")
# Formats of keys and of values.
QUANTIZED = (
    ("fp8_e4m3", "fp8_e4m3"),
    ("int8", "int8"),
    ("int4_hadamard", "int4_hadamard"),
    ("int4_per_channel", "int4_hadamard"),
)


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


def served(shape: AttentionShape, forms: tuple[str, str] = PLAIN) -> bool:
    """Whether the kernel serves a shape with keys and values in those formats."""
    keys, values = forms
    return tpu.refuses(
        head_dim=shape.head_dim, page_size=shape.page_size, dtype=PLAIN[0], key_format=keys, value_format=values,
        heads_per_kv_head=shape.heads // shape.kv_heads,
    ) is None  # fmt: skip


def quantized_shapes(forms: tuple[str, str]) -> list[AttentionShape]:
    """Shapes to compile with those formats: decode and prefill, with the smallest and the largest pages served."""
    shapes = [shape for shape in ATTENTION_SHAPES if shape.kv_heads == 8 and (shape.batch, shape.queries) != (1, 1)]
    found: dict[tuple[str, int], AttentionShape] = {}
    for shape, size in itertools.product(shapes, tpu.PAGE_SIZES):
        resized = dataclasses.replace(shape, page_size=size)
        if served(resized, forms):
            found.setdefault((shape.kernel, size), resized)
    sizes = [size for _, size in found]
    return [shape for shape in found.values() if shape.page_size in (min(sizes), max(sizes))]


def stored_shape(form: str, num_pages: int, heads: int, page_size: int, head_dim: int) -> Stored:
    """Shapes of the arrays that hold keys or values in a format."""
    of = FORMATS[form]
    codes = jax.ShapeDtypeStruct((num_pages, heads, page_size, head_dim // of.per_code), of.dtype)
    scale = jax.ShapeDtypeStruct((num_pages, heads, head_dim if of.is_per_channel else page_size), of.scale_dtype)
    return Stored(codes, (scale,) * of.num_scales, of)  # pyright: ignore[reportArgumentType]


def compile_shape(shape: AttentionShape, target: str, forms: tuple[str, str] = PLAIN) -> dict[str, Any]:
    """Compile the kernel for one shape, target and formats of keys and values, and return its row."""
    mesh = mesh_of(target)
    ints: Any = lambda *of: jax.ShapeDtypeStruct(of, jnp.int32)  # noqa: E731
    page = (shape.kv_heads, shape.page_size, shape.head_dim)
    page_bytes = bytes_on_a_device([stored_shape(form, 1, *page) for form in forms])
    least_bytes = POOL_BYTES if forms == PLAIN else QUANTIZED_POOL_BYTES
    num_pages = 1 + max(shape.batch * shape.pages_per_seq, -(-least_bytes // page_bytes))
    keys, values = (stored_shape(form, num_pages, *page) for form in forms)
    q = jax.ShapeDtypeStruct((shape.batch * shape.queries, shape.heads, shape.head_dim), PLAIN[0])
    seqs = (1, 1, shape.batch)
    rows = Rows(ints(*seqs, shape.pages_per_seq), ints(*seqs), ints(*seqs), ints(1), ints(1), ints())
    queries = Queries(*(ints(shape.batch) for _ in range(4)))
    arguments = (q, keys, values, ints(num_pages, shape.page_size), rows, queries)

    @jax.jit
    def attend(q, keys, values, positions, rows, queries):
        return tpu.paged_attention(
            q, keys, values, positions, rows, queries, scale=shape.head_dim**-0.5, max_query_length=shape.queries
        )

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = attend.trace(*placed(arguments, mesh)).lower().compile()
    return _row(shape, target, compiled, keys, values)


def _row(shape: AttentionShape, target: str, compiled: Any, keys: Stored, values: Stored) -> dict[str, Any]:
    text = compiled.as_text()
    call = next(line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line)
    used = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', call)
    slot_bytes = sum(of.codes.shape[3] * of.codes.dtype.itemsize for of in (keys, values))
    chosen = tpu.shape_of(
        shape.kv_heads, shape.heads // shape.kv_heads, shape.page_size, shape.head_dim, slot_bytes,
        is_decode=shape.queries == 1,
    )  # fmt: skip
    pool_bytes = bytes_on_a_device([keys, values])
    moved = bytes_moved(shape, pool_bytes // keys.codes.shape[0])
    row = dict(
        kernel=shape.kernel,
        format=keys.form.name if keys.form == values.form else f"{keys.form.name}, {values.form.name}",
        shape=shape.label,
        vmem_bytes=int(used[1]) if used else 0,
        smem_bytes=scalar_bytes(call),
        stages=chosen.stages,
        bytes=moved,
        floor_us=round(moved / BYTES_PER_SECOND[target] * 1e6, 2),
        pool_copies=len(whole_pool_operations(text, min(math.prod(of.codes.shape) for of in (keys, values)))),
        temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
    )
    return row | dict(faults=faults(row, pool_bytes))


def bytes_moved(shape: AttentionShape, page_bytes: int) -> int:
    """Bytes that must be moved where a page of keys, values and their scales has `page_bytes`."""
    slot_of_2_bytes = 2 * shape.kv_heads * shape.head_dim * 2
    tokens = 2 * shape.batch * shape.queries * shape.heads * shape.head_dim * 2
    return (shape.bytes_moved - tokens) // slot_of_2_bytes * page_bytes // shape.page_size + tokens


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
    asked = [
        (shape, PLAIN) for _, shape in some_of([shape for shape in ATTENTION_SHAPES if served(shape)], options.shapes)
    ]
    if options.shapes is None:
        asked += [(shape, forms) for forms in QUANTIZED for shape in quantized_shapes(forms)]
    for attention_shape, of_pages in asked:
        print(json.dumps(compile_shape(attention_shape, options.target, of_pages)), flush=True)
