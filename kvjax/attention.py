"""The one call a model makes: write this step's keys and values into their pages and attend to them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Integer

from kvjax import rotary as rotary_embedding
from kvjax.arguments import floats, integers
from kvjax.cache import POSITION_END, Cache, PooledCache
from kvjax.errors import InputError, shown, whole_number
from kvjax.implementations import candidates, run_first
from kvjax.kernels.formats import rotate
from kvjax.kernels.paged_attention import Queries, Rows
from kvjax.observation import decode_logits, note_attention, note_written, pages_to_read, reads_some
from kvjax.placement import end_slot
from kvjax.rotary import Rotary
from kvjax.spec import CacheSpec
from kvjax.step import Step
from kvjax.writing import write


def attend[C: (Cache, PooledCache)](
    cache: C,
    step: Step,
    layer: int | np.integer | Integer[Array, ""],
    q: Float[ArrayLike, "tokens heads head_dim"],
    k: Float[ArrayLike, "tokens kv_heads head_dim"],
    v: Float[ArrayLike, "tokens kv_heads head_dim"],
    *,
    rotary: Rotary | None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink_logits: Float[ArrayLike, " heads"] | None = None,
    k_scale: Float[ArrayLike, " kv_heads"] | Float[ArrayLike, ""] | None = None,
    v_scale: Float[ArrayLike, " kv_heads"] | Float[ArrayLike, ""] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], C]:
    """Write keys and values of one layer and attend the queries to all that is visible of their sequences.

    Query head h reads KV head `h // (heads // kv_heads)`.

    Args:
        cache: the cache, after `begin_step`.
        step: as `begin_step` returned it.
        layer: the layer. It may be traced where the cache has one pool; then nobody can check that the cache has it.
        q, k, v: packed tokens, not rotated.
        rotary: the rotary embedding of queries and keys, or None if the model encodes positions elsewhere.
        scale: factor of the logits, finite, `head_dim ** -0.5` by default.
        soft_cap: above 0; logits become `soft_cap * tanh(logits / soft_cap)`.
        sink_logits: a learned logit for each head that takes part in its softmax without a value.
        k_scale, v_scale: scales of keys and values that a checkpoint brings, for all heads or each KV head, above 0:
            fp8 and int8 pages take them in place of each vector's own, and what they are too small for saturates.
            Other formats have no use for them.
        implementation: "hopper" (NVIDIA H100 and H200), "tpu", "xla", "reference" (float64 on the host), or None for
            the first of these that can serve the call (see `kvjax.explain`).

    Returns: outputs in the dtype of `q`, zeros for padded tokens; and the cache.

    In quantised formats keys and values that are not finite are stored as the largest that can be, NaN as 0, and set
    NONFINITE_INPUT in the cache's status.

    Raises: InputError for arguments of the wrong shape or kind, a layer the cache does not have, or an unknown
        implementation; NotImplementedError for an implementation that cannot serve the call.
    """
    layer = _known_layer(cache.spec, layer)
    q, k, v = _tokens(cache.spec, step, q, k, v)
    sink_logits = None if sink_logits is None else floats("sink_logits", sink_logits, (q.shape[1],))
    scale = q.shape[-1] ** -0.5 if scale is None else _finite("scale", scale)
    soft_cap = None if soft_cap is None else _finite("soft_cap", soft_cap, above=0)
    q, k, of_sinks = (q, k, None) if rotary is None else _rotated(cache, step, layer, q, k, rotary)
    options: dict[str, Any] = dict(
        scale=scale, soft_cap=soft_cap, sink_logits=sink_logits, max_query_length=step.max_query_length
    )
    named = (("k_scale", k_scale), ("v_scale", v_scale))
    new = tuple((x, _of_heads(cache.spec, *scale)) for x, scale in zip((k, v), named, strict=True))
    given = (q, of_sinks, new, implementation, options, reads_some(cache.spec, step, layer))
    if not isinstance(cache, PooledCache):
        return _attend(cache, step, layer, *given)
    number, within = cache.spec.place_of(int(layer))
    out, changed = _attend(cache.of_pools[number], step.of_pool(number), within, *given)
    return out, cache.with_pools(changed if i == number else of for i, of in enumerate(cache.of_pools))


def _rotated(cache: Cache | PooledCache, step: Step, layer, q: Array, k: Array, rotary: Rotary):
    """Queries and keys at their positions, and the queries as sinks see them, if that is different."""
    cos, sin = rotary_embedding.angles(rotary, step.position, layer)
    of_both = (rotary_embedding.apply_angles(x, cos, sin, rotary.layout) for x in (q, k))
    return *of_both, _seen_by_sinks(cache, step, layer, q, rotary)


def _seen_by_sinks(cache: Cache | PooledCache, step: Step, layer, q: Array, rotary: Rotary) -> Array | None:
    """Queries as the first tokens that the policy keeps see them: no farther away than in a cache without gaps.

    StreamingLLM (arXiv 2309.17453) numbers tokens by their places in the cache. Those in the window keep their
    distances, so that only the sinks need another query.
    """
    policy = cache.spec.policy
    if not policy.num_sinks or policy.window_size is None:
        return None
    start = cache.of_pools[0].start_position.at[step.sequence].get(mode="promise_in_bounds")
    place = jnp.minimum(step.position - start, policy.num_sinks + policy.window_size - 1)
    return rotary_embedding.apply(rotary, q, start + place, layer)


def _of_heads(spec: CacheSpec, name: str, scale) -> Float[Array, "groups 1 heads"] | None:
    """Scales as the writing wants them."""
    if scale is None:
        return None
    heads = spec.num_kv_heads
    is_scalar = isinstance(scale, float | np.floating) or (hasattr(scale, "ndim") and scale.ndim == 0)
    given = floats(name, scale, () if is_scalar else (heads,))
    if not isinstance(given, Tracer) and not (np.isfinite(given) & (given > 0)).all():
        raise InputError(
            f"{name} is {shown(np.asarray(given).tolist())}: give one scale above 0, or {heads}, one a head"
        )
    return jnp.broadcast_to(given, spec.num_kv_heads).reshape(spec.groups, 1, -1)


def _attend(cache: Cache, step: Step, layer, q, of_sinks, new, implementation, options: dict[str, Any], lists_pages):
    """Write rotated keys, and values, with their scales, and attend rotated queries."""
    names = candidates(cache.spec, q.shape[1], str(q.dtype), implementation)
    cache = write(cache, step.writes, step.valid, layer, new, in_kernel=names[0] == "hopper")
    cache = note_written(cache, step, layer, *(x for x, _ in new))
    rotated = rotate if cache.spec.key_form.is_rotated else lambda q: q
    q, of_sinks = rotated(q), None if of_sinks is None else rotated(of_sinks)
    where, last = (_rows(cache, step, layer), _queries(cache, step)), decode_logits(cache, step)
    arguments = (q, *cache.stored, cache.positions, *where)
    of_call = options | dict(sink_query=of_sinks, last_logits=last)
    by = lambda **listed: run_first(names, arguments, cache.open_keys, of_call | listed, step.plan)  # noqa: E731
    by_list = lambda: by(page_list=pages_to_read(cache, step, layer, q))  # noqa: E731
    is_known = isinstance(lists_pages, bool)
    attention = (by_list if lists_pages else by)() if is_known else lax.cond(lists_pages, by_list, by)
    cache = note_attention(cache, step, layer, q, attention, where, options, in_kernel=names[0] == "hopper")
    return rotate(attention.out) if cache.spec.value_form.is_rotated else attention.out, cache


def plan_step(cache: Cache | PooledCache, step: Step, query_heads: int, *, implementation: str | None = None) -> Step:
    """Work out once for all layers what a kernel needs to know about a step.

    For models that scan over their layers: without it every layer's `attend` does it anew, because XLA does not move
    it out of the loop. The results are the same with and without.

    Args:
        cache: the cache, after `begin_step`.
        step: as `begin_step` returned it.
        query_heads: heads of the queries of every layer.
        implementation: as for `attend`.

    Returns: the step, to be used in its place.

    Raises: as `attend` does, of an implementation.
    """
    if isinstance(cache, PooledCache):
        of_pools = enumerate(cache.of_pools)
        plans = (plan_step(of, step.of_pool(i), query_heads, implementation=implementation).plan for i, of in of_pools)
        return dataclasses.replace(step, plan=tuple(plans))
    spec = cache.spec
    if candidates(spec, query_heads, spec.query_dtype, implementation)[0] != "hopper":
        return step
    from kvjax.kernels.paged_attention import hopper

    rows = dataclasses.replace(_rows(cache, step, 0), full_only=spec.key_form.is_per_channel)
    plan = hopper.plan(
        rows, _queries(cache, step), num_tokens=step.sequence.shape[0], heads=query_heads,
        head_dim=spec.head_dim, heads_per_group=spec.heads_per_group, page_size=spec.page_size,
        max_query_length=step.max_query_length,
    )  # fmt: skip
    return dataclasses.replace(step, plan=plan)


def _known_layer(spec: CacheSpec, layer) -> int | Array:
    if isinstance(layer, Tracer):
        if len(spec.pools) > 1:
            raise InputError(f"layer is traced, and skip_layers {spec.skip_layers} want numbers: unroll the layers")
        return integers("layer", layer, ())
    return whole_number("layer", layer, 0, spec.num_layers - 1)


def _tokens(spec: CacheSpec, step: Step, q, k, v) -> tuple[Array, Array, Array]:
    count = step.sequence.shape[0]
    k, v = (floats(name, new, (count, spec.num_kv_heads, spec.head_dim)) for name, new in (("k", k), ("v", v)))
    q = floats("q", q, (count, "heads", spec.head_dim))
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype.itemsize < 2:
            raise InputError(f"{name} has dtype {array.dtype}: give float32, bfloat16 or float16; pages have formats")
    if q.shape[1] == 0 or q.shape[1] % spec.num_kv_heads:
        raise InputError(f"q has {q.shape[1]} heads: give a multiple of the cache's {spec.num_kv_heads} KV heads")
    return q, k, v


def _finite(name: str, value, above: float = -math.inf) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not above < number < math.inf:
        limit = "" if above == -math.inf else f" above {above}"
        raise InputError(f"{name} is {shown(value)}: give a finite number{limit}, known when the step is traced")
    return number


def _rows(cache: Cache, step: Step, layer) -> Rows:
    spec = cache.spec
    windows = [POSITION_END if window is None else window for window in spec.layer_windows]
    rings, windows = (jnp.asarray(np.array(of, np.int32)) for of in (spec.rings, windows))
    after = end_slot(cache, step.lengths)
    table = cache.page_table[..., : spec.decode_entries] if step.is_decode else cache.page_table
    return Rows(table, cache.first, after, rings, windows, jnp.asarray(layer, jnp.int32), sinks=spec.policy.num_sinks)


def _queries(cache: Cache, step: Step) -> Queries:
    return Queries(step.starts, step.lengths, cache.next_position, cache.start_position)
