"""The Hopper kernel of attention mass in the interpreter, races detected and memory poisoned, and planted faults."""

import dataclasses
import functools
import inspect
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import ids, jit
from helpers.faults import assert_all_noticed, noticed_by, with_fault
from helpers.paged import Paged, with_rows
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.attention_mass import hopper, hopper_kernel, hopper_tile, hopper_work, reference

SIZE = 8
SMALL = hopper_tile.Shape(block=128, tile_tokens=16, key_stages=2, query_stages=2, workers=3)


@pytest.fixture(autouse=True)
def fresh_interpreter():
    """After an exception the interpreter keeps its state."""
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


def arguments_of(case: Paged) -> tuple[Any, ...]:
    q, keys, _, positions, rows, queries = case.arguments
    return q, jnp.asarray(case.reference().lse, jnp.float32), keys, positions, rows, queries


def mass(case: Paged, arguments=None, *, shape=SMALL, kernel=hopper, **options):
    """Run the kernel in the interpreter."""
    given = {name: of for name, of in case.options.items() if name != "sink_logits"}
    arrays = {name: jnp.asarray(of) for name, of in given.items() if np.ndim(of)}
    run = functools.partial(
        kernel.attention_mass, shape=shape, max_query_length=case.longest,
        interpret=plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"),
        **{name: of for name, of in (given | options).items() if name not in arrays},
    )  # fmt: skip
    return jit(run)(*(arguments or arguments_of(case)), **arrays)


def check(got, case: Paged, arguments=None, **options) -> None:
    """Compare with the definition."""
    given = {name: of for name, of in case.options.items() if name != "sink_logits"}
    wanted = reference.attention_mass(*(arguments or arguments_of(case)), **given | options)
    for array, expected in zip(got, wanted, strict=True):
        assert array.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(array, np.float64), expected, atol=1e-3, rtol=1e-3)


SINKS: dict[str, Any] = dict(window=9, sinks=5, ring=5, kv_heads=2, groups=2, heads=4)
CASES: dict[str, dict[str, Any]] = {
    "edges": dict(lengths=[0, 1, 7, 8, 9, 16, 150], query_lengths=[0, 1, 7, 8, 9, 1, 20]),
    "chunks over a prefix": dict(lengths=[70, 100, 9], query_lengths=[20, 100, 9], heads=4),
    "two groups": dict(lengths=[33, 12], query_lengths=[33, 5], kv_heads=4, heads=8, groups=2),
    "window": dict(lengths=[150, 300], query_lengths=[40, 150], window=9),
    "sinks with a query": dict(lengths=[150, 9, 3], query_lengths=[20, 9, 1], has_sink_query=True, **SINKS),
    "sinks": dict(lengths=[150, 9, 3], query_lengths=[20, 9, 1], **SINKS),
    "many sinks": dict(lengths=[300], query_lengths=[20], sinks=140, window=20),
    "far": dict(lengths=[70, 3], query_lengths=[20, 3], start=2_000_000_000, window=30),
    "learned sinks, cap, fp16": dict(
        lengths=[70], query_lengths=[40], dtype=jnp.float16,
        options=dict(soft_cap=2.5, sink_logits=np.array([0.5, -1], np.float32)),
    ),
}  # fmt: skip
SLOW = ("two groups", "sinks", "window", "far")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
@pytest.mark.parametrize("band", [None, pytest.param(5, marks=pytest.mark.slow)])
def test_mass_equals_the_definition(name, band):
    case = Paged(**CASES[name])
    check(mass(case, band=band), case, band=band)


@pytest.mark.parametrize("band", [0, SIZE, 2**31 - 1])
def test_bands(band):
    case = Paged([40], [17])
    check(mass(case, band=band), case, band=band)


@pytest.mark.slow
@pytest.mark.parametrize("size, dim", [*itertools.product(hopper.PAGE_SIZES, hopper.HEAD_DIMS)])
def test_all_layouts(size, dim):
    case = Paged([size + 1, 150], [size + 1, 70], page_size=size, head_dim=dim, heads=3)
    check(mass(case, shape=dataclasses.replace(hopper.shape_of(dim, 44, 70), workers=3)), case)


@pytest.mark.parametrize("tile_tokens", [8, 48])
def test_any_tile_gives_the_same(tile_tokens):
    # 48 columns are looked at in three parts.
    case = Paged([150, 70], [80, 9])
    check(mass(case, shape=dataclasses.replace(SMALL, tile_tokens=tile_tokens)), case)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("stages", [1, 3])
def test_any_number_of_workers_and_stages_gives_the_same(workers, stages):
    case = Paged([200, 1, 70, 0, 300], [200, 1, 20, 0, 9])
    check(mass(case, shape=hopper_tile.Shape(128, 16, stages, stages, workers)), case)


