"""Streams without end: a text, or the model's own, goes through a cache in jitted steps of donated state."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int8, Int32

from kvjax.batch import Batch, cache_spec, parts_of, token_kinds
from kvjax.cache import STATUS_MEANING, Status, init_cache
from kvjax.decoding import Finish, jit
from kvjax.errors import InputError, whole_number
from kvjax.formats import best_page_size
from kvjax.kernels.pytree import pytree
from kvjax.models.loading import LanguageModel
from kvjax.options import MOST_NEW_TOKENS, Options, checked
from kvjax.policy import Policy
from kvjax.step import begin_step, end_step


@pytree
class TextState:
    """What a text carries from step to step.

    Attributes:
        cache: the cache, of one pool or several, with one sequence.
        peak_pages: int32 [pools], most pages of each pool held after a step.
    """

    cache: Any
    peak_pages: Int32[Array, " pools"]


@functools.partial(jit, static_argnames="graph", donate_argnames="state")
def feed(
    graph: Any,
    weights: Any,
    state: TextState,
    tokens: Int32[Array, " tokens"],
    targets: Int32[Array, " tokens"],
    count: Int32[Array, ""],
    kinds: Int8[Array, " vocab"] | None = None,
) -> tuple[TextState, Float32[Array, " tokens"], Bool[Array, ""]]:
    """Feed `count` tokens of a text, padded, and score the tokens after each of them.

    Args:
        graph, weights: the split model, called as `model(cache, step, tokens, all_tokens=True)`.
        state: donated.
        tokens: the tokens.
        targets: the token that comes after each.
        count: tokens that are no padding.
        kinds: what policies want to know of tokens (see `begin_step`), or None if they do not.

    Returns: the state, -log p of the targets in nats, and whether the step was served; if not, nothing has changed.
    """
    model, size = nnx.merge(graph, weights), tokens.shape[0]
    of_tokens = None if kinds is None else kinds[tokens]
    cache, step = begin_step(state.cache, count[None], num_tokens=size, max_query_length=size, token_kinds=of_tokens)
    logits, cache = model(cache, step, tokens, all_tokens=True)
    cache, report = end_step(cache, step)
    peak = jnp.maximum(state.peak_pages, jnp.stack([pool.pages_used for pool in cache.of_pools]))
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    return TextState(cache, peak), nll, report.ok


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one step of a stream brought: its tokens, and -log p in nats of as many (of one fewer where a text ends)."""

    tokens: np.ndarray
    nll: np.ndarray


class TextStream:
    """A text on its way through a model; what it holds is bounded where the policy bounds it.

    Attributes:
        spec: of the cache.
        state: a `TextState`; what `kvjax.snapshots` saves, with `position`.
        position: tokens fed.

    Args:
        model: what `kvjax.load` returns, or a module called as `model(cache, step, tokens, all_tokens=True)` with a
            `config`.
        text: token ids.
        options: format, pages and policy of the cache; `chunk_size` is how many tokens a step feeds.
        limit: tokens to feed, of which a policy that bounds nothing needs to know; None for all there are.
        start_position: position of the first token.

    Raises: InputError for tokens out of range, a policy that holds more with every token where there is no limit, a
        limit beyond the text, or a cache too small.
    """

    def __init__(
        self,
        model: nnx.Module | LanguageModel,
        text: np.ndarray,
        options: Options,
        *,
        limit: int | None = None,
        start_position: int = 0,
    ):
        module, _ = parts_of(model)
        vocab: int = module.config.vocab_size  # pyright: ignore[reportAttributeAccessIssue]
        (tokens,), _, self.options = checked([text], options, vocab)
        self.text = np.array(tokens, np.int32)
        self.limit = len(self.text) if limit is None else whole_number("tokens", limit, 1)
        if self.limit > len(self.text):
            raise InputError(f"the text has {len(self.text)} tokens and {limit} are wanted: give more text or fewer")
        most = self.options.policy.most_slots(MOST_NEW_TOKENS, 0, self.options.chunk_size, _page_size(self.options))
        self.spec = cache_spec(module, [_sized_for(module, self.options, most, limit)], [1], self.options)
        self.graph, self.weights = nnx.split(module)
        self.kinds = token_kinds(model, vocab, self.spec.policy)
        cache = init_cache(self.spec, start_positions=[start_position])
        self.state, self.position = TextState(cache, jnp.zeros(len(self.spec.pools), jnp.int32)), 0

    @property
    def pages(self) -> int:
        """Most pages held after any step so far, of all pools."""
        return int(np.asarray(self.state.peak_pages).sum())

    def step(self) -> Piece | None:
        """Feed the next chunk. Returns None at the end. Raises InputError where the cache has no room or position."""
        begin, size = self.position, self.spec.max_query_length
        if (count := min(size, self.limit - begin)) <= 0:
            return None
        padded = np.zeros(size + 1, np.int32)
        padded[: min(count + 1, len(self.text) - begin)] = self.text[begin : begin + count + 1]
        chunk = (jnp.asarray(padded[:-1]), jnp.asarray(padded[1:]), jnp.int32(count))
        self.state, nll, ok = feed(self.graph, self.weights, self.state, *chunk, self.kinds)
        if not ok:
            raise _stopped(self.state.cache, begin)
        self.position = begin + count
        scored = min(count, len(self.text) - 1 - begin)
        return Piece(self.text[begin : self.position], np.asarray(nll)[:scored])

    def resume(self, state: TextState, position: int) -> None:
        """Go on from where a stream of the same kind was."""
        self.state, self.position = state, position


