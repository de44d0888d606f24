"""Attention over quantised pages: every backend against the definition, and the definition against decoded arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paged import Paged, assert_equal, by_xla, case_of

from kvjax.kernels.attention_mass import reference as mass_definition
from kvjax.kernels.attention_mass import xla as mass
from kvjax.kernels.formats import FORMATS, Stored, decode
from kvjax.kernels.paged_attention import xla

QUANTIZED = [name for name, form in FORMATS.items() if form.is_quantized]
QUERIES = {"decode": [0, 1, 1, 1], "prefill": [0, 1, 9, 20], "mixed": [0, 1, 5, 1]}
CASES = [dict(), dict(window=9, ring=5, groups=2), dict(window=9, sinks=11, has_sink_query=True, ring=5)]


def quantized(kind: str, forms, **changes) -> Paged:
    options: dict[str, Any] = dict(ring=None) | changes
    return case_of(QUERIES[kind], lengths=(0, 1, 9, 100), forms=forms, **options)


# A mixed step takes both loops.
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "mixed")) for kind in QUERIES])
@pytest.mark.parametrize("changes", CASES, ids=str)
@pytest.mark.parametrize("form", QUANTIZED)
def test_xla_equals_the_definition(kind, changes, form):
    case = quantized(kind, (form, form), **changes)
    assert_equal(by_xla(case, last_logits=2), case.reference(last_logits=2), 1e-4)


@pytest.mark.parametrize(
    "forms", [("int8", "fp8_e4m3"), ("float32", "int4_hadamard"), ("fp8_e5m2", "float32")], ids=str
)
def test_keys_and_values_may_differ(forms):
    case = quantized("mixed", forms)
    assert_equal(by_xla(case), case.reference(), 1e-4)


@pytest.mark.parametrize("form", QUANTIZED)
def test_the_definition_equals_that_over_decoded_pages(form):
    case = quantized("mixed", (form, form))
    q, keys, values, *rest = case.arguments
    plain = [decode(of.codes, of.scales, of.form) for of in (keys, values)]
    assert_equal(case.reference(), case.reference_of(q, *plain, *rest), 1e-5)


@pytest.mark.parametrize("form", QUANTIZED)
def test_half_precision_queries(form):
    case = quantized("mixed", (form, form), dtype=jnp.bfloat16)
    assert_equal(by_xla(case), case.reference(), 3e-2)


@pytest.mark.parametrize("form", ["int8", "int4_hadamard"])
def test_attention_mass_reads_quantised_keys(form):
    case = quantized("prefill", (form, form))
    q, keys, _, *rest = case.arguments
    lse, options = jnp.asarray(case.reference().lse, jnp.float32), dict(scale=0.6, soft_cap=2.5)
    got = mass.attention_mass(q, lse, keys, *rest, max_query_length=20, **options)
    for of, wanted in zip(got, mass_definition.attention_mass(q, lse, keys, *rest, **options), strict=True):
        np.testing.assert_allclose(of, wanted, atol=1e-4)


@pytest.mark.parametrize("form", QUANTIZED)
def test_the_cost_follows_codes_not_a_decoded_pool(form):
    case = quantized("decode", (form, form))
    many: Any = lambda of: jax.ShapeDtypeStruct((50_000, *of.shape[1:]), of.dtype)  # noqa: E731
    big = [Stored(many(of.codes), tuple(map(many, of.scales)), of.form) for of in case.arguments[1:3]]
    positions = jax.ShapeDtypeStruct((50_000, 8), jnp.int32)

    def attend(q, keys, values, positions, rows, queries):
        return xla.paged_attention(q, keys, values, positions, rows, queries, scale=0.6, max_query_length=1)

    compiled = jax.jit(attend).lower(case.q, *big, positions, *case.arguments[4:]).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2_000_000 < big[0].codes.size
