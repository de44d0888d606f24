"""The TPU kernel compiled for TPUs that are not there: its memory, and a loop that must not copy the pool."""

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvjax.benchmarks import compile_tpu
from kvjax.benchmarks.compile_checks import bytes_on_a_device
from kvjax.kernels.paged_attention import tpu
from kvjax.kernels.shapes import ATTENTION_SHAPES

LOOP, OPTIONS = (Path(__file__).parents[1] / "deviceless" / name for name in ("tpu_loop.py", "tpu_options.py"))
GOOD: dict[str, Any] = dict(vmem_bytes=9_000_000, smem_bytes=512, stages=2, pool_copies=0, temp_bytes=77)


@pytest.mark.parametrize(
    "changes, fault",
    [
        (dict(), None),
        (dict(vmem_bytes=0), "vector memory"),
        (dict(vmem_bytes=(16 << 20) + 1), "vector memory"),
        (dict(smem_bytes=(1 << 20) + 1), "scalar memory"),
        (dict(stages=1), "stages"),
        (dict(pool_copies=1), "all keys"),
        (dict(temp_bytes=100), "a tenth of the pool"),
    ],
)
def test_broken_limits_are_named(changes, fault):
    found = compile_tpu.faults(GOOD | changes, 1000)
    assert not found if fault is None else len(found) == 1 and fault in found[0]


def test_shapes_that_are_served():
    served = [shape for shape in ATTENTION_SHAPES if compile_tpu.served(shape)]
    assert {shape.head_dim for shape in served} == set(tpu.HEAD_DIMS)
    assert {shape.kernel for shape in served} == {"decode", "prefill"}
    assert {shape.page_size for shape in served} == set(tpu.PAGE_SIZES)


@pytest.mark.parametrize("forms", compile_tpu.QUANTIZED)
def test_quantised_shapes_are_of_the_smallest_and_largest_pages(forms):
    shapes = compile_tpu.quantized_shapes(forms)
    least = tpu.LEAST_PAGE_OF_INT4 if "int4" in forms[0] else tpu.LEAST_PAGE_OF_BYTES
    wanted = set(itertools.product(("decode", "prefill"), (least, tpu.PAGE_SIZES[-1])))
    assert len(shapes) == 4 and {(shape.kernel, shape.page_size) for shape in shapes} == wanted
    assert all(compile_tpu.served(shape, forms) for shape in shapes)


def test_bytes_moved_are_those_of_stored_pages():
    shape = ATTENTION_SHAPES[0]
    plain, int8 = (
        bytes_on_a_device(compile_tpu.stored_shape(form, 1, shape.kv_heads, shape.page_size, shape.head_dim))
        for form in ("bfloat16", "int8")
    )
    assert int8 == shape.kv_heads * shape.page_size * (shape.head_dim + 2)
    assert compile_tpu.bytes_moved(shape, 2 * plain) == shape.bytes_moved
    slots = shape.batch * shape.context
    assert shape.bytes_moved - compile_tpu.bytes_moved(shape, 2 * int8) == slots * 2 * (plain - int8) // shape.page_size


def test_scalar_memory_is_read_from_the_call():
    call = (
        "custom-call(%a), operand_layout_constraints={s32[2,64]{1,0}, s32[5,64]{1,0}, s32[3]{0}, "
        "bf16[64,8,8,128]{3,2,1,0}, s32[99,16]{1,0}, s32[4,1,64,512]{3,2,1,0}}, frontend_attributes={}"
    )
    assert compile_tpu.scalar_bytes(call) == 4 * (7 * 64 + 3 + 3 * 512)


@pytest.mark.slow
@pytest.mark.parametrize("target, shapes", [("v5e", 10), ("v6e", None)])
def test_kernels_of_all_kinds_compile(target, shapes, kernels_python):
    command = [kernels_python, "-m", "kvjax.benchmarks.compile_tpu", "--target", target]
    command += [] if shapes is None else ["--shapes", str(shapes)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert not any(row["faults"] for row in rows), rows
    forms = {"bfloat16", "fp8_e4m3", "int8", "int4_hadamard", "int4_per_channel, int4_hadamard"}
    kinds = set(itertools.product(forms, ("decode", "prefill")))
    found = {(row["format"], row["kernel"]) for row in rows}
    assert found == kinds if shapes is None else found <= kinds and len(rows) == shapes


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_a_loop_over_a_donated_pool_copies_nothing(target, kernels_python):
    result = subprocess.run([kernels_python, LOOP, target], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["kernels"] > 0 and not report["pool_copies"], report
    assert report["alias_bytes"] >= report["pool_bytes"] >= 1 << 30
    assert report["temp_bytes"] < 0.03 * report["pool_bytes"], report


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_every_option_compiles_without_a_copy_of_the_pool(target, kernels_python):
    result = subprocess.run([kernels_python, OPTIONS, target], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    # The last queries' logits in a prefill are a launch of their own.
    assert {row["name"]: row["kernels"] for row in rows}["logits, prefill"] == 2
    assert all(row["kernels"] > 0 and not row["pool_copies"] for row in rows), rows
