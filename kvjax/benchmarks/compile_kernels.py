"""Compile the Hopper kernels for an H200 and read what the compiler made of them.

`python -m kvjax.benchmarks.compile_kernels` prints a JSON row a line; `kvjax compile-kernels` runs it in the
environment that has the compilers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import tempfile
from collections.abc import Sequence
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

from kvjax.benchmarks.deviceless import h200_mesh, placed  # noqa: E402
from kvjax.kernels.formats import FORMATS, Stored  # noqa: E402
from kvjax.kernels.paged_attention import Queries, Rows, hopper  # noqa: E402
from kvjax.kernels.paged_attention.hopper_shared import Config  # noqa: E402
from kvjax.kernels.shapes import ATTENTION_SHAPES, AttentionShape  # noqa: E402

H200_BYTES_PER_SECOND = 4.8e12
SHARED_MEMORY_LIMIT = 232448
REGISTER_LIMIT = 255
# What the kernel can do beside attention: each needs registers and shared memory.
FEATURES = ("soft_cap", "sink_logits", "sinks", "page_list", "slot_logits")
_WITH_FEATURES = (
    ("decode", 128, ("soft_cap", "sink_logits")),
    ("decode", 128, ("sinks",)),
    ("decode", 128, ("page_list", "slot_logits")),
    ("prefill", 128, ("soft_cap", "sink_logits", "sinks")),
    ("prefill", 128, ("slot_logits",)),
    ("decode", 256, ("soft_cap", "sink_logits", "sinks", "slot_logits")),
    ("decode", 256, ("page_list",)),
    ("prefill", 256, ("soft_cap", "sink_logits", "sinks", "slot_logits")),
)
PLAIN = ("bfloat16", "bfloat16")
# Quantised pages: model, kernel, formats of keys and of values.
_QUANTIZED = (
    ("Llama-3.1-8B", "decode", ("fp8_e4m3", "fp8_e4m3")),
    ("Llama-3.1-8B", "decode", ("int8", "int8")),
    ("Llama-3.1-8B", "decode", ("int4_hadamard", "int4_hadamard")),
    ("Qwen3-32B", "decode", ("int4_per_channel", "int4_hadamard")),
    ("Llama-3.1-8B", "prefill", ("int4_per_channel", "int4_hadamard")),
    ("gpt-oss-120b local", "decode", ("int8", "int8")),
    ("Gemma-2-9B", "decode", ("int4_per_channel", "int4_hadamard")),
    ("Gemma-2-9B", "prefill", ("fp8_e4m3", "fp8_e4m3")),
)
_WARPGROUP = 128  # threads
SLOT_BYTES_LIMIT = 1.05  # times those that are stored: positions come on top
# Instructions to count in the machine code.
_COUNTED = dict(hgmma=r"\bHGMMA", tma_loads=r"\b(UTMALDG|UBLKCP)", local_memory=r"\b(LDL|STL)\b")


def faults(row: dict[str, Any]) -> list[str]:
    """Say which limits a row breaks."""
    limits = {
        "spills registers": row["spills"] > 0 or row["local_memory"] > 0,
        f"needs more than {REGISTER_LIMIT} registers": not 0 < row["registers"] <= REGISTER_LIMIT,
        f"needs more than {SHARED_MEMORY_LIMIT} bytes of shared memory": row["smem_bytes"] > SHARED_MEMORY_LIMIT,
        "has fewer than 2 stages": row["stages"] < 2,
        "does not use the tensor cores": row["hgmma"] == 0,
        "does not load by TMA": row["tma_loads"] == 0,
        "copies more than pages hold": row.get("slot_bytes", 0) > SLOT_BYTES_LIMIT * row.get("stored_bytes", 0),
    }
    return [fault for fault, is_broken in limits.items() if is_broken]


def stored_shape(form: str, num_pages: int, shape: AttentionShape) -> Stored:
    """Shapes of the arrays that hold keys or values in a format."""
    of, pages = FORMATS[form], (num_pages, shape.kv_heads)
    codes = jax.ShapeDtypeStruct((*pages, shape.page_size, shape.head_dim // of.per_code), of.dtype)
    scale = jax.ShapeDtypeStruct((*pages, shape.head_dim if of.is_per_channel else shape.page_size), of.scale_dtype)
    return Stored(codes, (scale,) * of.num_scales, of)  # pyright: ignore[reportArgumentType]


def compile_shape(
    shape: AttentionShape, dump: Path, spare_pages: int = 0, features: Sequence[str] = (),
    forms: tuple[str, str] = PLAIN,
) -> dict[str, Any]:  # fmt: skip
    """Compile the kernel for one shape, and return its row.

    Args:
        shape: of one layer's attention.
        dump: folder that the kernel's dumps go to; emptied before.
        spare_pages: kernels that are alike are compiled, and dumped, only once; this makes them differ.
        features: some of FEATURES.
        forms: formats of keys and of values.
    """
    mesh = h200_mesh()
    for old in dump.iterdir():
        old.unlink()
    ints: Any = lambda *of: jax.ShapeDtypeStruct(of, jnp.int32)  # noqa: E731
    num_pages = min(shape.batch * shape.pages_per_seq, 1 << 20) + 1 + spare_pages
    keys, values = (stored_shape(form, num_pages, shape) for form in forms)
    q = jax.ShapeDtypeStruct((shape.batch * shape.queries, shape.heads, shape.head_dim), jnp.bfloat16)
    seqs, sinks = (1, 1, shape.batch), 4 if "sinks" in features else 0
    of_rows = (ints(*seqs, shape.pages_per_seq), ints(*seqs), ints(*seqs), ints(1), ints(1), ints())
    rows = Rows(*of_rows, sinks, keys.form.is_per_channel)
    queries = Queries(*(ints(shape.batch) for _ in range(4)))
    arrays = dict(
        sinks=dict(sink_query=q),
        sink_logits=dict(sink_logits=jax.ShapeDtypeStruct((shape.heads,), jnp.float32)),
        page_list=dict(page_list=ints(shape.kv_heads, shape.batch, 64)),
    )
    optional = {name: array for feature in features for name, array in arrays.get(feature, {}).items()}
    arguments = (q, keys, values, ints(num_pages, shape.page_size), rows, queries, optional)
    soft_cap = 50.0 if "soft_cap" in features else None
    last_logits = min(shape.queries, 32) if "slot_logits" in features else 0

    @jax.jit
    def attend(q, keys, values, positions, rows, queries, optional):
        return hopper.paged_attention(
            q, keys, values, positions, rows, queries, scale=shape.head_dim**-0.5, max_query_length=shape.queries,
            soft_cap=soft_cap, last_logits=last_logits, **optional,
        )  # fmt: skip

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        attend.trace(*placed(arguments, mesh)).lower().compile()
    call = hopper.Call(keys, values, arguments[3], rows, None, 1.0, None, None, None)
    config = call.config((q,), is_decode=shape.queries == 1, has_logits=False)
    return _row(shape, dump, features, (keys, values), config)


def _row(
    shape: AttentionShape, dump: Path, features: Sequence[str], stored: tuple[Stored, Stored], config: Config
) -> dict[str, Any]:
    text = {suffix: "".join(path.read_text() for path in dump.glob(f"*{suffix}*")) for suffix in ("ptxas", "sass")}
    resources = "".join(path.read_text() for path in dump.glob("*.resources*"))
    largest = lambda pattern, of: max(map(int, re.findall(pattern, of)), default=0)  # noqa: E731
    of_page = sum(math.prod(of.shape[1:]) * of.dtype.itemsize for of in jax.tree.leaves(stored))
    stored_bytes = of_page / (shape.kv_heads * shape.page_size)
    moved = shape.bytes_with(stored_bytes)
    names = [of.form.name for of in stored]
    name = names[0] if names[0] == names[1] else ", ".join(names)
    row = dict(
        kernel=shape.kernel,
        format=name,
        shape=", ".join([shape.label, *features, *([name] if config.is_coded else [])]),
        registers=largest(r"Used (\d+) registers", text["ptxas"]),
        spills=largest(r"(\d+) bytes spill", text["ptxas"]),
        smem_bytes=largest(r"smem_scratch_bytes=(\d+)", resources),
        stages=config.code_stages if config.is_coded else config.stages,
        **{name: len(re.findall(pattern, text["sass"])) for name, pattern in _COUNTED.items()},
        **({} if features else dict(slot_bytes=_slot_bytes(dump, config), stored_bytes=stored_bytes)),
        bytes=moved,
        floor_us=round(moved / H200_BYTES_PER_SECOND * 1e6, 2),
    )
    return row | dict(faults=faults(row))


def _slot_bytes(dump: Path, config: Config) -> float:
    """Bytes that the kernel copies for a slot of a KV head, of all that its barriers expect but for the queries."""
    text = max((path.read_text() for path in dump.glob("*.ptx")), key=lambda of: of.count("expect_tx"))
    expected = []
    for register in re.findall(r"expect_tx\S* _, \[%r\d+\], (%r\d+);", text):
        # Every thread of a warpgroup expects its part, or one of them all.
        found = re.search(rf"(?:mov\.b32|selp\.b32)\s+{register}, (\d+)(, 0,)?", text)
        assert found is not None, f"{register} is no constant"
        expected.append(int(found[1]) * (1 if found[2] else _WARPGROUP))
    return sum(expected[config.kinds * config.parts :]) / config.shape.block


def some_of(shapes: Sequence[AttentionShape], count: int | None) -> list[tuple[int, AttentionShape]]:
    """Return `count` of the shapes (None for all) with their numbers: first one of each kernel, head and page size."""
    kinds: dict[tuple[str, int, int], int] = {}
    for number, shape in enumerate(shapes):
        kinds.setdefault((shape.kernel, shape.head_dim, shape.page_size), number)
    others = [number for number in range(len(shapes)) if number not in kinds.values()]
    return [(number, shapes[number]) for number in sorted([*kinds.values(), *others][:count])]


def shapes_asked_for() -> int | None:
    """Return how many shapes the command's arguments ask for, None for all: `[--target h200] [--shapes N]`."""
    parser = argparse.ArgumentParser(description="Compile for an H200 and print a JSON row a line.")
    parser.add_argument("--target", choices=["h200"], default="h200")
    parser.add_argument("--shapes", type=int)
    return parser.parse_args().shapes