class OwnStream:
    """A model that reads what it writes, after a prompt.

    Attributes and errors are those of `TextStream`; `position` counts tokens written.

    Args:
        model: as for `kvjax.generate`.
        prompt: token ids.
        options: of the cache, and of sampling. Ids that end a text end nothing.
        limit: most tokens to write; None for no end.
        steps: tokens that a step writes.
    """

    def __init__(
        self,
        model: nnx.Module | LanguageModel,
        prompt: np.ndarray,
        options: Options,
        *,
        limit: int | None = None,
        steps: int = 16,
    ):
        self.limit = MOST_NEW_TOKENS if limit is None else whole_number("tokens", limit, 1, MOST_NEW_TOKENS)
        most = options.policy.most_slots(len(prompt), MOST_NEW_TOKENS, options.chunk_size, _page_size(options))
        sized_for = _sized_for(parts_of(model)[0], options, most, limit)
        # No other log-probability than that of the token itself.
        own = dataclasses.replace(options, max_new_tokens=sized_for, stop_ids=(), logprobs=0)
        self.batch, self.steps = Batch(model, [prompt], own, collects=False), steps
        self.spec = self.batch.spec
        self.resume(self.batch.state, 0)

    @property
    def state(self) -> Any:
        return self.batch.state

    @property
    def pages(self) -> int:
        """Most pages held after any step so far, of all pools."""
        return int(np.asarray(self.state.peak_pages).sum())

    def step(self) -> Piece | None:
        """Read the prompt, or write the next tokens. Returns None at the end."""
        if self.position == 0:
            chosen = jax.tree.map(lambda of: of[None], list(self.batch.prefill())[-1])
        elif self.position < self.limit:
            chosen = self.batch.scan(self.steps)
        else:
            return None
        if (np.asarray(self.state.finish) == Finish.OUT_OF_PAGES).any():
            raise _stopped(self.state.cache, self.position)
        valid = np.asarray(chosen.valid)[:, 0]
        assert chosen.logprob is not None, "it was asked for"
        tokens, logprobs = (np.asarray(of)[:, 0][valid] for of in (chosen.token, chosen.logprob))
        self.position += len(tokens)
        return Piece(tokens, -logprobs)

    def resume(self, state: Any, position: int) -> None:
        """Go on from where a stream of the same kind was, to the limit of this one."""
        finish = Finish.RUNNING if position < self.limit else Finish.LENGTH
        changes: dict[str, Any] = dict(limit=jnp.array([self.limit], jnp.int32), finish=jnp.array([finish], jnp.int32))
        self.batch.state, self.position = dataclasses.replace(state, **changes), position


def _page_size(options: Options) -> int:
    return options.page_size or best_page_size(options.format)


def _sized_for(module: Any, options: Options, most_slots: int, limit: int | None) -> int:
    """Tokens to size a cache for: the same for all streams of a kind, unless the policy holds more with every token.

    Raises: InputError where nobody says how many there will be.
    """
    policy = options.policy
    windowed = all(window is not None or policy.window_size is not None for window in module.config.windows)
    if windowed or most_slots < MOST_NEW_TOKENS:
        return MOST_NEW_TOKENS
    if limit is None:
        instead = "give it prefill=chunked" if _has_chunks(policy) else "use one such as streaming:window=508"
        raise InputError(f"policy {policy.name} holds more with every token: {instead}, or say how many tokens")
    return limit


def _has_chunks(policy: Policy) -> bool:
    """Whether the policy holds less where it drops tokens after every chunk."""
    try:
        return dataclasses.replace(policy, prefill="chunked").bound is not None  # pyright: ignore[reportCallIssue]
    except (TypeError, InputError):
        return False


def _stopped(cache: Any, position: int) -> InputError:
    """What is said of a step that was not served."""
    # Later steps may have been served, as they had nothing to feed.
    at_end = int(np.asarray(cache.status)) & Status.POSITION_LIMIT
    reason = STATUS_MEANING[Status.POSITION_LIMIT if at_end else Status.OUT_OF_PAGES]
    return InputError(f"the stream cannot go on after {position} tokens: {reason}")