@pytest.mark.parametrize("window", [2**31 - 1, 30])
def test_only_some_queries(window):
    case = Paged([150, 9], [40, 9], window=window)
    *rest, queries = arguments_of(case)
    last = (*rest, queries.last(4))
    check(mass(case, last), case, last)
    middle = dataclasses.replace(
        queries, starts=queries.starts + 2, positions=queries.positions + 2, lengths=ids([20, 3])
    )
    check(mass(case, (*rest, middle)), case, (*rest, middle))


def test_rows_out_of_order_and_with_holes():
    case = Paged([150], [20])
    q, lse, keys, positions, rows, queries = arguments_of(case)
    table = rows.page_table[1]
    order = np.arange(table.shape[-1])
    order[[2, 11]] = order[[11, 2]]
    positions = positions.at[table[0, 0, 5], 3].set(-1).at[table[0, 0, 12], 0].set(-1)
    arguments = (q, lse, keys, positions, with_rows(rows, page_table=table[..., order]), queries)
    check(mass(case, arguments), case, arguments)


def test_nothing_to_see_gives_zeros():
    case = Paged([70, 3], [20, 3])
    *rest, queries = arguments_of(case)
    q, lse, *pool = rest
    hidden = dataclasses.replace(queries, start_positions=ids([1000, 1000]))
    sums, entropy = mass(case, (q, jnp.full_like(lse, -jnp.inf), *pool, hidden))
    assert not sums.any() and not entropy.any()


@pytest.mark.parametrize("what", ["q", "lse", "keys"])
def test_a_sequence_that_overflowed_spoils_no_other(what):
    case = Paged([70, 20, 9], [20, 5, 9])
    q, lse, keys, *rest = arguments_of(case)
    page = int(rest[1].page_table[1, 0, 1, 0])
    # Token 20 is the first of sequence 1, token 24 its last.
    spoilt = dict(q=(q.at[20:25].set(jnp.nan), lse, keys), lse=(q, lse.at[20:25].set(jnp.nan), keys))
    spoilt["keys"] = (q, lse, keys.at[page, :, 1].set(jnp.nan))
    sums, entropy = mass(case, (*spoilt[what], *rest))
    expected = reference.attention_mass(*arguments_of(case), **case.options)
    assert np.isnan(entropy[:, 1]).any()
    for got, wanted in zip((sums, entropy), expected, strict=True):
        np.testing.assert_allclose(got[:, ::2], wanted[:, ::2], atol=1e-3, rtol=1e-3)


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
        mass(Paged([4], **changes))


def test_pages_of_another_dtype_are_refused():
    case = Paged([4])
    q, lse, keys, *rest = arguments_of(case)
    with pytest.raises(NotImplementedError, match="pages of float16 are not of the queries' bfloat16"):
        mass(case, (q, lse, keys.astype(jnp.float16), *rest))


