"""The two caches that the decode benchmark compares, in one and the same while loop with the same decoder."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from kvjax.cache import Cache, init_cache
from kvjax.kernels.formats import Stored, encode
from kvjax.models.decoder import Decoder
from kvjax.policy import Policy
from kvjax.rotary import apply
from kvjax.sequences import truncate
from kvjax.spec import CacheSpec, pages_for
from kvjax.step import begin_step, end_step

_FILL_CHUNK = 512


@functools.partial(jax.jit, static_argnames=("advance", "graph"), donate_argnames="state")
def decode_loop(advance, graph: Any, weights: Any, state: Any, token: Int32[Array, " seqs"], steps: Int32[Array, ""]):
    """Decode greedily for `steps` steps; `advance(model, state, token)` runs one and returns logits and state."""
    model = nnx.merge(graph, weights)

    def body(carry):
        i, state, token = carry
        logits, state = advance(model, state, token)
        return i + 1, state, logits.argmax(-1).astype(jnp.int32)

    return jax.lax.while_loop(lambda carry: carry[0] < steps, body, (jnp.int32(0), state, token))[1:]


def advance_paged(model: Decoder, cache: Cache, token: Int32[Array, " seqs"]):
    """One decode step over pages."""
    seqs = token.shape[0]
    cache, step = begin_step(cache, jnp.ones(seqs, jnp.int32), num_tokens=seqs, max_query_length=1)
    logits, cache = model(cache, step, token)
    return logits, end_step(cache, step)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Contiguous:
    """A cache of exactly the right length, all sequences at one position.

    Attributes:
        keys, values: [seqs, kv_heads, context, head_dim], a tuple of one a layer where the decoder unrolls its
            layers, else one array with a leading axis for them.
        position: int32 [], of the next token.
    """

    keys: Any
    values: Any
    position: Int32[Array, ""]


def advance_contiguous(model: Decoder, state: Contiguous, token: Int32[Array, " seqs"]):
    """One decode step over contiguous keys and values."""
    config, rotary = model.config, model.rotary
    windows = jnp.array([2**31 - 1 if window is None else window for window in config.windows], jnp.int32)
    positions = jnp.full(token.shape, state.position, jnp.int32)

    def attention(kept, layer, q, k, v, *_):
        q, k = (apply(rotary, x, positions, layer) for x in (q, k))
        (keys, key), (values, value) = (_store(a, layer, x, state.position) for a, x in zip(kept, (k, v), strict=True))
        grouped = q.reshape(q.shape[0], config.num_kv_heads, -1, config.head_dim)
        logits = jnp.einsum("bkgd,bksd->bkgs", grouped, key, preferred_element_type=jnp.float32)
        logits = logits * config.attention_scale
        if (cap := config.attention_soft_cap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        distance = state.position - jnp.arange(key.shape[2], dtype=jnp.int32)
        visible = (distance >= 0) & (distance < windows[layer])
        shares = jax.nn.softmax(jnp.where(visible[None, None, None], logits, -jnp.inf), axis=-1).astype(value.dtype)
        out = jnp.einsum("bkgs,bksd->bkgd", shares, value, preferred_element_type=jnp.float32)
        return out.reshape(q.shape).astype(q.dtype), (keys, values)

    hidden, (keys, values) = model.hidden(token, attention, (state.keys, state.values))
    return model.logits(hidden), Contiguous(keys, values, state.position + 1)


def _store(kept, layer, new: Float[Array, "seqs kv_heads head_dim"], position):
    """Write one token of one layer; returns all layers and this one."""
    new = new[:, :, None]
    if isinstance(kept, tuple):
        mine = jax.lax.dynamic_update_slice(kept[layer], new, (0, 0, position, 0))
        return (*kept[:layer], mine, *kept[layer + 1 :]), mine
    kept = jax.lax.dynamic_update_slice(kept, new[None], (layer, 0, 0, position, 0))
    return kept, kept[layer]


def empty_contiguous(model: Decoder, batch: int, context: int, dtype: str) -> Contiguous:
    """Return contiguous keys and values that are random (the same in all layers), at position 0."""
    config = model.config
    shape = (batch, config.num_kv_heads, context, config.head_dim)
    both = jax.random.normal(jax.random.key(0), (2, *shape), dtype)
    if model.scan:
        keys, values = (jnp.repeat(of_layer[None], config.num_layers, axis=0) for of_layer in both)
    else:
        # Buffers of their own, as all are donated.
        keys, values = (tuple(jnp.copy(of_layer) for _ in range(config.num_layers)) for of_layer in both)
    return Contiguous(keys, values, jnp.int32(0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One place to measure at: sequences, tokens of each at the end, steps to time, pages and what is kept in them."""

    batch: int
    context: int
    steps: int
    dtype: str
    page_size: int = 16
    policy: Policy = Policy()

    @property
    def stays_full(self) -> bool:
        """Whether the policy holds rows at the context, so that there is no going back before a measurement."""
        return self.policy.in_decode or self.policy.window_size is not None


