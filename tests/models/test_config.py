"""Configurations from Hugging Face files, old and new, and from GGUF metadata."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.models.config import rotary
from kvjax.models.config_gguf import from_gguf
from kvjax.models.config_hf import from_hf

SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    eos_token_id=2,
)
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


def hf(model_type, **changes):
    return from_hf(SIZES | dict(model_type=model_type) | changes)


def test_llama():
    config = hf("llama", rope_theta=500_000.0, rms_norm_eps=1e-5, bos_token_id=1)
    assert (config.head_dim, config.num_kv_heads, config.norm_eps) == (16, 2, 1e-5)
    assert config.attention_scale == 0.25 and config.embedding_scale == 1.0
    assert config.windows == (None,) * 6 and config.rope_theta == 500_000.0 and config.rope_scaling == ()
    assert not (config.qkv_bias or config.qk_norm or config.post_norms or config.tie_word_embeddings)
    assert (config.bos_id, config.eos_ids, config.max_position) == (1, (2,), 512)
    assert isinstance(hash(config), int)


def test_missing_key_value_heads_mean_as_many_as_heads():
    values = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    assert from_hf(values | dict(model_type="llama")).num_kv_heads == 4


@pytest.mark.parametrize(
    "scaling",
    [
        dict(rope_scaling=dict(rope_type="llama3", **LLAMA3), rope_theta=500_000.0),
        dict(rope_parameters=dict(rope_type="llama3", rope_theta=500_000.0, **LLAMA3)),
    ],
)
def test_llama3_scaling_in_both_forms(scaling):
    config = hf("llama", **scaling)
    assert dict(config.rope_scaling) == dict(rope_type="llama3", **LLAMA3)
    assert config.rope_theta == 500_000.0
    assert rotary(config).phases.shape == (1, 8)


def test_older_key_and_default_scaling():
    config = hf("llama", rope_scaling=dict(type="linear", factor=4.0))
    assert dict(config.rope_scaling) == dict(rope_type="linear", factor=4.0)
    assert hf("llama", rope_parameters=dict(rope_type="default", rope_theta=7.0)).rope_scaling == ()


def test_yarn_takes_the_trained_context_and_the_factor_from_the_lengths():
    scaling = dict(hf("llama", rope_scaling=dict(rope_type="yarn", factor=4.0)).rope_scaling)
    assert scaling["original_max_position_embeddings"] == 512
    given = dict(rope_type="yarn", factor=None, original_max_position_embeddings=128)
    assert dict(hf("qwen2", rope_scaling=given).rope_scaling)["factor"] == 4.0


def test_partial_rotary_factor():
    config = hf("llama", partial_rotary_factor=0.5)
    assert config.rotary_dim == 8 and rotary(config).phases.shape == (1, 4)


def test_mistral_windows():
    assert hf("mistral", sliding_window=100).windows == (100,) * 6
    assert hf("mistral", sliding_window=None).windows == (None,) * 6
    assert hf("mistral").windows == (4096,) * 6  # transformers' default


def test_qwen2_windows_need_the_switch():
    config = hf("qwen2", sliding_window=32, max_window_layers=4)
    assert config.windows == (None,) * 6 and config.qkv_bias
    config = hf("qwen2", sliding_window=32, max_window_layers=4, use_sliding_window=True)
    assert config.windows == (None, None, None, None, 32, 32)
    kinds = ["sliding_attention", "full_attention"] * 3
    assert hf("qwen2", sliding_window=32, use_sliding_window=True, layer_types=kinds).windows == (32, None) * 3


def test_qwen3():
    config = hf("qwen3")
    assert config.head_dim == 128 and config.qk_norm and not config.qkv_bias


def test_gemma2():
    config = hf("gemma2", head_dim=32, query_pre_attn_scalar=144, sliding_window=8)
    assert config.windows == (8, None) * 3 and config.post_norms and config.tie_word_embeddings
    assert config.attention_scale == pytest.approx(1 / 12) and config.embedding_scale == 8.0
    assert (config.attention_soft_cap, config.final_soft_cap) == (50.0, 30.0)
    assert config.activation == "gelu_tanh" and config.rope_local_theta is None


BASES = {
    "sliding_attention": dict(rope_type="default", rope_theta=10_000.0),
    "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1_000_000.0),
}


@pytest.mark.parametrize(
    "given",
    [
        dict(rope_parameters=BASES, layer_types=["sliding_attention"] * 5 + ["full_attention"]),
        dict(rope_scaling=dict(rope_type="linear", factor=8.0), sliding_window_pattern=6),
        dict(rope_scaling=dict(rope_type="linear", factor=8.0), rope_theta=1e6, rope_local_base_freq=1e4),
    ],
)
def test_gemma3_in_all_forms(given):
    config = hf("gemma3_text", sliding_window=8, **given)
    assert config.model_type == "gemma3" and config.qk_norm and config.attention_soft_cap is None
    assert config.windows == (8, 8, 8, 8, 8, None)
    assert (config.rope_theta, config.rope_local_theta) == (1_000_000.0, 10_000.0)
    built = rotary(config)
    assert built.phases.shape == (6, config.head_dim // 2)
    # The first pair turns one radian a position; only the global layer is scaled.
    first = np.asarray(built.phases[:, 0], np.float64) / 2**32 * 2 * np.pi
    np.testing.assert_allclose(first, [1, 1, 1, 1, 1, 1 / 8], atol=1e-8)
    assert jnp.array_equal(built.phases[0], built.phases[4])


def test_text_config_of_a_multimodal_model_and_its_defaults():
    inner = dict(model_type="gemma3_text", hidden_size=2560, num_hidden_layers=34, sliding_window=1024)
    config = from_hf(dict(model_type="gemma3", text_config=inner, eos_token_id=[1, 106]))
    assert (config.vocab_size, config.num_heads, config.head_dim, config.max_position) == (262_208, 8, 256, 131_072)
    assert config.eos_ids == (1, 106) and config.windows[:6] == (1024,) * 5 + (None,)


def test_ids_of_the_generation_config_are_added():
    config = from_hf(SIZES | dict(model_type="llama"), dict(eos_token_id=[2, 7, 9]))
    assert config.eos_ids == (2, 7, 9)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="mamba"), "'mamba' is not supported: use one of llama, mistral"),
        (dict(model_type=["llama"]), r"model_type \['llama'\] is not supported"),
        (dict(model_type={}), "model_type {} is not supported"),
        (dict(hidden_act="relu2"), "hidden_act 'relu2'"),
        (dict(hidden_act=["silu"]), r"hidden_act \['silu'\]"),
        (dict(hidden_activation={"a": 1}), "hidden_activation {'a': 1}"),
        (dict(text_config=3), "text_config is 3"),
        (dict(num_hidden_layers=10**30), "num_hidden_layers is 1000.* from 1 to 10000"),
        (dict(head_dim="x"), "head_dim is 'x'"),
        (dict(tie_word_embeddings="false"), "tie_word_embeddings is 'false'"),
        (dict(eos_token_id=1.5), "eos_token_id is 1.5"),
        (dict(eos_token_id=[1, "x"]), "eos_token_id is 'x'"),
        (dict(bos_token_id="x"), "bos_token_id is 'x'"),
        (dict(bos_token_id=-1), "bos_token_id is -1"),
        (dict(rope_theta=0.5), "rope_theta is 0.5 .*above 1"),
        (dict(partial_rotary_factor="x"), "partial_rotary_factor is 'x'"),
        (dict(partial_rotary_factor=1.5), "partial_rotary_factor is 1.5 .*at most 1"),
        (dict(partial_rotary_factor=0), "partial_rotary_factor is 0"),
        (dict(rope_parameters=dict(rope_theta="x")), "rope_theta is 'x'"),
        (dict(rope_scaling=dict(rope_type=["yarn"])), r"rope_type \['yarn'\]"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=2.0, beta_fast="x")), "beta_fast is 'x'"),
        (dict(rope_scaling=dict(rope_type="yarn", original_max_position_embeddings="x")), "original_max_pos.* is 'x'"),
        (dict(model_type="mistral", sliding_window="x"), "sliding_window is 'x'"),
        (dict(model_type="mistral", sliding_window=-3), "sliding_window is -3"),
        (dict(model_type="qwen3", layer_types=3), "layer_types is 3"),
        (dict(model_type="qwen3", layer_types=[[]] * 6), "layer_types is"),
        (dict(model_type="gemma2", query_pre_attn_scalar="x"), "query_pre_attn_scalar is 'x'"),
        (dict(model_type="gemma2", attn_logit_softcapping=-1), "attn_logit_softcapping is -1"),
        (dict(model_type="gemma3", rope_local_base_freq=[]), r"rope_local_base_freq is \[\]"),
        (dict(model_type="gemma3", rope_parameters=dict(full_attention=3)), "full_attention is 3"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(num_key_value_heads=3), "wrong head counts.*4 query heads are no multiple of 3"),
        (dict(num_attention_heads=5, num_key_value_heads=5), "wrong head counts.*5 heads do not divide"),
        (dict(vocab_size=None), "vocab_size is None"),
        (dict(num_hidden_layers=-1), "num_hidden_layers is -1"),
        (dict(hidden_size="64"), "hidden_size is '64'"),
        (dict(rope_scaling=dict(rope_type="longrope")), "'longrope' is not supported"),
        (dict(model_type="qwen3", layer_types=["chunked_attention"] * 6), "'chunked_attention'"),
        (dict(model_type="qwen3", layer_types=["sliding_attention"] * 6), "no sliding_window"),
        (dict(model_type="gemma2", layer_types=["full_attention"] * 5), "do not fit 6 layers"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(InputError, match=message):
        from_hf(SIZES | dict(model_type="llama") | changes)


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
@pytest.mark.parametrize("value", [None, "x", [], float("nan"), float("inf"), -1, 0, True, 10**400], ids=str)
def test_numbers_that_are_none(key, value):
    with pytest.raises(InputError, match=f"^{key} is "):
        hf("llama", **{key: value})


@pytest.mark.parametrize("value", [1, "linear", True, [2]])
def test_scaling_that_is_no_object(value):
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(InputError, match=f"^{key} is .*: it must be an object"):
            hf("llama", **{key: value})


def test_scaling_without_its_factor():
    with pytest.raises(InputError, match="needs the value 'factor'"):
        rotary(hf("llama", rope_scaling=dict(type="linear")))


def gguf_fields(arch, **changes):
    values = {
        "block_count": 6,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 80,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    fields = {f"{arch}.{key}": value for key, value in values.items() if value is not None}
    tokens = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.tokens": ["a", "</s>", "<end_of_turn>", "<|eot_id|>"]}
    return fields | tokens | {"tokenizer.ggml.token_type": [1, 3, 3, 1], "general.architecture": arch}


TENSORS = {"token_embd.weight": (96, 64)}


def test_gguf_llama():
    config = from_gguf(gguf_fields("llama", rope__freq_base=100_000.0), TENSORS)
    assert (config.vocab_size, config.head_dim, config.norm_eps, config.rope_theta) == (96, 16, 1e-5, 100_000.0)
    assert config.tie_word_embeddings and config.activation == "silu" and config.windows == (None,) * 6
    assert config.eos_ids == (1, 2)  # stated, and a control token that ends a turn
    assert not from_gguf(gguf_fields("llama"), TENSORS | {"output.weight": (96, 64)}).tie_word_embeddings


def test_gguf_llama31_scaling_is_a_tensor():
    config = from_gguf(gguf_fields("llama"), TENSORS, [1.0] * 4 + [8.0] * 4)
    frequencies = np.asarray(rotary(config).phases[0], np.float64) / 2**32 * 2 * np.pi
    np.testing.assert_allclose(frequencies[4], 10_000.0**-0.5 / 8, atol=1e-8)


def test_gguf_qwen2_and_yarn():
    changes = dict(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=128)
    config = from_gguf(gguf_fields("qwen2", **changes), TENSORS | {"blk.0.attn_q.bias": (64,)})
    assert config.qkv_bias
    expected = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
    assert dict(config.rope_scaling) == expected


def test_gguf_gemma():
    config = from_gguf(gguf_fields("gemma2", attention__key_length=16, attention__sliding_window=8), TENSORS)
    assert config.windows == (8, None) * 3 and config.attention_soft_cap == 50.0 and config.attention_scale == 0.25
    norms = TENSORS | {"blk.0.attn_q_norm.weight": (16,)}
    config = from_gguf(gguf_fields("gemma3", attention__key_length=16, attention__sliding_window=8), norms)
    assert config.windows == (8, 8, 8, 8, 8, None) and config.qk_norm and config.post_norms
    assert (config.rope_theta, config.rope_local_theta) == (1_000_000.0, 10_000.0)
    assert config.activation == "gelu_tanh" and config.embedding_scale == 8.0


@pytest.mark.parametrize(
    "arch, changes, message",
    [
        ("mamba", {}, "'mamba' is not supported"),
        ("llama", dict(expert_count=8), "experts"),
        ("llama", dict(block_count=None), "lacks the key llama.block_count"),
        ("llama", dict(attention__head_count=[4, 2]), "differs between layers"),
        ("llama", dict(attention__value_length=8), "value heads"),
        ("llama", dict(rope__dimension_count=8), "a part of each head"),
        ("llama", dict(attention__head_count_kv=3), "wrong head counts"),
        ("qwen2", dict(rope__scaling__type="longrope", rope__scaling__factor=2.0), "'longrope' is not supported"),
    ],
)
def test_gguf_bad_input(arch, changes, message):
    with pytest.raises(InputError, match=message):
        from_gguf(gguf_fields(arch, **changes), TENSORS)


def test_gguf_without_embedding():
    with pytest.raises(InputError, match="lacks the tensor token_embd.weight"):
        from_gguf(gguf_fields("llama"), {})
