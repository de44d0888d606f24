"""A model over caches of several formats, fed the same tokens: how far logits and attention outputs move apart."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int32

from kvjax import rotary as rotary_embedding
from kvjax.attention import attend, plan_step
from kvjax.cache import init_cache
from kvjax.evaluation.texts import Document
from kvjax.kernels.formats import Format, decode, encode, rotate
from kvjax.models.decoder import Decoder
from kvjax.spec import CacheSpec
from kvjax.step import begin_step, end_step


@dataclasses.dataclass(frozen=True)
class Fake:
    """Formats that no page has: keys and values are replaced by what they would read, and stored exactly.

    Attributes:
        keys, values: the formats.
        before_rotary: whether keys are stored before the rotary embedding.
    """

    keys: Format
    values: Format
    before_rotary: bool = False


@dataclasses.dataclass(frozen=True)
class Variant:
    """A cache to measure: its name, its spec, and what stands in for formats that no page has."""

    name: str
    spec: CacheSpec
    fake: Fake | None = None


class Scores(NamedTuple):
    """What was measured after each token but the last, [length - 1] each.

    `nll` is -log p of the next token, `kl` is KL(full precision || format) of the next token's distribution, both in
    nats; `agrees` says whether the likeliest token is that of full precision, `right` whether it is the next token.
    """

    nll: Float32[Array | np.ndarray, " tokens"]
    kl: Float32[Array | np.ndarray, " tokens"]
    agrees: Bool[Array | np.ndarray, " tokens"]
    right: Bool[Array | np.ndarray, " tokens"]


class Comparison:
    """A decoder with a full-precision cache and those to compare with it.

    Documents are fed in chunks of `full.max_query_length` tokens, as a prompt is, each chunk to all caches in turn.
    """

    def __init__(self, decoder: Decoder, full: CacheSpec, variants: list[Variant]):
        self.graph, self.weights = nnx.split(decoder)
        self.full, self.variants = Variant("full", full), variants

    def chunks(self, document: Document) -> int:
        """Chunks that a document is fed in."""
        return -(-len(document.tokens) // self.full.spec.max_query_length)

    def scores(self, document: Document, variants: Sequence[Variant] | None = None) -> dict[str, Scores]:
        """Return the scores of full precision, under "full", and of the variants: of all where None are given."""
        variants = self.variants if variants is None else variants
        caches = {variant.name: init_cache(variant.spec) for variant in (self.full, *variants)}
        found: dict[str, list[Scores]] = {name: [] for name in caches}
        for chunk in self._chunks(document):
            caches["full"], logits, ok = _full(self.graph, self.weights, caches["full"], chunk)
            assert ok, "the cache is sized for the document"
            found["full"].append(compare(logits, logits, chunk.targets))
            for of in variants:
                caches[of.name], scores, ok = _scores(
                    self.graph, self.weights, caches[of.name], chunk, logits, fake=of.fake
                )
                assert ok, "the cache is sized for the document"
                found[of.name].append(scores)
        last = len(document.tokens) - 1
        return {
            name: Scores(
                *(np.concatenate([np.asarray(part) for part in parts])[:last] for parts in zip(*of, strict=True))
            )
            for name, of in found.items()
        }

    def attention_error(self, variant: Variant, document: Document) -> float:
        """Return |out - exact| / |exact| over all tokens and heads of a layer, in the mean over the layers.

        Every layer reads what it would in full precision; so do its keys and values, which both caches are given.
        """
        caches = init_cache(self.full.spec), init_cache(variant.spec)
        sums = jnp.zeros((self.full.spec.num_layers, 2), jnp.float32)
        for chunk in self._chunks(document):
            caches, sums = _attention_sums(self.graph, self.weights, caches, chunk, sums, fake=variant.fake)
        return relative_error(sums)

    def _chunks(self, document: Document):
        size, length = self.full.spec.max_query_length, len(document.tokens)
        tokens = np.zeros(self.chunks(document) * size + 1, np.int32)
        tokens[:length] = document.tokens
        for begin in range(0, length, size):
            end = begin + size
            count = jnp.int32(min(size, length - begin))
            yield _Chunk(jnp.asarray(tokens[begin:end]), jnp.asarray(tokens[begin + 1 : end + 1]), count)


class _Chunk(NamedTuple):
    """Tokens of a document and the tokens after them, padded, and how many there are."""

    tokens: Int32[Array, " tokens"]
    targets: Int32[Array, " tokens"]
    length: Int32[Array, ""]


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="cache")
def _full(graph, weights, cache, chunk):
    return _logits(nnx.merge(graph, weights), cache, chunk, None)


@functools.partial(jax.jit, static_argnames=("graph", "fake"), donate_argnames="cache")
def _scores(graph, weights, cache, chunk, full, *, fake):
    cache, logits, ok = _logits(nnx.merge(graph, weights), cache, chunk, fake)
    return cache, compare(logits, full, chunk.targets), ok


@functools.partial(jax.jit, static_argnames=("graph", "fake"), donate_argnames=("caches", "sums"))
def _attention_sums(graph, weights, caches, chunk, sums, *, fake):
    """Add squares of differences and of exact outputs, [layers, 2], to `sums`; returns the caches and them."""
    model = nnx.merge(graph, weights)
    begun = tuple(_begin(model, cache, chunk) for cache in caches)
    (full, other), sums = attention_squares(model, chunk.tokens, begun, sums, fake=fake)
    return (end_step(full, begun[0][1])[0], end_step(other, begun[1][1])[0]), sums


def attention_squares(model: Decoder, tokens: Int32[Array, " tokens"], begun, sums, *, fake: Fake | None = None):
    """Run the layers over two caches, each layer of both given what the layers before made of the first one alone.

    Args:
        model: a decoder.
        tokens: those of the step.
        begun: two pairs of a cache and a step that it has begun; the first is the exact one.
        sums: float32 [layers, 2], to which squares of differences and of exact outputs are added.
        fake: what stands in for the second cache's format.

    Returns: both caches, and the sums.
    """
    (full, exact_step), (other, step) = begun

    def attention(state, layer, q, k, v, *_):
        full, other, sums = state
        exact, full = _attend(model, full, exact_step, layer, q, k, v, None)
        out, other = _attend(model, other, step, layer, q, k, v, fake)
        squares = [jnp.square(of.astype(jnp.float32)).sum() for of in (out - exact, exact)]
        return exact, (full, other, sums.at[layer].add(jnp.stack(squares)))

    _, (full, other, sums) = model.hidden(tokens, attention, (full, other, sums))
    return (full, other), sums


def relative_error(sums: Float32[Array, "layers 2"]) -> float:
    """Return |out - exact| / |exact| of sums of `attention_squares`, in the mean over the layers."""
    wrong, exact = np.asarray(sums, np.float64).T
    return float(np.sqrt(wrong / exact).mean())


def perplexity(windows: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Return tokens, ppl, ppl_ratio and ppl_ratio_error of windows.

    A window is -log p of a cache and of the exact one, in nats, float32 [tokens] each.
    `ppl_ratio_error` is the standard error of `ppl_ratio` from the spread over windows; None for a single one.
    """
    nll, exact = (np.concatenate(side).astype(np.float64) for side in zip(*windows, strict=True))
    ratio = math.exp(nll.mean() - exact.mean())
    changes = [float((own.astype(np.float64) - full).mean()) for own, full in windows]
    error = ratio * float(np.std(changes, ddof=1)) / math.sqrt(len(changes)) if len(changes) > 1 else None
    return dict(tokens=nll.size, ppl=math.exp(nll.mean()), ppl_ratio=ratio, ppl_ratio_error=error)