class ContiguousEngine:
    """The contiguous cache at one point; calling it measures the seconds of the last steps up to the context."""

    def __init__(self, model: Decoder, point: Point):
        self._point, self._tokens = point, _first_tokens(model, point)
        self.graph, self.weights = nnx.split(model)
        self.state: Any = empty_contiguous(model, point.batch, point.context, point.dtype)

    def __call__(self) -> float:
        begin = jnp.int32(self._point.context - self._point.steps)
        self.state = dataclasses.replace(self.state, position=begin)
        return _time(self, advance_contiguous, self._tokens, self._point.steps)


class PagedEngine:
    """The paged cache at one point.

    Args:
        model: the decoder.
        point: where to measure.
        pool, table: how many times larger than needed the pool and the page tables are.
    """

    def __init__(self, model: Decoder, point: Point, *, pool: int = 1, table: int = 1):
        self._point, self._tokens = point, _first_tokens(model, point)
        self.graph, self.weights = nnx.split(model)
        self.state: Any = _random_cache(paged_spec(model, point, pool, table))
        kept = point.context - (0 if point.stays_full else point.steps)
        for begin in range(0, kept, _FILL_CHUNK):
            chunk = min(_FILL_CHUNK, kept)
            lengths = jnp.full(point.batch, min(chunk, kept - begin), jnp.int32)
            self.state = _append(self.state, lengths, chunk)

    def __call__(self) -> float:
        if not self._point.stays_full:
            everyone = jnp.arange(self._point.batch, dtype=jnp.int32)
            self.state = _rewind(self.state, everyone, jnp.full_like(everyone, self._point.context - self._point.steps))
        before = np.asarray(self.state.lengths)
        seconds = _time(self, advance_paged, self._tokens, self._point.steps)
        gained = np.asarray(self.state.lengths) - before
        assert (gained == self._point.steps).all(), "the measured steps found no pages"
        return seconds


def paged_spec(model: Decoder, point: Point, pool: int = 1, table: int = 1) -> CacheSpec:
    """Return the cache that just holds a point's tokens, or a larger one."""
    config = model.config
    shape: dict[str, Any] = dict(
        num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        windows=config.windows, max_seqs=point.batch, max_query_length=min(_FILL_CHUNK, point.context),
        format=point.dtype, page_size=point.page_size, rollback=0 if point.stays_full else point.steps,
        policy=point.policy, groups=config.num_kv_heads if point.policy.by_head else 1,
    )  # fmt: skip
    small = CacheSpec(**shape, num_pages=2**30, pages_per_seq=2**20)
    slots = point.policy.most_slots(point.context, point.steps if point.stays_full else 0, 1, small.page_size)
    pages = max(pages_for(slots, small.page_size), *small.window_rings, 1)
    of_all = point.batch * config.num_layers * small.groups * pages
    return CacheSpec(**shape, num_pages=pool * of_all + 1, pages_per_seq=pages * table)


def _first_tokens(model: Decoder, point: Point) -> Int32[Array, " seqs"]:
    return jax.random.randint(jax.random.key(1), (point.batch,), 3, model.config.vocab_size, jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def _random_cache(spec: CacheSpec) -> Cache:
    """Every page holds the same random keys and values: as good as others for time, and quick to make."""
    cache = init_cache(spec)
    assert isinstance(cache, Cache), "one format serves all layers"
    random = jax.random.normal(jax.random.key(0), (2, spec.heads_per_group, spec.page_size, spec.head_dim))
    pools = [_filled(stored, page) for stored, page in zip(cache.stored, random, strict=True)]
    (keys, key_scales), (values, value_scales) = pools
    return dataclasses.replace(cache, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales)


def _filled(stored: Stored, page: Float[Array, "heads page_size head_dim"]):
    """Codes and scales of a pool in which every page is this one."""
    codes, scales = encode(page, stored.form)
    fill = lambda of, pool: jnp.broadcast_to(of[None], pool.shape)  # noqa: E731
    return fill(codes, stored.codes), tuple(map(fill, scales, stored.scales))


@functools.partial(jax.jit, static_argnames="longest", donate_argnames="cache")
def _append(cache: Cache, lengths: Int32[Array, " seqs"], longest: int) -> Cache:
    """Append tokens without a model, which keep the keys and values of their slots."""
    num_tokens = lengths.shape[0] * longest
    return end_step(*begin_step(cache, lengths, num_tokens=num_tokens, max_query_length=longest))[0]


_rewind = jax.jit(truncate, donate_argnames="cache")


def _time(engine: ContiguousEngine | PagedEngine, advance, tokens, steps: int) -> float:
    """Run the loop on an engine's state, which it donates and renews, and return the seconds."""
    state, engine.state = jax.block_until_ready(engine.state), None
    begin = time.perf_counter()
    state, last = decode_loop(advance, engine.graph, engine.weights, state, tokens, jnp.int32(steps))
    jax.block_until_ready(last)
    seconds = time.perf_counter() - begin
    engine.state = state
    return seconds
