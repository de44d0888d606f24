"""The compiled parts of generation: one prefill step, one decode step, and the loops over decode steps.

All of them take and return the whole `State`, donated, and are traced once per shape.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int8, Int32, PRNGKeyArray

from kvjax.kernels.pytree import pytree
from kvjax.pages import ragged
from kvjax.sampling import Sampling, log_probabilities, sample
from kvjax.step import begin_step, end_step


class Finish(enum.IntEnum):
    """Why a sequence has ended; RUNNING has not."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    OUT_OF_PAGES = 3


@pytree
class State:
    """Everything a generation carries from step to step.

    Attributes:
        cache: the cache, of one pool or several.
        finish: int32 [seqs], a `Finish` each.
        token: int32 [seqs], the last token chosen, which the next step feeds.
        generated: int32 [seqs], tokens chosen so far.
        limit: int32 [seqs], most tokens to choose.
        stop_ids: int32 [n], tokens that end a sequence (they count as generated).
        sampling: how each sequence samples.
        key: the random key; the key of a token is folded from it, the sequence and the token's number.
        seen: bool [seqs, vocab] for the repetition penalty, or None without one.
        peak_pages: int32 [pools], most pages of each pool used at once.
        kinds: int8 [vocab], what policies want to know of tokens (see `begin_step`), or None if they do not.
    """

    cache: Any
    finish: Int32[Array, " seqs"]
    token: Int32[Array, " seqs"]
    generated: Int32[Array, " seqs"]
    limit: Int32[Array, " seqs"]
    stop_ids: Int32[Array, " n"]
    sampling: Sampling
    key: PRNGKeyArray
    seen: Bool[Array, "seqs vocab"] | None
    peak_pages: Int32[Array, " pools"]
    kinds: Int8[Array, " vocab"] | None = None


@pytree
class Chosen:
    """What one step chose: tokens [..., seqs], whether a sequence chose one, and log-probabilities on request."""

    token: Int32[Array, "*steps seqs"]
    valid: Bool[Array, "*steps seqs"]
    logprob: Float32[Array, "*steps seqs"] | None = None
    top_ids: Int32[Array, "*steps seqs n"] | None = None
    top_logprobs: Float32[Array, "*steps seqs n"] | None = None


def _choose(state: State, logits, choosing, num_logprobs: int) -> tuple[State, Chosen]:
    """Sample for the sequences that are `choosing`, and end those that are through."""
    number = jnp.arange(state.token.shape[0], dtype=jnp.int32)
    keys = jax.vmap(lambda s, n: jax.random.fold_in(jax.random.fold_in(state.key, s), n))(number, state.generated)
    token = jnp.where(choosing, sample(logits, state.sampling, keys, state.seen), state.token)
    generated = state.generated + choosing.astype(jnp.int32)
    stopped = (token[:, None] == state.stop_ids[None]).any(1)
    finish = jnp.where(generated >= state.limit, int(Finish.LENGTH), int(Finish.RUNNING))
    finish = jnp.where(choosing, jnp.where(stopped, int(Finish.STOP), finish), state.finish).astype(jnp.int32)
    seen = None if state.seen is None else state.seen.at[number, token].max(choosing)
    state = dataclasses.replace(state, token=token, generated=generated, finish=finish, seen=seen)
    logs = (None, None, None) if num_logprobs < 0 else log_probabilities(logits, token, num_logprobs)
    return state, Chosen(token, choosing, *logs)


def _run(model, state: State, tokens, lengths, longest: int, num_logprobs: int, choosing, give_up):
    """One step of the model, over packed prompt tokens or (None) the token each sequence chose last.

    A step that finds no pages changes nothing, but ends its sequences where `give_up` holds.
    """
    num_tokens = lengths.shape[0] if tokens is None else tokens.shape[0]
    said: dict[str, Any] = dict(prompt_ends=None if tokens is None else choosing)
    if tokens is None:
        tokens = state.token[ragged(lengths, num_tokens)[0]]
    if state.kinds is not None:
        said["token_kinds"] = state.kinds[tokens]
    cache, step = begin_step(state.cache, lengths, num_tokens=num_tokens, max_query_length=longest, **said)
    logits, cache = model(cache, step, tokens)
    # Before the step's end gives pages back.
    peak = jnp.maximum(state.peak_pages, jnp.stack([pool.pages_used for pool in cache.of_pools]))
    cache, report = end_step(cache, step)
    starved = ~report.ok & (lengths > 0) & give_up
    finish = jnp.where(starved, int(Finish.OUT_OF_PAGES), state.finish).astype(jnp.int32)
    state = dataclasses.replace(state, cache=cache, finish=finish, peak_pages=peak)
    state, chosen = _choose(state, logits, choosing & report.ok, num_logprobs)
    return state, chosen, report.ok


