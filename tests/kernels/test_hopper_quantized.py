"""Quantised pages in the Hopper kernel: the interpreter, races detected, garbage in unused slots; planted faults."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.faults import assert_all_noticed, noticed_by, with_fault
from helpers.hopper import MODULES, PREFILL, SMALL, attend, forget_state, quantized
from helpers.paged import Paged, assert_equal

from kvjax.kernels.paged_attention import (
    hopper,
    hopper_block,
    hopper_codes,
    hopper_fetch,
    hopper_kernel,
    hopper_shared,
)

PAIRS = [
    ("int8", "int8"),
    ("int4_per_channel", "int4_hadamard"),
    ("fp8_e4m3", "fp8_e4m3"),
    ("fp8_e5m2", "fp8_e5m2"),
    ("int4_hadamard", "int4_hadamard"),
    ("int4_per_token", "int4_per_token"),
    ("int4_per_channel", "int8"),
]
FAST = PAIRS[:2]
ALL = [pytest.param(pair, id="-".join(pair), marks=[pytest.mark.slow] * (pair not in FAST)) for pair in PAIRS]


@pytest.fixture(autouse=True)
def fresh_interpreter():
    yield
    forget_state()


def check_all(case: Paged, *, shape=SMALL, kernel=hopper, **options) -> None:
    """Compare with the definition, over the same arguments."""
    got = attend(case, shape=shape, kernel=kernel, **options)
    assert_equal(got, case.reference(**options), 0.02)


@pytest.mark.parametrize("forms", ALL)
def test_decode_equals_the_definition(forms):
    check_all(quantized([70, 3, 0, 130], heads=4, kv_heads=2, forms=forms))


@pytest.mark.parametrize("forms", ALL)
def test_prefill_equals_the_definition(forms):
    check_all(quantized([70, 9], [20, 9], heads=2, forms=forms), shape=PREFILL)


LEARNED = dict(soft_cap=2.5, sink_logits=np.array([0.5, -1], np.float32))
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "groups, logits": (dict(lengths=[70, 3, 0], kv_heads=2, heads=4, groups=2), dict(last_logits=1)),
    "window, soft cap": (dict(lengths=[150, 30], window=20, ring=4, options=LEARNED), {}),
    "sinks": (dict(lengths=[150, 30], window=20, ring=4, sinks=11, has_sink_query=True), {}),
    "sinks of a prefill": (
        dict(lengths=[100, 30], query_lengths=[40, 30], window=20, sinks=5, has_sink_query=True), dict(last_logits=2)
    ),
    "fp16": (dict(lengths=[70, 3], dtype=jnp.float16), {}),
    "pages of 16": (dict(lengths=[70, 3], page_size=16, head_dim=128), {}),
    "pages of 128": (dict(lengths=[200, 3], page_size=128), {}),
}  # fmt: skip


BESIDE = [(name, forms) for name in FEATURES for forms in FAST] + [("fp16", ("fp8_e5m2", "fp8_e5m2"))]


@pytest.mark.slow
@pytest.mark.parametrize("name, forms", BESIDE, ids=str)
def test_what_the_kernel_can_do_beside(name, forms):
    changes, options = FEATURES[name]
    case = quantized(**changes, forms=forms)
    check_all(case, shape=SMALL if case.longest == 1 else PREFILL, **options)


@pytest.mark.slow
@pytest.mark.parametrize("forms", [PAIRS[0], PAIRS[4]], ids="-".join)
def test_only_listed_pages_are_read(forms):
    case = quantized([150, 30], kv_heads=2, heads=4, forms=forms)
    check_all(case, page_list=jnp.asarray(case.some_pages(5)))


@pytest.mark.slow
@pytest.mark.parametrize("forms", FAST, ids="-".join)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_one_consumer(kind, forms):
    lengths = ([70, 3],) if kind == "decode" else ([70, 9], [20, 9])
    case = quantized(*lengths, head_dim=256, page_size=16, forms=forms)
    shape = dataclasses.replace(hopper.shape_of(256, 44, is_decode=kind == "decode"), workers=3)
    check_all(case, shape=shape)


@pytest.mark.slow
def test_head_dim_96():
    check_all(quantized([70, 3], head_dim=96, forms=("int8", "fp8_e4m3")))


def test_what_cannot_be_served_is_refused():
    with pytest.raises(NotImplementedError, match="head_dim 96 of int4_hadamard takes 48 bytes"):
        attend(quantized([9], head_dim=96, forms=("int8", "int4_hadamard")))
    with pytest.raises(NotImplementedError, match="keys of bfloat16 and values of int8"):
        attend(quantized([9], forms=("bfloat16", "int8")))
    with pytest.raises(NotImplementedError, match="pages of int4_per_channel"):
        attend(quantized([9], forms=("int8", "int4_per_channel")))


@pytest.mark.parametrize("forms", PAIRS, ids="-".join)
def test_codes_fit_beside_what_the_products_read(forms):
    for case in (quantized([9], head_dim=dim, page_size=8, forms=forms) for dim in (64, 128, 256)):
        for is_decode in (True, False):
            config = hopper_shared.Config(
                shape=hopper.shape_of(case.head_dim, 8, is_decode=is_decode), page_size=8, heads_per_group=1,
                head_dim=case.head_dim, forms=(case.arguments[1].form, case.arguments[2].form), heads=4,
                tile_tokens=1 if is_decode else 32, kinds=2, sinks=4, is_listed=False, has_logits=False, scale=1.0,
                soft_cap=None, is_interpreted=False,
            )  # fmt: skip
            assert config.code_stages >= 2


# (module, what stands there, the fault).
FAULTS = {
    "dropped key scale": (hopper_block, "scaled = _columns(logits, at.key_scales, slot, 0)", "scaled = logits"),
    "dropped value scale": (hopper_block, "weights = _columns(weights, at.value_scales, slot, 0)", "pass"),
    "scale in the normaliser": (
        hopper_block, "        weights = _columns(weights, at.value_scales, slot, 0)",
        "        scaled = _columns(weights, at.value_scales, slot, 0)\n"
        "        total = total - weights.sum(axis=1) + scaled.sum(axis=1)\n        weights = scaled",
    ),
    "scale of the neighbour": (
        hopper_codes, "plgpu.load(source.at[stage, i], layout=_OF_SLOTS)",
        "jnp.roll(plgpu.load(source.at[stage, i], layout=_OF_SLOTS), 1)",
    ),
    "scale of an empty slot kept": (hopper_codes, "jnp.where(position >= 0, scale, 0.0)", "scale"),
    "swapped nibbles": (hopper_codes, "return [low, high", "return [high * 0 + low * 0 + high"),
    "minimum of keys forgotten": (
        hopper_block, "return scaled + _columns(lax.broadcast_in_dim(sums, logits.shape, [0]), at.key_scales, slot, 1)",
        "return scaled",
    ),
    "minimum of values forgotten": (hopper_kernel, "acc = acc + lax.broadcast_in_dim(of_rows, acc.shape, [0])", "pass"),
    "sum of minima not shrunk": (hopper_block, "of * shrink + _columns", "of + _columns"),
    "sum of the other queries": (hopper_block, "at.query_sums.at[me, kind]", "at.query_sums.at[me, 0]"),
    "minimum of channels forgotten": (hopper_codes, "* spread(scale) + spread(minimum)", "* spread(scale)"),
    "scale of another channel": (hopper_codes, "scales.at[i, columns]", "scales.at[i, pl.ds(0, columns.size)]"),
    "scales of another page": (hopper_fetch, "scale.at[page], into", "scale.at[1], into"),
    "scales of another piece": (hopper_codes, "codes.key_scales.at[stage, :, j]", "codes.key_scales.at[stage, :, 0]"),
    "scales of the page's first piece": (
        hopper_fetch, "scale.at[page, there], into.value_scales",
        "scale.at[page, pl.ds(0, there.size)], into.value_scales",
    ),
    "keys' scales for values": (
        hopper_fetch, "scales[config.forms[0].num_scales :]", "scales[: config.forms[1].num_scales]"
    ),
    "missing wait for codes of keys": (hopper_codes, "plgpu.barrier_wait(codes.k_full.at[stage])\n", "pass\n"),
    "missing wait for codes of values": (hopper_codes, "plgpu.barrier_wait(codes.v_full.at[stage])\n", "pass\n"),
    "missing wait for free keys": (
        hopper_kernel, "pl.when(is_reused)(lambda: plgpu.barrier_wait(at.k_free.at[slot]))\n", "pass\n"
    ),
    "missing wait for free values": (
        hopper_kernel, "pl.when(is_reused)(lambda: plgpu.barrier_wait(at.v_free.at[slot]))\n", "pass\n"
    ),
    "missing commit of numbers": (hopper_codes, "plgpu.commit_smem()\n", "pass\n"),
    "block of another stage": (hopper_codes, "codes.keys.at[stage], at.keys", "codes.keys.at[0], at.keys"),
}  # fmt: skip

# The case that notices a fault, where the first does not.
NOTICED_BY = {
    "swapped nibbles": 1, "minimum of keys forgotten": 1, "minimum of values forgotten": 1,
    "sum of minima not shrunk": 3, "sum of the other queries": 1, "minimum of channels forgotten": 2,
    "scale of another channel": 2, "scales of another page": 2, "scales of another piece": 2,
    "scales of the page's first piece": 3, "missing wait for free keys": 3, "missing wait for free values": 3,
    "missing commit of numbers": 4, "block of another stage": 1,
}  # fmt: skip


@functools.cache
def _suite():
    """Small cases that together use everything: (case, shape)."""
    lone = dataclasses.replace(SMALL, workers=1)
    sinks: dict[str, Any] = dict(window=9, sinks=11, has_sink_query=True)
    return (
        (quantized([70, 20], [1, 1], kv_heads=2, heads=4, forms=("int8", "fp8_e4m3")), SMALL),
        (quantized([70, 40], heads=4, **sinks, forms=("int4_per_token", "int4_hadamard")), SMALL),
        (quantized([72, 16], forms=("int4_per_channel", "int4_hadamard")), SMALL),
        (quantized([330], page_size=128, forms=("int8", "int4_hadamard")), lone),
        (quantized([520], forms=("int8", "int8")), lone),
    )


def _noticed_by(kernel, first: int = 0) -> str | None:
    cases = (functools.partial(check_all, case, shape=shape, kernel=kernel) for case, shape in _suite())
    return noticed_by(cases, forget_state, first)


@pytest.mark.slow
def test_mutation_suite_passes_without_a_fault():
    untouched = FAULTS["swapped nibbles"][:2]
    assert _noticed_by(with_fault(MODULES, *untouched, untouched[1])) is None


@pytest.mark.slow
def test_mutation_every_planted_fault_is_noticed(capsys):
    def notice(name):
        return _noticed_by(with_fault(MODULES, *FAULTS[name]), NOTICED_BY.get(name, 0))

    assert_all_noticed(FAULTS, notice, capsys)
