"""The Hopper kernel: tiles of queries over pages that TMA copies fetch by page id. One kernel for decode and prefill.

A CTA serves one KV head and a run of blocks of slots (`tiles.py`). One producer and one or two consumer warpgroups,
`stages` buffers each for keys and values:

    producer   queries -> | ids of block i | keys, positions -> | values -> | ids of block i + 1 | ...
                          ^ waits q_free     ^ waits k_free       ^ waits v_free
    consumer   wait q_full | wait k_full: logits = q k | mask, softmax | wait v_full | free K | out += p v | free V ...
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
from jaxtyping import Array, Float32

from kvjax.kernels.paged_attention.hopper_block import EMPTY, attend_block, sum_queries, zero_empty
from kvjax.kernels.paged_attention.hopper_codes import Codes, convert_keys, convert_values, scratch_of_codes
from kvjax.kernels.paged_attention.hopper_fetch import fetch_keys, fetch_values
from kvjax.kernels.paged_attention.hopper_run import Run
from kvjax.kernels.paged_attention.hopper_shared import ROWS, Config, Inputs, Scratch


def attend_tiles(
    given: Inputs, scales: tuple[tuple[Array, ...], ...], config: Config, most_blocks: int, interpret: Any = None
) -> tuple[
    Float32[Array, "kv_heads fragments consumers rows head_dim"],
    Float32[Array, "kv_heads fragments consumers 2 64"],
    Float32[Array, "kv_heads tiles parts blocks copies rows columns"] | None,
]:
    """Return the unnormalised attention of every fragment, its maximum (base 2) and total, and logits on request.

    Args:
        given: the inputs.
        scales: of keys and of values, as they are stored.
        config: static choices.
        most_blocks: of a tile (static), for the logits.
        interpret: `plgpu.InterpretGPUParams` to run without a GPU.

    Returns: fragments that nobody wrote, and logits of blocks that nobody read, may hold anything. Logits are in base
        2, EMPTY where masked.
    """
    shape = config.shape
    num_tiles, kv_heads = given.q.shape[:2]
    fragments = (kv_heads, num_tiles + shape.workers - 1, shape.consumers)
    outs: list[tuple[int, ...]] = [(*fragments, config.rows, config.head_dim), (*fragments, 2, ROWS)]
    if config.has_logits:
        copies = shape.block // config.columns
        outs.append((kv_heads, num_tiles, config.parts, most_blocks, copies, config.rows, config.columns))
    call = plgpu.kernel(
        _Kernel(config),
        out_type=tuple(jax.ShapeDtypeStruct(out, jnp.float32) for out in outs),
        grid=(shape.workers, kv_heads),
        grid_names=("worker", "head"),
        num_threads=shape.consumers + (2 if config.is_coded else 1),
        thread_name="warpgroup",
        scratch_types=[*config.scratch(given.q.dtype).values(), *scratch_of_codes(config).values()],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    out, stats, *logits = call(*given, *scales[0], *scales[1])
    return out, stats, logits[0] if logits else None


# By consumers: those that a thread starts with, then those of producer, converter and consumers.
_REGISTERS = {1: (168, 72, 160, 256), 2: (128, 72, 104, 168)}


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel's body; a call binds the references."""

    config: Config

    def __call__(self, *refs):
        config, given = self.config, Inputs(*refs[: len(Inputs._fields)])
        refs = list(refs[len(given) :])
        take = lambda count: [refs.pop(0) for _ in range(count)]  # noqa: E731
        scales = tuple(take(form.num_scales) for form in config.forms)
        outs = take(2 + config.has_logits)
        names = config.scratch(given.q.dtype)
        scratch = Scratch(**dict(zip(names, take(len(names)), strict=True)))
        codes = Codes(**dict(zip(scratch_of_codes(config), refs, strict=True))) if config.is_coded else None
        warpgroup, consumers = lax.axis_index("warpgroup"), config.shape.consumers

        @pl.when(warpgroup == consumers)
        def _():
            body = self._enter(0, given, scratch, codes)
            in_group = lax.rem(body.head, config.heads_per_group)
            of_head = (scale.at[:, in_group] for of in scales for scale in of)
            pool = (given.keys.at[:, in_group], given.values.at[:, in_group], given.positions, *of_head)
            body.drain(body.for_each_fragment(body.produce(pool)))

        if codes is not None:

            @pl.when(warpgroup == consumers + 1)
            def _():
                body = self._enter(1, given, scratch, codes)
                body.drain_converted(body.for_each_fragment(body.convert(codes)))

        @pl.when(warpgroup < consumers)
        def _():
            body = self._enter(2, given, scratch, codes)
            body.for_each_fragment(body.consume(warpgroup, tuple(out.at[body.head] for out in outs)))

    def _enter(self, role: int, given: Inputs, scratch: Scratch, codes: Codes | None) -> _Cta:
        """Take the registers of a role; each finds its place for itself, as what all share would take registers."""
        self._take_registers(role)
        worker, head = lax.axis_index("worker"), lax.axis_index("head")
        row = head if self.config.is_listed else lax.div(head, jnp.int32(self.config.heads_per_group))
        return _Cta(self.config, given, scratch, worker, head, row, given.layer[0], codes)

    def _take_registers(self, role: int) -> None:
        """Share the registers unequally where a converter takes a part of them."""
        if not self.config.is_coded:
            return
        before, *after = _REGISTERS[self.config.shape.consumers]
        plgpu.set_max_registers(after[role], action="increase" if after[role] > before else "decrease")


