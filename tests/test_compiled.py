"""What is compiled: programs that update the pool in place, and one program for a bucket of shapes."""

import functools
import json
import logging
import subprocess
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from helpers.decoders import tiny_decoder
from helpers.programs import POOL_BYTES, faults, lowered

import kvjax
from kvjax import batch, decoding, sizes
from kvjax.benchmarks.compile_checks import whole_pool_operations
from kvjax.policies import H2O, PagedEviction

DEVICELESS = Path(__file__).parent / "deviceless" / "decode_memory.py"


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("name", ["step", "while", "scan", "prefill"])
def test_the_pool_is_updated_in_place(name, scan):
    program, spec = lowered(name, scan=scan)
    assert 0.99 * POOL_BYTES < sizes.pool_bytes(spec) <= POOL_BYTES
    assert not faults(program.compile(), spec)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("while", H2O(budget=48, heads="mean")),
        ("prefill", H2O(budget=48, heads="mean")),
        ("while", PagedEviction(budget=64)),
    ],
)
def test_policies_change_the_pool_in_place(name, policy):
    program, spec = lowered(name, scan=True, policy=policy)
    assert not faults(program.compile(), spec)


def test_a_copy_of_the_pool_is_noticed():
    _, spec = lowered("step", scan=False)
    keys = sizes.cache_shapes(spec)["keys"]
    compiled = jax.jit(lambda pool: (pool, pool.at[0].set(0))).lower(keys).compile()
    found = faults(compiled, spec)
    assert any("alias" in fault for fault in found) and any("copy(" in fault for fault in found)
    text = compiled.as_text()
    assert text is not None
    of_a_page = text.replace(f"f32[{spec.num_pages},", "f32[1,")
    assert not whole_pool_operations(of_a_page, keys.size)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step", "while", "scan", "prefill"])
def test_the_pool_is_updated_in_place_on_an_h200(name, kernels_python):
    result = subprocess.run([kernels_python, DEVICELESS, name], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["device"] == "NVIDIA H200" and report["kernels"] > 0
    assert not report["faults"], report


@pytest.fixture
def traces(monkeypatch):
    """Lets each compiled part of generation be traced once; chex raises at the second time."""
    chex.clear_trace_counter()
    for name in ("prefill_step", "decode_while", "decode_scan"):
        function = getattr(decoding, name).__wrapped__
        once = functools.wraps(function)(chex.assert_max_traces(function, n=1))
        donated = ("state", "out") if name == "decode_while" else ("state",)
        static = ("graph", "num_logprobs") + (("steps",) if name == "decode_scan" else ())
        monkeypatch.setattr(batch, name, jax.jit(once, static_argnames=static, donate_argnames=donated))


@pytest.fixture
def compilations(caplog):
    """The programs compiled since the test began."""
    caplog.set_level(logging.WARNING, logger="jax")
    with jax.log_compiles():
        yield lambda: [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling ")]


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(1, 61, length).tolist() for length in lengths]


def test_one_trace_and_one_compile_for_a_bucket(traces, compilations):
    model = tiny_decoder(windows=(None, 40))
    options = kvjax.Options(max_new_tokens=300)
    first = kvjax.generate(model, prompts(3, 50, 129), options)
    assert [len(sequence.token_ids) for sequence in first.sequences] == [300] * 3
    names = [line.split()[1] for line in compilations()]
    for name in ("prefill_step", "decode_while"):
        assert sum(name in compiled for compiled in names) == 1, names
    before = len(names)
    again = kvjax.generate(model, prompts(2, 41, 135), options)
    assert again.spec == first.spec, "the prompts must be of one bucket"
    assert [len(sequence.token_ids) for sequence in again.sequences] == [300] * 3
    assert not compilations()[before:]


def test_loops_of_both_kinds_choose_the_same_tokens(traces, compilations):
    model = tiny_decoder(windows=(None, 40))
    asked = prompts(3, 50, 129)
    options = kvjax.Options(max_new_tokens=[300, 120, 7], temperature=[0.0, 0.8, 0.0])
    whole = kvjax.generate(model, asked, options)
    streamed: list[list[int]] = [[] for _ in asked]
    for events in kvjax.stream(model, asked, options, steps=20):
        for event in events:
            streamed[event.sequence] += event.token_ids
    assert streamed == [sequence.token_ids for sequence in whole.sequences]
    assert sum("decode_scan" in line for line in compilations()) == 1