@jax.jit
def compare(
    logits: Float32[Array, "tokens vocab"], full: Float32[Array, "tokens vocab"], targets: Int32[Array, " tokens"]
) -> Scores:
    """Return the scores of logits beside those of full precision; `targets` are the next tokens."""
    ours, exact = (jax.nn.log_softmax(of) for of in (logits, full))
    nll = -jnp.take_along_axis(ours, targets[:, None], axis=1)[:, 0]
    kl = (jnp.exp(exact) * (exact - ours)).sum(1)
    best = logits.argmax(1)
    return Scores(nll, kl, best == full.argmax(1), best == targets)


def _begin(model: Decoder, cache, chunk: _Chunk):
    size = chunk.tokens.shape[0]
    cache, step = begin_step(cache, chunk.length[None], num_tokens=size, max_query_length=size)
    return cache, plan_step(cache, step, model.config.num_heads)


def _logits(model: Decoder, cache, chunk: _Chunk, fake: Fake | None):
    """Feed a chunk; returns the cache, the logits of all its tokens, and whether it fitted the cache."""
    cache, step = _begin(model, cache, chunk)

    def attention(cache, layer, q, k, v, *_):
        return _attend(model, cache, step, layer, q, k, v, fake)

    hidden, cache = model.hidden(chunk.tokens, attention, cache)
    cache, report = end_step(cache, step)
    return cache, model.logits(hidden), report.ok


def _attend(model: Decoder, cache, step, layer, q, k, v, fake: Fake | None):
    rotary: Any = model.rotary
    if fake is not None:
        page_size, count = cache.spec.page_size, step.lengths[0]
        if not fake.before_rotary:
            q, k = (rotary_embedding.apply(rotary, x, step.position, layer) for x in (q, k))
            rotary = None
        k = read_back(k, fake.keys, page_size, count)
        v = read_back(v, fake.values, page_size, count)
    return attend(
        cache, step, layer, q, k, v, rotary=rotary, scale=model.config.attention_scale,
        soft_cap=model.config.attention_soft_cap,
    )  # fmt: skip


def read_back(x, form: Format, page_size: int, count):
    """Return what readers see of keys or values stored in a format.

    Args:
        x: [tokens, heads, head_dim], the first of them at the beginning of a page.
        form: the format; where it is per channel, the `count % page_size` last vectors, in their open page, stay
            bfloat16.
        page_size: divides the number of tokens.
        count: int32 [], tokens that are no padding.
    """
    if not form.is_per_channel:
        seen = decode(*encode(x, form), form)
        return (rotate(seen) if form.is_rotated else seen).astype(x.dtype)
    x = x.astype(jnp.bfloat16).astype(x.dtype)  # as open pages are
    pages = x.reshape(-1, page_size, *x.shape[1:]).swapaxes(1, 2)
    seen = decode(*encode(pages, form), form).swapaxes(1, 2).reshape(x.shape)
    is_open = jnp.arange(x.shape[0], dtype=jnp.int32) >= count // page_size * page_size
    return jnp.where(is_open[:, None, None], x, seen.astype(x.dtype))
