"""Reads a model's configuration from the metadata of a GGUF file (key names: the GGUF specification of ggml)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.errors import InputError
from kvjax.models.config import DecoderConfig, hashable, head_size

# model_type by `general.architecture`; Mistral files state llama.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
# (window, every n-th layer sees all) of a family; the files leave out the pattern.
_WINDOWS = {"gemma2": (4096, 2), "gemma3": (None, 6)}
# 27B models divide by sqrt(hidden / heads), the others by sqrt(head_dim): no key says so, llama.cpp goes by layers too.
_WIDE_SCALE_LAYERS = {"gemma2": 46, "gemma3": 62}
# Instruction models end a turn with one of these, which is not always the file's eos token.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")
_CONTROL = 3  # the token type
_MISSING = object()


def from_gguf(
    fields: Mapping[str, Any], tensors: Mapping[str, Sequence[int]], divisors: Sequence[float] | None = None
) -> DecoderConfig:
    """The configuration that a GGUF file states.

    Args:
        fields: its metadata as Python values.
        tensors: shape of every tensor by name, outermost dimension first.
        divisors: values of the tensor `rope_freqs.weight`, where there is one (Llama 3.1 scaling).

    Raises:
        InputError: for an architecture or value that is not supported, and for a missing key.
    """
    family = _family(fields)
    gemma = family.startswith("gemma")
    hidden, heads = _get(fields, family, "embedding_length"), _uniform(fields, family, "attention.head_count")
    head_dim = _get(fields, family, "attention.key_length", None) or head_size(hidden, heads)
    if _get(fields, family, "attention.value_length", head_dim) != head_dim:
        raise InputError("GGUF files whose value heads differ in size from the key heads are not supported")
    if family == "llama" and _get(fields, family, "rope.dimension_count", head_dim) != head_dim:
        # The rows of q and k are permuted within the whole head: which rows are rotated is not known.
        raise InputError("GGUF llama files that rotate a part of each head are not supported: use the Hugging Face one")
    layers = _get(fields, family, "block_count")
    wide = _WIDE_SCALE_LAYERS.get(family) == layers
    return DecoderConfig(
        model_type=family,
        vocab_size=_vocab_size(fields, tensors),
        hidden_size=hidden,
        intermediate_size=_uniform(fields, family, "feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_uniform(fields, family, "attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=_short(_get(fields, family, "attention.layer_norm_rms_epsilon")),
        activation="gelu_tanh" if gemma else "silu",
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        post_norms=gemma,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=(hidden / heads if wide else head_dim) ** -0.5,
        attention_soft_cap=_get(fields, family, "attn_logit_softcapping", 50.0) if family == "gemma2" else None,
        final_soft_cap=_get(fields, family, "final_logit_softcapping", 30.0) if family == "gemma2" else None,
        windows=_windows(fields, family, layers),
        max_position=_get(fields, family, "context_length"),
        bos_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_ids=eos_ids(fields),
        **_rope(fields, family, head_dim, divisors),
    )


def eos_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text or a turn: the stated ones, and control tokens known to end a turn."""
    stated = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    found = [token for token in stated if token is not None]
    spellings, kinds = fields.get("tokenizer.ggml.tokens", ()), fields.get("tokenizer.ggml.token_type", ())
    for token, (spelling, kind) in enumerate(zip(spellings, kinds, strict=False)):
        if kind == _CONTROL and spelling in _TURN_ENDS:
            found.append(token)
    return tuple(dict.fromkeys(found))


def _family(fields: Mapping[str, Any]) -> str:
    family = fields.get("general.architecture")
    if family not in ARCHITECTURES:
        raise InputError(f"GGUF architecture {family!r} is not supported: use one of {', '.join(ARCHITECTURES)}")
    if _get(fields, family, "expert_count", 0):
        raise InputError("GGUF files with experts are not supported: use a dense model")
    return family


def _get(fields: Mapping[str, Any], family: str, key: str, default: Any = _MISSING) -> Any:
    value = fields.get(f"{family}.{key}", default)
    if value is _MISSING:
        raise InputError(f"the GGUF file lacks the key {family}.{key}: download or convert it again")
    return value


def _uniform(fields: Mapping[str, Any], family: str, key: str, default: Any = _MISSING) -> int:
    """A value that the format allows to differ from layer to layer; kvjax wants one for all."""
    value = _get(fields, family, key, default)
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise InputError(f"{family}.{key} differs between layers ({sorted(values)}): such models are not supported")
    return values.pop()


def _short(value: float) -> float:
    """A float32 as the decimal that was meant: 9.999999747378752e-06 is 1e-05."""
    return float(f"{value:.7g}")


def _vocab_size(fields: Mapping[str, Any], tensors: Mapping[str, Sequence[int]]) -> int:
    if "token_embd.weight" not in tensors:
        raise InputError("the GGUF file lacks the tensor token_embd.weight: download or convert it again")
    return int(tensors["token_embd.weight"][0])


def _windows(fields: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    default, pattern = _WINDOWS.get(family, (None, 0))
    window = _get(fields, family, "attention.sliding_window", default) or None
    if family in ("qwen2", "qwen3"):
        window = None
    pattern = _get(fields, family, "attention.sliding_window_pattern", pattern)
    if isinstance(pattern, list):
        return tuple(window if local else None for local in pattern)
    return tuple(None if pattern and (layer + 1) % pattern == 0 else window for layer in range(layers))


def _rope(fields: Mapping[str, Any], family: str, head_dim: int, divisors: Sequence[float] | None) -> dict[str, Any]:
    default = 1_000_000.0 if family == "gemma3" else 10_000.0
    found: dict[str, Any] = dict(
        rope_theta=float(_get(fields, family, "rope.freq_base", default)),
        partial_rotary_factor=_get(fields, family, "rope.dimension_count", head_dim) / head_dim,
        rope_scaling=_scaling(fields, family, divisors),
    )
    if family == "gemma3":
        found["rope_local_theta"] = float(_get(fields, family, "rope.freq_base_swa", 10_000.0))
    return found


def _scaling(fields: Mapping[str, Any], family: str, divisors: Sequence[float] | None) -> tuple[tuple[str, Any], ...]:
    kind = _get(fields, family, "rope.scaling.type", "none")
    factor = _get(fields, family, "rope.scaling.factor", _get(fields, family, "rope.scale_linear", None))
    if divisors is not None:
        if kind != "none":
            raise InputError(f"rope scaling {kind!r} together with rope_freqs.weight is not supported")
        return hashable(dict(rope_type="divisors", divisors=[float(value) for value in divisors]))
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return ()
    scaling: dict[str, Any] = dict(rope_type=kind, factor=factor)
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = _get(fields, family, "rope.scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            scaling[key] = fields.get(f"{family}.rope.scaling.yarn_{key}")
    return hashable(scaling)
