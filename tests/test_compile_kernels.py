"""The compile checks: what counts as a fault, and the kernels themselves where the compilers are."""

import json

import pytest

from kvjax.cli.main import main
from kvjax.kernels.paged_attention import hopper
from kvjax.kernels.shapes import ATTENTION_SHAPES

GOOD = dict(registers=168, spills=0, smem_bytes=200_000, stages=4, hgmma=12, tma_loads=14, local_memory=0)


@pytest.mark.parametrize(
    "changes, fault",
    [
        (dict(), None),
        (dict(spills=8), "spills registers"),
        (dict(local_memory=2), "spills registers"),
        (dict(registers=0), "registers"),
        (dict(smem_bytes=232_449), "shared memory"),
        (dict(stages=1), "stages"),
        (dict(hgmma=0), "tensor cores"),
        (dict(tma_loads=0), "TMA"),
    ],
)
def test_broken_limits_are_named(changes, fault):
    from kvjax.benchmarks.compile_kernels import faults

    found = faults(GOOD | changes)
    assert not found if fault is None else len(found) == 1 and fault in found[0]


def test_shapes_are_some_that_the_kernel_serves():
    assert len(ATTENTION_SHAPES) == len(set(ATTENTION_SHAPES)) <= 48
    for shape in ATTENTION_SHAPES:
        assert hopper.refuses(
            head_dim=shape.head_dim, page_size=shape.page_size, dtype="bfloat16", pool_dtype="bfloat16",
            heads_per_kv_head=shape.heads // shape.kv_heads,
        ) is None  # fmt: skip
    llama = next(shape for shape in ATTENTION_SHAPES if (shape.batch, shape.context) == (32, 1024))
    # 32 sequences of 1024 tokens, 8 heads of 128, keys and values of 2 bytes; 32 queries and outputs of 32 heads.
    assert llama.bytes_moved == 32 * 1024 * 8 * 128 * 2 * 2 + 2 * 32 * 32 * 128 * 2


def test_missing_compilers_are_named(monkeypatch, capsys):
    monkeypatch.setenv("KVJAX_KERNELS_PYTHON", "/nowhere/python")
    assert main(["compile-kernels"]) == 2
    assert "/nowhere/python: run `make kernel-checks`" in capsys.readouterr().err


@pytest.mark.slow
def test_kernels_compile_for_an_h200(kernels_python, capsys):
    assert main(["compile-kernels", "--target", "h200", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == len(ATTENTION_SHAPES) and not any(row["spills"] for row in rows)