# Faults planted in the source: (module, what stands there, the fault). Every one must fail a case below.
FAULTS = {
    "missing wait for keys": (hopper_kernel, "plgpu.barrier_wait(at.k_full.at[slot])\n", "pass\n"),
    "missing wait for queries": (hopper_tile, "plgpu.barrier_wait(at.q_full.at[slot])\n", "pass\n"),
    "missing wait for free keys": (
        hopper_kernel,
        "pl.when(fragments >= self.shape.key_stages)(lambda: plgpu.barrier_wait(at.k_free.at[slot]))", "pass",
    ),
    "missing wait for a free tile": (
        hopper_kernel,
        "pl.when(steps + i >= self.shape.query_stages)(lambda: plgpu.barrier_wait(at.q_free.at[slot]))", "pass",
    ),
    "missing wait for the last fragment": (hopper_kernel, "plgpu.wait_smem_to_gmem(0)  # what", "pass  # what"),
    "missing commit of lse's reads": (
        hopper_tile, "plgpu.commit_smem()\n    plgpu.barrier_arrive(at.q_free", "plgpu.barrier_arrive(at.q_free"
    ),
    "missing commit of the result": (
        hopper_kernel, "plgpu.commit_smem()\n            plgpu.barrier_arrive(at.k_free",
        "plgpu.barrier_arrive(at.k_free",
    ),
    "dropped scale": (hopper_tile, "config.scale, config.soft_cap)", "1.0, config.soft_cap)"),
    "wrong head map": (hopper_kernel, "(q, lse, head * self.heads)", "(q, lse, 0)"),
    "heads in another order": (hopper_kernel, "at.entropy[me, head] =", "at.entropy[me, self.heads - 1 - head] ="),
    "parts swapped": (hopper_kernel, "sums_out.at[block + worker, me]", "sums_out.at[block + worker, 1 - me]"),
    "swapped pages": (hopper_kernel, "ids[j // per_page]", "ids[-1 - j // per_page]"),
    "mask left out": (hopper_tile, "lax.cond(is_full, lambda x: x, mask, log_p)", "log_p"),
    "mask left out too early": (hopper_tile, "first >= info[fields.FULL_FROM]",
                                "first >= info[fields.FULL_FROM] - 16"),
    "mask left out too late": (hopper_tile, "end <= info[fields.FULL_TO]",
                               "end <= info[fields.FULL_TO] + 8"),
    "not causal": (hopper_tile, "(column >= of_row(own())) &", ""),
    "causal + 1": (hopper_tile, "column >= of_row(own())", "column > of_row(own())"),
    "window + 1": (hopper_tile, "_LAST - window) + window, tokens)", "_LAST - window) + window + 1, tokens)"),
    "padding counted": (hopper_tile, "_LAST - window) + window, tokens)", "_LAST - window) + window, tokens + 1)"),
    "band + 1": (hopper_tile, "_LAST - band) + band)", "_LAST - band) + band + 1)"),
    "band - 1": (hopper_tile, "column <= of_row(jnp.minimum(own()", "column < of_row(jnp.minimum(own()"),
    "empty slots counted": (hopper_kernel, "(position >= lowest) &", ""),
    "sums of one tile only": (hopper_tile, "return sums + p,", "return p,"),
    "sinks + 1": (hopper_work, "starts + jnp.where(is_sink, 0, rows.sinks)",
                  "starts + jnp.where(is_sink, 0, rows.sinks + 1)"),
    "sinks - 1": (hopper_work, "starts + rows.sinks - 1", "starts + rows.sinks - 2"),
    "sinks counted twice": (hopper_work, "starts + jnp.where(is_sink, 0, rows.sinks)", "starts"),
    "sinks in the window only": (
        hopper_work, "jnp.where(is_sink, 2**31 - 1, rows", "jnp.where(is_sink & False, 1, rows"
    ),
    "sinks seen by the other query": (
        hopper_work, "jnp.where(is_sink, to_sink_queries, 0)", "jnp.where(is_sink, 0, 0)"
    ),
    "first tile left out": (hopper_work, "// ALIGNMENT * ALIGNMENT\n    tokens",
                            "// ALIGNMENT * ALIGNMENT + 8\n    tokens"),
    "last tile left out": (hopper_work, "jnp.minimum(lengths, last + near))", "jnp.minimum(lengths, last + near) - 8)"),
    "a page too few": (hopper_work, "end_page = -(-end_slot // size)", "end_page = end_slot // size"),
    "ring not turned": (hopper_work, "pinned + (logical - pinned) % rows.rings[rows.layer])\n    group",
                        "jnp.minimum(logical, rows.rings[rows.layer]))\n    group"),
    "a fragment left out": (hopper_work, "(work.end - 1) // work", "(work.begin) // work"),
    "fragments of others counted": (hopper_work, "jnp.where(written.reshape(shape), of_fragments, 0)", "of_fragments"),
    "entries not turned": (hopper, "held + (entry - first) % ring", "held + entry"),
    "entropy in bits": (hopper, "-math.log(2)", "-1.0"),
}  # fmt: skip


# The case that notices a fault, where the first does not.
NOTICED_BY = {
    "missing wait for free keys": 2, "band + 1": 1, "band - 1": 1, "sinks - 1": 1, "sinks counted twice": 1,
    "sinks in the window only": 1, "sinks seen by the other query": 1, "ring not turned": 1, "entries not turned": 1,
}  # fmt: skip


@functools.cache
def _suite():
    """Small cases that together use everything: (case, options)."""
    lone = hopper_tile.Shape(block=128, tile_tokens=16, key_stages=1, query_stages=2, workers=1)
    large = dataclasses.replace(SMALL, block=256)
    return (
        (Paged([150, 9, 0, 70], [40, 9, 0, 1], kv_heads=2, heads=4), dict(shape=SMALL)),
        (Paged([150, 9], [20, 9], has_sink_query=True, **SINKS), dict(shape=large, band=5)),
        (Paged([330], [130], window=200, heads=1), dict(shape=lone)),
    )


def _noticed_by(kernel, first: int = 0) -> str | None:
    def run(case, options):
        check(mass(case, kernel=kernel, **options), case, band=options.get("band"))

    cases = (functools.partial(run, *of) for of in _suite())
    return noticed_by(cases, gpu_callbacks.reset_gpu_interpret_mode_state, first)


@pytest.mark.parametrize("name", FAULTS)
def test_mutation_has_its_place_in_the_source(name):
    module, old, _ = FAULTS[name]
    assert inspect.getsource(module).count(old) == 1


@pytest.mark.slow
def test_mutation_suite_passes_without_a_fault():
    assert _noticed_by(hopper) is None


@pytest.mark.slow
def test_mutation_every_planted_fault_is_noticed(capsys):
    modules = (hopper_work, hopper_tile, hopper_kernel, hopper)
    notice = lambda name: _noticed_by(with_fault(modules, *FAULTS[name]), NOTICED_BY.get(name, 0))  # noqa: E731
    assert_all_noticed(FAULTS, notice, capsys)
