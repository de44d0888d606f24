"""A tiny random decoder, and lowering without arrays. Needs no pytest: scripts of other environments use it too."""

import contextlib
from typing import Any

import jaxtyping
import numpy as np

from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder


def tiny_decoder(*, scan: bool = False, dtype: str = "float32", **changes: Any) -> Decoder:
    """A random model with grouped heads; `changes` are fields of its configuration, `windows` among them."""
    layers = changes.pop("num_layers", 2)
    shape: dict[str, Any] = dict(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=8
    )
    shape |= dict(windows=(None,) * layers, attention_scale=0.3) | changes
    config = DecoderConfig(
        **shape, model_type="llama", num_layers=layers, norm_eps=1e-5, activation="silu", tie_word_embeddings=True,
        rope_theta=10000.0, max_position=4096,
    )  # fmt: skip
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = dict(q=(q, hidden), k=(kv, hidden), v=(kv, hidden), o=(hidden, q))
    matrices |= dict(gate=(inner, hidden), up=(inner, hidden), down=(hidden, inner))
    rng = np.random.default_rng(0)
    norm = np.ones(hidden, np.float32)

    def draw(rows: int, columns: int) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) * 2 / np.sqrt(columns)).astype(dtype)

    drawn = [
        {name: draw(*of) for name, of in matrices.items()} | dict(attn_norm=norm, mlp_norm=norm) for _ in range(layers)
    ]
    weights = dict(embed=draw(config.vocab_size, hidden) * np.asarray(6, dtype), final_norm=norm, layers=drawn)
    return Decoder(config, weights, scan=scan)


@contextlib.contextmanager
def unchecked_shapes():
    """Let state hold shapes in place of arrays, as `jax.eval_shape` and `lower` have it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
