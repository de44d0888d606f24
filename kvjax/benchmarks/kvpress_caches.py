"""Our side of the comparison with kvpress: a model on a cache with a policy, fed a prompt and its continuation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax import sizes
from kvjax.batch import cache_spec
from kvjax.cache import Cache, init_cache
from kvjax.models.decoder import Decoder
from kvjax.options import Options
from kvjax.policy import Policy
from kvjax.spec import CacheSpec
from kvjax.step import begin_step, end_step


class Run(NamedTuple):
    """What a cache held, and what the model then said; `scripts/peers/kvpress_peer.py` answers the same.

    Attributes:
        kept: bool [steps, layers, kv_heads, tokens], tokens that the next query sees, after the prompt and, where the
            continuation came token by token, after each of its tokens.
        logits: float32 [tokens, vocab] of the first tokens of the continuation.
        nll: float32 [continuation - 1], -log p of its tokens but the first, in nats.
        bytes: int64 [2], held after the prompt and at the end: pages with all that is kept beside keys and values, and
            the page table.
    """

    kept: np.ndarray
    logits: np.ndarray
    nll: np.ndarray
    bytes: np.ndarray


class Caches:
    """A decoder that runs on caches with policies."""

    def __init__(self, decoder: Decoder, page_size: int):
        self.decoder, self.page_size = decoder, page_size
        self.graph, self.weights = nnx.split(decoder)

    def spec(self, policy: Policy, prompt: int, continuation: int) -> CacheSpec:
        """Return the cache that `kvjax.generate` would make, in float32, for a prompt read at once."""
        options = Options(policy=policy, page_size=self.page_size, chunk_size=prompt)
        return cache_spec(self.decoder, [prompt], [continuation + 1], options)

    def run(
        self, policy: Policy, prompt: Sequence[int], continuation: Sequence[int], *, in_decode: bool, logits: int
    ) -> Run:
        """Feed a prompt and its continuation.

        Args:
            policy: of the cache.
            prompt, continuation: token ids; the latter may be empty.
            in_decode: whether the continuation comes token by token, as generated text does, and the policy drops what
                it drops then; else it comes in one step, after which nothing is dropped.
            logits: of how many tokens of the continuation to return them.
        """
        spec = self.spec(policy, len(prompt), len(continuation))
        cache, ok = _read(self.graph, self.weights, init_cache(spec), jnp.array(prompt, jnp.int32))
        assert ok, "the cache is sized for the prompt"
        bytes_held = [held_bytes(cache)]
        positions, next_position = [_positions(cache)], [len(prompt)]
        said, nll = np.zeros((0, self.decoder.config.vocab_size), np.float32), np.zeros(0, np.float32)
        if len(continuation):
            feed, tokens = _decode if in_decode else _append, jnp.array(continuation, jnp.int32)
            cache, said, nll, after, ok = feed(self.graph, self.weights, cache, tokens, logits=logits)
            assert ok, "the cache is sized for the continuation"
            positions += list(np.asarray(after))
            next_position += [len(prompt) + 1 + i for i in range(len(after))]
        length = len(prompt) + len(continuation)
        kept = [_seen(policy, *of, length) for of in zip(positions, next_position, strict=True)]
        of_heads = np.repeat(np.stack(kept), spec.heads_per_group, axis=2)
        return Run(of_heads, np.asarray(said), np.asarray(nll), np.array([*bytes_held, held_bytes(cache)]))


def page_costs(spec: CacheSpec) -> tuple[int, int]:
    """Return the bytes of a cache that do not depend on its pages (tables, lengths), and those of one page."""
    of_page = sizes.page_bytes(spec)
    return sizes.cache_bytes(spec) - spec.num_pages * of_page, of_page


def held_bytes(cache: Cache) -> int:
    """Bytes of the pages that a cache has in use, with all that is kept beside keys and values, and of its tables."""
    fixed, of_page = page_costs(cache.spec)
    return fixed + int(cache.pages_used) * of_page


def _positions(cache: Cache):
    """Positions of what the only sequence holds, [layers, groups, slots], -1 where a slot is empty."""
    return cache.positions[cache.page_table[:, :, 0]].reshape(*cache.page_table.shape[:2], -1)


def _seen(policy: Policy, positions, next_position: int, length: int) -> np.ndarray:
    """Which tokens the next query sees, bool [layers, groups, length]."""
    positions = np.asarray(positions)
    kept = np.zeros((*positions.shape[:2], length + 1), bool)
    np.put_along_axis(kept, positions, True, axis=-1)  # -1 is the last place, which is cut off
    kept = kept[..., :-1]
    if policy.window_size is not None:
        place = np.arange(length)
        kept &= (place < policy.num_sinks) | (place > next_position - policy.window_size)
    return kept


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="cache")
def _read(graph, weights, cache, tokens):
    cache, _, ok = _step(nnx.merge(graph, weights), cache, tokens, prompt_ends=True)
    return cache, ok


@functools.partial(jax.jit, static_argnames=("graph", "logits"), donate_argnames="cache")
def _append(graph, weights, cache, tokens, *, logits):
    """Feed a continuation in one step, as a part of a prompt that goes on."""
    cache, said, ok = _step(nnx.merge(graph, weights), cache, tokens, prompt_ends=False)
    return cache, said[:logits], _nll(said, tokens), jnp.zeros((0, 0, 0, 0), jnp.int32), ok


@functools.partial(jax.jit, static_argnames=("graph", "logits"), donate_argnames="cache")
def _decode(graph, weights, cache, tokens, *, logits):
    """Feed a continuation token by token; returns the positions that are held after each too."""
    model = nnx.merge(graph, weights)

    def body(cache, token):
        cache, said, ok = _step(model, cache, token[None], prompt_ends=None)
        return cache, (said[0], _positions(cache), ok)

    cache, (said, positions, ok) = jax.lax.scan(body, cache, tokens)
    return cache, said[:logits], _nll(said, tokens), positions, ok.all()


def _step(model, cache, tokens, *, prompt_ends: bool | None):
    """Feed tokens; returns the cache, the logits of all tokens, and whether they fitted."""
    count = tokens.shape[0]
    ends = None if prompt_ends is None else jnp.array([prompt_ends])
    lengths = jnp.array([count], jnp.int32)
    cache, step = begin_step(cache, lengths, num_tokens=count, max_query_length=count, prompt_ends=ends)
    said, cache = model(cache, step, tokens, all_tokens=not prompt_ends)
    cache, report = end_step(cache, step)
    return cache, said, report.ok


def _nll(said, tokens):
    return -jnp.take_along_axis(jax.nn.log_softmax(said[:-1]), tokens[1:, None], axis=1)[:, 0]
