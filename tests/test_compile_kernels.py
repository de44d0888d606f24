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
        (dict(slot_bytes=264.0, stored_bytes=260.0), None),
        (dict(slot_bytes=516.0, stored_bytes=260.0), "copies more than pages hold"),
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
            head_dim=shape.head_dim, page_size=shape.page_size, dtype="bfloat16",
            key_format="bfloat16", value_format="bfloat16", heads_per_kv_head=shape.heads // shape.kv_heads,
        ) is None  # fmt: skip
    llama = next(shape for shape in ATTENTION_SHAPES if (shape.batch, shape.context) == (32, 1024))
    # 32 sequences of 1024 tokens, 8 heads of 128, keys and values of 2 bytes; 32 queries and outputs of 32 heads.
    assert llama.bytes_moved == 32 * 1024 * 8 * 128 * 2 * 2 + 2 * 32 * 32 * 128 * 2


def test_missing_compilers_are_named(monkeypatch, capsys):
    monkeypatch.setenv("KVJAX_KERNELS_PYTHON", "/nowhere/python")
    assert main(["compile-kernels"]) == 2
    assert "/nowhere/python: run `make kernel-checks`" in capsys.readouterr().err


ROWS = dict(
    h200=GOOD | dict(kernel="decode", format="bfloat16", shape="a model", bytes=8, floor_us=0.25, faults=[]),
    v6e=dict(
        kernel="decode", format="bfloat16", shape="a model", vmem_bytes=9_000_000, smem_bytes=512, stages=2, bytes=8,
        floor_us=0.25, pool_copies=0, temp_bytes=77, faults=[],
    ),
    loop=dict(
        format="int8", policy="full",
        program="generate", devices=8, pool_bytes=4_294_967_296, alias_bytes=4_300_000_000, temp_bytes=77,
        pool_copies=0, kernels=3, faults=[],
    ),
)  # fmt: skip


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Lets a script stand for the Python with the compilers; it prints its arguments to stderr, then what is given."""

    def stand_in(rows, code: int = 0):
        script = tmp_path / "python"
        lines = "\n".join(json.dumps(row) for row in rows)
        # More on stderr than a pipe holds.
        script.write_text(
            f"#!/bin/sh\nyes | head -c 200000 >&2\necho \"$@\" >&2\ncat <<'END'\n{lines}\nEND\nexit {code}\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("KVJAX_KERNELS_PYTHON", str(script))

    return stand_in


@pytest.mark.parametrize(
    "argv, kind, columns",
    [
        ([], "h200", ["168", "200000", "12", "14", "0.25"]),
        (["--target", "v6e"], "v6e", ["9000000", "512", "77", "0.25"]),
        (["--loop"], "loop", ["8", "4294967296", "4300000000", "77"]),
        (["--loop", "--target", "v6e"], "loop", ["8", "4294967296", "4300000000", "77"]),
    ],
)
def test_rows_are_printed(worker, capsys, argv, kind, columns):
    worker([ROWS[kind]])
    assert main(["compile-kernels", *argv]) == 0
    out = capsys.readouterr().out
    head, *found = out.splitlines()
    # The same stands in for attention, attention mass and the writes of pages.
    assert len(found) == (3 if kind == "h200" else 1)
    assert all(set(columns) <= set(row.split()) for row in found) and ("temp_bytes" in head) == (kind != "h200")
    worker([ROWS[kind], ROWS[kind] | dict(faults=["is not what it should be"])])
    assert main(["compile-kernels", *argv, "--json"]) == 1
    assert [bool(row["faults"]) for row in json.loads(capsys.readouterr().out)["rows"]] == [False, True] * len(found)


@pytest.mark.parametrize(
    "argv, module, options",
    [
        ([], "compile_kernels", "--target h200"),
        (["--target", "h200"], "compile_kernels", "--target h200"),
        (["--target", "v5e"], "compile_tpu", "--target v5e"),
        (["--target", "v5e", "--loop"], "compile_loop", "--target v5e"),
        (["--shapes", "3"], "compile_kernels", "--target h200 --shapes 3"),
    ],
)
def test_the_right_module_runs_and_its_failure_is_told(worker, capsys, argv, module, options):
    worker([ROWS["h200"]], code=3)
    assert main(["compile-kernels", *argv]) == 2
    said = capsys.readouterr().err
    assert f"{module} for {options.split()[1]} failed after 1 rows" in said and said.endswith(
        f": -m kvjax.benchmarks.{module} {options}\n"
    )


def test_wrong_flags_are_named(capsys):
    assert main(["compile-kernels", "--shapes", "0"]) == 2
    assert "--shapes is 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compile-kernels", "--shapes", "2", "--loop"])
    assert "not allowed with" in capsys.readouterr().err


def test_some_of_the_shapes_are_of_all_kinds():
    from kvjax.benchmarks.compile_kernels import some_of

    assert [shape for _, shape in some_of(ATTENTION_SHAPES, None)] == list(ATTENTION_SHAPES)
    assert some_of(ATTENTION_SHAPES, 99) == list(enumerate(ATTENTION_SHAPES))
    few = some_of(ATTENTION_SHAPES, 8)
    assert all(ATTENTION_SHAPES[number] is shape for number, shape in few)
    kinds = {(shape.kernel, shape.head_dim) for shape in ATTENTION_SHAPES}
    assert len(few) == len(kinds) and {(shape.kernel, shape.head_dim) for _, shape in few} == kinds


def test_every_feature_is_compiled_for_the_heads_that_leave_it_the_fewest_registers():
    from kvjax.benchmarks.compile_kernels import FEATURES, with_features

    compiled = with_features()
    for head_dim in (128, 256):
        for kernel in ("decode", "prefill"):
            shapes = [(shape, of) for shape, of in compiled if (shape.kernel, shape.head_dim) == (kernel, head_dim)]
            served = set(FEATURES) - ({"page_list"} if kernel == "prefill" else set())
            assert {feature for _, of in shapes for feature in of} == served


@pytest.mark.slow
def test_kernels_compile_for_an_h200(kernels_python, capsys):
    from kvjax.benchmarks.compile_kernels import quantized, with_features

    assert main(["compile-kernels", "--target", "h200", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    attention = [row for row in rows if row["kernel"] in ("decode", "prefill")]
    assert len(attention) == len(ATTENTION_SHAPES) + len(with_features()) + len(quantized()) < len(rows) <= 60
    # Derived from what the kernel's barriers expect: codes, scales, and 4 bytes of a position.
    copied = [row for row in attention if "slot_bytes" in row]
    assert all(row["slot_bytes"] == row["stored_bytes"] + 4 for row in copied)
    assert {row["format"] for row in copied} >= {"bfloat16", "int8", "fp8_e4m3", "int4_hadamard"}
    assert {row["kernel"] for row in rows} == {"decode", "prefill", "attention_mass", "write_pages"}
    assert not any(row["spills"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_kernels_compile_for_tpus(kernels_python, capsys, target):
    assert main(["compile-kernels", "--target", target, "--json", "--shapes", "12"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 12 and not any(row["faults"] or row["pool_copies"] for row in rows)
