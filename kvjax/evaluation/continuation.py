"""Prompts read into a cache, and continuations fed to it token by token: what the model says, and what it holds."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int8, Int32

from kvjax import sizes
from kvjax.attention import plan_step
from kvjax.batch import Batch
from kvjax.decoding import Finish
from kvjax.evaluation.quality import attention_squares, relative_error
from kvjax.models.loading import LanguageModel
from kvjax.options import Options
from kvjax.pages import ragged
from kvjax.step import begin_step, end_step

STEPS = 16


class Followed(NamedTuple):
    """What was measured of continuations, a list entry for each prompt.

    Attributes:
        nll: -log p of each token but the first, in nats.
        right: whether that token was the likeliest.
        pages: int32 [seqs], most pages of all layers that a sequence held after a step.
        tokens_per_s: of all sequences together, after the first `STEPS` steps; None where there were no others.
    """

    nll: list[Float32[np.ndarray, " _"]]
    right: list[Bool[np.ndarray, " _"]]
    pages: Int32[np.ndarray, " seqs"]
    tokens_per_s: float | None


class Prompted:
    """Prompts that a model has read as `generate` reads them, and the cache after them.

    The cache is a value: any number of continuations start from it.

    Attributes:
        spec: of the cache, which has room for `most` more tokens of each prompt.
        cache: after the prompts.
    """

    def __init__(
        self,
        model: LanguageModel | nnx.Module,
        prompts: Sequence[Sequence[int]],
        most: int,
        options: Options,
        pause: Callable[[], None],
    ):
        """Read the prompts; `pause` is called between compiled calls, and what it raises ends the measurement."""
        for_batch: dict[str, Any] = dict(max_new_tokens=most + 1, stop_ids=[])
        run = Batch(model, prompts, Options(**(vars(options) | for_batch)))
        for _ in run.prefill():
            pause()
        assert (np.asarray(run.state.finish) != Finish.OUT_OF_PAGES).all(), "the cache is sized for the prompts"
        self.graph, self.weights, self.spec, self.cache = run.graph, run.weights, run.spec, run.state.cache
        self._kinds, self._pause = run.state.kinds, pause

    def follow(self, continuations: Sequence[Int32[np.ndarray, " _"]]) -> Followed:
        """Feed all but the last token of each continuation, in decode steps of all prompts together."""
        counts = np.array([len(of) - 1 for of in continuations], np.int32)
        steps = -(-int(counts.max()) // STEPS) * STEPS
        tokens = np.zeros((steps + 1, len(counts)), np.int32)
        for sequence, of in enumerate(continuations):
            tokens[: len(of), sequence] = of
        is_fed = np.arange(steps)[:, None] < counts
        cache, parts, seconds = jax.tree.map(jnp.copy, self.cache), [], []
        for begin in range(0, steps, STEPS):
            part = slice(begin, begin + STEPS)
            feed = (tokens[:-1][part], tokens[1:][part], is_fed[part].astype(np.int32))
            began = time.perf_counter()
            cache, said = _decode(self.graph, self.weights, cache, self._kinds, *map(jnp.asarray, feed))
            parts.append(jax.device_get(said))
            seconds.append(time.perf_counter() - began)
            self._pause()
        nll, right, pages, ok = (np.concatenate(of) for of in zip(*parts, strict=True))
        assert ok.all(), "the cache is sized for the continuations"
        speed = float(is_fed[STEPS:].sum()) / sum(seconds[1:]) if seconds[1:] else None
        of_sequences = lambda of: [of[:count, i] for i, count in enumerate(counts.tolist())]  # noqa: E731
        return Followed(of_sequences(nll), of_sequences(right), pages.max(0), speed)

    def attention_error(self, exact: Prompted, tokens: Int32[np.ndarray, " seqs"]) -> float:
        """Return |out - exact| / |exact| of attention outputs of one decode step, in the mean over the layers.

        Every layer of both caches is given what the layers before it make of the exact one.
        """
        kinds = (exact._kinds, self._kinds)
        sums = _decode_sums(self.graph, self.weights, (exact.cache, self.cache), kinds, jnp.asarray(tokens))
        return relative_error(sums)

    def bytes_of(self, pages: int) -> float:
        """Bytes of a sequence that holds so many pages: these, with what the policy keeps of them, and its rows."""
        of_page = sizes.page_bytes(self.spec)
        of_rows = sizes.cache_bytes(self.spec) - self.spec.num_pages * of_page
        return pages * of_page + of_rows / self.spec.max_seqs


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="cache")
def _decode(
    graph: Any,
    weights: Any,
    cache: Any,
    kinds: Int8[Array, " vocab"] | None,
    tokens: Int32[Array, "steps seqs"],
    targets: Int32[Array, "steps seqs"],
    lengths: Int32[Array, "steps seqs"],
):
    """Feed tokens where the length is 1; returns the cache and, for each step and sequence, what `Followed` holds."""
    model = nnx.merge(graph, weights)

    def one(cache, fed):
        token, target, length = fed
        packed = token[ragged(length, length.shape[0])[0]]
        cache, step = _begin(cache, kinds, packed, length)
        logits, cache = model(cache, step, packed)
        cache, report = end_step(cache, step)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=1)[:, 0]
        pages = (cache.page_table > 0).sum((0, 1, 3), dtype=jnp.int32)
        return cache, (nll, logits.argmax(1) == target, pages, report.ok)

    return jax.lax.scan(one, cache, (tokens, targets, lengths))


@functools.partial(jax.jit, static_argnames="graph")
def _decode_sums(
    graph: Any, weights: Any, caches: Any, kinds: Any, tokens: Int32[Array, " seqs"]
) -> Float32[Array, "layers 2"]:
    """Squares of one decode step's differences and exact outputs, by layer."""
    model = nnx.merge(graph, weights)
    begun = []
    for cache, of in zip(caches, kinds, strict=True):
        cache, step = _begin(cache, of, tokens, jnp.ones(tokens.shape, jnp.int32))
        begun.append((cache, plan_step(cache, step, model.config.num_heads)))
    sums = jnp.zeros((caches[0].spec.num_layers, 2), jnp.float32)
    return attention_squares(model, tokens, begun, sums)[1]


def _begin(cache, kinds, packed, lengths):
    """Begin a decode step, telling what is known of its tokens."""
    of_tokens = None if kinds is None else kinds[packed]
    return begin_step(cache, lengths, num_tokens=packed.shape[0], max_query_length=1, token_kinds=of_tokens)
