"""Reads a Hugging Face `config.json`: of transformers 5 (`rope_parameters`, `layer_types`) and of the years before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.errors import InputError
from kvjax.models.config import Activation, DecoderConfig, hashable, head_size

# What transformers assumes for a key that config.json leaves out.
_LLAMA = dict(
    rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False, rope_theta=10_000.0, max_position_embeddings=2048
)
_QWEN = _LLAMA | dict(
    use_sliding_window=False, sliding_window=4096, max_window_layers=28, max_position_embeddings=32768
)
_GEMMA = dict(
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    rms_norm_eps=1e-6,
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    sliding_window=4096,
    query_pre_attn_scalar=256,
    bos_token_id=2,
    eos_token_id=1,
)
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | dict(sliding_window=4096, num_key_value_heads=8, max_position_embeddings=131_072),
    "qwen2": _QWEN,
    "qwen3": _QWEN | dict(head_dim=128),
    "gemma2": _GEMMA
    | dict(
        vocab_size=256_000,
        max_position_embeddings=8192,
        rope_theta=10_000.0,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding_window_pattern=2,
    ),
    "gemma3": _GEMMA
    | dict(
        vocab_size=262_208,
        max_position_embeddings=131_072,
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        sliding_window_pattern=6,
    ),
}
_ALIASES = {"gemma3_text": "gemma3"}
_ACTIVATIONS: dict[Any, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}
_REFUSED = ("attention_bias", "mlp_bias", "use_bidirectional_attention")


def from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> DecoderConfig:
    """The configuration that a `config.json` states.

    Args:
        config: the parsed file; a multimodal one is read at its `text_config`.
        generation: the parsed `generation_config.json`, whose end-of-sequence ids are added.

    Raises:
        InputError: for a model type, activation, layer type, bias or rotary scaling that is not supported, a missing
            or senseless size, wrong head counts.
    """
    family, values = _family_and_values(config)
    for key in _REFUSED:
        if values.get(key):
            raise InputError(f"{key}={values[key]!r} is not supported for {family} models: use a checkpoint without it")
    gemma = family.startswith("gemma")
    heads, hidden = _integer(values, "num_attention_heads"), _integer(values, "hidden_size")
    head_dim = _integer(values, "head_dim") if values.get("head_dim") else head_size(hidden, heads)
    activation = values.get("hidden_activation") or values.get("hidden_act")
    if activation not in _ACTIVATIONS:
        raise InputError(f"activation {activation!r} is not supported: use one of {', '.join(_ACTIVATIONS)}")
    return DecoderConfig(
        model_type=family,
        vocab_size=_integer(values, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(values, "intermediate_size"),
        num_layers=_integer(values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(values, "num_key_value_heads") if values.get("num_key_value_heads") else heads,
        head_dim=head_dim,
        norm_eps=float(values["rms_norm_eps"]),
        activation=_ACTIVATIONS[activation],
        tie_word_embeddings=bool(values["tie_word_embeddings"]),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        post_norms=gemma,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=float(values["query_pre_attn_scalar"] if gemma else head_dim) ** -0.5,
        attention_soft_cap=values.get("attn_logit_softcapping") if gemma else None,
        final_soft_cap=values.get("final_logit_softcapping") if gemma else None,
        windows=_windows(family, values),
        max_position=_integer(values, "max_position_embeddings"),
        bos_id=values.get("bos_token_id"),
        eos_ids=_eos_ids(values, generation or {}),
        **_rope(family, values),
    )


def _family_and_values(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    inner = config.get("text_config") or {}
    merged = {key: value for key, value in config.items() if key != "text_config"} | dict(inner)
    name = merged.get("model_type")
    family = _ALIASES.get(str(name), name)
    if family not in _DEFAULTS:
        raise InputError(f"model_type {name!r} is not supported: use one of {', '.join(_DEFAULTS)}")
    return family, _DEFAULTS[family] | merged


def _integer(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{key} is {value!r} in the model's configuration: it must be an integer above 0")
    return value


def _windows(family: str, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    layers, window = _integer(values, "num_hidden_layers"), values.get("sliding_window")
    if family == "llama":
        return (None,) * layers
    if family == "mistral":
        return (window,) * layers
    kinds = values.get("layer_types")
    if family.startswith("qwen"):
        window = window if values["use_sliding_window"] else None
        first = layers if window is None else values["max_window_layers"]
        kinds = kinds or ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    else:
        pattern = values.get("_sliding_window_pattern") or values["sliding_window_pattern"]
        kinds = kinds or ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise InputError(f"layer type {unknown[0]!r} is not supported: use sliding_attention or full_attention")
    if window is None and "sliding_attention" in kinds:
        raise InputError("layer_types names sliding_attention but there is no sliding_window: give it a number")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary fields, from `rope_parameters` (flat, or nested by layer type) or the older keys."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    local: Mapping[str, Any] = given.get("sliding_attention") or {}
    distant = dict(given.get("full_attention") or {} if given.keys() & _LAYER_KINDS else given)
    theta = distant.pop("rope_theta", None) or values["rope_theta"]
    factor = distant.pop("partial_rotary_factor", None) or values.get("partial_rotary_factor") or 1.0
    fields = dict(rope_theta=float(theta), partial_rotary_factor=float(factor))
    if family == "gemma3":
        fields["rope_local_theta"] = float(local.get("rope_theta") or values["rope_local_base_freq"])
    if hashable({key: local[key] for key in local if key in ("type", "rope_type")}):
        raise InputError("rope scaling of sliding_attention layers is not supported: use rope_type 'default' there")
    name = distant.get("rope_type", distant.get("type", "default"))
    if name in ("llama3", "yarn"):
        context = values.get("original_max_position_embeddings") or distant.get("original_max_position_embeddings")
        distant["original_max_position_embeddings"] = context or values["max_position_embeddings"]
        if distant.get("factor") is None:
            distant["factor"] = values["max_position_embeddings"] / distant["original_max_position_embeddings"]
    return fields | dict(rope_scaling=hashable(distant))


_LAYER_KINDS = {"sliding_attention", "full_attention"}


def _eos_ids(values: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    for given in (values.get("eos_token_id"), generation.get("eos_token_id")):
        found += [] if given is None else [given] if isinstance(given, int) else list(given)
    return tuple(dict.fromkeys(found))
