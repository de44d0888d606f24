"""Trains the small model of the tests: 100 000 parameters that copy, find needles and follow a Markov chain."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from kvjax.errors import InputError
from kvjax.evaluation.small_task import BOS, VOCAB_SIZE, Tag, documents, score
from kvjax.models.config import DecoderConfig
from kvjax.models.config_hf import from_hf
from kvjax.models.decoder import Decoder
from kvjax.models.optional import require

CONFIG = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    hidden_act="silu",
    max_position_embeddings=128,
    tie_word_embeddings=False,
    bos_token_id=BOS,
    torch_dtype="float32",
)
# Trained with tied embeddings and a factor on the input; the written input matrix holds the factor. A power of two, so
# that this changes no bit.
EMBEDDING_SCALE = 4.0
TEST_SEED = 1_000_000
_LOSS_WEIGHTS = {Tag.OTHER: 0.1, Tag.FILLER: 1.0, Tag.COPY: 2.0, Tag.ANSWER: 4.0}
_WARM_UP = 50


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of the curriculum: `steps` batches of documents of one kind."""

    length: int
    batch: int
    learning_rate: float
    steps: int
    needles: int = 2


# Short documents first: copying is found in them. With two needles a model then learns to name any needle not named yet
# and stays at that; five make it look at the keys.
CURRICULUM = (Phase(64, 64, 4e-3, 400), Phase(96, 40, 4e-3, 400, needles=5), Phase(128, 32, 2.5e-3, 1400))


