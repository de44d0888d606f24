"""Weights of a checkpoint in one canonical form, whichever file they come from.

    {"embed" [vocab, hidden], "final_norm" [hidden], "lm_head" [vocab, hidden] (absent when tied), "layers": [{
        "attn_norm" [hidden], "q" [heads * head_dim, hidden], "k" and "v" [kv_heads * head_dim, hidden],
        "o" [hidden, heads * head_dim], "mlp_norm" [hidden], "gate" and "up" [intermediate, hidden],
        "down" [hidden, intermediate], and where the family has them "q_bias", "k_bias", "v_bias" [rows],
        "q_norm", "k_norm" [head_dim], "post_attn_norm", "post_mlp_norm" [hidden]; "k_scale", "v_scale" [kv_heads],
        float32, if the checkpoint brings scales for 8-bit caches}, ...]}

Matrices are [out, in]. Rows of q and k stand in half-split rotary order, and a norm's weight is the factor itself
(Gemma's Hugging Face files store the factor minus one). Norms are float32, everything else has the dtype asked for.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from kvjax.errors import InputError, shown
from kvjax.models.config import DecoderConfig
from kvjax.models.gguf_file import GgufFile
from kvjax.models.hf_folder import HfFolder

Weights = dict[str, Any]
DTYPES = {"float32": np.dtype("float32"), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype("float16")}


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor of the canonical form: its key, its name in both kinds of file, the sizes of its dimensions."""

    key: str
    hf: str
    gguf: str
    shape: tuple[str, ...]
    needs: str | None = None  # the flag of the configuration that brings the tensor


_HEADS = (
    _Tensor("q", "self_attn.q_proj.weight", "attn_q.weight", ("heads", "hidden")),
    _Tensor("k", "self_attn.k_proj.weight", "attn_k.weight", ("kv_heads", "hidden")),
    _Tensor("v", "self_attn.v_proj.weight", "attn_v.weight", ("kv_heads", "hidden")),
    _Tensor("q_bias", "self_attn.q_proj.bias", "attn_q.bias", ("heads",), "qkv_bias"),
    _Tensor("k_bias", "self_attn.k_proj.bias", "attn_k.bias", ("kv_heads",), "qkv_bias"),
    _Tensor("v_bias", "self_attn.v_proj.bias", "attn_v.bias", ("kv_heads",), "qkv_bias"),
    _Tensor("q_norm", "self_attn.q_norm.weight", "attn_q_norm.weight", ("head_dim",), "qk_norm"),
    _Tensor("k_norm", "self_attn.k_norm.weight", "attn_k_norm.weight", ("head_dim",), "qk_norm"),
    _Tensor("o", "self_attn.o_proj.weight", "attn_output.weight", ("hidden", "heads")),
)
_MLP = (
    _Tensor("gate", "mlp.gate_proj.weight", "ffn_gate.weight", ("intermediate", "hidden")),
    _Tensor("up", "mlp.up_proj.weight", "ffn_up.weight", ("intermediate", "hidden")),
    _Tensor("down", "mlp.down_proj.weight", "ffn_down.weight", ("hidden", "intermediate")),
)
_ATTN_NORM = _Tensor("attn_norm", "input_layernorm.weight", "attn_norm.weight", ("hidden",))
# The norm before the feed-forward part is called "post attention" in Llama; in Gemma that name is another norm.
_MLP_NORM = _Tensor("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight", ("hidden",))
_GEMMA_NORMS = (
    _Tensor("post_attn_norm", "post_attention_layernorm.weight", "post_attention_norm.weight", ("hidden",)),
    _Tensor("mlp_norm", "pre_feedforward_layernorm.weight", "ffn_norm.weight", ("hidden",)),
    _Tensor("post_mlp_norm", "post_feedforward_layernorm.weight", "post_ffw_norm.weight", ("hidden",)),
)
_TOP = (
    _Tensor("embed", "embed_tokens.weight", "token_embd.weight", ("vocab", "hidden")),
    _Tensor("final_norm", "norm.weight", "output_norm.weight", ("hidden",)),
)
_LM_HEAD = _Tensor("lm_head", "lm_head.weight", "output.weight", ("vocab", "hidden"))
# Rotary frequencies follow from the configuration; a tied output matrix may be stored once more.
_FOLLOWS = ("rotary_emb.inv_freq", "rope_freqs.weight", "lm_head.weight")


