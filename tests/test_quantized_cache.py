"""Quantised pages in a cache: what is stored, how outputs follow the inputs, and inputs that nothing can hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.driver import DECODE, HEADS, PREFILL, SPEC, Twin, jit

from kvjax.cache import Status, init_cache
from kvjax.evaluation.small_task import documents
from kvjax.spec import CacheSpec
from kvjax.step import begin_step, end_step

QUANTIZED = ["fp8_e4m3", "fp8_e5m2", "int8", "int4_hadamard", "int4"]
PER_SLOT = QUANTIZED[:-1]


def spec_of(name: str) -> CacheSpec:
    return dataclasses.replace(SPEC, format=name, num_pages=80, debug=False)


@pytest.mark.parametrize("name", QUANTIZED)
def test_dtypes_and_bytes_are_those_of_the_format(name):
    spec = spec_of(name)
    cache, slots = init_cache(spec), spec.num_pages * spec.num_kv_heads * spec.page_size
    bits = 4 if name.startswith("int4") else 8
    assert cache.keys.dtype == (jnp.int8 if name == "int8" else jnp.uint8) == cache.values.dtype
    assert cache.keys.nbytes == cache.values.nbytes == slots * spec.head_dim * bits // 8
    of_values = (jnp.bfloat16,) if bits == 8 else (jnp.float16, jnp.float16)
    assert tuple(scale.dtype for scale in cache.value_scales) == of_values
    assert sum(scale.nbytes for scale in cache.value_scales) == slots * 2 * len(of_values)
    vectors = spec.head_dim if name == "int4" else spec.page_size
    assert all(scale.shape[2] == vectors for scale in cache.key_scales)


@pytest.mark.parametrize("name", QUANTIZED)
def test_outputs_follow_the_scale_of_values_and_not_that_of_keys(name):
    outs = []
    for q_factor, k_factor, v_factor in ((1, 1, 1), (1, 1, 64), (1 / 64, 64, 1)):
        twin = Twin(spec_of(name), seed=3, tolerance=1e-3)
        for lengths, shape in (([20, 4, 0, 0], PREFILL), ([1, 1, 0, 0], DECODE)):
            q, k, v = twin.draw_tokens(sum(lengths))
            twin.run(lengths, (q * q_factor, k * k_factor, v * v_factor), **shape)
        outs.append(twin.run([1, 1, 0, 0], (q * q_factor, k * k_factor, v * v_factor), **DECODE)[0])
    np.testing.assert_allclose(outs[1], 64 * outs[0], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(outs[2], outs[0], rtol=1e-5, atol=1e-5)


def logits_of(model, spec: CacheSpec, tokens, chunks) -> np.ndarray:
    """Logits of all tokens of sequence 0, fed in chunks."""

    @jit
    def feed(cache, tokens, length):
        cache, step = begin_step(cache, length, num_tokens=tokens.shape[0], max_query_length=tokens.shape[0])
        logits, cache = nnx.merge(graph, weights)(cache, step, tokens, all_tokens=True)
        return logits, end_step(cache, step)[0]

    graph, weights = nnx.split(model)
    cache, done, out = init_cache(spec), 0, []
    for chunk in chunks:
        logits, cache = feed(cache, jnp.asarray(tokens[done : done + chunk]), jnp.array([chunk, 0], jnp.int32))
        out.append(np.asarray(logits))
        done += chunk
    return np.concatenate(out)


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "int4_hadamard", "int4"])
def test_logits_of_a_prefill_are_those_of_decode_steps(small_model, name):
    config, tokens = small_model.config, np.asarray(documents(1, 120, seed=5).tokens[0], np.int32)
    spec = CacheSpec(
        num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, num_pages=30,
        max_seqs=2, pages_per_seq=8, max_query_length=120, page_size=16, format=name,
    )  # fmt: skip
    at_once, one_by_one = (logits_of(small_model, spec, tokens, chunks) for chunks in ([120], [1] * 120))
    log_p, log_q = (jax.nn.log_softmax(jnp.asarray(of)) for of in (one_by_one, at_once))
    kl = np.asarray((jnp.exp(log_p) * (log_p - log_q)).sum(-1))
    # Sums in another order are enough for some value to round to the next code.
    assert np.median(np.abs(at_once - one_by_one)) < 1e-5 or name not in PER_SLOT
    # Before a page is full its tokens see its keys per channel as they were.
    assert kl.mean() <= (1e-5 if name in PER_SLOT else 0.01)


HOSTILE = {
    "zeros": 0.0, "an outlier": 1e4, "the largest number": 3.4e38, "the smallest": -3.4e38, "a denormal": 1e-40,
    "inf": np.inf, "-inf": -np.inf, "nan": np.nan,
}  # fmt: skip


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "int4"])
def test_hostile_values_are_told_of_and_stay_in_their_sequence(name):
    twins = [Twin(spec_of(name), seed=1), Twin(spec_of(name), seed=1)]
    for kind, value in HOSTILE.items():
        outs = []
        for twin, is_spoilt in zip(twins, (False, True), strict=True):
            twin.cache, twin.rng = init_cache(twin.spec), np.random.default_rng(7)
            q, k, v = twin.draw_tokens(24)
            if is_spoilt:
                # One number in the first sequence's fourth token; a whole vector for zeros.
                where = np.s_[:, 3, 0] if kind == "zeros" else np.s_[:, 3, 0, 2]
                k[where], v[where] = value, value
            out, report = twin.run([16, 8, 0, 0], (q, k, v), **PREFILL)
            assert int(report.status) == (Status.NONFINITE_INPUT if is_spoilt and not np.isfinite(value) else 0)
            outs.append((out, twin.run([1, 1, 0, 0], twin.draw_tokens(2), **DECODE)[0]))
        (prefilled, decoded), (spoilt, later) = outs
        assert np.isfinite(spoilt).all() and np.isfinite(later).all(), kind
        np.testing.assert_array_equal(spoilt[:, 16:24], prefilled[:, 16:24])
        np.testing.assert_array_equal(later[:, 1:2], decoded[:, 1:2])
        # Queries before it do not see it; the other KV head has vectors of its own.
        half = HEADS // 2
        if name != "int4":  # whose channels share scales
            np.testing.assert_array_equal(spoilt[:, :3], prefilled[:, :3])
        np.testing.assert_array_equal(spoilt[:, :16, half:], prefilled[:, :16, half:])