def main(argv: Sequence[str] | None = None) -> int:
    """Train, show progress, and write a Hugging Face folder. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Train the small model of the tests (some minutes on two cores).")
    parser.add_argument("--out", type=Path, required=True, help="folder for config.json and model.safetensors")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the data (default 0)")
    given = parser.parse_args(argv)
    if given.seed < 0:
        parser.error(f"argument --seed: {given.seed} is negative: give 0 or more")
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot make {given.out} ({error.strerror}): give another folder")
    try:
        require("safetensors.numpy")  # before the minutes of training, not after them
        model = train(given.seed)
        facts = dict(seed=given.seed, steps=sum(phase.steps for phase in CURRICULUM), **evaluate(model))
        save(model, given.out, facts)
    except InputError as error:
        parser.error(str(error))
    print(f"wrote {given.out}: {json.dumps(facts)}")
    return 0


def training_config() -> DecoderConfig:
    """Return the configuration that is trained: `CONFIG` with tied embeddings."""
    return dataclasses.replace(from_hf(CONFIG), tie_word_embeddings=True, embedding_scale=EMBEDDING_SCALE)


def train(seed: int, curriculum: Sequence[Phase] = CURRICULUM) -> Decoder:
    """Train a new model, printing a line every 50 steps."""
    optax = require_optax()
    model = Decoder(training_config(), first_weights(training_config(), seed), scan=False, features_major=False)
    graph, weights, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(_schedule(optax, curriculum), b2=0.98, weight_decay=0.02)
    )

    def loss_of(weights, tokens, tags):
        losses = token_losses(nnx.merge(graph, weights, rest), tokens)
        factors = jnp.array([_LOSS_WEIGHTS[tag] for tag in Tag])[tags[:, 1:]]
        by_tag = jnp.stack([_mean(losses, (tags[:, 1:] == tag).astype(losses.dtype)) for tag in Tag])
        return _mean(losses, factors), by_tag

    @jax.jit
    def update(weights, state, tokens, tags):
        gradients, by_tag = jax.grad(loss_of, has_aux=True)(weights, tokens, tags)
        changes, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, changes), state, by_tag

    step, state, began = 0, optimizer.init(weights), time.perf_counter()
    for phase in curriculum:
        for _ in range(phase.steps):
            step += 1
            made = documents(phase.batch, phase.length, seed=(seed, step), needles=phase.needles)
            weights, state, by_tag = update(weights, state, jnp.asarray(made.tokens), jnp.asarray(made.tags))
            if step % 50 == 0:
                _show(step, phase, np.asarray(by_tag), time.perf_counter() - began)
    return nnx.merge(graph, weights, rest)


def require_optax() -> Any:
    """Return optax, which only training needs; InputError where it is missing."""
    try:
        import optax
    except ModuleNotFoundError:
        raise InputError("the package 'optax' is not installed: run pip install 'kvjax[dev]'") from None
    return optax


def first_weights(config: DecoderConfig, seed: int) -> dict[str, Any]:
    """Draw the weights that training starts from, in the canonical form of `kvjax.models.checkpoint`."""
    random = np.random.default_rng((seed, 0))
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # What joins the residual stream starts small, so that the stream keeps its scale through the layers.
    residual = (2 * config.num_layers) ** -0.5

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (gain * columns**-0.5 * random.standard_normal((rows, columns))).astype(np.float32)

    def layer() -> dict[str, np.ndarray]:
        attention = dict(q=matrix(q_size, hidden), k=matrix(kv_size, hidden), v=matrix(kv_size, hidden))
        attention["o"] = matrix(hidden, q_size, residual)
        mlp = dict(gate=matrix(inner, hidden), up=matrix(inner, hidden), down=matrix(hidden, inner, residual))
        return attention | mlp | dict.fromkeys(("attn_norm", "mlp_norm"), np.ones(hidden, np.float32))

    layers = [layer() for _ in range(config.num_layers)]
    return dict(embed=matrix(config.vocab_size, hidden), final_norm=np.ones(hidden, np.float32), layers=layers)


def token_losses(model: Decoder, tokens: Int32[Array, "documents length"]) -> Float[Array, "documents length-1"]:
    """Return the negative log-likelihood of every token but the first."""
    log_probabilities = jax.nn.log_softmax(jax.vmap(model.dense)(tokens)[:, :-1])
    return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=2)[..., 0]


def evaluate(model: Decoder) -> dict[str, dict[str, float]]:
    """Score the model on documents that training has not seen, as long as the last of the curriculum."""
    made = documents(256, CURRICULUM[-1].length, seed=TEST_SEED)
    logits = np.asarray(jax.jit(jax.vmap(model.dense))(jnp.asarray(made.tokens)))
    return {
        tag.name.lower(): dict(nll=round(s.nll, 4), accuracy=round(s.accuracy, 4))
        for tag, s in score(logits, made).items()
    }


def save(model: Decoder, folder: Path, facts: dict[str, Any]) -> None:
    """Write config.json, with the facts under "training", and float32 weights under Hugging Face names."""
    config = model.config
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    embed = np.asarray(model.embed[...])
    tensors = {
        "model.embed_tokens.weight": embed * np.float32(config.embedding_scale),
        "lm_head.weight": embed,
        "model.norm.weight": np.asarray(model.final_norm.weight[...]),
    }
    # Which parts a layer has depends on its configuration, which no type checker follows.
    layers: list[Any] = list(model.layers)
    for number, layer in enumerate(layers):
        q, k, v = np.split(np.asarray(layer.qkv.weight[...]), (q_size, q_size + kv_size))
        gate, up = np.split(np.asarray(layer.gate_up.weight[...]), 2)
        parts = dict(q_proj=q, k_proj=k, v_proj=v, o_proj=layer.o.weight[...])
        named = {f"self_attn.{name}": value for name, value in parts.items()}
        named |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": layer.down.weight[...]}
        named |= dict(input_layernorm=layer.attn_norm.weight[...], post_attention_layernorm=layer.mlp_norm.weight[...])
        tensors |= {f"model.layers.{number}.{name}.weight": np.asarray(value) for name, value in named.items()}
    contiguous = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    require("safetensors.numpy").save_file(contiguous, folder / "model.safetensors", metadata=dict(format="pt"))
    (folder / "config.json").write_text(json.dumps(CONFIG | dict(training=facts), indent=2) + "\n")


def _schedule(optax: Any, curriculum: Sequence[Phase]) -> Any:
    """Warm-up and cosine, anew in each phase."""
    parts = [
        optax.warmup_cosine_decay_schedule(0.0, p.learning_rate, min(_WARM_UP, p.steps // 2), p.steps)
        for p in curriculum
    ]
    ends = np.cumsum([phase.steps for phase in curriculum])[:-1].tolist()
    return optax.join_schedules(parts, ends)


def _mean(values: Float[Array, "documents places"], factors: Float[Array, "documents places"]) -> Float[Array, ""]:
    return (values * factors).sum() / jnp.maximum(factors.sum(), 1.0)


def _show(step: int, phase: Phase, by_tag: Float[np.ndarray, " tags"], seconds: float) -> None:
    losses = ", ".join(f"{tag.name.lower()} {by_tag[tag]:.3f}" for tag in Tag)
    print(f"step {step}, documents of {phase.length}: {losses} ({seconds:.0f} s)", flush=True)
