"""The Hopper kernel of attention mass: blocks of keys stay in shared memory while the queries that see them pass by.

A CTA serves one KV head and a run of steps (`hopper_work.py`). A block has 64 slots for each of two or four consumer
warpgroups; one producer warpgroup brings keys and tiles of queries:

    producer   keys, positions -> | queries, lse of step i -> | step i + 1 -> ...
                                  ^ waits k_free (block)       ^ waits q_free (step)
    consumer   wait k_full | wait q_full: logits = keys queries^T | free Q | p = exp2(logits - lse), sums | ...
               end of a head: entropy -> shared memory; end of a block: free K, sums and entropies -> fragment

Slots are the rows of the product, so that what a slot receives is a sum along a row, kept in registers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kvjax.kernels.attention_mass import hopper_work as work_fields
from kvjax.kernels.attention_mass.hopper_tile import Logits, Scratch, Shape, add_tile
from kvjax.kernels.attention_mass.hopper_work import ALIGNMENT, Work
from kvjax.kernels.paged_attention.hopper_block import ROWS, tile_columns
from kvjax.kernels.paged_attention.hopper_fetch import copy_row


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
) -> tuple[
    Float32[Array, "kv_heads fragments consumers 64"], Float32[Array, "kv_heads fragments consumers heads_of_one 64"]
]:
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
    kernel = _Kernel(shape, page_size, keys.shape[1], heads, Logits(scale, soft_cap, band))
    columns = tile_columns(head_dim)
    # pyright takes these classes for abstract ones.
    transforms = (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(2 * columns),  # pyright: ignore[reportAbstractUsage]
    )
    outs = (kv_heads, work.begin.shape[1] + shape.workers - 1, shape.consumers)
    stages = (shape.key_stages, shape.query_stages)
    call = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((*outs, ROWS), jnp.float32),
            jax.ShapeDtypeStruct((*outs, heads, ROWS), jnp.float32),
        ),
        grid=(shape.workers, kv_heads),
        grid_names=("worker", "head"),
        num_threads=shape.consumers + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((stages[0], shape.consumers, ROWS, head_dim), keys.dtype, transforms=transforms),
            plgpu.SMEM((stages[0], shape.consumers, ROWS), jnp.int32),
            plgpu.SMEM((stages[1], shape.tile_tokens, head_dim), q.dtype, transforms=transforms),
            plgpu.SMEM((stages[1], shape.tile_tokens), jnp.float32),
            plgpu.SMEM((shape.consumers, ROWS), jnp.float32),
            plgpu.SMEM((shape.consumers, heads, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=2 * kernel.pieces, num_barriers=stages[0]),
            plgpu.Barrier(num_arrivals=shape.consumers, num_barriers=stages[0]),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages[1]),
            plgpu.Barrier(num_arrivals=shape.consumers, num_barriers=stages[1]),
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
    logits: Logits

    @property
    def piece(self) -> int:
        """Slots that one copy brings: a page, or the half of it that one consumer has."""
        return min(self.page_size, ROWS)

    @property
    def pieces(self) -> int:
        """Copies of a block."""
        return self.shape.block // self.piece

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

        @pl.when(warpgroup == self.shape.consumers)
        def _():
            self._take_registers(64, "decrease")
            queries = (q, lse, head * self.heads)
            pool = (keys.at[:, head_in_group], positions, pages.at[group])
            steps, fragments = for_each_fragment(self._produce(queries, pool, info.at[group], at))
            self._drain(steps, fragments, at)

        @pl.when(warpgroup < self.shape.consumers)
        def _():
            self._take_registers(104, "increase")
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
                copy_row(positions.at[page, there], at.positions.at[slot, part, here], full)
                plgpu.copy_gmem_to_smem(keys.at[page, there], at.keys.at[slot, part, here], full)

            def fetch(i, _):
                slot = self._slot(steps + i)
                head, tile = first_head + lax.div(first + i, tiles), lax.rem(first + i, tiles)
                # Multiplied here, so that the compiler sees what the place is a multiple of.
                tokens = pl.ds((place + tile * (tile_tokens // ALIGNMENT)) * ALIGNMENT, tile_tokens)
                pl.when(steps + i >= self.shape.query_stages)(lambda: plgpu.barrier_wait(at.q_free.at[slot]))
                copy_row(lse.at[head, tokens], at.lse.at[slot], at.q_full.at[slot])
                plgpu.copy_gmem_to_smem(q.at[head, tokens], at.queries.at[slot], at.q_full.at[slot])
                return _

            lax.fori_loop(0, count, fetch, jnp.int32(0))

        return fragment

    def _take_registers(self, count: int, action: Literal["increase", "decrease"]) -> None:
        """Let consumers have registers of the producer where there are five warpgroups.

        They start with 96 each, and must not ask for more than these: 5 x 96 = 64 + 4 x 104.
        """
        if self.shape.consumers == 4:
            plgpu.set_max_registers(count, action=action)

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
            return plgpu.layout_cast(jnp.zeros((ROWS, self.shape.columns), jnp.float32), plgpu.Layout.WGMMA)

        def fragment(block, first, count, steps, fragments):
            tiles, slot = info[block, work_fields.TILES], lax.rem(fragments, jnp.int32(self.shape.key_stages))
            plgpu.barrier_wait(at.k_full.at[slot])
            position = plgpu.load(at.positions.at[slot, me], layout=of_rows)
            plgpu.wait_smem_to_gmem(0)  # what the last fragment wrote has left shared memory

            def counted(by_column):
                """The sums of the slots that count; read late, as registers are few."""
                lowest, highest = info[block, work_fields.LOWEST], info[block, work_fields.HIGHEST]
                return jnp.where((position >= lowest) & (position <= highest), by_column.sum(axis=1), 0.0)

            def of_head(head, sums):
                def of_tile(tile, carry):
                    step = self._slot(steps + head * tiles + tile - first)
                    return add_tile(self.logits, at, (slot, me, step), tile, position, info.at[block], carry)

                begin, end = (jnp.clip(at_step - head * tiles, 0, tiles) for at_step in (first, first + count))
                sums, entropy = lax.fori_loop(begin, end, of_tile, (sums, zeros()))
                at.entropy[me, head] = counted(entropy)
                return sums

            sums = lax.fori_loop(0, self.heads, of_head, zeros())
            at.sums[me] = counted(sums)
            plgpu.commit_smem()
            plgpu.barrier_arrive(at.k_free.at[slot])
            plgpu.copy_smem_to_gmem(at.sums.at[me], sums_out.at[block + worker, me])
            plgpu.copy_smem_to_gmem(at.entropy.at[me], entropy_out.at[block + worker, me])

        return fragment
