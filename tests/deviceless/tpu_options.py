"""Compile the TPU kernel with every option, for a TPU on a machine without one.

python tests/deviceless/tpu_options.py v5e|v6e, in an environment with the TPU compiler; prints a JSON row a line.
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

from kvjax.benchmarks.compile_checks import whole_pool_operations
from kvjax.benchmarks.deviceless import mesh_of, placed
from kvjax.kernels.paged_attention import Queries, Rows, tpu

PAGES, SEQS, HEADS = 4097, 4, 32
# Shapes, and which options are given.
CASES: dict[str, dict[str, Any]] = {
    "float32": dict(dtype=jnp.float32),
    "a head to a page": dict(in_group=1, groups=8),
    "3 query heads, prefill": dict(heads=24, queries=100),
    "MQA of 16, prefill": dict(in_group=1, heads=16, queries=100),
    "32 KV heads, prefill": dict(in_group=32, queries=100),
    "rows in pieces": dict(entries=2048),
    "rows that are padded": dict(entries=1100),
    "pages of 8, prefill": dict(size=8, queries=100),
    "learned sinks, soft cap": dict(gives=("sink_logits",), soft_cap=3.0),
    "sinks with a query of their own": dict(gives=("sink_query", "sink_logits"), sinks=20),
    "the same, prefill": dict(gives=("sink_query", "sink_logits"), sinks=20, queries=64),
    "lists of pages": dict(gives=("page_list",), last_logits=1),
    "logits": dict(last_logits=1),
    "logits, prefill": dict(last_logits=32, queries=100),
}


def compile_case(
    mesh, *, in_group=8, groups=1, heads=HEADS, size=16, dim=128, queries=1, entries=512, dtype=jnp.bfloat16, sinks=0,
    gives=(), soft_cap=None, last_logits=0,
) -> dict[str, Any]:  # fmt: skip
    """Compile one call, and count the arrays of the size of all keys that it makes."""
    ints: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    pool = jax.ShapeDtypeStruct((PAGES, in_group, size, dim), dtype)
    q = jax.ShapeDtypeStruct((SEQS * queries, heads, dim), dtype)
    of_rows = ints(3, groups, SEQS)
    rows = Rows(ints(3, groups, SEQS, entries), of_rows, of_rows, ints(3), ints(3), ints(), sinks)
    options = dict(
        sink_logits=jax.ShapeDtypeStruct((heads,), jnp.float32), sink_query=q,
        page_list=ints(in_group * groups, SEQS, 40),
    )  # fmt: skip
    arguments = (q, pool, pool, ints(PAGES, size), rows, Queries(*(ints(SEQS) for _ in range(4))))
    given = {name: options[name] for name in gives}

    @jax.jit
    def attend(arguments, given):
        return tpu.paged_attention(
            *arguments, **given, scale=0.1, soft_cap=soft_cap, last_logits=last_logits, max_query_length=queries
        )

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = attend.trace(*placed((arguments, given), mesh)).lower().compile().as_text()
    assert text is not None
    return dict(
        pool_copies=whole_pool_operations(text, math.prod(pool.shape)),
        kernels=text.count('custom_call_target="tpu_custom_call"'),
    )


if __name__ == "__main__":
    of_target = mesh_of(sys.argv[1])
    for name, case in CASES.items():
        print(json.dumps(dict(name=name) | compile_case(of_target, **case)), flush=True)
