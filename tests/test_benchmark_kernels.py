"""The benchmark of the kernels, as far as a machine without a GPU goes."""

import copy
import dataclasses
import functools
import json
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.benchmarks import kernel_contenders, kernels, roofline
from kvjax.benchmarks.kernel_cases import case_of, ragged_case, reference_output, samples
from kvjax.benchmarks.kernel_contenders import CUDNN, GATHER, HOPPER, TRITON, XLA
from kvjax.benchmarks.kernel_rates import Rates, measure_rates
from kvjax.cli.main import main
from kvjax.kernels.shapes import ATTENTION_SHAPES, AttentionShape

SMALL = AttentionShape("small", heads=4, kv_heads=2, head_dim=16, batch=3, context=45, page_size=8)
SHAPES = dict(
    decode=SMALL,
    window=dataclasses.replace(SMALL, window=19),
    prefill=dataclasses.replace(SMALL, queries=10),
    window_prefill=dataclasses.replace(SMALL, queries=10, window=19),
    prompt=dataclasses.replace(SMALL, queries=45),
)
RATES = Rates(copy_bytes_per_s=4e12, matmul_flops_per_s=8e14)
BY_NAME = {contender.name: contender for contender in kernel_contenders.contenders("cpu")}
OTHERS = {
    XLA: BY_NAME[XLA],
    GATHER: BY_NAME[GATHER],
    # On a CPU: jax's kernel interpreted, and XLA's attention over the same arrays that cuDNN would get.
    TRITON: BY_NAME[TRITON]._replace(attend=functools.partial(kernel_contenders._triton, interpret=True)),
    CUDNN: BY_NAME[CUDNN]._replace(attend=functools.partial(kernel_contenders._cudnn, implementation="xla")),
}


@pytest.fixture
def short(monkeypatch):
    """Measurements of next to no time."""
    monkeypatch.setattr(kernels, "_MEASUREMENT_S", 1e-5)
    monkeypatch.setattr(kernels, "_CACHE_BYTES", 2 * SMALL.bytes_moved)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_samples_are_what_the_definition_says(shape):
    case = case_of(shape, layers=2, seed=3)
    arguments = dataclasses.replace(case, rows=dataclasses.replace(case.rows, layer=jnp.int32(1)))
    whole = reference_output(arguments)
    found = list(samples(case, layer=1))
    assert len(found) == (2 if shape.queries == 1 else 4) * 2
    for token, head, wanted in found:
        np.testing.assert_allclose(whole[token, head], wanted, atol=1e-12)
        assert np.abs(wanted).max() > 0.1, "an error of the tolerance would not show"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("name", OTHERS)
def test_contenders_compute_the_same(name, shape):
    contender = OTHERS[name]
    decode = dataclasses.replace(SMALL, context=48)
    shape = dataclasses.replace(shape, context=48, queries=48 if shape.queries == shape.context else shape.queries)
    case = case_of(shape, layers=2)
    try:
        arrays = contender.prepare(case)
    except NotImplementedError:
        behind_a_prefix = shape.queries < shape.context or bool(shape.window)
        assert (name == TRITON and shape != decode) or (name == CUDNN and shape.queries > 1 and behind_a_prefix)
        return
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        out = np.asarray(contender.attend(shape, arrays, case.q, 1), np.float64)
    for token, head, wanted in samples(case, layer=1):
        np.testing.assert_allclose(out[token, head], wanted, atol=kernels._TOLERANCE)


def test_a_window_holds_only_the_pages_that_it_sees():
    case = case_of(dataclasses.replace(SMALL, context=1000, window=19), layers=3)
    assert case.rows.page_table.shape == (3, 1, 3, 3) and case.keys.shape[0] == 2 + 3 * 3 * 3
    assert np.unique(case.rows.page_table).size == 3 * 3 * 3, "every layer has pages of its own"


def test_rows_have_figures_or_a_reason(short):
    planned = []
    planning = BY_NAME[XLA]._replace(planner=lambda case: lambda: planned.append(case.shape))
    all_four = [planning, *list(BY_NAME.values())[1:]]
    rows = {row["contender"]: row for row in kernels.measure(SMALL, all_four, RATES, 2)}
    assert planned == [SMALL] * 3 and rows[XLA]["plan_us"] >= 0 and rows[GATHER]["plan_us"] is None
    assert list(rows) == [XLA, GATHER, TRITON, CUDNN]
    for name in (XLA, GATHER):
        row = rows[name]
        assert row["reason"] is None and row["max_error"] < kernels._TOLERANCE and not row["is_fault"]
        assert row["gb_s"] == pytest.approx(SMALL.bytes_moved / row["us"] / 1e3, rel=0.01, abs=0.06)
        assert row["single_us"] > 0 and row["share_of_copy"] == pytest.approx(row["gb_s"] / 4e3, abs=1e-3)
    for name in (TRITON, CUDNN):
        assert rows[name]["us"] is None and rows[name]["reason"] and not rows[name]["is_fault"]


def broken(attend):
    return lambda shape, arrays, q, layer: attend(shape, arrays, q, layer).at[-1].multiply(1.2)