@dataclasses.dataclass(frozen=True)
class _Cta(Run):
    """What the warpgroups of a CTA do; `codes` is where pages of codes arrive."""

    codes: Codes | None

    @property
    def arrivals(self) -> tuple[Any, int]:
        """Where pages arrive, and how many blocks of them fit."""
        return (self.at, self.config.stages) if self.codes is None else (self.codes, self.config.code_stages)

    def _slots(self, part):
        """Slots of a piece in its page, so that the compiler sees what they are multiples of."""
        piece = self.config.piece
        return pl.ds(0 if piece == self.config.page_size else part * piece, piece)

    def _slot(self, step):
        return lax.rem(step, jnp.int32(self.config.stages))

    def produce(self, pool):
        """The producer's part of a fragment."""
        config, at, (into, stages) = self.config, self.at, self.arrivals

        def fragment(tile, first, count, before):
            pl.when(before > 0)(lambda: plgpu.barrier_wait(at.q_free))
            for kind in range(config.kinds):
                for part in range(config.parts):
                    q = self.given.q.at[tile, self.head, kind, part]
                    plgpu.copy_gmem_to_smem(q, at.queries.at[kind, part, pl.ds(0, config.rows)], at.q_full)

            def pages_of(i):
                return [self.page_of(tile, first + i, j) for j in range(config.pieces)]

            def fetch(i, pages):
                step = before + i
                slot = lax.rem(step, jnp.int32(stages))
                is_reused = step >= stages
                # Read a block ahead, so that the copies of a block do not wait for its ids.
                following = pages_of(i + 1)
                pl.when(is_reused)(lambda: plgpu.barrier_wait(into.k_free.at[slot]))
                for j, (page, part) in enumerate(pages):
                    fetch_keys(config, pool, page, self._slots(part), into, slot, j)
                pl.when(is_reused)(lambda: plgpu.barrier_wait(into.v_free.at[slot]))
                for j, (page, part) in enumerate(pages):
                    fetch_values(config, pool, page, self._slots(part), into, slot, j)
                return following

            lax.fori_loop(0, count, fetch, pages_of(0))

        return fragment

    def convert(self, codes: Codes):
        """The converter's part of a fragment."""
        config, at = self.config, self.at

        def fragment(tile, first, count, before):
            def of_block(i, _):
                step = before + i
                stage, slot = lax.rem(step, jnp.int32(config.code_stages)), self._slot(step)
                is_reused = step >= config.stages
                pl.when(is_reused)(lambda: plgpu.barrier_wait(at.k_free.at[slot]))
                convert_keys(config, codes, stage, at, slot)
                pl.when(is_reused)(lambda: plgpu.barrier_wait(at.v_free.at[slot]))
                convert_values(config, codes, stage, at, slot)
                return _

            lax.fori_loop(0, count, of_block, jnp.int32(0))

        return fragment

    def drain(self, steps):
        """Wait for what nobody else waits for, so that no barrier ends with a phase unseen."""
        pl.when(steps > 0)(lambda: plgpu.barrier_wait(self.at.q_free))
        self._drain(steps, *self.arrivals)

    def drain_converted(self, steps):
        """The same for the converter."""
        self._drain(steps, self.at, self.config.stages)

    def _drain(self, steps, at, stages):
        for slot in range(stages):

            @pl.when(steps > slot)
            def _(slot=slot):
                plgpu.barrier_wait(at.k_free.at[slot])
                plgpu.barrier_wait(at.v_free.at[slot])

    def consume(self, me, outs):
        """A consumer's part of a fragment."""
        config, at = self.config, self.at
        part = me if config.shape.shares_blocks else 0
        stride = jnp.int32(1 if config.shape.shares_blocks else config.shape.consumers)
        of_rows, has_minima = plgpu.Layout.WGMMA.reduce(1), config.forms[1].num_scales == 2

        def fragment(tile, first, count, before):
            plgpu.barrier_wait(at.q_full)
            for kind in range(config.kinds if config.sums_queries else 0):
                sum_queries(at.queries.at[kind, part], at.query_sums.at[me, kind])
            # Read here and not for each block: registers are scarce there.
            limits_of = self.limits(tile, part)
            may_be_empty = self.may_be_empty(tile)
            # By steps, not by blocks, so that a buffer always has the same reader: waits count a barrier's phases.
            begin = 0 if config.shape.shares_blocks else lax.rem(me + stride - lax.rem(before, stride), stride)

            def attend(i, carry):
                number = begin + i * stride
                slot, block = self._slot(before + number), first + number
                kind, limits = limits_of(block)
                zero = lambda: pl.when(may_be_empty(block))(lambda: self._zero_empty(me, slot))  # noqa: E731
                store = lambda logits: self._store_logits(logits, me, [of.at[tile, part, block] for of in outs[2:]])  # noqa: E731
                return attend_block(config, at, me, slot, (kind, part), limits, carry, zero, store)

            start = (
                plgpu.layout_cast(jnp.zeros((ROWS, config.head_dim), jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((ROWS,), EMPTY / 2, jnp.float32), of_rows),
                *(plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), of_rows) for _ in range(1 + has_minima)),
            )
            carry = lax.fori_loop(0, lax.div(count - begin + stride - 1, stride), attend, start)
            self._store(carry, me, [of.at[tile + self.worker, me] for of in outs[:2]])

        return fragment

    def _zero_empty(self, me, slot):
        """Zero the values of empty slots: those behind the last token may hold NaN, and 0 x NaN is NaN."""
        at = self.at
        if self.config.readers == 1:
            zero_empty(at.values.at[slot], at.positions.at[slot])
            return

        @pl.when(me == 0)
        def _():
            zero_empty(at.values.at[slot], at.positions.at[slot])
            plgpu.barrier_arrive(at.zeroed)

        pl.when(me != 0)(lambda: plgpu.barrier_wait(at.zeroed))

    def _store_logits(self, logits, me, there):
        for of_block in there:  # none, if they are not wanted
            self._store_columns(logits, me, [of_block.at[i] for i in range(of_block.shape[0])])

    def _store(self, carry, me, there):
        at, (acc, maximum, total, *minima), (out, stats) = self.at, carry, there
        at.stats[me, 0] = maximum
        at.stats[me, 1] = total
        plgpu.commit_smem()
        plgpu.barrier_arrive(at.q_free)
        for of_rows in minima:  # the same in every column
            acc = acc + lax.broadcast_in_dim(of_rows, acc.shape, [0])
        columns = self.config.columns
        self._store_columns(acc, me, [out.at[:, pl.ds(i, columns)] for i in range(0, self.config.head_dim, columns)])
        plgpu.copy_smem_to_gmem(at.stats.at[me], stats)
        plgpu.wait_smem_to_gmem(0)

    def _store_columns(self, matrix, me, there):
        """Copy the columns of a matrix to device memory, as many at a time as there are buffers."""
        at, columns, buffers = self.at, self.config.columns, self.at.out.shape[1]
        for begin in range(0, len(there), buffers):
            plgpu.wait_smem_to_gmem(0)
            now = there[begin : begin + buffers]
            for i in range(len(now)):
                at.out[me, i] = matrix[:, (begin + i) * columns : (begin + i + 1) * columns]
            plgpu.commit_smem()
            for i, of_columns in enumerate(now):
                plgpu.copy_smem_to_gmem(at.out.at[me, i, pl.ds(0, self.config.rows)], of_columns)