# Products by cuBLAS: before one in Triton, XLA copies a layer's weights out of the stack that a scan over layers reads
# (436 MB a layer of Llama-3.1-8B, in every step). It says nothing to other devices.
jit = functools.partial(jax.jit, compiler_options={"xla_gpu_enable_triton_gemm": False})


@functools.partial(jit, static_argnames=("graph", "num_logprobs"), donate_argnames="state")
def prefill_step(
    graph: Any,
    weights: Any,
    state: State,
    tokens: Int32[Array, " tokens"],
    lengths: Int32[Array, " seqs"],
    last: Bool[Array, " seqs"],
    give_up: Bool[Array, ""],
    *,
    num_logprobs: int = -1,
) -> tuple[State, Chosen, Bool[Array, ""]]:
    """Feed a chunk of packed prompt tokens; sequences whose prompt ends with it (`last`) choose their first token.

    Returns: the state, what was chosen, and whether the chunk fitted the cache. If not, nothing has changed, except
    that the sequences have ended where `give_up` holds.
    """
    if state.seen is not None:
        owner, _, real = ragged(lengths, tokens.shape[0])
        state = dataclasses.replace(state, seen=state.seen.at[owner, tokens].max(real))
    model = nnx.merge(graph, weights)
    return _run(model, state, tokens, lengths, tokens.shape[0], num_logprobs, last, give_up)


def _decode_step(model, state: State, num_logprobs: int) -> tuple[State, Chosen]:
    running = state.finish == int(Finish.RUNNING)
    return _run(model, state, None, running.astype(jnp.int32), 1, num_logprobs, running, True)[:2]


@functools.partial(jit, static_argnames=("graph", "num_logprobs"), donate_argnames=("state", "out"))
def decode_while(
    graph: Any, weights: Any, state: State, out: Chosen, most: Int32[Array, ""], *, num_logprobs: int = -1
) -> tuple[State, Chosen]:
    """Run decode steps in one `while_loop` until all sequences have ended, or `most` steps.

    Args:
        graph, weights: the split model.
        state: donated.
        out: buffers [places, seqs]; what a sequence chooses goes to the row of its number of generated tokens.
        most: steps to run; 0 compiles and changes nothing.
    """
    model = nnx.merge(graph, weights)
    sequence = jnp.arange(state.token.shape[0])

    def body(carry):
        i, state, out = carry
        place = state.generated
        state, chosen = _decode_step(model, state, num_logprobs)
        # A sequence that chose nothing writes what stands there already.
        write = lambda old, new: old.at[place, sequence].set(  # noqa: E731
            jnp.where(chosen.valid.reshape(-1, *(1,) * (new.ndim - 1)), new, old[place, sequence]), mode="clip"
        )
        return i + 1, state, jax.tree.map(write, out, chosen)

    def unfinished(carry):
        return (carry[0] < most) & (carry[1].finish == int(Finish.RUNNING)).any()

    return jax.lax.while_loop(unfinished, body, (jnp.int32(0), state, out))[1:]


@functools.partial(jit, static_argnames=("graph", "steps", "num_logprobs"), donate_argnames="state")
def decode_scan(graph: Any, weights: Any, state: State, *, steps: int, num_logprobs: int = -1) -> tuple[State, Chosen]:
    """Run a fixed number of decode steps; returns the state and what each step chose, [steps, seqs]."""
    model = nnx.merge(graph, weights)
    return jax.lax.scan(lambda state, _: _decode_step(model, state, num_logprobs), state, length=steps)
