"""The Hopper kernel of attention mass: blocks of keys stay in shared memory while the queries that see them pass by.

A CTA serves one KV head and a run of steps (`hopper_work.py`). A block has 128 slots, 64 for each of two consumer
warpgroups; one producer warpgroup brings keys and tiles of queries:

    producer   keys, positions -> | queries, lse of step i -> | step i + 1 -> ...
                                  ^ waits k_free (block)       ^ waits q_free (step)
    consumer   wait k_full | wait q_full: logits = keys queries^T | free Q | p = exp2(logits - lse), sums | ...
               end of a head: entropy -> shared memory; end of a block: free K, sums and entropies -> fragment

Slots are the rows of the product, so that what a slot receives is a sum along a row, kept in registers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kvjax.kernels.attention_mass import hopper_work as work_fields
from kvjax.kernels.attention_mass.hopper_work import ALIGNMENT, BLOCK, Work
from kvjax.kernels.paged_attention.hopper_block import EMPTY, ROWS, cap, product, tile_columns

_PARTS = BLOCK // ROWS  # consumers of a CTA
_LAST = 2**31 - 1
_COLUMNS = 64  # of a tile, looked at together: each needs a register for its lse


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static choices.

    Attributes:
        tile_tokens: query tokens of a tile, a multiple of 8 up to 256.
        key_stages, query_stages: blocks of keys and tiles of queries in shared memory.
        workers: CTAs of one KV head.
    """

    tile_tokens: int
    key_stages: int
    query_stages: int
    workers: int


