"""How much of the memory that the allocator hands out holds tokens, over lengths like those of real chats."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jaxtyping import Array, Int32

from kvjax.cache import Cache, init_cache
from kvjax.errors import InputError
from kvjax.sequences import release
from kvjax.spec import CacheSpec, pages_for
from kvjax.step import begin_step, end_step

# Median and mean in tokens of ShareGPT's user turns and replies, and the longest kept of each.
_PROMPT = (18, 110, 2048)
_REPLY = (297, 330, 1024)
_CHUNK = 256
_WARM_UP = 500


def slots_used_share(*, page_size: int = 16, seqs: int = 16, steps: int = 3000, seed: int = 0) -> float:
    """Run the allocator as a busy server would and return used slots over allocated slots, averaged over time.

    Every sequence brings its prompt in chunks, then one token a step, and gives its place to a new one when its reply
    ends. Conversations are single turns, the hardest case: a history in front would waste the same over more tokens.

    Args:
        page_size: tokens of a page.
        seqs: sequences at once.
        steps: steps of the server, of which the first 500 are not counted.
        seed: of the lengths.

    Raises: InputError for too few steps, or a page size that the cache refuses.
    """
    if steps <= _WARM_UP:
        raise InputError(f"steps {steps} is too small: the first {_WARM_UP} are not counted")
    pages_per_seq = pages_for(_PROMPT[2] + _REPLY[2], page_size)
    cache = init_cache(
        CacheSpec(
            num_layers=2, num_kv_heads=1, head_dim=2, num_pages=2 * seqs * pages_per_seq + 1, max_seqs=seqs,
            pages_per_seq=pages_per_seq, max_query_length=_CHUNK, page_size=page_size,
        )
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    prompt = np.array([_length(rng, *_PROMPT) for _ in range(seqs)])
    reply = np.array([_length(rng, *_REPLY) for _ in range(seqs)])
    shares = []
    for number in range(steps):
        lengths = _lengths_of_step(prompt, reply)
        cache, used, allocated = _serve(cache, lengths)
        prompt, reply = np.where(prompt > 0, prompt - lengths, 0), np.where(prompt > 0, reply, reply - lengths)
        if number >= _WARM_UP:
            shares.append(float(used) / float(allocated))
        for sequence in np.flatnonzero((prompt == 0) & (reply == 0)).tolist():
            cache = _release(cache, np.array([sequence], np.int32))
            prompt[sequence], reply[sequence] = _length(rng, *_PROMPT), _length(rng, *_REPLY)
    return float(np.mean(shares))


def _length(rng: np.random.Generator, median: float, mean: float, most: int) -> int:
    """Draw from the log-normal distribution that has this median and mean."""
    drawn = rng.lognormal(np.log(median), np.sqrt(2 * np.log(mean / median)))
    return int(np.clip(round(drawn), 1, most))


def _lengths_of_step(prompt: np.ndarray, reply: np.ndarray) -> np.ndarray:
    """One token for those that reply, and prompt tokens for the others as far as the chunk goes."""
    lengths, room = (prompt == 0).astype(np.int32), _CHUNK
    for sequence in np.flatnonzero(prompt).tolist():
        lengths[sequence] = min(int(prompt[sequence]), room)
        room -= lengths[sequence]
    return lengths


@functools.partial(jax.jit, donate_argnames="cache")
def _serve(cache: Cache, lengths: Int32[Array, " seqs"]):
    """One step without a model; returns the cache, the slots with tokens and the slots of all pages held."""
    num_tokens = cache.spec.max_seqs + _CHUNK
    cache, step = begin_step(cache, lengths, num_tokens=num_tokens, max_query_length=_CHUNK)
    cache, _ = end_step(cache, step)
    held = (cache.allocator.refcounts > 0).at[0].set(False)
    used = (held[:, None] & (cache.positions >= 0)).sum()
    return cache, used, cache.pages_used * cache.spec.page_size


_release = jax.jit(release, donate_argnames="cache")