@pytest.mark.parametrize("name", [XLA, GATHER])
def test_a_wrong_contender_is_not_timed(short, name):
    contender = BY_NAME[name]._replace(attend=broken(BY_NAME[name].attend))
    (row,) = kernels.measure(SMALL, [contender], RATES, 2)
    assert row["us"] is None and "wrong: outputs differ" in row["reason"]
    assert row["is_fault"] == (name == XLA) == bool(kernels.summary([row])["faults"])


def test_a_fault_at_a_page_edge_is_found_before_anything_is_timed():
    def attend(shape, arrays, q, layer):
        *pool, rows, queries = arrays
        # The last page is forgotten where it is full.
        ends = rows.end_slot - shape.page_size * (rows.end_slot % shape.page_size == 0).astype(jnp.int32)
        return BY_NAME[XLA].attend(shape, (*pool, dataclasses.replace(rows, end_slot=ends), queries), q, layer)

    kind = kernels._kind(SHAPES["window"])
    assert kernels.ragged_error(BY_NAME[XLA], kind) < kernels._TOLERANCE
    shifted = BY_NAME[XLA]._replace(attend=attend)
    case = ragged_case(kind)
    assert any(length % kind.page_size == 0 for length in case.lengths)
    assert not kernels.ragged_error(shifted, kind) < kernels._TOLERANCE


@pytest.mark.parametrize("takes_traced_layers", [True, False])
def test_launches_of_a_loop_follow_each_other_through_all_layers(takes_traced_layers):
    def attend(shape, arrays, q, layer):
        return q * 2 + jnp.asarray(layer, q.dtype)

    contender = kernel_contenders.Contender("adds layers", lambda case: (), attend, takes_traced_layers)
    q, expected = jnp.asarray([1.0]), 1.0
    for launch in range(6):
        expected = expected * 2 + launch % 3
    assert kernels._loop(SMALL, contender, 3, 6)((), q).tolist() == [expected]


@pytest.mark.parametrize("single, layers, launches", [(1e-6, 32, 512), (1e-3, 3, 21), (1.0, 32, 32), (0.0, 1, 512)])
def test_launches_are_whole_rounds(single, layers, launches):
    assert kernels._launches(single, layers) == launches


def test_operations_are_counted():
    assert kernels.flops(SMALL) == 4 * 3 * 4 * 16 * 45
    # Queries 44 and 45 see 44 and 45 tokens; with a window of 19 both see 19.
    assert kernels.flops(dataclasses.replace(SMALL, queries=2)) == 4 * 3 * 4 * 16 * (44 + 45)
    assert kernels.flops(dataclasses.replace(SMALL, queries=2, window=19)) == 4 * 3 * 4 * 16 * 2 * 19


def test_important_shapes_come_first():
    shapes = kernels.benchmark_shapes()
    assert set(ATTENTION_SHAPES) < set(shapes) and len(shapes) == len(set(shapes)) == len(ATTENTION_SHAPES) + 2
    first = shapes[:8]
    assert {shape.head_dim for shape in first} >= {64, 128} and {shape.kernel for shape in first} == {
        "decode",
        "prefill",
    }
    assert any(shape.context == 512 for shape in first) and any(shape.context >= 4096 for shape in first)


def test_shapes_that_do_not_fit_the_time_are_named(monkeypatch):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(kernels, "measure", lambda shape, *_: [dict(kernels._row(shape, XLA))])
    shapes = tuple(dataclasses.replace(SMALL, context=8 * n) for n in range(1, 6))
    report = kernels.run(kernels.Settings(shapes, budget_s=45), [], RATES, lambda line: None)
    measured = [row["context"] for row in report["rows"]]
    assert measured and [*measured, *range(8 * len(measured) + 8, 48, 8)] == [8, 16, 24, 32, 40]
    assert report["left_out"] == [shape.label for shape in shapes[len(measured) :]] != []


def test_rates_are_of_what_is_done():
    rates = measure_rates(copy_bytes=1 << 20, matmul_size=64, loops=2, repeats=2)
    assert 0 < rates.copy_bytes_per_s < 1e13 and 0 < rates.matmul_flops_per_s < 1e14


@pytest.fixture
def report():
    rows = []
    for shape, own, other in ((ATTENTION_SHAPES[0], 2.0, 3.0), (ATTENTION_SHAPES[4], 400.0, 300.0)):
        for name, us in ((HOPPER, own), (GATHER, other)):
            rows.append(kernels._row(shape, name) | dict(single_us=us + 20))
            kernels._add_figures(rows[-1], shape, [us / 1e6] * 3, RATES)
    refused = kernels._row(ATTENTION_SHAPES[0], CUDNN) | dict(reason="cuDNN is not detected.")
    return dict(
        benchmark="kernels", machine=dict(device="NVIDIA H200"), rates=dataclasses.asdict(RATES), left_out=["a shape"],
        rows=[*rows, refused], summary=kernels.summary([*rows, refused]),
    )  # fmt: skip


