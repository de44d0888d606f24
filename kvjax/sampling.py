"""Choosing the next token: greedy or random, restricted by top-k, top-p and min-p, per sequence and inside jit."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Key

from kvjax.errors import InputError, shown
from kvjax.kernels.pytree import pytree

_RULES = {
    "temperature": (0.0, lambda x: 0 <= x < 1e30, "at least 0 (0 is greedy), and finite"),
    "top_k": (0, lambda x: 0 <= x < 2**31 and x.is_integer(), "a whole number from 0 to 2147483647 (0 keeps all)"),
    "top_p": (1.0, lambda x: 0 < x <= 1, "above 0 and at most 1 (1 keeps all)"),
    "min_p": (0.0, lambda x: 0 <= x <= 1, "from 0 to 1 (0 keeps all)"),
    "repetition_penalty": (1.0, lambda x: 1e-30 < x < 1e30, "above 0 (1 is none), and finite"),
}


@pytree
class Sampling:
    """How each sequence samples; float32 or int32 [seqs] each. Build it with `sampling`.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens until their probabilities reach p; 1 keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest.
        repetition_penalty: logits of tokens that occurred are divided (if positive) or multiplied by it.
    """

    temperature: Float32[Array, " seqs"]
    top_k: Int32[Array, " seqs"]
    top_p: Float32[Array, " seqs"]
    min_p: Float32[Array, " seqs"]
    repetition_penalty: Float32[Array, " seqs"]


def sampling(num_seqs: int, **options: float | Sequence[float] | np.ndarray | None) -> Sampling:
    """Build the sampling of `num_seqs` sequences from numbers for all or one number for each.

    Args:
        options: temperature, top_k, top_p, min_p, repetition_penalty; see `Sampling`. None is the default.

    Raises: InputError for an unknown option or a value out of range.
    """
    if unknown := set(options) - set(_RULES):
        raise InputError(f"unknown sampling option {sorted(unknown)[0]!r}: use {', '.join(_RULES)}")
    fields = {}
    for name, (default, allowed, range_text) in _RULES.items():
        given = options.get(name)
        try:
            values = np.asarray(default if given is None else given, np.float64)
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"{name} is {shown(given)}: give a number, or one for each sequence") from None
        if values.ndim > 1 or (values.ndim == 1 and values.shape != (num_seqs,)):
            raise InputError(f"{name} has {values.size} values for {num_seqs} sequences: give one, or one for each")
        for value in values.reshape(-1).tolist():
            if not allowed(value):
                raise InputError(f"{name} {value:g} is out of range: it must be {range_text}")
        dtype = jnp.int32 if name == "top_k" else jnp.float32
        fields[name] = jnp.asarray(np.broadcast_to(values, num_seqs), dtype)
    return Sampling(**fields)


def sample(
    logits: Float32[Array, "seqs vocab"],
    how: Sampling,
    keys: Key[Array, " seqs"],
    seen: Bool[Array, "seqs vocab"] | None = None,
) -> Int32[Array, " seqs"]:
    """Choose a token for every sequence.

    Args:
        logits: float32 [seqs, vocab].
        how: the options of each sequence.
        keys: [seqs] random keys, one for each sequence's token.
        seen: tokens of the prompt and the generation so far, for the repetition penalty; None leaves it out.

    Returns: int32 [seqs].

    Penalty, temperature, top-k, top-p and min-p are applied in this order (transformers' order).
    """
    if seen is not None:
        penalty = how.repetition_penalty[:, None]
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def random(logits):
        scaled = logits / jnp.where(how.temperature > 0, how.temperature, 1)[:, None]
        restricted = ((how.top_k > 0) | (how.top_p < 1) | (how.min_p > 0)).any()
        scaled = jax.lax.cond(restricted, lambda x: _restrict(x, how), lambda x: x, scaled)
        drawn = jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
        return jnp.where(how.temperature > 0, drawn, greedy)

    return jax.lax.cond((how.temperature > 0).any(), random, lambda _: greedy, logits)


def _restrict(logits: Float32[Array, "seqs vocab"], how: Sampling) -> Float32[Array, "seqs vocab"]:
    """Set the logits of tokens that top-k, top-p or min-p leave out to minus infinity."""
    vocab = logits.shape[1]
    falling = -jnp.sort(-logits, axis=-1)
    k = jnp.where(how.top_k > 0, jnp.minimum(how.top_k, vocab), vocab)[:, None]
    in_top_k = jnp.arange(vocab)[None] < k
    probabilities = jax.nn.softmax(jnp.where(in_top_k, falling, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The likeliest token is always kept: nothing comes before it.
    kept = in_top_k & ((before < how.top_p[:, None]) | (how.top_p[:, None] >= 1))
    kept &= probabilities >= how.min_p[:, None] * probabilities[:, :1]
    least = jnp.where(kept, falling, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)


def log_probabilities(
    logits: Float[Array, "seqs vocab"], chosen: Int32[Array, " seqs"], most: int
) -> tuple[Float32[Array, " seqs"], Int32[Array, "seqs most"], Float32[Array, "seqs most"]]:
    """Return the log-probability of the chosen token, and the `most` likeliest tokens with theirs.

    They are the model's own: before penalty, temperature and restriction.
    """
    logs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    top, ids = jax.lax.top_k(logs, most)
    return jnp.take_along_axis(logs, chosen[:, None], axis=1)[:, 0], ids.astype(jnp.int32), top
