"""The configuration of a decoder: one description for every supported family, whatever file it came from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

from kvjax.errors import InputError
from kvjax.rotary import SCALINGS, Layout, Rotary, per_layer
from kvjax.rotary import rotary as one_base

Activation = Literal["silu", "gelu_tanh", "gelu"]
_COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer of the Llama family. Hashable, so it can be a static argument.

    Attributes:
        model_type: the family: llama, mistral, qwen2, qwen3, gemma2 or gemma3.
        activation: of the gated feed-forward part.
        qkv_bias: q, k and v projections have a bias.
        qk_norm: q and k heads are normalised before the rotation.
        post_norms: attention and feed-forward outputs are normalised before they join the residual stream.
        embedding_scale: factor of the token embedding.
        attention_scale: factor of the query-key products.
        attention_soft_cap, final_soft_cap: `cap * tanh(logit / cap)` on attention logits and output logits.
        windows: per layer, a token sees the positions with `query - position < window` (itself and the window - 1
            before it: transformers' `sliding_window`); None sees all.
        rope_theta: base of the layers without a window, and of all layers where `rope_local_theta` is None.
        rope_local_theta: base of the layers with a window, never scaled (Gemma 3).
        rope_scaling: the items of a `rope_scaling` mapping; empty without scaling.
        max_position: trained context in tokens.
        bos_id, eos_ids: token ids; generation stops at any of `eos_ids`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: Activation
    tie_word_embeddings: bool
    attention_scale: float
    windows: tuple[int | None, ...]
    rope_theta: float
    max_position: int
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    rope_local_theta: float | None = None
    rope_scaling: tuple[tuple[str, Any], ...] = ()
    rope_layout: Layout = "half"
    partial_rotary_factor: float = 1.0
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r} in the model's configuration: it must be an integer above 0")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"wrong head counts in the model's configuration: {self.num_heads} query heads are no multiple of "
                f"{self.num_kv_heads} key-value heads"
            )
        if len(self.windows) != self.num_layers or any(window is not None and window < 1 for window in self.windows):
            raise InputError(
                f"the windows {self.windows} do not fit {self.num_layers} layers: give each None or a number above 0"
            )
        if self.rope_name not in SCALINGS:
            raise InputError(f"rope scaling {self.rope_name!r} is not supported: use one of {', '.join(SCALINGS)}")

    @property
    def rope_name(self) -> str:
        """The kind of rotary scaling: "default" without one."""
        return dict(self.rope_scaling).get("rope_type", "default")

    @property
    def rotary_dim(self) -> int:
        """Leading components of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)


def rotary(config: DecoderConfig) -> Rotary:
    """The model's rotary embedding: one row of phases, or a row per layer where layers differ in base (Gemma 3)."""
    base = functools.partial(one_base, config.head_dim, rotary_dim=config.rotary_dim, layout=config.rope_layout)
    distant = base(config.rope_theta, scaling=dict(config.rope_scaling))
    if config.rope_local_theta is None:
        return distant
    local = base(config.rope_local_theta)
    return per_layer([local, distant], [int(window is None) for window in config.windows])


def hashable(scaling: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    """A `rope_scaling` mapping as sorted items, its lists as tuples; nothing where it does not scale."""
    scaling = {key: value for key, value in (scaling or {}).items() if value is not None}
    scaling["rope_type"] = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    if scaling["rope_type"] == "default":
        return ()
    return tuple(sorted((key, tuple(v) if isinstance(v, list) else v) for key, v in scaling.items()))


def head_size(hidden_size: int, num_heads: int) -> int:
    """The size of a head where a checkpoint does not state it."""
    if hidden_size % num_heads:
        raise InputError(
            f"wrong head counts in the model's configuration: {num_heads} heads do not divide hidden size {hidden_size}"
        )
    return hidden_size // num_heads
