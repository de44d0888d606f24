"""What a warpgroup of the Hopper kernel of attention mass does with one tile of queries in shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.attention_mass import hopper_work as fields
from kvjax.kernels.paged_attention.hopper_block import EMPTY, ROWS, cap, product

_COLUMNS = 16  # of a tile, looked at together: what they take of the registers bounds the tile
_LAST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static choices.

    Attributes:
        block: slots of a block: 128 or 256.
        tile_tokens: query tokens of a tile, 8 or a multiple of 16 up to 256.
        key_stages, query_stages: blocks of keys and tiles of queries in shared memory.
        workers: CTAs of one KV head.
    """

    block: int
    tile_tokens: int
    key_stages: int
    query_stages: int
    workers: int

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, each for 64 slots of a block."""
        return self.block // ROWS

    @property
    def columns(self) -> int:
        """Columns of a tile that are looked at together."""
        return min(self.tile_tokens, _COLUMNS)


class Scratch(NamedTuple):
    """The kernel's shared memory and barriers.

    Attributes:
        keys: [key stages, consumers, 64, head_dim].
        positions: int32 [key stages, consumers, 64].
        queries: [query stages, tile_tokens, head_dim].
        lse: float32 [query stages, tile_tokens].
        sums: float32 [consumers, 64].
        entropy: float32 [consumers, heads, 64].
        k_full, q_full: copies have arrived.
        k_free, q_free: all consumers have done.
    """

    keys: Any
    positions: Any
    queries: Any
    lse: Any
    sums: Any
    entropy: Any
    k_full: Any
    k_free: Any
    q_full: Any
    q_free: Any


@dataclasses.dataclass(frozen=True)
class Logits:
    """What logits become, and which pairs the column sums count; see `reference.attention_mass`."""

    scale: float
    soft_cap: float | None
    band: int | None


def add_tile(config: Logits, at: Scratch, where, tile, position, info, carry):
    """Add what one tile of one head gives to the column sums and to the sums of p * log2(p).

    Both are kept for some columns of a row apart, and added up at the end: no thread waits for another here.

    Args:
        config: static choices.
        at: shared memory and barriers.
        where: the block's buffer, the consumer, and the tile's buffer.
        tile: number among the block's tiles of a head.
        position: int32 [64], of the consumer's slots.
        info: the block's fields.
        carry: both sums so far, float32 [64, columns].

    Returns: both sums.
    """
    block, me, slot = where
    tile_tokens, width = at.queries.shape[1], carry[0].shape[1]
    plgpu.barrier_wait(at.q_full.at[slot])
    logits = product(at.keys.at[block, me], at.queries.at[slot].T, (ROWS, tile_tokens))
    for begin in range(0, tile_tokens, width):
        lse = plgpu.load(at.lse.at[slot, pl.ds(begin, width)], layout=plgpu.Layout.WGMMA.reduce(0))
        log_p = cap(logits[:, begin : begin + width], config.scale, config.soft_cap)
        log_p = log_p - lax.broadcast_in_dim(lse, log_p.shape, [1])
        carry = _add_columns(log_p, tile * tile_tokens + begin, position, info, carry, config.band)
    # The fence orders the reads of lse before the copy that overwrites it.
    plgpu.commit_smem()
    plgpu.barrier_arrive(at.q_free.at[slot])
    return carry


def _add_columns(log_p, first, position, info, carry, band: int | None):
    """Add some columns of a tile; `first` is the number of the first query among the block's."""
    sums, entropy = carry
    column = plgpu.broadcasted_iota(jnp.int32, log_p.shape, 1, layout=plgpu.Layout.WGMMA)

    def own():
        """Where the query of a slot's own position stands."""
        return position - info[fields.POSITION]

    def of_row(limit):
        """A limit of each row's own; a column compared with it is a constant, and takes no register."""
        return lax.broadcast_in_dim(limit - first, log_p.shape, [0])

    def mask(log_p):
        window, tokens = info[fields.WINDOW], info[fields.TOKENS]
        end = jnp.minimum(jnp.minimum(own(), _LAST - window) + window, tokens)
        return jnp.where((column >= of_row(own())) & (column < of_row(end)), log_p, EMPTY)

    end = first + log_p.shape[1]
    is_full = (first >= info[fields.FULL_FROM]) & (end <= info[fields.FULL_TO])
    log_p = lax.cond(is_full, lambda x: x, mask, log_p)
    p = jnp.exp2(log_p)
    entropy = entropy + p * log_p
    if band is not None:
        p = jnp.where(column <= of_row(jnp.minimum(own(), _LAST - band) + band), p, 0.0)
    return sums + p, entropy