class Scratch(NamedTuple):
    """The kernel's shared memory and barriers.

    Attributes:
        keys: [key stages, 2, 64, head_dim].
        positions: int32 [key stages, 2, 64].
        queries: [query stages, tile_tokens, head_dim].
        lse: float32 [query stages, tile_tokens].
        sums: float32 [2, 64].
        entropy: float32 [2, heads, 64].
        k_full, q_full: copies have arrived.
        k_free, q_free: both consumers have done.
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


def mass_of_fragments(
    q: Float[Array, "heads places head_dim"],
    lse: Float32[Array, "heads places"],
    keys: Float[Array, "pages heads_per_group page_size head_dim"],
    positions: Int32[Array, "pages page_size"],
    work: Work,
    *,
    kv_heads: int,
    shape: Shape,
    scale: float,
    soft_cap: float | None,
    band: int | None,
    interpret: Any = None,
) -> tuple[Float32[Array, "kv_heads fragments 2 64"], Float32[Array, "kv_heads fragments 2 heads_of_one 64"]]:
    """Return the column sums of every fragment, and the sums of p * log2(p) of every slot and query head.

    Args:
        q, lse: aligned, those of the sinks behind the others; lse in base 2.
        keys, positions: as for `reference.attention_mass`.
        work: blocks and steps.
        kv_heads: of all groups.
        shape: static choices.
        scale, soft_cap, band: as for `reference.attention_mass`.
        interpret: `plgpu.InterpretGPUParams` to run without a GPU.
    """
    heads, head_dim, page_size = q.shape[0] // kv_heads, q.shape[2], keys.shape[2]
    kernel = _Kernel(shape, page_size, keys.shape[1], heads, scale, soft_cap, band)
    columns = tile_columns(head_dim)
    # pyright takes these classes for abstract ones.
    transforms = (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(2 * columns),  # pyright: ignore[reportAbstractUsage]
    )
    outs = (kv_heads, work.begin.shape[1] + shape.workers - 1, _PARTS)
    stages = (shape.key_stages, shape.query_stages)
    call = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((*outs, ROWS), jnp.float32),
            jax.ShapeDtypeStruct((*outs, heads, ROWS), jnp.float32),
        ),
        grid=(shape.workers, kv_heads),
        grid_names=("worker", "head"),
        num_threads=_PARTS + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((stages[0], _PARTS, ROWS, head_dim), keys.dtype, transforms=transforms),
            plgpu.SMEM((stages[0], _PARTS, ROWS), jnp.int32),
            plgpu.SMEM((stages[1], shape.tile_tokens, head_dim), q.dtype, transforms=transforms),
            plgpu.SMEM((stages[1], shape.tile_tokens), jnp.float32),
            plgpu.SMEM((_PARTS, ROWS), jnp.float32),
            plgpu.SMEM((_PARTS, heads, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=2 * kernel.pieces, num_barriers=stages[0]),
            plgpu.Barrier(num_arrivals=_PARTS, num_barriers=stages[0]),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages[1]),
            plgpu.Barrier(num_arrivals=_PARTS, num_barriers=stages[1]),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return call(
        q, lse, keys, positions, work.pages, work.info, work.begin, work.end, work.per_worker, work.first_block,
        work.end_block,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel's body; a call binds the references."""

    shape: Shape
    page_size: int
    heads_per_group: int
    heads: int
    scale: float
    soft_cap: float | None
    band: int | None

    @property
    def piece(self) -> int:
        """Slots that one copy brings: a page, or the part of it that one consumer has."""
        return min(self.page_size, ROWS)

    @property
    def pieces(self) -> int:
        """Copies of a block."""
        return BLOCK // self.piece

    def __call__(
        self, q, lse, keys, positions, pages, info, begin, end, per_worker, first_block, end_block, sums, entropy,
        *scratch,
    ):  # fmt: skip
        at = Scratch(*scratch)
        worker, head = lax.axis_index("worker"), lax.axis_index("head")
        group, head_in_group = lax.div(head, jnp.int32(self.heads_per_group)), lax.rem(head, self.heads_per_group)
        begin_step = worker * per_worker[group]
        end_step = begin_step + per_worker[group]

        def for_each_fragment(body):
            """Call body(block, its first step here, steps, steps before, fragments before); returns both counts."""

            def of_block(block, before):
                steps, fragments = before
                block_begin = begin[group, block]
                first = jnp.maximum(begin_step, block_begin)
                count = jnp.maximum(jnp.minimum(end_step, end[group, block]) - first, 0)
                pl.when(count > 0)(lambda: body(block, first - block_begin, count, steps, fragments))
                return steps + count, fragments + (count > 0).astype(jnp.int32)

            return lax.fori_loop(
                first_block[group, worker], end_block[group, worker], of_block, (jnp.int32(0), jnp.int32(0))
            )

        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _PARTS)
        def _():
            queries = (q, lse, head * self.heads)
            pool = (keys.at[:, head_in_group], positions, pages.at[group])
            steps, fragments = for_each_fragment(self._produce(queries, pool, info.at[group], at))
            self._drain(steps, fragments, at)

        @pl.when(warpgroup < _PARTS)
        def _():
            fragment = (sums.at[head], entropy.at[head], worker)
            for_each_fragment(self._consume(warpgroup, fragment, info.at[group], at))
            plgpu.wait_smem_to_gmem(0)

    def _produce(self, queries, pool, info, at):
        (q, lse, first_head), (keys, positions, pages) = queries, pool
        tile_tokens = self.shape.tile_tokens

        def fragment(block, first, count, steps, fragments):
            slot = lax.rem(fragments, jnp.int32(self.shape.key_stages))
            per_page = self.page_size // self.piece
            ids = [pages[block, j] for j in range(self.pieces // per_page)]
            place, tiles = info[block, work_fields.PLACE], info[block, work_fields.TILES]
            pl.when(fragments >= self.shape.key_stages)(lambda: plgpu.barrier_wait(at.k_free.at[slot]))
            for j in range(self.pieces):
                part, row = divmod(j * self.piece, ROWS)
                here, there = pl.ds(row, self.piece), pl.ds(j % per_page * self.piece, self.piece)
                page, full = ids[j // per_page], at.k_full.at[slot]
                plgpu.copy_gmem_to_smem(positions.at[page, there], at.positions.at[slot, part, here], full)
                plgpu.copy_gmem_to_smem(keys.at[page, there], at.keys.at[slot, part, here], full)

            def fetch(i, _):
                slot = self._slot(steps + i)
                head, tile = first_head + lax.div(first + i, tiles), lax.rem(first + i, tiles)
                # Multiplied here, so that the compiler sees what the place is a multiple of.
                tokens = pl.ds((place + tile * (tile_tokens // ALIGNMENT)) * ALIGNMENT, tile_tokens)
                pl.when(steps + i >= self.shape.query_stages)(lambda: plgpu.barrier_wait(at.q_free.at[slot]))
                plgpu.copy_gmem_to_smem(lse.at[head, tokens], at.lse.at[slot], at.q_full.at[slot])
                plgpu.copy_gmem_to_smem(q.at[head, tokens], at.queries.at[slot], at.q_full.at[slot])
                return _

            lax.fori_loop(0, count, fetch, jnp.int32(0))

        return fragment

    def _drain(self, steps, fragments, at):
        """Wait for what nobody else waits for, so that no barrier ends with a phase unseen."""
        for slot in range(self.shape.key_stages):
            pl.when(fragments > slot)(lambda slot=slot: plgpu.barrier_wait(at.k_free.at[slot]))
        for slot in range(self.shape.query_stages):
            pl.when(steps > slot)(lambda slot=slot: plgpu.barrier_wait(at.q_free.at[slot]))

    def _slot(self, step):
        return lax.rem(step, jnp.int32(self.shape.query_stages))

    def _consume(self, me, fragment_refs, info, at):
        sums_out, entropy_out, worker = fragment_refs
        of_rows = plgpu.Layout.WGMMA.reduce(1)

        def zeros():
            return plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), of_rows)

        def fragment(block, first, count, steps, fragments):
            fields = [info[block, i] for i in range(work_fields.FULL_TO + 1)]
            tiles, slot = fields[work_fields.TILES], lax.rem(fragments, jnp.int32(self.shape.key_stages))
            plgpu.barrier_wait(at.k_full.at[slot])
            position = plgpu.load(at.positions.at[slot, me], layout=of_rows)
            counts = (position >= fields[work_fields.LOWEST]) & (position <= fields[work_fields.HIGHEST])
            plgpu.wait_smem_to_gmem(0)  # what the last fragment wrote has left shared memory

            def of_head(head, sums):
                def of_tile(tile, carry):
                    step = self._slot(steps + head * tiles + tile - first)
                    return self._of_tile(at.keys.at[slot, me], step, tile, position, fields, carry, at)

                begin, end = (jnp.clip(at_step - head * tiles, 0, tiles) for at_step in (first, first + count))
                sums, entropy = lax.fori_loop(begin, end, of_tile, (sums, zeros()))
                at.entropy[me, head] = jnp.where(counts, entropy, 0.0)
                return sums

            sums = lax.fori_loop(0, self.heads, of_head, zeros())
            at.sums[me] = jnp.where(counts, sums, 0.0)
            plgpu.commit_smem()
            plgpu.barrier_arrive(at.k_free.at[slot])
            plgpu.copy_smem_to_gmem(at.sums.at[me], sums_out.at[block + worker, me])
            plgpu.copy_smem_to_gmem(at.entropy.at[me], entropy_out.at[block + worker, me])

        return fragment

    def _of_tile(self, keys, slot, tile, position, fields, carry, at):
        """Add what one tile of one head gives to the column sums and to the sums of p * log2(p)."""
        plgpu.barrier_wait(at.q_full.at[slot])
        logits = product(keys, at.queries.at[slot].T, (ROWS, self.shape.tile_tokens))
        for begin in range(0, self.shape.tile_tokens, _COLUMNS):
            width = min(_COLUMNS, self.shape.tile_tokens - begin)
            lse = plgpu.load(at.lse.at[slot, pl.ds(begin, width)], layout=plgpu.Layout.WGMMA.reduce(0))
            log_p = cap(logits[:, begin : begin + width], self.scale, self.soft_cap)
            log_p = log_p - lax.broadcast_in_dim(lse, log_p.shape, [1])
            carry = self._add(log_p, tile * self.shape.tile_tokens + begin, position, fields, carry)
        # The fence orders the reads of lse before the copy that overwrites it.
        plgpu.commit_smem()
        plgpu.barrier_arrive(at.q_free.at[slot])
        return carry

    def _add(self, log_p, first, position, fields, carry):
        """Add some columns of a tile to the sums; `first` is the number of the first query among the block's."""
        sums, entropy = carry
        column = plgpu.broadcasted_iota(jnp.int32, log_p.shape, 1, layout=plgpu.Layout.WGMMA)
        # Where the query of a slot's own position stands.
        own = position - fields[work_fields.POSITION]

        def of_row(limit):
            """A limit of each row's own; a column compared with it is a constant, and takes no register."""
            return lax.broadcast_in_dim(limit - first, log_p.shape, [0])

        def mask(log_p):
            window, tokens = fields[work_fields.WINDOW], fields[work_fields.TOKENS]
            end = jnp.minimum(jnp.minimum(own, _LAST - window) + window, tokens)
            return jnp.where((column >= of_row(own)) & (column < of_row(end)), log_p, EMPTY)

        end = first + log_p.shape[1]
        is_full = (first >= fields[work_fields.FULL_FROM]) & (end <= fields[work_fields.FULL_TO])
        log_p = lax.cond(is_full, lambda x: x, mask, log_p)
        p = jnp.exp2(log_p)
        entropy = entropy + (p * log_p).sum(axis=1)
        if self.band is not None:
            p = jnp.where(column <= of_row(jnp.minimum(own, _LAST - self.band) + self.band), p, 0.0)
        return sums + p.sum(axis=1), entropy
