"""attend against float64 attention over plain lists of tokens, with NaN in every slot that holds none."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import DECODE, HEADS, PREFILL, SIZE, SPEC, WINDOW, Twin, ids, jit

from kvjax.attention import attend, plan_step
from kvjax.cache import init_cache
from kvjax.errors import InputError
from kvjax.formats import dequantize_pages
from kvjax.invariants import check
from kvjax.kernels.formats import FORMATS
from kvjax.rotary import rotary
from kvjax.step import begin_step

ROTARY = rotary(SPEC.head_dim, 10_000.0)
# Steps of prefill, mixed and decode over four sequences, among them lengths 0, 1, S-1, S, S+1 and 2S.
MIXED = ([0, 1, SIZE - 1, SIZE], [SIZE + 1, 0, 1, 2], [1, 1, 1, 1], [2 * SIZE, 0, 0, 1])


def run(twin, steps, decodes=0):
    for lengths in steps:
        assert bool(twin.step(lengths, **PREFILL).ok)
    for _ in range(decodes):
        assert bool(twin.step([1] * twin.spec.max_seqs, **DECODE).ok)
    check(twin.cache, held={})
    return twin


def changed(**changes):
    return dataclasses.replace(SPEC, num_pages=80, **changes)


@pytest.mark.parametrize("seed", range(3))
def test_ragged_prefill_mixed_and_decode_steps_with_rotary(seed):
    run(Twin(seed=seed, rotary=ROTARY, tolerance=1e-4), MIXED[:3] + (([0, 1, 0, 3]),), decodes=5)


def test_ragged_steps_without_rotary():
    run(Twin(), MIXED[:3])


def test_first_and_last_sequences_empty_and_all_empty():
    run(Twin(), ([0, 5, 0, 9], [0, 0, 0, 0], [0, 0, 7, 0], [4, 0, 0, 1]))


def test_decode_of_some_sequences_only():
    twin = run(Twin(), ([3, 8, 0, 9],))
    for lengths in ([1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]):
        assert bool(twin.step(lengths, **DECODE).ok)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 2), (4, 1)], ids=["mha", "gqa-4", "mqa"])
def test_head_ratios(heads, kv_heads):
    run(Twin(changed(num_kv_heads=kv_heads), heads=heads), MIXED)


def test_groups_of_their_own_give_the_outputs_of_one_group():
    outs = []
    for groups in (1, SPEC.num_kv_heads):
        twin = Twin(changed(groups=groups))
        run(twin, MIXED[:3])
        outs.append(twin.out)
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-6)


def test_windows_around_page_edges():
    windows = (1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE)
    run(Twin(changed(num_layers=len(windows), windows=windows, rollback=0)), MIXED)


def test_soft_cap_sink_logits_and_scale():
    sinks = np.random.default_rng(1).standard_normal(HEADS).astype(np.float32) * 2
    run(Twin(soft_cap=1.5, sinks=sinks, scale=0.9), MIXED[:3], decodes=3)


@pytest.mark.parametrize(
    "formats",
    [dict(format=name) for name, form in FORMATS.items() if name != "float32" and not form.is_per_channel]
    + [dict(format="int4"), dict(key_format="bfloat16", value_format="int8"), dict(key_format="int4_per_channel")],
    ids=str,
)
def test_page_formats_store_rounded_keys_and_values(formats):
    twin = run(Twin(changed(**formats)), MIXED)
    cache, spec = twin.cache, twin.spec
    of_pages = (cache.keys, cache.key_scales, spec.key_form), (cache.values, cache.value_scales, spec.value_form)
    for codes, scales, form in of_pages:
        assert codes.dtype == jnp.dtype(form.dtype)
        assert codes.shape == (*cache.positions.shape[:1], 2, SIZE, SPEC.head_dim // form.per_code)
        vectors = SPEC.head_dim if form.is_per_channel else SIZE
        assert [scale.shape for scale in scales] == [(*codes.shape[:2], vectors)] * form.num_scales


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8"])
def test_scales_of_a_checkpoint_take_the_place_of_each_vector_s(name):
    spec, form = changed(format=name, num_layers=1, windows=None), FORMATS[name]
    k, v = np.random.default_rng(0).standard_normal((2, 4, 2, SPEC.head_dim)).astype(np.float32)
    k[0, 0, 0], v[3, 1, 2] = 100, -100  # beyond what the scales can hold

    def written(cache, k, v, k_scale, v_scale):
        cache, step = begin_step(cache, ids([4, 0, 0, 0]), num_tokens=4, max_query_length=4)
        q = jnp.zeros((4, HEADS, SPEC.head_dim), jnp.float32)
        cache = attend(cache, step, 0, q, k, v, rotary=None, k_scale=k_scale, v_scale=v_scale)[1]
        page = cache.page_table[0, 0, 0, 0]
        return [dequantize_pages(of)[page, :, :4] for of in cache.stored], cache.key_scales[0][page, :, :4]

    of_heads = np.array([0.03, 0.06], np.float32)
    (keys, values), scales = jit(written)(init_cache(spec), jnp.asarray(k), jnp.asarray(v), jnp.asarray(of_heads), 0.05)
    assert form.largest is not None
    for got, x, scale in ((keys, k, of_heads[:, None, None]), (values, v, 0.05)):
        scale = np.asarray(jnp.asarray(scale, jnp.bfloat16), np.float32)
        wanted = np.clip(x.swapaxes(0, 1), -scale * form.largest, scale * form.largest)
        np.testing.assert_allclose(got, wanted, atol=0.04 if name == "int8" else 0.01, rtol=2**-4)
    stored = np.asarray(jnp.asarray(of_heads, jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(np.asarray(scales, np.float32), stored[:, None].repeat(4, 1))


@pytest.mark.usefixtures("as_a_user")
def test_scales_of_the_wrong_shape_are_refused():
    cache, step = begin_step(init_cache(SPEC), [1, 0, 0, 0], num_tokens=1, max_query_length=1)
    q, k = jnp.zeros((1, HEADS, SPEC.head_dim)), jnp.zeros((1, 2, SPEC.head_dim))
    mistakes: list[Any] = [float("nan"), 0.0, [1.0, -1.0], np.array(np.inf)]
    for bad in mistakes:
        with pytest.raises(InputError, match="v_scale is .*: give one scale above 0, or 2, one a head"):
            attend(cache, step, 0, q, k, k, rotary=None, v_scale=bad)
    ragged: Any = [[1.0], [1.0, 2.0]]
    with pytest.raises(InputError, match="k_scale is no array: give floats of shape"):
        attend(cache, step, 0, q, k, k, rotary=None, k_scale=ragged)
    with pytest.raises(InputError, match=r"k_scale is float.* of shape \[3\]: give floats of shape \[2\]"):
        attend(cache, step, 0, q, k, k, rotary=None, k_scale=np.ones(3, np.float32))


def test_outputs_have_the_dtype_of_the_queries():
    cache = init_cache(changed(format="float16"))

    def of_dtype(cache, x):
        cache, step = begin_step(cache, ids([2, 0, 1, 0]), num_tokens=4, max_query_length=2)
        return attend(cache, step, 0, x, x[:, :2], x[:, :2], rotary=None)[0]

    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, HEADS, SPEC.head_dim)), jnp.bfloat16)
    out = jit(of_dtype)(cache, x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out[0, ::2]), np.asarray(x[0, :2]))


def test_static_layer_gives_the_outputs_of_a_traced_one():
    traced, static = Twin(), Twin(static_layer=True)
    for lengths in MIXED[:3]:
        for twin in (traced, static):
            twin.step(lengths, **PREFILL)
        np.testing.assert_allclose(traced.out, static.out, atol=1e-6)


def test_reference_through_a_callback():
    run(Twin(implementation="reference"), ([0, 1, 7, 8], [9, 0, 1, 2]))


def test_batch_equals_one_by_one():
    lengths, batch = [1, SIZE - 2, SIZE, SIZE + 1], Twin()
    qkv = batch.draw_tokens(24)
    batch.step(lengths, **PREFILL, qkv=qkv)
    place = 0
    for length in lengths:
        alone, mine = Twin(), [part[:, place : place + length] for part in qkv]
        alone.step([length, 0, 0, 0], **PREFILL, qkv=mine)
        np.testing.assert_allclose(batch.out[:, place : place + length], alone.out[:, :length], atol=1e-6)
        place += length


@pytest.mark.parametrize("length", sorted({SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, WINDOW - 1, WINDOW, WINDOW + 1, 19}))
def test_prefill_then_decode_equals_one_prefill(length):
    whole = Twin(rotary=ROTARY, tolerance=1e-4)
    q, k, v = whole.draw_tokens(length + 1)
    whole.step([0, length + 1, 0, 0], **PREFILL, qkv=(q, k, v))
    parts = Twin(rotary=ROTARY, tolerance=1e-4)
    parts.step([0, length, 0, 0], **PREFILL, qkv=(q[:, :-1], k[:, :-1], v[:, :-1]))
    parts.step([0, 1, 0, 0], **DECODE, qkv=(q[:, -1:], k[:, -1:], v[:, -1:]))
    np.testing.assert_allclose(parts.out[:, 0], whole.out[:, length], atol=1e-5)


@pytest.mark.parametrize("chunks", [(5, 7, 11, 13), (3,) * 12, (20, 1, 15)], ids=str)
def test_chunks_that_divide_nothing(chunks):
    run(Twin(rotary=ROTARY, tolerance=1e-4), [[0, 0, chunk, 0] for chunk in chunks])


def test_shift_to_two_thousand_million_changes_nothing():
    outs = []
    for starts in ((0, 0, 0, 0), (2_000_000_000, 1_999_999_999, 0, 32_760)):
        twin = Twin(rotary=ROTARY, starts=starts, tolerance=1e-4)
        for lengths in ([9, 5, 3, 7], [1, 14, 0, 2]):
            assert bool(twin.step(lengths, **PREFILL).ok)
            outs.append(twin.out)
        for _ in range(6):
            assert bool(twin.step([1, 1, 1, 1], **DECODE).ok)
            outs.append(twin.out)
    half = len(outs) // 2
    for at_zero, shifted in zip(outs[:half], outs[half:], strict=True):
        np.testing.assert_allclose(shifted, at_zero, atol=1e-4)


def test_last_position_of_all_is_served():
    twin = Twin(rotary=ROTARY, starts=(2**31 - 1 - 10, 0, 2**31 - 2, 2**31 - 3), tolerance=1e-4)
    assert bool(twin.step([9, 2, 0, 1], **PREFILL).ok)
    assert bool(twin.step([1, 1, 1, 1], **DECODE).ok)
    assert not bool(twin.step([1, 0, 0, 0], **DECODE).ok)


def test_one_token_of_a_full_layer_returns_its_value():
    # A single visible token has weight 1, whatever its logit.
    twin = Twin()
    q, k, v = twin.draw_tokens(1)
    twin.step([0, 1, 0, 0], **DECODE, qkv=(q * 100, k * 100, v))
    np.testing.assert_array_equal(twin.out[:, 0], np.repeat(v[:, 0], HEADS // SPEC.num_kv_heads, axis=1))


def test_wrong_shapes_and_unknown_implementations_are_refused():
    def refused(message, q, k, v, **options):
        def call():
            cache, step = begin_step(init_cache(SPEC), ids([1, 1, 0, 0]), **DECODE)
            attend(cache, step, 0, q, k, v, rotary=None, **options)

        with pytest.raises(InputError, match=message):
            jax.eval_shape(call)

    q, k = jnp.zeros((4, HEADS, SPEC.head_dim)), jnp.zeros((4, SPEC.num_kv_heads, SPEC.head_dim))
    refused(r"k is float32 of shape \[3, 2, 8\]: give floats of shape \[4, 2, 8\]", q[:3], k[:3], k[:3])
    refused(r"k .*give floats of shape \[4, 2, 8\]", q, k[:, :1], k[:, :1])
    refused(r"k .*give floats of shape \[4, 2, 8\]", q[..., :6], k[..., :6], k[..., :6])
    refused("q has 3 heads: give a multiple of the cache's 2 KV heads", q[:, :3], k, k)
    refused("implementation 'fast' is unknown.*hopper, tpu, xla, reference", q, k, k, implementation="fast")


def test_padding_and_refused_steps_write_to_trash_only():
    twin = Twin()
    twin.step([20, 0, 0, 0], **PREFILL)
    before = np.asarray(twin.cache.keys)
    q, k, v = twin.draw_tokens(3)
    twin.run([0, -1, 0, 2], (q, k, v), **PREFILL)
    np.testing.assert_array_equal(np.asarray(twin.cache.keys)[1:], before[1:])
    twin.run([0, 3, 0, 0], (q, k, v), **PREFILL)
    differ = (np.nan_to_num(np.asarray(twin.cache.keys)) != np.nan_to_num(before)).any((1, 2, 3))
    own = np.asarray(twin.cache.page_table)[:, :, 1, 0].reshape(-1)
    assert set(np.flatnonzero(differ)) - {0} <= set(own.tolist())


def test_a_step_is_planned_only_for_kernels_that_need_it():
    cache, step = begin_step(init_cache(SPEC), ids([1, 1, 0, 0]), **DECODE)
    assert plan_step(cache, step, SPEC.num_kv_heads) is step
    with pytest.raises(NotImplementedError, match="is no Hopper GPU"):
        plan_step(cache, step, SPEC.num_kv_heads, implementation="hopper")
