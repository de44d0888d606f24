"""What a warpgroup of the Hopper kernel does with one block of keys and values in shared memory."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.paged_attention.hopper_shared import ROWS, Config, Scratch, tile_columns
from kvjax.kernels.paged_attention.tiles import LOG2E

EMPTY = -1e30


def attend_block(config: Config, at: Scratch, me, slot, query, limits, carry, zero, store_logits):
    """Attend queries to the block in a slot.

    Args:
        config: static choices.
        at: shared memory and barriers.
        me: which consumer this is.
        slot: where the block is, or will be when its barriers say so.
        query: kind and part of the queries.
        limits: first and last position of each row, or of all.
        carry: accumulator, maximum (base 2) and total so far, and where values have minima the weighted sum of those.
        zero: zeroes the values of empty slots where the block may have any.
        store_logits: takes the masked logits, in base 2.

    Returns: the carry with the block.
    """
    acc, maximum, total, *minima = carry
    plgpu.barrier_wait(at.k_full.at[slot])
    logits = product(at.queries.at[query], at.keys.at[slot].T, (ROWS, at.keys.shape[1]))
    if at.key_scales is not None:
        logits = _scale_logits(logits, at, me, slot, query[0])
    logits = mask(cap(logits, config.scale, config.soft_cap), at.positions.at[slot], limits)
    store_logits(logits)
    weights, shrink, maximum, total = softmax_step(logits, maximum, total)
    acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
    plgpu.barrier_wait(at.v_full.at[slot])
    if at.value_scales is not None:
        minima = [of * shrink + _columns(weights, at.value_scales, slot, 1).sum(axis=1) for of in minima]
        weights = _columns(weights, at.value_scales, slot, 0)
    zero()
    # The fence orders the reads of positions before the copy that overwrites them.
    plgpu.commit_smem()
    plgpu.barrier_arrive(at.k_free.at[slot])
    acc = add_product(acc, weights.astype(at.values.dtype), at.values.at[slot], config.is_interpreted)
    plgpu.barrier_arrive(at.v_free.at[slot])
    return acc, maximum, total, *minima


def _scale_logits(logits, at: Scratch, me, slot, kind):
    """Products with numbers to products with keys."""
    scaled = _columns(logits, at.key_scales, slot, 0)
    if at.query_sums is None:
        return scaled
    sums = plgpu.load(at.query_sums.at[me, kind], layout=plgpu.Layout.WGMMA.reduce(1))
    return scaled + _columns(lax.broadcast_in_dim(sums, logits.shape, [0]), at.key_scales, slot, 1)


def _columns(matrix, scales, slot, i):
    """Multiply the column of each slot."""
    of_slots = plgpu.load(scales.at[slot, i], layout=plgpu.Layout.WGMMA.reduce(0))
    return matrix * lax.broadcast_in_dim(of_slots, matrix.shape, [1])


def sum_queries(queries, sums) -> None:
    """Store the sum of each row of queries [64, head_dim], a part of the columns at a time."""
    width = tile_columns(queries.shape[1])
    total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    for column in range(0, queries.shape[1], width):
        part = plgpu.load(queries.at[:, pl.ds(column, width)], layout=plgpu.Layout.WGMMA)
        total = total + part.astype(jnp.float32).sum(axis=1)
    sums[...] = total
    plgpu.commit_smem()


def cap(logits, scale: float, soft_cap: float | None):
    """Scaled and soft-capped logits, in base 2."""
    if soft_cap is None:
        return logits * (scale * LOG2E)
    return jnp.tanh(logits * (scale / soft_cap)) * (soft_cap * LOG2E)


def mask(logits, positions, limits):
    """Logits of the slots whose position lies within the limits of the row, EMPTY elsewhere."""
    position = plgpu.load(positions, layout=plgpu.Layout.WGMMA.reduce(0))
    earliest, latest = limits
    if jnp.ndim(latest):
        position = lax.broadcast_in_dim(position, logits.shape, [1])
        earliest, latest = (lax.broadcast_in_dim(of_row, logits.shape, [0]) for of_row in limits)
        visible = (position >= earliest) & (position <= latest)
    else:
        visible = lax.broadcast_in_dim((position >= earliest) & (position <= latest), logits.shape, [1])
    return jnp.where(visible, logits, EMPTY)


def softmax_step(logits, maximum, total):
    """One step of the online softmax: weights, factor of what came before, new maximum and total."""
    new = jnp.maximum(jnp.maximum(maximum, logits.max(axis=1)), EMPTY / 2)
    shrink = jnp.exp2(maximum - new)
    weights = jnp.exp2(logits - lax.broadcast_in_dim(new, logits.shape, [0]))
    return weights, shrink, new, total * shrink + weights.sum(axis=1)


def product(a, b, shape: tuple[int, int]):
    """a @ b, both in shared memory."""

    def multiply(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def add_product(acc, a, b, is_interpreted: bool):
    """acc + a @ b with `a` in registers, for which the interpreter has no rule."""
    if is_interpreted:
        acc = acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # this product reads like a thread, not like a tensor core
        return acc
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))  # pyright: ignore[reportPrivateImportUsage]


def zero_empty(values, positions) -> None:
    """Zero the rows of empty slots in shared memory."""
    position = plgpu.load(positions, layout=plgpu.Layout.WGMMA.reduce(1))
    width = tile_columns(values.shape[1])
    for column in range(0, values.shape[1], width):  # a part at a time, as the accumulator holds most registers
        part = values.at[:, pl.ds(column, width)]
        matrix = plgpu.load(part, layout=plgpu.Layout.WGMMA)
        used = lax.broadcast_in_dim(position >= 0, matrix.shape, [0])
        part[...] = jnp.where(used, matrix, jnp.zeros_like(matrix))
    plgpu.commit_smem()
