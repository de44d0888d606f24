"""Reads a Hugging Face `config.json`: of transformers 5 (`rope_parameters`, `layer_types`) and of the years before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.errors import InputError, shown
from kvjax.models import fields
from kvjax.models.config import Activation, DecoderConfig, hashable, head_size
from kvjax.rotary import SCALINGS

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
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}
# More layers than any model has; a list of them is made before the weights are seen.
_MOST_LAYERS = 10_000
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
    heads, hidden = fields.integer(values, "num_attention_heads"), fields.integer(values, "hidden_size")
    head_dim = _or(values, "head_dim", None) or head_size(hidden, heads)
    activation = fields.choice(
        values, "hidden_activation" if values.get("hidden_activation") else "hidden_act", _ACTIVATIONS
    )
    bos = fields.token_ids(values, "bos_token_id")
    return DecoderConfig(
        model_type=family,
        vocab_size=fields.integer(values, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer(values, "intermediate_size"),
        num_layers=fields.integer(values, "num_hidden_layers", most=_MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=_or(values, "num_key_value_heads", heads),
        head_dim=head_dim,
        norm_eps=fields.number(values, "rms_norm_eps"),
        activation=_ACTIVATIONS[activation],
        tie_word_embeddings=fields.flag(values, "tie_word_embeddings"),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        post_norms=gemma,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=(fields.number(values, "query_pre_attn_scalar") if gemma else head_dim) ** -0.5,
        attention_soft_cap=_soft_cap(values, "attn_logit_softcapping") if gemma else None,
        final_soft_cap=_soft_cap(values, "final_logit_softcapping") if gemma else None,
        windows=_windows(family, values),
        max_position=fields.integer(values, "max_position_embeddings"),
        bos_id=bos[0] if bos else None,
        eos_ids=tuple(
            dict.fromkeys(fields.token_ids(values, "eos_token_id") + fields.token_ids(generation or {}, "eos_token_id"))
        ),
        **_rope(family, values),
    )


def _family_and_values(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    values = {key: value for key, value in config.items() if key != "text_config"}
    values |= fields.mapping(config, "text_config")
    if values.get("model_type") in list(_ALIASES):
        values["model_type"] = _ALIASES[values["model_type"]]
    family = fields.choice(values, "model_type", _DEFAULTS)
    return family, _DEFAULTS[family] | values


def _or(values: Mapping[str, Any], key: str, default: Any) -> Any:
    return default if values.get(key) is None else fields.integer(values, key)


def _soft_cap(values: Mapping[str, Any], key: str) -> float | None:
    return None if values.get(key) is None else fields.number(values, key)


def _windows(family: str, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    layers = fields.integer(values, "num_hidden_layers", most=_MOST_LAYERS)
    window = _or(values, "sliding_window", None)
    if family == "llama":
        return (None,) * layers
    if family == "mistral":
        return (window,) * layers
    kinds = values.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise InputError(f"layer_types is {shown(kinds)}: it must be a list with a word for each layer")
    if family.startswith("qwen"):
        window = window if fields.flag(values, "use_sliding_window") else None
        first = layers if window is None else fields.integer(values, "max_window_layers", 0)
        kinds = kinds or ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    else:
        key = "_sliding_window_pattern" if values.get("_sliding_window_pattern") else "sliding_window_pattern"
        pattern = fields.integer(values, key)
        kinds = kinds or ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise InputError(f"layer type {unknown[0]!r} is not supported: use sliding_attention or full_attention")
    if window is None and "sliding_attention" in kinds:
        raise InputError("layer_types names sliding_attention but there is no sliding_window: give it a number")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary fields, from `rope_parameters` (flat, or nested by layer type) or the older keys."""
    given = fields.mapping(values, "rope_parameters") or fields.mapping(values, "rope_scaling")
    local = fields.mapping(given, "sliding_attention")
    distant = fields.mapping(given, "full_attention") if given.keys() & _LAYER_KINDS else given
    theta = _taken(distant, values, "rope_theta")
    factor = _taken(distant, values, "partial_rotary_factor")
    found = dict(rope_theta=fields.number(theta, "rope_theta", above=1.0), partial_rotary_factor=1.0)
    if factor["partial_rotary_factor"] is not None:
        found["partial_rotary_factor"] = fields.number(factor, "partial_rotary_factor", most=1.0)
    if family == "gemma3":
        stated = local.get("rope_theta") is not None
        source, key = (local, "rope_theta") if stated else (values, "rope_local_base_freq")
        found["rope_local_theta"] = fields.number(source, key, above=1.0)
    if hashable({key: local[key] for key in local if key in ("type", "rope_type")}):
        raise InputError("rope scaling of sliding_attention layers is not supported: use rope_type 'default' there")
    _check_scaling(distant)
    if distant.get("rope_type", distant.get("type")) in ("llama3", "yarn"):
        context = "original_max_position_embeddings"
        length = values.get(context) or distant.get(context) or values["max_position_embeddings"]
        distant[context] = fields.integer({context: length}, context)
        if distant.get("factor") is None:
            distant["factor"] = fields.integer(values, "max_position_embeddings") / distant[context]
    return found | dict(rope_scaling=hashable(distant))


_LAYER_KINDS = {"sliding_attention", "full_attention"}


def _taken(scaling: dict[str, Any], values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Take a key out of the rotary fields; where it is not there, the configuration's own."""
    value = scaling.pop(key, None)
    return {key: values.get(key) if value is None else value}


def _check_scaling(scaling: Mapping[str, Any]) -> None:
    for key, value in scaling.items():
        if value is None or (isinstance(value, bool) and key == "truncate"):
            continue
        if key in ("type", "rope_type"):
            fields.choice(scaling, key, SCALINGS)
            continue
        for item in value if isinstance(value, list) else [value]:
            if item != 0:  # what zero means is each scaling's own
                fields.number({key: item}, key)
