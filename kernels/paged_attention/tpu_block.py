"""What the TPU kernel does with one block of keys and values in vector memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels.paged_attention.tiles import LOG2E
from kvjax.kernels.paged_attention.tpu_codes import Pages, may_be_nan, numbers_of, scale_logits, scale_weights
from kvjax.kernels.paged_attention.tpu_plan import LANES, Choices

EMPTY = -1e30
_LOGITS_AT_ONCE = 1 << 16  # of all heads that are computed together
_NUMBERS_AT_ONCE = 1 << 18  # of quantised keys, and of values, that stand in vector memory together


class Buffers(NamedTuple):
    """The kernel's memory and semaphores.

    Attributes:
        keys, values: codes [stages, heads, slots, width]; scales are those of all heads of a page.
        positions: int32 [stages, pages, page_size].
        ids: int32 [3, entries] in scalar memory, rows of the page table.
        acc: float32 [heads, rows, head_dim].
        maximum, total: float32 [heads, rows, 1], maximum in base 2.
        state: int32 [3] in scalar memory: blocks and steps with work before this one, and the step after it.
        pages_in: a semaphore for each stage.
        ids_in: one for each row of ids.
        key_rows, value_rows: float32, the scales of the block that is computed; see `tpu_codes.py`.
        logits: float32 [heads, rows, slots], and a semaphore for them, where they are returned.
    """

    keys: Pages
    values: Pages
    positions: Any
    ids: Any
    acc: Any
    maximum: Any
    total: Any
    state: Any
    pages_in: Any
    ids_in: Any
    key_rows: tuple[Any, ...]
    value_rows: tuple[Any, ...]
    logits: Any = None
    logits_out: Any = None


class Tile(NamedTuple):
    """The queries of a step: scalars and references.

    Attributes:
        q: [1, heads, rows, head_dim].
        head: the first of the step's KV heads among those of a page.
        sink_query: the same for slots of sinks, or None.
        tokens: query tokens.
        position: of the first of them.
        start: position of the sequence's first token.
        window: positions a query sees.
    """

    q: Any
    head: Any
    sink_query: Any
    tokens: Any
    position: Any
    start: Any
    window: Any


def start_tile(at: Buffers) -> None:
    """Empty the accumulators."""
    at.acc[...] = jnp.zeros_like(at.acc)
    at.maximum[...] = jnp.full_like(at.maximum, EMPTY / 2)
    at.total[...] = jnp.zeros_like(at.total)


def positions_of(at: Buffers, slot, live):
    """Positions [1, slots] of a block in its buffer, -1 behind its `live` pages."""
    pages, page_size = at.positions.shape[1:]
    positions = jnp.concatenate([at.positions[slot, pl.ds(page, 1), :] for page in range(pages)], axis=1)
    index = lax.broadcasted_iota(jnp.int32, positions.shape, 1)
    return jnp.where(index < live * page_size, positions, -1)


def zero_empty(at: Buffers, slot, positions) -> None:
    """Zero the values of empty slots: those may hold NaN, and 0 x NaN is NaN."""
    if not may_be_nan(at.values.form):
        return
    values = at.values.codes
    (heads, slots, head_dim), is_float = values.shape[1:], jnp.issubdtype(values.dtype, jnp.floating)
    wide = jnp.float32 if is_float else jnp.int32
    for first in range(0, slots, LANES):
        used = (positions[:, first : first + LANES] >= 0).astype(jnp.float32)
        used = jnp.broadcast_to(used, (LANES, LANES)).T > 0

        def of_head(head, _, first=first, used=used):
            for column in range(0, head_dim, LANES):
                part = values.at[slot, head, pl.ds(first, LANES), pl.ds(column, LANES)]
                part[...] = jnp.where(used, part[...].astype(wide), 0).astype(values.dtype)
            return 0

        lax.fori_loop(0, heads, of_head, 0)


def attend_block(choices: Choices, at: Buffers, slot, tile: Tile, positions, rows: int, has_sinks: bool) -> None:
    """Attend the first rows of a tile to the block in a buffer.

    Args:
        choices: what is static.
        at: the kernel's memory.
        slot: where the block is.
        tile: the queries.
        positions: int32 [1, slots].
        rows: that have queries.
        has_sinks: whether slots of sinks, seen by a query of their own, may be in the block.
    """
    visible, is_sink = visible_slots(choices, tile, positions, rows)
    heads, slots = at.keys.codes.shape[1:3]
    together = _heads_together(at, heads, rows)

    def some_heads(i, _):
        here, of_page = pl.ds(i * together, together), pl.ds(tile.head + i * together, together)
        dtype = tile.q.dtype
        keys = numbers_of(at.keys.codes[slot, here], at.keys, at.key_rows, of_page, dtype)
        values = numbers_of(at.values.codes[slot, here], at.values, at.value_rows, of_page, dtype)

        def logits_of(query):
            return scale_logits(_product(query, keys, 2), query, at.keys, at.key_rows, of_page)

        logits = logits_of(tile.q[0, here, :rows])
        if has_sinks:
            logits = jnp.where(is_sink, logits_of(tile.sink_query[0, here, :rows]), logits)
        logits = cap(logits, choices.scale, choices.soft_cap)
        if choices.has_logits:
            at.logits[here, :rows] = jnp.where(visible, logits / LOG2E, -jnp.inf)
        logits = jnp.where(visible, logits, EMPTY)
        maximum = at.maximum[here, :rows]
        new = jnp.maximum(maximum, logits.max(axis=2, keepdims=True))
        shrink, weights = jnp.exp2(maximum - new), jnp.exp2(logits - new)
        at.maximum[here, :rows] = new
        at.total[here, :rows] = at.total[here, :rows] * shrink + weights.sum(axis=2, keepdims=True)
        weights, minima = scale_weights(weights, at.values, at.value_rows, of_page)
        at.acc[here, :rows] = at.acc[here, :rows] * shrink + _product(weights.astype(values.dtype), values, 1)
        if at.values.form.num_scales == 2:
            at.acc[here, :rows] += minima
        return 0

    lax.fori_loop(0, heads // together, some_heads, 0)


def _heads_together(at: Buffers, heads: int, rows: int) -> int:
    """A divisor of the heads whose logits, and numbers of quantised pages, are few enough to be computed together."""
    slots, head_dim = at.keys.codes.shape[2], at.acc.shape[2]
    is_quantized = at.keys.form.is_quantized or at.values.form.is_quantized
    most = max(_LOGITS_AT_ONCE // (rows * slots), 1)
    if is_quantized:
        most = max(min(most, _NUMBERS_AT_ONCE // (slots * head_dim)), 1)
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= most)


def visible_slots(choices: Choices, tile: Tile, positions, rows: int):
    """Which slots each row sees, and which of them are sinks: [1, rows, slots] and [1, 1, slots]."""
    token = lax.div(lax.broadcasted_iota(jnp.int32, (rows, 1), 0), jnp.int32(choices.query_heads))
    latest = jnp.where(token < tile.tokens, tile.position + token, -1)
    earliest = jnp.maximum(tile.start, latest - tile.window + 1)
    is_sink = positions < tile.start + choices.sinks
    in_reach = positions >= earliest
    if choices.sinks:
        in_reach = in_reach | (is_sink & (positions >= tile.start))
    return (in_reach & (positions <= latest))[None], is_sink[None]


def cap(logits, scale: float, soft_cap: float | None):
    """Scaled and soft-capped logits, in base 2."""
    if soft_cap is None:
        return logits * (scale * LOG2E)
    return jnp.tanh(logits * (scale / soft_cap)) * (soft_cap * LOG2E)


def finish(at: Buffers, sink_logits, out, lse) -> None:
    """Write the outputs of a step and their log-sum-exp; add the learned sinks once."""
    acc, maximum, total = at.acc[...], at.maximum[...], at.total[...]
    sees_nothing = total == 0
    if sink_logits is not None:
        sinks = sink_logits[...] * LOG2E
        higher = jnp.maximum(maximum, sinks)
        shrink = jnp.exp2(maximum - higher)
        acc, total = acc * shrink, total * shrink + jnp.exp2(sinks - higher)
        maximum = higher
    total = jnp.where(sees_nothing, 1, total)
    out[0] = (acc / total).astype(out.dtype)
    lse[0] = jnp.where(sees_nothing, -jnp.inf, maximum / LOG2E + jnp.log(total))


def _product(a, b, axis: int):
    """a [heads, rows, n] times b [heads, slots, head_dim] over one of b's axes, in float32."""
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (((2,), (axis,)), ((0,), (0,))), precision=exact, preferred_element_type=jnp.float32
    )  # fmt: skip