def with_features() -> list[tuple[AttentionShape, tuple[str, ...]]]:
    """Return the shapes at which the kernel is compiled with features: the first of its kernel and head_dim."""
    return [
        (next(shape for shape in ATTENTION_SHAPES if (shape.kernel, shape.head_dim) == (kernel, head_dim)), features)
        for kernel, head_dim, features in _WITH_FEATURES
    ]


def quantized() -> list[tuple[AttentionShape, tuple[str, str]]]:
    """Return shapes to compile with quantised pages, and the formats of keys and values."""
    return [
        (next(shape for shape in ATTENTION_SHAPES if (shape.name, shape.kernel) == (name, kernel)), forms)
        for name, kernel, forms in _QUANTIZED
    ]


if __name__ == "__main__":
    assert _DUMP is not None
    only = shapes_asked_for()
    for i, attention_shape in some_of(ATTENTION_SHAPES, only):
        print(json.dumps(compile_shape(attention_shape, _DUMP, i)), flush=True)
    for attention_shape, chosen_features in with_features() if only is None else ():
        print(json.dumps(compile_shape(attention_shape, _DUMP, features=chosen_features)), flush=True)
    for attention_shape, chosen_forms in quantized() if only is None else ():
        print(json.dumps(compile_shape(attention_shape, _DUMP, forms=chosen_forms)), flush=True)
