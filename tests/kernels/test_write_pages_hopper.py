"""The Hopper write in the interpreter, races detected and memory poisoned, against the write in XLA; planted faults."""

import functools
import json
import os
import subprocess
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import jit
from helpers.faults import assert_all_noticed, noticed_by, with_fault
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels import write_pages as in_xla
from kvjax.kernels import write_pages_hopper as in_hopper

PARAMS = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
by_xla = jit(in_xla.write_pages)


@pytest.fixture(autouse=True)
def fresh_interpreter():
    """After an exception the interpreter keeps its state."""
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


def case_of(*, heads=2, size=8, dims=(64, 64), groups=1, touched=4, dtype: Any = jnp.bfloat16, new: Any = None, seed=0):
    """Pools, new tokens, and where they go: distinct pages in shuffled order, some of them padding."""
    rng = np.random.default_rng(seed)
    num_pages, tokens = groups * touched + 3, 2 * size
    is_code = jnp.issubdtype(dtype, jnp.integer)
    draw = lambda *shape: rng.integers(0, 128, shape) if is_code else rng.standard_normal(shape)  # noqa: E731
    nothing = 99 if is_code else jnp.nan
    pools = tuple(jnp.asarray(draw(num_pages, heads, size, dim), dtype).at[0].set(nothing) for dim in dims)
    news = tuple(jnp.asarray(draw(groups, tokens, heads, dim), new or dtype) for dim in dims)
    pages = rng.permutation(np.arange(1, num_pages))[: groups * touched].reshape(groups, touched)
    pages[:, -1] = 0
    begins = rng.integers(0, size, pages.shape)
    begins[:, 0], begins[:, 1] = 0, size - 1
    ends = rng.integers(begins + 1, size + 1)
    ends[:, 0] = size
    first = rng.integers(0, tokens - (ends - begins) + 1)
    blanks = np.where(rng.random(pages.shape) < 0.5, ends, rng.integers(ends, size + 1))
    return pools, news, *(jnp.asarray(of, jnp.int32) for of in (pages, first, begins, ends, blanks))


def of_layers(where) -> Any:
    """Where tokens go in layer 1; in layers 0 and 2 they go nowhere."""
    return *(jnp.stack([of * 0, of, of * 0]) for of in where), jnp.int32(1)


def check(case, kernel=in_hopper) -> None:
    pools, news, *where = case
    written = jit(functools.partial(kernel.write_pages, interpret=PARAMS))(pools, news, *of_layers(where))
    for got, pool, new in zip(written, pools, news, strict=True):
        assert got.dtype == pool.dtype
        bits = lambda array: np.asarray(array[1:]).view(np.uint8)  # noqa: E731
        np.testing.assert_array_equal(bits(got), bits(by_xla(pool, new, *where)))


CASES: dict[str, dict[str, Any]] = {
    "small": dict(),
    "one head": dict(heads=1, groups=2),
    "pages in chunks": dict(size=16, heads=16, dims=(256, 256), touched=2),
    "pages of 128": dict(size=128, dims=(96, 96), touched=2),
    "unlike keys and values": dict(dims=(96, 32)),
    "float32": dict(dtype=jnp.float32, dims=(4, 4)),
    "float16": dict(dtype=jnp.float16),
    "rounded": dict(new=jnp.float32),
    "8 bits": dict(dtype=jnp.float8_e4m3fn, new=jnp.bfloat16),
    "nibbles of one head": dict(dtype=jnp.uint8, heads=1, dims=(32, 32)),
    "bytes": dict(dtype=jnp.int8, heads=3, dims=(64, 32)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_write_equals_that_of_xla(name):
    check(case_of(**CASES[name]))


def test_padding_may_bring_nan_tokens_and_changes_no_page():
    pools, news, *where = case_of()
    nothing = [jnp.zeros_like(of) for of in where]
    spoilt = tuple(jnp.full_like(new, jnp.nan) for new in news)
    written = in_hopper.write_pages(pools, spoilt, *of_layers(nothing), interpret=PARAMS)
    for got, pool in zip(written, pools, strict=True):
        np.testing.assert_array_equal(got[1:].astype(jnp.float32), pool[1:].astype(jnp.float32))


def test_rows_that_tma_cannot_copy_are_refused():
    with pytest.raises(NotImplementedError, match="rows of 24 bytes are no multiple of 16"):
        check(case_of(dims=(64, 12)))


@pytest.mark.slow
def test_the_write_compiles_for_an_h200_in_place(kernels_python):
    command = [kernels_python, "-m", "kvjax.benchmarks.compile_write"]
    run = subprocess.run(command, env=os.environ | dict(KVJAX_BESIDE_XLA="1"), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert rows and not any(row["faults"] for row in rows)
    for kernel, xla in zip(rows[::2], rows[1::2], strict=True):
        assert kernel["shape"] == xla["shape"]
        assert kernel["launches"] < xla["launches"] and kernel["temp_bytes"] < xla["temp_bytes"]


# (what stands there, the fault): every one must fail a case below.
FAULTS = {
    "missing wait for a row": ("plgpu.barrier_wait(arrived.at[i])\n", "pass\n"),
    "missing commit of the zeros": ("        plgpu.commit_smem()\n", ""),
    "one zero too few": ("lax.fori_loop(unused, chunk,", "lax.fori_loop(unused + 1, chunk,"),
    "one zero too many": ("lax.fori_loop(unused, chunk,", "lax.fori_loop(unused - 1, chunk,"),
    "tokens behind a hole cleared": ("lax.fori_loop(unused, chunk,", "lax.fori_loop(behind, chunk,"),
    "nothing cleared": ("zero[...] = jnp.zeros(zero.shape, zero.dtype)", "pass"),
    "token of the slot before": ("first + first_slot + i - begin", "first + first_slot + i - begin - 1"),
    "token of the page's first slot": ("first + first_slot + i - begin", "first + first_slot + i"),
    "chunks not counted": ("first + first_slot + i - begin", "first + i - begin"),
    "slot of another chunk": (
        "first_slot + i])\n        return _\n\n    def clear",
        "i])\n        return _\n\n    def clear",
    ),
    "rows of another slot": ("row.at[i, pl", "row.at[0, pl"),
    "values for keys": (
        "zip(rows, pools, strict=True):\n            plgpu",
        "zip(rows[::-1], pools):\n            plgpu",
    ),
    "group of another": ("source.at[group, token]", "source.at[0, token]"),
    "another layer": ("of[layer[0], group", "of[0, group"),
    "padding written": ("pl.when(page > 0)", "pl.when(page >= 0)"),
    "page 1 taken for padding": ("pl.when(page > 0)", "pl.when(page > 1)"),
}


@functools.cache
def _suite():
    """Small cases that together use everything; padding would bring what is not there."""
    return (
        case_of(groups=2, seed=1), case_of(size=16, heads=16, dims=(256, 256), touched=3),
        (*case_of(touched=5)[:2], *(jnp.asarray([of], jnp.int32) for of in ([1, 0], [0, 500], [2, 0], [5, 1], [6, 1]))),
    )  # fmt: skip


def _noticed_by(kernel) -> str | None:
    cases = (functools.partial(check, case, kernel) for case in _suite())
    return noticed_by(cases, gpu_callbacks.reset_gpu_interpret_mode_state)


def test_mutation_suite_passes_without_a_fault():
    assert _noticed_by(in_hopper) is None


@pytest.mark.slow
def test_mutation_every_planted_fault_is_noticed(capsys):
    def notice(name):
        return _noticed_by(with_fault([in_hopper], in_hopper, *FAULTS[name]))

    assert_all_noticed(FAULTS, notice, capsys)