def read_weights(file: GgufFile | HfFolder, config: DecoderConfig, dtype: str = "float32") -> Weights:
    """Reads, dequantises and casts the weights of a checkpoint into the canonical form (this module's docstring).

    Raises:
        InputError: for a missing tensor, an unexpected shape (wrong head counts), a tensor that has no place in this
            model, an unknown dtype, a damaged file.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not supported: use one of {', '.join(DTYPES)}")
    reader = _Gguf(file, config) if isinstance(file, GgufFile) else _Hf(file, config)
    expected = list(_expected(config))
    names = {(layer, tensor.key): reader.name(tensor, layer) for layer, tensor in expected}
    weights: Weights = {"layers": [{} for _ in range(config.num_layers)]}
    scales = _cache_scales(reader, config)
    _refuse_leftovers(reader, set(names.values()) | set(scales), config)
    for name, (layer, key) in scales.items():
        weights["layers"][layer][key] = _scale_of_heads(reader, name, config)
    for layer, tensor in expected:
        target = weights if layer is None else weights["layers"][layer]
        target[tensor.key] = _read(reader, names[layer, tensor.key], tensor, config, DTYPES[dtype])
    return weights


def _cache_scales(reader: _Gguf | _Hf, config: DecoderConfig) -> dict[str, tuple[int, str]]:
    """The tensors that hold scales of keys and values: name -> (layer, key). Of all layers, or none."""
    found = {}
    for layer, key in itertools.product(range(config.num_layers), ("k_scale", "v_scale")):
        for name in (f"self_attn.{key}", f"self_attn.attn.{key}", f"self_attn.{key[0]}_proj.{key}"):
            full = reader.name(_Tensor(key, name, "", ()), layer)
            if full in reader.names:
                found[full] = (layer, key)
    if found and len(found) != 2 * config.num_layers:
        raise InputError(
            f"{reader.path} has {len(found)} scales of keys and values, {next(iter(found))} for one: all "
            f"{config.num_layers} layers want one of each, or none"
        )
    return found


def _scale_of_heads(reader: _Gguf | _Hf, name: str, config: DecoderConfig) -> np.ndarray:
    value = np.asarray(reader.read(name), np.float32).reshape(-1)
    if value.size not in (1, config.num_kv_heads) or not (np.isfinite(value) & (value > 0)).all():
        raise InputError(
            f"tensor {name} in {reader.path} is {shown(value.tolist())}: a scale is one number above 0, or "
            f"{config.num_kv_heads}, one for each key-value head"
        )
    return np.broadcast_to(value, (config.num_kv_heads,)).copy()


def _expected(config: DecoderConfig) -> Iterator[tuple[int | None, _Tensor]]:
    norms = _GEMMA_NORMS if config.post_norms else (_MLP_NORM,)
    for tensor in _TOP if config.tie_word_embeddings else (*_TOP, _LM_HEAD):
        yield None, tensor
    for layer in range(config.num_layers):
        for tensor in (_ATTN_NORM, *_HEADS, *norms, *_MLP):
            if tensor.needs is None or getattr(config, tensor.needs):
                yield layer, tensor


def _read(reader: _Gguf | _Hf, name: str, tensor: _Tensor, config: DecoderConfig, dtype: np.dtype) -> np.ndarray:
    if name not in reader.names:
        raise InputError(f"tensor {name} is missing in {reader.path}: the file is incomplete, download it again")
    value = reader.read(name)
    sizes = dict(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_heads * config.head_dim,
        kv_heads=config.num_kv_heads * config.head_dim,
        head_dim=config.head_dim,
    )
    shape = tuple(sizes[part] for part in tensor.shape)
    if value.shape != shape:
        raise InputError(
            f"tensor {name} in {reader.path} has shape {list(value.shape)}, the configuration ({config.num_heads} "
            f"query and {config.num_kv_heads} key-value heads of {config.head_dim}) asks for {list(shape)}: correct "
            f"the configuration or take the weights that belong to it"
        )
    value = reader.canonical(tensor.key, value)
    return np.asarray(value, np.float32 if tensor.key.endswith("norm") else dtype)


def _refuse_leftovers(reader: _Gguf | _Hf, used: set[str], config: DecoderConfig) -> None:
    """A tensor that nobody reads means another model than the configuration says: better refused than ignored."""
    for name in sorted(reader.names - used):
        if not name.endswith(_FOLLOWS):
            raise InputError(
                f"tensor {name} in {reader.path} has no place in a {config.model_type} model of {config.num_layers} "
                f"layers: correct the configuration, or use a supported model"
            )


class _Gguf:
    """Names and conventions of GGUF files."""

    def __init__(self, file: GgufFile, config: DecoderConfig) -> None:
        self.path, self.names, self.read = file.path, set(file.tensors), file.read
        self._config = config
        # llama.cpp stores q and k of this one architecture permuted for interleaved rotation.
        self._permuted = file.fields.get("general.architecture") == "llama"

    def name(self, tensor: _Tensor, layer: int | None) -> str:
        return tensor.gguf if layer is None else f"blk.{layer}.{tensor.gguf}"

    def canonical(self, key: str, value: np.ndarray) -> np.ndarray:
        part, _, kind = key.partition("_")
        if not self._permuted or part not in ("q", "k") or kind not in ("", "bias"):
            return value
        heads = self._config.num_heads if part == "q" else self._config.num_kv_heads
        return half_split_rows(value, heads)


class _Hf:
    """Names and conventions of Hugging Face folders."""

    def __init__(self, folder: HfFolder, config: DecoderConfig) -> None:
        self.path, self.read = folder.path, folder.read
        # A multimodal checkpoint holds the decoder below a prefix, beside parts that are not read.
        found = [name for name in folder.files if name.endswith(_TOP[0].hf)]
        self._prefix = found[0].removesuffix(_TOP[0].hf) if len(found) == 1 else "model."
        heads = [name for name in folder.files if name.endswith(_LM_HEAD.hf)]
        self._lm_head = heads[0] if heads else _LM_HEAD.hf
        self.names = {name for name in folder.files if name.startswith(self._prefix)} | set(heads)
        self._norm_offset = np.float32(1 if config.model_type.startswith("gemma") else 0)

    def name(self, tensor: _Tensor, layer: int | None) -> str:
        if tensor is _LM_HEAD:
            return self._lm_head
        return self._prefix + (tensor.hf if layer is None else f"layers.{layer}.{tensor.hf}")

    def canonical(self, key: str, value: np.ndarray) -> np.ndarray:
        return value.astype(np.float32) + self._norm_offset if key.endswith("norm") else value


def half_split_rows(value: Shaped[np.ndarray, " rows *columns"], heads: int) -> Shaped[np.ndarray, " rows *columns"]:
    """Reorders the rows of every head from interleaved pairs (0, 1), (2, 3) ... to pairs (i, i + head_dim / 2)."""
    return value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
