"""Joining the fragments of each tile by log-sum-exp: one small kernel, where XLA would need a dozen."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from kvjax.kernels.paged_attention.hopper_block import EMPTY
from kvjax.kernels.paged_attention.hopper_shared import ROWS, Config, Inputs
from kvjax.kernels.paged_attention.tiles import LOG2E

_COLUMNS = 128  # joined by a CTA: accumulator and new part share the registers


class Parts(NamedTuple):
    """What `attend_tiles` left: [kv_heads, fragments, consumers, rows, head_dim] and [..., 2, 64]."""

    out: Any
    stats: Any


def join_fragments(
    parts: Parts,
    given: Inputs,
    sink_logits: Float[Array, " heads"] | None,
    config: Config,
    interpret: Any = None,
) -> tuple[Float[Array, "tiles kv_heads rows head_dim"], Float32[Array, "tiles kv_heads rows"]]:
    """Join the unnormalised parts of each tile, and add a learned sink logit per query head.

    Returns: outputs in the dtype of the queries, 0 for rows that see nothing, and log-sum-exp (natural), -inf there;
        in decode the rows are the query heads of a KV head, else 64 for each part.
    """
    num_tiles, kv_heads = given.q.shape[:2]
    rows = config.heads if config.tile_tokens == 1 else ROWS
    columns = min(config.head_dim, _COLUMNS)
    call = plgpu.kernel(
        _Join(config, rows, columns, sink_logits is not None),
        out_type=(
            jax.ShapeDtypeStruct((num_tiles, kv_heads, config.parts, rows, config.head_dim), given.q.dtype),
            jax.ShapeDtypeStruct((num_tiles, kv_heads, config.parts, ROWS), jnp.float32),
        ),
        grid=(num_tiles, kv_heads, config.parts, config.head_dim // columns),
        grid_names=("tile", "head", "part", "column"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((2, ROWS, columns), jnp.float32),
            plgpu.SMEM((2, 2, ROWS), jnp.float32),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.SMEM((ROWS, columns), given.q.dtype),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_arrivals=1),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    sinks = () if sink_logits is None else (_sinks_of_rows(sink_logits, config),)
    out, lse = call(*parts, given.layer, given.begin_block, given.end_block, given.per_worker, *sinks)
    return out.reshape(num_tiles, kv_heads, -1, config.head_dim), lse[..., :rows].reshape(num_tiles, kv_heads, -1)


def _sinks_of_rows(sink_logits, config: Config) -> Float32[Array, "kv_heads parts 64"]:
    """Learned sink logits by row, in base 2."""
    sinks = (sink_logits.astype(jnp.float32) * LOG2E).reshape(-1, config.heads)
    num_rows = config.parts * ROWS
    return jnp.tile(sinks, (1, -(-num_rows // config.heads)))[:, :num_rows].reshape(-1, config.parts, ROWS)


class _Scratch(NamedTuple):
    part: Any
    stats: Any
    sinks: Any
    out: Any
    lse: Any
    full: Any
    sinks_full: Any


@dataclasses.dataclass(frozen=True)
class _Join:
    """The kernel's body: a part of a tile's rows and some of the columns."""

    config: Config
    rows: int
    columns: int
    has_sinks: bool

    def __call__(self, parts, stats, layer, begin_block, end_block, per_worker, *refs):
        sinks, (out, lse, *scratch) = refs[: self.has_sinks], refs[self.has_sinks :]
        config, at = self.config, _Scratch(*scratch)
        tile, head, part = (lax.axis_index(name) for name in ("tile", "head", "part"))
        column = lax.axis_index("column") * self.columns
        row = head if config.is_listed else lax.div(head, jnp.int32(config.heads_per_group))
        begin, end = begin_block[layer[0], row, tile], end_block[layer[0], row, tile]
        per = per_worker[layer[0], row]
        first, last = lax.div(begin, per), lax.div(end - 1, per)
        in_turns = 1 if config.shape.shares_blocks else config.shape.consumers
        count = jnp.where(end > begin, (last - first + 1) * in_turns, 0)
        if self.has_sinks:
            plgpu.copy_gmem_to_smem(sinks[0].at[head, part], at.sinks, at.sinks_full)

        def fetch(i):
            slot = lax.rem(i, jnp.int32(2))
            fragment, consumer = tile + first + lax.div(i, jnp.int32(in_turns)), lax.rem(i, jnp.int32(in_turns))
            consumer = part if config.shape.shares_blocks else consumer
            of_rows = at.part.at[slot, pl.ds(0, config.rows)]
            there = parts.at[head, fragment, consumer, :, pl.ds(column, self.columns)]
            plgpu.copy_gmem_to_smem(there, of_rows, at.full.at[slot])
            plgpu.copy_gmem_to_smem(stats.at[head, fragment, consumer], at.stats.at[slot], at.full.at[slot])

        pl.when(count > 0)(lambda: fetch(jnp.int32(0)))

        def add(i, carry):
            pl.when(i + 1 < count)(lambda: fetch(i + 1))
            return _merged(at, lax.rem(i, jnp.int32(2)), carry)

        of_rows = plgpu.Layout.WGMMA.reduce(1)
        start = (
            plgpu.layout_cast(jnp.zeros((ROWS, self.columns), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), EMPTY / 2, jnp.float32), of_rows),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), of_rows),
        )
        self._store(at, lax.fori_loop(0, count, add, start))
        there = out.at[tile, head, part, :, pl.ds(column, self.columns)]
        plgpu.copy_smem_to_gmem(at.out.at[pl.ds(0, self.rows)], there)
        pl.when(column == 0)(lambda: plgpu.copy_smem_to_gmem(at.lse, lse.at[tile, head, part]))
        plgpu.wait_smem_to_gmem(0)

    def _store(self, at, carry):
        """Normalise, with the learned sinks, into shared memory."""
        acc, maximum, total = carry
        sees_nothing = total == 0
        if self.has_sinks:
            plgpu.barrier_wait(at.sinks_full)
            sink = plgpu.load(at.sinks, layout=plgpu.Layout.WGMMA.reduce(1))
            acc, maximum, total = _join(carry, sink, jnp.ones_like(sink), None)
        total = jnp.where(total > 0, total, 1.0)
        at.out[...] = (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(at.out.dtype)
        at.lse[...] = jnp.where(sees_nothing, -jnp.inf, maximum * (1 / LOG2E) + jnp.log(total))
        plgpu.commit_smem()


def _merged(at: _Scratch, slot, carry):
    """Add the part that a buffer holds, or will hold when its barrier says so."""
    plgpu.barrier_wait(at.full.at[slot])
    of_rows = plgpu.Layout.WGMMA.reduce(1)
    maximum, total = (plgpu.load(at.stats.at[slot, i], layout=of_rows) for i in range(2))
    joined = _join(carry, maximum, total, plgpu.load(at.part.at[slot], layout=plgpu.Layout.WGMMA))
    plgpu.commit_smem()  # orders these reads before the copy that overwrites the buffer
    return joined


def _join(carry, other_maximum, other_total, other):
    """Join two unnormalised parts; the other's output may be nothing."""
    acc, maximum, total = carry
    new = jnp.maximum(maximum, other_maximum)
    old_factor, factor = jnp.exp2(maximum - new), jnp.exp2(other_maximum - new)
    acc = acc * lax.broadcast_in_dim(old_factor, acc.shape, [0])
    if other is not None:
        acc = acc + other * lax.broadcast_in_dim(factor, acc.shape, [0])
    return acc, new, total * old_factor + other_total * factor