def test_the_summary_is_of_the_worst(report):
    llama = ATTENTION_SHAPES[4]
    assert llama.context == 8192
    assert report["summary"]["decode_share_of_copy_4k"] == pytest.approx(llama.bytes_moved / 400e-6 / 4e12, abs=1e-3)
    assert report["summary"]["decode_share_of_copy_512"] is None
    assert report["summary"]["faster"] == [f"{GATHER}: {llama.label}"] and not report["summary"]["faults"]


def test_a_report_is_printed_and_drawn(report, tmp_path, capsys):
    file, picture = tmp_path / "report.json", tmp_path / "roof.svg"
    file.write_text(json.dumps(report))
    assert main(["benchmark-kernels", "--report", str(file), "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert (
        "NVIDIA H200: copies 4000 GB/s, products 800 TFLOP/s" in out
        and "left out, as the time was over: a shape" in out
    )
    assert "cuDNN is not detected." in out and ATTENTION_SHAPES[4].label in out
    assert picture.read_text().startswith("<?xml") and "kvjax hopper" in picture.read_text()
    copied = tmp_path / "copy.json"
    report["summary"]["faults"].append("a kernel is wrong")
    file.write_text(json.dumps(report))
    assert main(["benchmark-kernels", "--report", str(file), "--json", str(copied)]) == 1
    assert json.loads(copied.read_text()) == report


def test_points_lie_under_the_roof(report):
    for x, y in roofline.points(report).values():
        assert len(x) == len(y) == 2
        assert all(0 < of <= limit for of, limit in zip(y, roofline.roof(report, x), strict=True))
    assert roofline.roof(report, [1.0, 200.0, 400.0]) == [4.0, 800.0, 800.0]


def test_wrong_files_are_named(tmp_path, report, capsys):
    file = tmp_path / "report.json"
    for text, said in (("{", "is no JSON"), ("{}", "is no report"), ("[1]", "is no report")):
        file.write_text(text)
        assert main(["benchmark-kernels", "--report", str(file)]) == 2
        assert said in capsys.readouterr().err
    file.write_text(json.dumps(report))
    assert main(["benchmark-kernels", "--report", str(file), "--plot", str(tmp_path / "roof.nonsense")]) == 2
    assert "cannot draw into" in capsys.readouterr().err


def test_missing_matplotlib_is_named_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["benchmark-kernels", "--plot", "roof.png"]) == 2
    assert 'pip install "kvjax[plots]"' in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--quick"], ["--json", "--budget", "5"]])
def test_without_a_gpu_it_ends_with_2_and_says_so(argv, capsys):
    assert main(["benchmark-kernels", *argv]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("kvjax: error: this benchmark needs an H100 or H200: cpu is no Hopper")
        and said.count("\n") == 1
    )


def test_wrong_numbers_are_named(capsys):
    for flag in ("--repeats", "--budget"):
        assert main(["benchmark-kernels", flag, "0"]) == 2
        assert f"{flag} is 0" in capsys.readouterr().err


def test_on_a_gpu_everything_is_measured_and_written(monkeypatch, tmp_path, report, capsys):
    """The command itself, with what a GPU would give in the place of the measurement."""
    monkeypatch.setattr("kvjax.cli.benchmark_kernels._hopper", lambda: "NVIDIA H200")
    monkeypatch.setattr("kvjax.benchmarks.kernel_rates.measure_rates", lambda: RATES)
    asked = []

    def run(settings, contenders, rates, notify):
        asked.append((len(settings.shapes), settings.repeats, [contender.name for contender in contenders]))
        return copy.deepcopy(report)

    monkeypatch.setattr(kernels, "run", run)
    file = tmp_path / "report.json"
    assert main(["benchmark-kernels", "--quick", "--json", str(file)]) == 0
    assert asked == [(8, 3, [HOPPER, XLA, GATHER, TRITON, CUDNN])]
    assert json.loads(file.read_text())["rows"] == report["rows"] and GATHER in capsys.readouterr().out
    assert main(["benchmark-kernels", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == report["rows"]


@pytest.mark.slow
def test_what_is_timed_compiles_for_an_h200(kernels_python):
    script = Path(__file__).parent / "deviceless" / "benchmark_programs.py"
    result = subprocess.run([kernels_python, script], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    rows = json.loads(result.stdout.splitlines()[-1])
    compiled = {(row["kernel"], row["contender"]) for row in rows if row["reason"] is None}
    assert compiled == {(kernel, name) for kernel in ("decode", "prefill") for name in (HOPPER, XLA, GATHER)} | {
        ("decode", TRITON)
    }
    # A loop whose end is known: for another the host is asked before each launch.
    assert all(row["counted"] for row in rows if row["reason"] is None)


@pytest.mark.parametrize("missing", ["rates", "rows", "left_out", "summary"])
def test_a_report_that_lacks_a_part_is_refused(report, missing, tmp_path, capsys):
    file = tmp_path / "report.json"
    file.write_text(json.dumps({name: part for name, part in report.items() if name != missing}))
    assert main(["benchmark-kernels", "--report", str(file)]) == 2
    assert "is no report of kvjax benchmark-kernels" in capsys.readouterr().err
