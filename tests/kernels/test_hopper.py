"""The Hopper kernel in the interpreter, races detected and memory poisoned, against the oracle; planted faults."""

import dataclasses
import functools
import inspect
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import ids
from helpers.paged import NO_WINDOW, Paged, assert_equal, with_rows
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.paged_attention import hopper, hopper_block, hopper_kernel, tiles

SIZE = 8
EDGES = [0, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 150]
SMALL = hopper_block.Shape(block=64, stages=2, workers=3, consumers=2, shares_blocks=False)
PREFILL = dataclasses.replace(SMALL, shares_blocks=True)


def attend(case: Paged, *, shape=SMALL, arguments=None, kernel=hopper, **options):
    """Run the kernel in the interpreter."""
    given = {name: jnp.asarray(value) if np.ndim(value) else value for name, value in case.options.items()}
    return kernel.paged_attention(
        *(case.arguments if arguments is None else arguments), shape=shape,
        max_query_length=1 if case.longest == 1 else 128,
        interpret=plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"), **given | options,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_interpreter():
    """After an exception the interpreter keeps its state."""
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


def check(attention, case: Paged, **options):
    assert_equal(attention, case.reference(**options), 0.02)


DECODES: dict[str, dict[str, Any]] = {
    "edges": dict(lengths=EDGES),
    "heads": dict(lengths=[70, 3], kv_heads=2, heads=12),
    "groups": dict(lengths=[70, 3], kv_heads=2, heads=2, groups=2),
    "mqa of 16": dict(lengths=[17, 66], heads=16),
    "options": dict(lengths=[70, 3], options=dict(soft_cap=2.5, sink_logits=np.array([0.5, -1], np.float32))),
    "far": dict(lengths=[70, 3], start=2_000_000_000),
    "fp16": dict(lengths=[70, 3], dtype=jnp.float16),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    f"page {size}, head_dim {dim}": dict(lengths=[size + 1, 70], page_size=size, head_dim=dim)
    for size, dim in itertools.product(hopper.PAGE_SIZES, hopper.HEAD_DIMS)
}
SLOW = [name for name in LAYOUTS if name not in ("page 128, head_dim 256", "page 16, head_dim 96")]


@pytest.mark.parametrize(
    "name", [*DECODES, *(pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS)]
)
def test_decode_equals_the_oracle(name):
    case = Paged(**(DECODES | LAYOUTS)[name])
    shape = dataclasses.replace(hopper.shape_of(case.head_dim, 44, is_decode=True), workers=3)
    check(attend(case, shape=shape), case)


@pytest.mark.parametrize("window", [1, SIZE - 1, SIZE, SIZE + 1, 65])
def test_windows_around_page_edges(window):
    case = Paged(lengths=[5, 70, 130], window=window)
    check(attend(case), case)


def test_pages_outside_the_window_are_not_read():
    # Their ids lead to poison: every page before the window's first is of NaN and seemingly in the window.
    case = Paged(lengths=[130], window=SIZE)
    q, keys, values, positions, rows, queries = case.arguments
    trap = int(rows.page_table[1, 0, 0, 0])
    rows = with_rows(rows, page_table=rows.page_table[1].at[0, 0, : (130 - SIZE) // SIZE - 1].set(trap))
    values = values.at[trap].set(jnp.nan)
    out = attend(case, arguments=(q, keys, values, positions.at[trap].set(129), rows, queries))
    check(out, case)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_workers_gives_the_same(workers):
    case = Paged(lengths=[200, 1, 70, 0, 64])
    check(attend(case, shape=dataclasses.replace(SMALL, workers=workers)), case)


PREFILLS: dict[str, dict[str, Any]] = {
    "chunks over a prefix": dict(lengths=[70, 100, 9], query_lengths=[20, 100, 9], heads=4),
    "mixed with decode": dict(lengths=[70, 40, 0, 9], query_lengths=[1, 40, 0, 9], heads=4),
    "two groups": dict(lengths=[33, 12], query_lengths=[33, 5], kv_heads=2, heads=6, groups=2),
    "options": dict(
        lengths=[70], query_lengths=[40], options=dict(soft_cap=2.5, sink_logits=np.array([0.5, -1], np.float32))
    ),
}


@pytest.mark.parametrize("name", PREFILLS)
@pytest.mark.parametrize("window", [NO_WINDOW, pytest.param(9, marks=pytest.mark.slow)])
def test_prefill_equals_the_oracle(name, window):
    case = Paged(**PREFILLS[name], window=window)
    check(attend(case, shape=PREFILL), case)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", hopper.HEAD_DIMS)
def test_prefill_of_all_head_dims(head_dim):
    case = Paged([100, 9], [70, 9], page_size=16, head_dim=head_dim, heads=4)
    shape = dataclasses.replace(hopper.shape_of(head_dim, 44, is_decode=False), workers=3)
    check(attend(case, shape=shape), case)


def test_nothing_to_see_gives_zeros():
    case = Paged(lengths=[70, 3])
    hidden = dataclasses.replace(case.arguments[5], start_positions=ids([1000, 1000]))
    attention = attend(case, arguments=(*case.arguments[:5], hidden))
    assert not attention.out.any()
    assert (attention.lse == -np.inf).all()


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(head_dim=80), "head_dim 80 is not one of 64, 96, 128, 256"),
        (dict(page_size=12), "page_size 12 is not one of 8, 16, 32, 64, 128"),
        (dict(dtype=jnp.float32), "queries of float32"),
        (dict(heads=17), "17 query heads of a KV head"),
    ],
)
def test_what_the_kernel_cannot_serve_is_refused(changes, reason):
    with pytest.raises(NotImplementedError, match=reason):
        attend(Paged(lengths=[4], **changes))


