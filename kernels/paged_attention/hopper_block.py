"""What a warpgroup of the Hopper kernel does with one block of keys and values in shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.paged_attention.tiles import LOG2E

ROWS = 64  # of one warpgroup's product
EMPTY = -1e30


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static choices.

    Attributes:
        block: slots of a block.
        stages: blocks in flight; a multiple of the consumers that take turns.
        workers: CTAs of one KV head.
        consumers: warpgroups that compute.
        shares_blocks: every consumer has rows of its own and reads all blocks; else they take turns.
    """

    block: int
    stages: int
    workers: int
    consumers: int
    shares_blocks: bool

    def piece(self, page_size: int) -> int:
        """Slots that one copy brings: a page, or the part of it that a block has."""
        return min(page_size, self.block)


class Scratch(NamedTuple):
    """The kernel's shared memory and barriers.

    Attributes:
        queries: [parts, 64, head_dim].
        limits: int32 [parts, 2, 64], first and last position a row sees.
        keys, values: [stages, block, head_dim].
        positions: int32 [stages, block].
        out: float32 [consumers, 64, columns].
        stats: float32 [consumers, 2, 64], maximum and total.
        q_full, k_full, v_full: a copy has arrived.
        q_free, k_free, v_free: its readers have done.
        zeroed: the first consumer has zeroed the values of empty slots.
    """

    queries: Any
    limits: Any
    keys: Any
    values: Any
    positions: Any
    out: Any
    stats: Any
    q_full: Any
    q_free: Any
    zeroed: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any


def attend_block(at: Scratch, slot, part, limits, carry, zero, scale: float, soft_cap: float | None, interpret: bool):
    """Attend a part of the queries to the block in a slot.

    Args:
        at: shared memory and barriers.
        slot: where the block is, or will be when its barriers say so.
        part: of the queries.
        limits: first and last position of each row.
        carry: accumulator, maximum (base 2) and total so far.
        zero: zeroes the values of empty slots where the block has any.
        scale, soft_cap: of the logits.
        interpret: whether the interpreter runs this.

    Returns: the carry with the block.
    """
    acc, maximum, total = carry
    plgpu.barrier_wait(at.k_full.at[slot])
    logits = product(at.queries.at[part], at.keys.at[slot].T, (ROWS, at.keys.shape[1]))
    logits = mask(cap(logits, scale, soft_cap), at.positions.at[slot], limits)
    weights, shrink, maximum, total = softmax_step(logits, maximum, total)
    acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
    plgpu.barrier_wait(at.v_full.at[slot])
    zero()
    # The fence orders the reads of positions before the copy that overwrites them.
    plgpu.commit_smem()
    plgpu.barrier_arrive(at.k_free.at[slot])
    acc = add_product(acc, weights.astype(at.values.dtype), at.values.at[slot], interpret)
    plgpu.barrier_arrive(at.v_free.at[slot])
    return acc, maximum, total


def cap(logits, scale: float, soft_cap: float | None):
    """Scaled and soft-capped logits, in base 2."""
    if soft_cap is None:
        return logits * (scale * LOG2E)
    return jnp.tanh(logits * (scale / soft_cap)) * (soft_cap * LOG2E)


def mask(logits, positions, limits):
    """Logits of the slots whose position lies within the limits of the row, EMPTY elsewhere."""
    position = plgpu.load(positions, layout=plgpu.Layout.WGMMA.reduce(0))
    position = lax.broadcast_in_dim(position, logits.shape, [1])
    earliest, latest = (lax.broadcast_in_dim(of_row, logits.shape, [0]) for of_row in limits)
    visible = (position >= earliest) & (position <= latest)
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


def tile_columns(head_dim: int) -> int:
    """Columns of a swizzled tile in shared memory."""
    return 64 if head_dim % 64 == 0 else 32
