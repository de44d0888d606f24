"""The tiny configurations of `families.npz`, one or more a model family, and the maker of their logits.

Part of `make_reference.py`; runs in its Python 3.11 environment (torch, transformers), not in the tests.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from random_weights import checksum, draw_weights

TOKENS = 40
WINDOW = 8
SIZES: dict = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64)

# query_pre_attn_scalar differs from head_dim, and the caps are low enough to bend the logits of so small a model:
# with the published values a scale or a cap that is ignored would stay within the tolerance.
GEMMA2 = dict(query_pre_attn_scalar=24, attn_logit_softcapping=4.0, final_logit_softcapping=6.0, sliding_window=WINDOW)
GEMMA3 = dict(query_pre_attn_scalar=24, sliding_window=WINDOW, num_hidden_layers=7)
GEMMA3_BASES = {
    "sliding_attention": dict(rope_type="default", rope_theta=10_000.0),
    "full_attention": dict(rope_type="default", rope_theta=1_000_000.0),
}
GEMMA3_LINEAR = GEMMA3_BASES | {"full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1_000_000.0)}


def _rope(theta: float, **scaling: object) -> dict:
    return dict(rope_parameters={"rope_type": "default"} | scaling | {"rope_theta": theta})


FAMILIES: dict[str, tuple[str, dict]] = {
    "llama2": ("Llama", _rope(10_000.0) | dict(num_key_value_heads=4)),
    "llama3.1": ("Llama", _rope(10_000.0, **LLAMA3) | dict(head_dim=32)),
    "llama_yarn": ("Llama", _rope(10_000.0, **YARN)),
    "llama_linear": ("Llama", _rope(10_000.0, rope_type="linear", factor=4.0)),
    "mistral": ("Mistral", _rope(10_000.0) | dict(sliding_window=WINDOW)),
    "qwen2": ("Qwen2", _rope(1_000_000.0) | dict(head_dim=None)),
    "qwen3": ("Qwen3", _rope(1_000_000.0) | dict(head_dim=32, tie_word_embeddings=True)),
    "gemma2": ("Gemma2", _rope(10_000.0) | GEMMA2 | dict(num_hidden_layers=4)),
    "gemma3": ("Gemma3Text", dict(rope_parameters=GEMMA3_BASES) | GEMMA3 | dict(num_key_value_heads=1)),
    "gemma3_linear": ("Gemma3Text", dict(rope_parameters=GEMMA3_LINEAR) | GEMMA3 | dict(head_dim=32)),
    "smollm2": (
        "Llama",
        _rope(100_000.0)
        | dict(num_attention_heads=9, num_key_value_heads=3, head_dim=16, hidden_size=144, tie_word_embeddings=True),
    ),
}

# What transformers 4 wrote for the same model: (keys to remove, keys to set).
LEGACY: dict[str, tuple[list[str], dict]] = {
    # As Llama 2 was first published: neither a rotary base nor the number of KV heads.
    "llama2": (["rope_parameters", "num_key_value_heads"], dict(rope_scaling=None)),
    "llama3.1": (["rope_parameters"], dict(rope_theta=10_000.0, rope_scaling=LLAMA3)),
    "llama_yarn": (["rope_parameters"], dict(rope_theta=10_000.0, rope_scaling=YARN)),
    "llama_linear": (
        ["rope_parameters", "head_dim"],
        dict(rope_theta=10_000.0, rope_scaling=dict(type="linear", factor=4.0), head_dim=16),
    ),
    # As Qwen2 is published: a window is named but switched off.
    "qwen2": (
        ["rope_parameters", "layer_types"],
        dict(rope_theta=1_000_000.0, sliding_window=WINDOW, use_sliding_window=False, max_window_layers=2),
    ),
    "gemma2": (["rope_parameters", "layer_types"], dict(rope_theta=10_000.0)),
    "gemma3": (
        ["rope_parameters", "layer_types"],
        dict(rope_theta=1_000_000.0, rope_local_base_freq=10_000.0, rope_scaling=None, sliding_window_pattern=6),
    ),
    "gemma3_linear": (
        ["rope_parameters", "layer_types"],
        dict(
            rope_theta=1_000_000.0,
            rope_local_base_freq=10_000.0,
            rope_scaling=dict(rope_type="linear", factor=8.0),
            sliding_window_pattern=6,
        ),
    ),
}


def build_families(folder: Path) -> None:
    """Writes families.npz (tokens and logits) and families.json (configurations, parameters, seeds)."""
    arrays: dict[str, np.ndarray] = {}
    described: dict[str, dict] = {}
    for name, (prefix, changes) in FAMILIES.items():
        entry, tokens, logits = _build_family(name, prefix, changes)
        described[name] = entry
        arrays[f"{name}.tokens"], arrays[f"{name}.logits"] = tokens, logits
        print(f"{name}: logits std {logits.std():.2f}, largest {abs(logits).max():.2f}")
    # pyright takes any of the arrays for savez's allow_pickle
    np.savez_compressed(folder / "families.npz", **arrays)  # pyright: ignore[reportArgumentType]
    (folder / "families.json").write_text(json.dumps(described, indent=1) + "\n")


def _build_family(name: str, prefix: str, changes: dict) -> tuple[dict, np.ndarray, np.ndarray]:
    sizes = {key: value for key, value in (SIZES | changes).items() if value is not None}
    config = getattr(transformers, f"{prefix}Config")(**sizes)
    model_class = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")
    seed = zlib.crc32(name.encode()) % 1000
    norm_center = 0.0 if prefix.startswith("Gemma") else 1.0
    saved, shapes = _checkpoint_names(model_class(config))
    weights = draw_weights(shapes, seed=seed, norm_center=norm_center)
    tokens = np.random.default_rng(seed).integers(0, sizes["vocab_size"], TOKENS).astype(np.int32)
    logits = _logits(model_class, saved, weights, tokens)
    entry = dict(config=saved, seed=seed, norm_center=norm_center, weights_crc32=checksum(weights), parameters=shapes)
    if name in LEGACY:
        removed, added = LEGACY[name]
        legacy = {key: value for key, value in saved.items() if key not in removed} | added
        entry["legacy_config"] = legacy
        np.testing.assert_array_equal(_logits(model_class, legacy, weights, tokens), logits)
    return entry, tokens, logits


def _checkpoint_names(model: torch.nn.Module) -> tuple[dict, dict[str, list[int]]]:
    """The configuration and the tensor names as `save_pretrained` writes them (tied weights once)."""
    from safetensors import safe_open

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads(Path(folder, "config.json").read_text())
        with safe_open(Path(folder, "model.safetensors"), "np") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
    return config, shapes


@torch.inference_mode()
def _logits(model_class: type, config: dict, weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Logits [tokens, vocab] of one plain pass, read back from a checkpoint folder as a user's would be."""
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        model, info = model_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise ValueError(f"the checkpoint did not load as it is named: {info}")
    return model.eval()(torch.from_numpy(tokens[None]).long()).logits[0].float().numpy()
