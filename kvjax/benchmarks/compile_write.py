"""Compile the writes of pages for an H200, in a loop over layers, and read what the compiler made of them.

`python -m kvjax.benchmarks.compile_write` prints a JSON row a line, in the environment that has the compilers; with
KVJAX_BESIDE_XLA set, also one for the write in XLA beside each.
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

from kvjax.benchmarks.compile_checks import whole_pool_operations  # noqa: E402
from kvjax.benchmarks.compile_kernels import (  # noqa: E402
    H200_BYTES_PER_SECOND,
    SHARED_MEMORY_LIMIT,
    shapes_asked_for,
    some_of,
)
from kvjax.benchmarks.compile_mass import read_dump  # noqa: E402
from kvjax.benchmarks.deviceless import h200_mesh, placed  # noqa: E402
from kvjax.kernels.shapes import ATTENTION_SHAPES, AttentionShape  # noqa: E402
from kvjax.kernels.write_pages import write_pages as write_pool  # noqa: E402
from kvjax.kernels.write_pages_hopper import write_pages  # noqa: E402

_LAYERS, _SPARE_PAGES = 4, 4096
SHAPES = tuple(some_of(ATTENTION_SHAPES, 4))


def faults(row: dict[str, Any]) -> list[str]:
    """Say which limits a row breaks."""
    is_kernel = row["kernel"] == "write_pages"
    limits = {
        "spills registers": row["spills"] > 0 or row["local_memory"] > 0,
        f"needs more than {SHARED_MEMORY_LIMIT} bytes of shared memory": row["smem_bytes"] > SHARED_MEMORY_LIMIT,
        "does not store by TMA": is_kernel and row["tma_stores"] == 0,
        "takes more than one launch": is_kernel and row["launches"] > 1,
        "copies a pool": row["pool_copies"] > 0 or row["alias_bytes"] != row["pool_bytes"],
        "needs more than a hundredth of the pools": is_kernel and row["temp_bytes"] > row["pool_bytes"] // 100,
    }
    return [fault for fault, is_broken in limits.items() if is_broken]


def launches(text: str) -> int:
    """Count the kernels that one turn of an optimised program's only loop launches, but for the loop's counter."""
    bodies = set(re.findall(r"body=(%[\w.\-]+)", text))
    assert len(bodies) == 1, f"{len(bodies)} loops"
    body = text[text.index(f"\n{bodies.pop()} (") :].split("\n}")[0]
    return len(re.findall(r"= (?!s32\[\])\S.*? (?:fusion|custom-call|copy|scatter)\(", body))


def compile_write(shape: AttentionShape, dump: Path, spare_pages: int = 0, *, in_xla: bool = False) -> dict[str, Any]:
    """Compile a loop over layers that writes keys and values into donated pools, and return its row.

    Kernels that are alike are compiled, and dumped, only once: `spare_pages` makes them differ.
    """
    mesh = h200_mesh()
    for old in dump.iterdir():
        old.unlink()
    touched = shape.batch * (shape.queries // shape.page_size + 1)
    pool_shape = (touched + _SPARE_PAGES + spare_pages, shape.kv_heads, shape.page_size, shape.head_dim)
    pool = jax.ShapeDtypeStruct(pool_shape, jnp.bfloat16)
    new = jax.ShapeDtypeStruct((1, shape.batch * shape.queries, shape.kv_heads, shape.head_dim), jnp.bfloat16)
    where = [jax.ShapeDtypeStruct((_LAYERS, 1, touched), jnp.int32)] * 5

    def layers(pools, new, where):
        def layer(number, pools):
            if in_xla:
                here = [of[number] for of in where]
                return tuple(write_pool(pool, of, *here) for pool, of in zip(pools, new, strict=True))
            return write_pages(pools, new, where[0], where[1], where[2], where[3], where[4], number)

        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(_LAYERS), layer, pools)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        arguments = placed(((pool, pool), (new, new), where), mesh)
        compiled = jax.jit(layers, donate_argnums=0).trace(*arguments).lower().compile()
    return _row(shape, dump, compiled, pool, new, "write_pages in XLA" if in_xla else "write_pages")


def _row(shape: AttentionShape, dump: Path, compiled, pool, new, name: str) -> dict[str, Any]:
    memory, text, moved = compiled.memory_analysis(), compiled.as_text(), 2 * 2 * new.size * new.dtype.itemsize
    row: dict[str, Any] = dict(
        kernel=name,
        format="bfloat16",
        shape=shape.label,
        **read_dump(dump),
        launches=launches(text),
        pool_bytes=2 * pool.size * pool.dtype.itemsize,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        pool_copies=len(whole_pool_operations(text, pool.size)),
        bytes=moved,
        floor_us=round(moved / H200_BYTES_PER_SECOND * 1e6, 2),
    )
    return row | dict(faults=faults(row))


if __name__ == "__main__":
    assert _DUMP is not None
    for i, attention_shape in SHAPES[: shapes_asked_for()]:
        for in_xla in (False, True) if "KVJAX_BESIDE_XLA" in os.environ else (False,):
            print(json.dumps(compile_write(attention_shape, _DUMP, i, in_xla=in_xla)), flush=True)
