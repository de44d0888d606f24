"""Compile the Hopper kernel of attention mass for an H200 and read what the compiler made of it.

`python -m kvjax.benchmarks.compile_mass` prints a JSON row a line, in the environment that has the compilers.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

# Before jax reads them.
_DUMP = Path(tempfile.mkdtemp()) if __name__ == "__main__" else None
if _DUMP is not None:
    os.environ |= dict(
        JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_SASS="1", MOSAIC_GPU_DUMP_TO=str(_DUMP)
    )

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from kvjax.benchmarks.compile_kernels import H200_BYTES_PER_SECOND, faults, shapes_asked_for  # noqa: E402
from kvjax.benchmarks.deviceless import h200_mesh, placed  # noqa: E402
from kvjax.kernels.attention_mass import hopper  # noqa: E402
from kvjax.kernels.paged_attention import Queries, Rows  # noqa: E402
from kvjax.kernels.shapes import ATTENTION_SHAPES, AttentionShape  # noqa: E402

# Instructions to count in the machine code.
_COUNTED = dict(
    hgmma=r"\bHGMMA", tma_loads=r"\b(UTMALDG|UBLKCP)", tma_stores=r"\bUTMASTG", local_memory=r"\b(LDL|STL)\b"
)
LAST_QUERIES = 32  # a policy that looks at the end of a prompt asks for so many
_PREFILLS = [shape for shape in ATTENTION_SHAPES if shape.kernel == "prefill"]
_FIRST = {shape.head_dim: shape for shape in reversed(_PREFILLS)}
# All queries of a chunk, or only the last ones: one of each head_dim, and many short chunks.
CASES = (
    *((shape, None) for shape in (*_FIRST.values(), _PREFILLS[-1])),
    (_FIRST[128], LAST_QUERIES),
)


def bytes_moved(shape: AttentionShape, queries: int) -> int:
    """Bytes that must be moved: the visible keys, queries and lse once, a column sum for each slot and KV head."""
    seen = shape.context if shape.window is None else min(shape.context, shape.window + queries - 1)
    of_slots = seen * shape.kv_heads * (shape.head_dim * 2 + 4)
    return shape.batch * (of_slots + queries * shape.heads * (shape.head_dim * 2 + 4))


def compile_mass(
    shape: AttentionShape, dump: Path, spare_pages: int = 0, *, last: int | None = None, options: Any = None
) -> dict[str, Any]:
    """Compile the kernel for one shape, and return its row.

    Args:
        shape: of the prefill.
        dump: folder that the kernel's dumps go to; emptied before.
        spare_pages: kernels that are alike are compiled, and dumped, only once; this makes them differ.
        last: how many of each sequence's last queries are asked for, None for all.
        options: further arguments of `attention_mass`.
    """
    mesh = h200_mesh()
    for old in dump.iterdir():
        old.unlink()
    queries = min(shape.queries, last or shape.queries)
    ints: Any = lambda *of: jax.ShapeDtypeStruct(of, jnp.int32)  # noqa: E731
    num_pages = min(shape.batch * shape.pages_per_seq, 1 << 20) + 1 + spare_pages
    pool = jax.ShapeDtypeStruct((num_pages, shape.kv_heads, shape.page_size, shape.head_dim), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((shape.batch * shape.queries, shape.heads, shape.head_dim), jnp.bfloat16)
    seqs = (1, 1, shape.batch)
    rows = Rows(ints(*seqs, shape.pages_per_seq), ints(*seqs), ints(*seqs), ints(1), ints(1), ints())
    given = Queries(*(ints(shape.batch) for _ in range(4)))
    lse = jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)
    arguments = (q, lse, pool, ints(num_pages, shape.page_size), rows, given)

    @jax.jit
    def mass(q, lse, keys, positions, rows, given):
        return hopper.attention_mass(
            q, lse, keys, positions, rows, given.last(queries), scale=shape.head_dim**-0.5, max_query_length=queries,
            **options or {},
        )  # fmt: skip

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        mass.trace(*placed(arguments, mesh)).lower().compile()
    return _row(shape, queries, dump)


def read_dump(dump: Path) -> dict[str, int]:
    """Return what the compiler made of the kernel that was dumped: registers, memory, and counted instructions."""
    text = {suffix: "".join(path.read_text() for path in dump.glob(f"*{suffix}*")) for suffix in ("ptxas", "sass")}
    resources = "".join(path.read_text() for path in dump.glob("*.resources*"))
    largest = lambda pattern, of: max(map(int, re.findall(pattern, of)), default=0)  # noqa: E731
    return dict(
        registers=largest(r"Used (\d+) registers", text["ptxas"]),
        spills=largest(r"(\d+) bytes spill", text["ptxas"]),
        smem_bytes=largest(r"smem_scratch_bytes=(\d+)", resources),
        **{name: len(re.findall(pattern, text["sass"])) for name, pattern in _COUNTED.items()},
    )


def _row(shape: AttentionShape, queries: int, dump: Path) -> dict[str, Any]:
    chosen = hopper.shape_of(shape.head_dim, shape.kv_heads, queries)
    moved = bytes_moved(shape, queries)
    row: dict[str, Any] = dict(
        kernel="attention_mass",
        format="bfloat16",
        shape=shape.label if queries == shape.queries else f"{shape.label}, last {queries}",
        stages=min(chosen.key_stages, chosen.query_stages),
        **read_dump(dump),
        bytes=moved,
        floor_us=round(moved / H200_BYTES_PER_SECOND * 1e6, 2),
    )
    return row | dict(faults=faults(row))


if __name__ == "__main__":
    assert _DUMP is not None
    for i, (attention_shape, last) in enumerate(CASES[: shapes_asked_for()]):
        print(json.dumps(compile_mass(attention_shape, _DUMP, i, last=last)), flush=True)
