"""The Hopper kernel: tiles of queries over pages that TMA copies fetch by page id. One kernel for decode and prefill.

A CTA serves one KV head and a run of blocks of slots (`tiles.py`). One producer and one or two consumer warpgroups,
`stages` buffers each for keys and values:

    producer   q, limits -> | ids of block i | keys, positions -> | values -> | ids of block i + 1 | ...
                            ^ waits q_free     ^ waits k_free       ^ waits v_free
    consumer   wait q_full  | wait k_full: logits = q k | mask, softmax | wait v_full | free K | out += p v | free V ...
               end of a tile: accumulator, maximum and total -> fragment `tile + worker`, float32

Decode: a tile is one token, and two consumers take alternate blocks, so that one computes a softmax while the other
has the tensor cores; their parts are joined like fragments. Prefill: a tile has twice 64 rows, and both consumers read
every block.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kvjax.kernels.paged_attention.arguments import Rows
from kvjax.kernels.paged_attention.hopper_block import (
    EMPTY,
    ROWS,
    Scratch,
    Shape,
    attend_block,
    tile_columns,
    zero_empty,
)
from kvjax.kernels.paged_attention.tiles import Tiles, Work

_OUT_COLUMNS = 128  # written at a time, which bounds the shared memory for it


def attend_tiles(
    q: Float[Array, "tiles kv_heads parts rows head_dim"],
    limits: Int32[Array, "tiles parts 2 64"],
    keys: Float[Array, "pages heads_per_group page_size head_dim"],
    values: Float[Array, "pages heads_per_group page_size head_dim"],
    positions: Int32[Array, "pages page_size"],
    rows: Rows,
    tiles: Tiles,
    work: Work,
    *,
    shape: Shape,
    scale: float,
    soft_cap: float | None,
    interpret: Any = None,
) -> tuple[
    Float32[Array, "kv_heads fragments consumers rows head_dim"], Float32[Array, "kv_heads fragments consumers 2 64"]
]:
    """Return the unnormalised attention of every fragment, and its maximum (base 2) and total.

    Args:
        q: unscaled queries; a consumer that has rows of its own takes one part.
        limits: first and last position each row sees.
        keys, values, positions, rows: as for `reference.paged_attention`.
        tiles, work: which queries and blocks.
        shape: static choices.
        scale, soft_cap: of the logits.
        interpret: `plgpu.InterpretGPUParams` to run without a GPU.
    """
    kernel = _Kernel(shape, keys.shape[2], keys.shape[1], q.shape[3], scale, soft_cap, interpret is not None)
    num_tiles, kv_heads, parts, num_rows, head_dim = q.shape
    columns = tile_columns(head_dim)
    # pyright takes these classes for abstract ones.
    transforms = (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(2 * columns),  # pyright: ignore[reportAbstractUsage]
    )
    outs = (kv_heads, num_tiles + shape.workers - 1, shape.consumers)
    barriers = [
        plgpu.Barrier(num_arrivals=parts + 1),
        plgpu.Barrier(num_arrivals=shape.consumers),
        plgpu.Barrier(num_arrivals=1),
        *(
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=shape.stages)
            for arrivals in (2 * kernel.pieces, kernel.readers, kernel.pieces, kernel.readers)
        ),
    ]
    call = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((*outs, num_rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((*outs, 2, ROWS), jnp.float32),
        ),
        grid=(shape.workers, kv_heads),
        grid_names=("worker", "head"),
        num_threads=shape.consumers + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((parts, ROWS, head_dim), q.dtype, transforms=transforms),
            plgpu.SMEM((parts, 2, ROWS), jnp.int32),
            plgpu.SMEM((shape.stages, shape.block, head_dim), keys.dtype, transforms=transforms),
            plgpu.SMEM((shape.stages, shape.block, head_dim), values.dtype, transforms=transforms),
            plgpu.SMEM((shape.stages, shape.block), jnp.int32),
            plgpu.SMEM((shape.consumers, ROWS, min(head_dim, _OUT_COLUMNS)), jnp.float32),
            plgpu.SMEM((shape.consumers, 2, ROWS), jnp.float32),
            *barriers,
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    # Pieces behind the tile's end are of page 0, slots behind the row's end were never written.
    end_slot = jnp.minimum(rows.end_slot[rows.layer][:, tiles.sequence], work.end_piece * kernel.piece)
    return call(
        q, limits, keys, values, positions, rows.page_table[rows.layer], rows.rings[rows.layer][None],
        tiles.sequence, end_slot,
        work.first_piece, work.end_piece, work.begin_block, work.end_block, work.per_worker, work.first_tile,
        work.end_tile,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel's body; a call binds the references."""

    shape: Shape
    page_size: int
    heads_per_group: int
    rows: int
    scale: float
    soft_cap: float | None
    is_interpreted: bool

    @property
    def piece(self) -> int:
        """Slots that one copy brings."""
        return self.shape.piece(self.page_size)

    @property
    def pieces(self) -> int:
        """Copies of a block."""
        return self.shape.block // self.piece

    @property
    def readers(self) -> int:
        """Consumers of a block."""
        return self.shape.consumers if self.shape.shares_blocks else 1

    def __call__(
        self, q, limits, keys, values, positions, table, ring, sequence, end_slot, first_piece, end_piece, begin_block,
        end_block, per_worker, first_tile, end_tile, out, stats, *scratch,
    ):  # fmt: skip
        at = Scratch(*scratch)
        worker, head = lax.axis_index("worker"), lax.axis_index("head")
        group, head_in_group = lax.div(head, jnp.int32(self.heads_per_group)), lax.rem(head, self.heads_per_group)
        begin = worker * per_worker[group]
        end = begin + per_worker[group]

        def for_each_fragment(body):
            """Call body(tile, its first block here, blocks, blocks before) for its tiles; returns all blocks."""

            def of_tile(tile, before):
                tile_begin = begin_block[group, tile]
                first = jnp.maximum(begin, tile_begin)
                count = jnp.maximum(jnp.minimum(end, end_block[group, tile]) - first, 0)
                pl.when(count > 0)(lambda: body(tile, first - tile_begin, count, before))
                return before + count

            return lax.fori_loop(first_tile[group, worker], end_tile[group, worker], of_tile, jnp.int32(0))

        def page_of(tile, block, j):
            """Page id and number of the piece in the page; page 0, whose positions are -1, behind the end."""
            piece = first_piece[group, tile] + block * self.pieces + j
            pieces_per_page = self.page_size // self.piece
            entry = lax.rem(lax.div(piece, pieces_per_page), ring[0])
            page = jnp.where(piece < end_piece[group, tile], table[group, sequence[tile], entry], 0)
            return page, lax.rem(piece, pieces_per_page)

        pool = tuple(ref.at[:, head_in_group] for ref in (keys, values))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == self.shape.consumers)
        def _():
            steps = for_each_fragment(self._produce((q.at[:, head], limits), (*pool, positions), page_of, at))
            self._drain(steps, at)

        @pl.when(warpgroup < self.shape.consumers)
        def _():
            def empty_behind(tile, block):
                return (first_piece[group, tile] + (block + 1) * self.pieces) * self.piece > end_slot[group, tile]

            fragment = (out.at[head], stats.at[head], worker)
            for_each_fragment(self._consume(warpgroup, fragment, empty_behind, at))

    def _slots(self, part):
        """Slots of a piece in its page, so that the compiler sees what they are multiples of."""
        return pl.ds(0 if self.piece == self.page_size else part * self.piece, self.piece)

    def _slot(self, step):
        return lax.rem(step, jnp.int32(self.shape.stages))

    def _produce(self, queries, pool, page_of, at):
        (q, limits), (keys, values, positions) = queries, pool

        def fragment(tile, first, count, before):
            pl.when(before > 0)(lambda: plgpu.barrier_wait(at.q_free))
            for part in range(at.queries.shape[0]):
                plgpu.copy_gmem_to_smem(q.at[tile, part], at.queries.at[part, pl.ds(0, self.rows)], at.q_full)
            plgpu.copy_gmem_to_smem(limits.at[tile], at.limits, at.q_full)

            def pages_of(i):
                return [page_of(tile, first + i, j) for j in range(self.pieces)]

            def fetch(i, pages):
                step = before + i
                slot = self._slot(step)
                is_reused = step >= self.shape.stages
                # Read a block ahead, so that the copies of a block do not wait for its ids.
                following = pages_of(i + 1)
                pl.when(is_reused)(lambda: plgpu.barrier_wait(at.k_free.at[slot]))
                for j, (page, part) in enumerate(pages):
                    here, there = pl.ds(j * self.piece, self.piece), self._slots(part)
                    plgpu.copy_gmem_to_smem(positions.at[page, there], at.positions.at[slot, here], at.k_full.at[slot])
                    plgpu.copy_gmem_to_smem(keys.at[page, there], at.keys.at[slot, here], at.k_full.at[slot])
                pl.when(is_reused)(lambda: plgpu.barrier_wait(at.v_free.at[slot]))
                for j, (page, part) in enumerate(pages):
                    here, there = pl.ds(j * self.piece, self.piece), self._slots(part)
                    plgpu.copy_gmem_to_smem(values.at[page, there], at.values.at[slot, here], at.v_full.at[slot])
                return following

            lax.fori_loop(0, count, fetch, pages_of(0))

        return fragment

    def _drain(self, steps, at):
        """Wait for what nobody else waits for, so that no barrier ends with a phase unseen."""
        pl.when(steps > 0)(lambda: plgpu.barrier_wait(at.q_free))
        for slot in range(self.shape.stages):

            @pl.when(steps > slot)
            def _(slot=slot):
                plgpu.barrier_wait(at.k_free.at[slot])
                plgpu.barrier_wait(at.v_free.at[slot])

    def _consume(self, me, fragment_refs, empty_behind, at):
        out, stats, worker = fragment_refs
        part = me if self.shape.shares_blocks else 0
        stride = jnp.int32(1 if self.shape.shares_blocks else self.shape.consumers)
        of_rows = plgpu.Layout.WGMMA.reduce(1)
        head_dim = at.queries.shape[-1]

        def fragment(tile, first, count, before):
            plgpu.barrier_wait(at.q_full)
            limit = [plgpu.load(at.limits.at[part, i], layout=of_rows) for i in range(2)]
            # By steps, not by blocks, so that a buffer always has the same reader: waits count a barrier's phases.
            begin = 0 if self.shape.shares_blocks else lax.rem(me + stride - lax.rem(before, stride), stride)

            def attend(i, carry):
                block = begin + i * stride
                slot, is_end = self._slot(before + block), empty_behind(tile, first + block)
                zero = lambda: pl.when(is_end)(lambda: self._zero_empty(me, slot, at))  # noqa: E731
                return attend_block(at, slot, part, limit, carry, zero, self.scale, self.soft_cap, self.is_interpreted)

            start = (
                plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((ROWS,), EMPTY / 2, jnp.float32), of_rows),
                plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), of_rows),
            )
            mine = lax.div(count - begin + stride - 1, stride)
            acc, maximum, total = lax.fori_loop(0, mine, attend, start)
            at.stats[me, 0] = maximum
            at.stats[me, 1] = total
            plgpu.commit_smem()
            plgpu.barrier_arrive(at.q_free)
            plgpu.copy_smem_to_gmem(at.stats.at[me], stats.at[tile + worker, me])
            for column in range(0, head_dim, _OUT_COLUMNS):
                columns = slice(column, min(column + _OUT_COLUMNS, head_dim))
                at.out[me] = acc[:, columns]
                plgpu.commit_smem()
                there = out.at[tile + worker, me, :, pl.ds(column, at.out.shape[-1])]
                plgpu.copy_smem_to_gmem(at.out.at[me, pl.ds(0, self.rows)], there)
                plgpu.wait_smem_to_gmem(0)

        return fragment

    def _zero_empty(self, me, slot, at):
        """Zero the values of empty slots: those behind the last token may hold NaN, and 0 x NaN is NaN."""
        if self.readers == 1:
            zero_empty(at.values.at[slot], at.positions.at[slot])
            return

        @pl.when(me == 0)
        def _():
            zero_empty(at.values.at[slot], at.positions.at[slot])
            plgpu.barrier_arrive(at.zeroed)

        pl.when(me != 0)(lambda: plgpu.barrier_wait(at.zeroed))