def test_pages_of_another_dtype_are_refused():
    case = Paged(lengths=[4])
    with pytest.raises(NotImplementedError, match="pages of float16 are not of the queries' bfloat16"):
        attend(case, arguments=(case.q, *(a.astype(jnp.float16) for a in case.arguments[1:3]), *case.arguments[3:]))


# Faults planted in the source: (module, what stands there, the fault). Every one must fail a case above.
SOURCE_FAULTS = {
    "missing wait for keys": (hopper_block, "plgpu.barrier_wait(at.k_full.at[slot])\n", "pass\n"),
    "missing wait for values": (hopper_block, "plgpu.barrier_wait(at.v_full.at[slot])\n", "pass\n"),
    "missing wait for a free buffer": (
        hopper_kernel, "pl.when(is_reused)(lambda: plgpu.barrier_wait(at.k_free.at[slot]))", "pass"
    ),
    "missing wait for the query": (hopper_kernel, "plgpu.barrier_wait(at.q_full)\n", "pass\n"),
    "missing commit of the result": (
        hopper_kernel, "at.out[me] = acc[:, columns]\n                plgpu.commit_smem()",
        "at.out[me] = acc[:, columns]",
    ),
    "values of empty slots not zeroed": (hopper_block, "position >= 0, matrix.shape", "position >= -1, matrix.shape"),
    "unmasked tail": (hopper_block, "visible = (position >= earliest) &", "visible ="),
    "stale page id": (hopper_kernel, "following = pages_of(i + 1)", "following = pages_of(i)"),
    "swapped pages": (hopper_kernel, "values.at[page, there]", "values.at[pages[-1 - j][0], there]"),
    "dropped scale": (hopper_block, "logits * (scale * LOG2E)", "logits * LOG2E"),
    "wrong head map": (hopper_kernel, "q.at[:, head]", "q.at[:, 0]"),
    "old total not shrunk": (hopper_block, "total * shrink + weights", "total + weights"),
    "window + 1": (tiles, "latest - window + 1", "latest - window"),
    "window - 1": (tiles, "latest - window + 1", "latest - window + 2"),
    "one piece too few": (tiles, "end_piece = -(-(first_slot + tiles.tokens[None]) // piece)",
                          "end_piece = (first_slot + tiles.tokens[None]) // piece"),
    "one piece skipped": (tiles, "oldest_slot // piece)", "oldest_slot // piece + 1)"),
    "a fragment left out": (tiles, "fragment[None, :, None] <= last", "fragment[None, :, None] < last"),
    "sink counted twice": (tiles, "jnp.exp2(sinks - higher)", "2 * jnp.exp2(sinks - higher)"),
}  # fmt: skip


@functools.cache
def _suite():
    """Small cases that together use everything: (case, workers)."""
    sinks = np.array([0.5, -1, 1, 0], np.float32)
    return (
        (Paged([150, 9, 70], kv_heads=2, heads=4, options=dict(sink_logits=sinks)), 3),
        (Paged([70, 20], window=9), 3),
        (Paged([330]), 1),
    )


def _fails(attend) -> str | None:
    """Name what notices a fault: a race, a hang, or a wrong output of a case."""
    for i, (case, workers) in enumerate(_suite()):
        try:
            check(attend(case, shape=dataclasses.replace(SMALL, workers=workers)), case)
        except AssertionError:
            return f"case {i}: wrong output"
        except Exception as error:  # noqa: BLE001, the interpreter raises what it likes
            return f"case {i}: {'race' if 'RACE' in str(error) else type(error).__name__}"
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()
    return None


def _with_fault(module, old: str, new: str):
    """The entry point of a copy of the kernel's modules, one of which has the fault."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}"
    copies = {}
    for original in (tiles, hopper_block, hopper_kernel, hopper):
        text = inspect.getsource(original)
        text = text.replace(old, new) if original is module else text
        copy = types.ModuleType(original.__name__)
        exec(compile(text, original.__name__, "exec"), copy.__dict__)
        for name, other in copies.items():
            for attribute in vars(other):
                if attribute in copy.__dict__ and getattr(vars(other)[attribute], "__module__", None) == name:
                    setattr(copy, attribute, vars(other)[attribute])
        copies[original.__name__] = copy
    return copies[hopper.__name__]


def test_mutation_suite_passes_without_a_fault():
    assert _fails(attend) is None


@pytest.mark.slow
def test_mutation_every_planted_fault_is_noticed(capsys):
    noticed = {}
    for name, fault in SOURCE_FAULTS.items():
        jax.clear_caches()
        noticed[name] = _fails(functools.partial(attend, kernel=_with_fault(*fault)))
    with capsys.disabled():
        print()
        for name, by in noticed.items():
            print(f"    {name:36} {by or 'NOT NOTICED'}")
    assert all(noticed.values())
