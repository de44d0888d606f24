"""The TPU kernel: tiles of queries over pages that copies fetch by page id. One kernel for decode and prefill.

A TensorCore walks the grid (slice of KV heads, tile) one step after another. The pool stays in HBM; a block of a few
pages is copied into one of two buffers while the block before it is attended to, across the ends of steps:

    ids          | of step s + 2 ...                            page table -> scalar memory
    pages        | keys, values, positions of the next block    pool -> vector memory; of step s or s + 1
    computation  | products, mask and softmax of this block; at the end of a step sink logits, division, output
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from kvjax.kernels.paged_attention.tpu_block import (
    Buffers,
    Tile,
    attend_block,
    finish,
    positions_of,
    start_tile,
    zero_empty,
)
from kvjax.kernels.paged_attention.tpu_codes import Pages, read_scales
from kvjax.kernels.paged_attention.tpu_fetch import Fetch, Pool
from kvjax.kernels.paged_attention.tpu_plan import PAGES, PLACE, POSITION, START, TOKENS, Choices, Plan

_ROWS_OF_IDS = 3  # of this step, the next with work, and the one after it
OfSlots = Float32[Array, "steps blocks heads rows slots"]
# What `Buffers.state` holds.
BLOCKS, STEPS, FOLLOWING = range(3)


def _kernel(*refs, choices: Choices) -> None:
    """One step of the grid."""
    plan, q, pool, at, rest = Plan(*refs[:3]), refs[3], refs[4], refs[-1], list(refs[5:-1])
    sink_query = rest.pop(0) if choices.has_sink_query else None
    sink_logits = rest.pop(0) if choices.has_sink_logits else None
    out, lse = rest.pop(0), rest.pop(0)
    of_slots = rest.pop(0) if choices.has_logits else None
    fetch, end, number = Fetch(choices, plan, pool, at), plan.steps.shape[1], pl.program_id(1)
    step = pl.program_id(0) * plan.tiles.shape[1] + number

    @pl.when(step == 0)
    def _():
        first = _next_with_work(plan, 0)
        second = _next_with_work(plan, first + 1)
        at.state[BLOCKS], at.state[STEPS], at.state[FOLLOWING] = 0, 0, second
        pl.when(second < end)(lambda: fetch.start_ids(second, 1))

        @pl.when(first < end)
        def _():
            fetch.start_ids(first, 0)
            fetch.wait_ids(first, 0)
            fetch.start(first, 0, 0, 0)

    if choices.full_only:

        @pl.when((plan.steps[PAGES, step] == 0) & (plan.tiles[TOKENS, number] > 0))
        def _():
            out[...], lse[...] = jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)

    @pl.when(plan.steps[PAGES, step] > 0)
    def _():
        before, steps, following = (at.state[i] for i in (BLOCKS, STEPS, FOLLOWING))
        second = _next_with_work(plan, following + 1)
        row, next_row, last_row = (lax.rem(steps + i, _ROWS_OF_IDS) for i in range(_ROWS_OF_IDS))
        pl.when(second < end)(lambda: fetch.start_ids(second, last_row))
        start_tile(at)
        of_tile = (plan.tiles[of, number] for of in (TOKENS, POSITION, START))
        tile = Tile(q, fetch.first_head(step), sink_query, *of_tile, window=plan.limits[1])
        blocks = pl.cdiv(plan.steps[PAGES, step], choices.shape.pages)

        def block(i, _):
            slot, next_slot = (lax.rem(before + i + ahead, choices.shape.stages) for ahead in range(2))
            is_last = i + 1 == blocks
            pl.when(jnp.logical_not(is_last))(lambda: fetch.start(step, i + 1, next_slot, row))

            @pl.when(is_last & (following < end))
            def _():
                fetch.wait_ids(following, next_row)
                fetch.start(following, 0, next_slot, next_row)

            fetch.wait(step, i, slot)
            _attend(choices, at, tile, slot, fetch.live(step, i), i, is_last)
            if of_slots is not None:
                copy = pltpu.make_async_copy(at.logits, of_slots.at[step, i], at.logits_out)
                copy.start()
                copy.wait()
            return 0

        lax.fori_loop(0, blocks, block, 0)
        finish(at, sink_logits, out, lse)
        at.state[BLOCKS], at.state[STEPS], at.state[FOLLOWING] = before + blocks, steps + 1, second


def _attend(choices: Choices, at: Buffers, tile: Tile, slot, live, i, is_last) -> None:
    """Attend to the block in a buffer, in one of few compiled forms."""
    positions = positions_of(at, slot, live)
    read_scales(at.keys, at.key_rows, slot, positions >= 0)
    read_scales(at.values, at.value_rows, slot, positions >= 0)
    if choices.is_listed:
        zero_empty(at, slot, positions)
    else:
        pl.when(is_last)(lambda: zero_empty(at, slot, positions))
    num_rows = tile.q.shape[2]
    few = min(-(-choices.query_heads // 8) * 8, num_rows)

    def attend(has_sinks: bool) -> None:
        # A decode row in a mixed step needs only the first rows of its tile.
        if few < num_rows:
            pl.when(tile.tokens == 1)(lambda: attend_block(choices, at, slot, tile, positions, few, has_sinks))
            pl.when(tile.tokens != 1)(lambda: attend_block(choices, at, slot, tile, positions, num_rows, has_sinks))
        else:
            attend_block(choices, at, slot, tile, positions, num_rows, has_sinks)

    if not choices.has_sink_query or choices.is_listed:
        attend(choices.has_sink_query)
    else:
        is_pinned = i * choices.shape.pages < choices.pinned
        pl.when(is_pinned)(lambda: attend(True))
        pl.when(jnp.logical_not(is_pinned))(lambda: attend(False))


def _next_with_work(plan: Plan, step):
    """The first step from `step` on that has pages, or the number of steps."""
    end = plan.steps.shape[1]
    has_none = lambda i: (i < end) & (plan.steps[PAGES, jnp.minimum(i, end - 1)] == 0)  # noqa: E731
    return lax.while_loop(has_none, lambda i: i + 1, step)


def attend_tiles(
    q: Float[Array, "places kv_heads rows head_dim"],
    pool: Pool,
    plan: Plan,
    sink_query: Float[Array, "places kv_heads rows head_dim"] | None,
    sink_logits: Float32[Array, "kv_heads rows 1"] | None,
    choices: Choices,
    interpret: Any = None,
) -> tuple[Float[Array, "places kv_heads rows head_dim"], Float32[Array, "places kv_heads rows 1"], OfSlots | None]:
    """Return outputs and log-sum-exp of every tile, at its place, and on request the logits of the slots it reads.

    Logits come in the order of the plan: step, block, head of the slice, row, slot. What belongs to no tile or block
    may hold anything.

    Args:
        q: unscaled queries, a row is a token and one of its query heads.
        pool: what stays in HBM; codes are never copied.
        plan: the steps.
        sink_query, sink_logits: in rows like those of `q`.
        choices: what is static.
        interpret: `pltpu.InterpretParams` to run without a TPU.
    """
    _, kv_heads, num_rows, head_dim = q.shape
    heads = choices.shape.heads

    def of_tile(width: int):
        return pl.BlockSpec(
            (1, heads, num_rows, width), lambda part, tile, steps, tiles, limits: (tiles[PLACE, tile], part, 0, 0)
        )

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    optional = [
        (sink_query, of_tile(head_dim)),
        (sink_logits, pl.BlockSpec((heads, num_rows, 1), lambda part, tile, *_: (part, 0, 0))),
    ]
    optional = [(array, spec) for array, spec in optional if array is not None]
    outs = [
        (jax.ShapeDtypeStruct(q.shape, q.dtype), of_tile(head_dim)),
        (jax.ShapeDtypeStruct((*q.shape[:3], 1), jnp.float32), of_tile(1)),
    ]
    if choices.has_logits:
        pages, steps = choices.shape.pages, plan.steps.shape[1]
        of_slots = (steps, pl.cdiv(pool.table.shape[-1], pages), heads, num_rows, pages * choices.page_size)
        outs.append((jax.ShapeDtypeStruct(of_slots, jnp.float32), in_hbm))
    buffers: Any = _buffers(choices, pool, num_rows, head_dim)
    out, lse, *logits = pl.pallas_call(
        functools.partial(_kernel, choices=choices),
        out_shape=[shape for shape, _ in outs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(kv_heads // heads, plan.tiles.shape[1]),
            in_specs=[of_tile(head_dim), jax.tree.map(lambda _: in_hbm, pool), *(spec for _, spec in optional)],
            out_specs=[spec for _, spec in outs],
            scratch_shapes=[buffers],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=False if interpret is None else interpret,
        name="paged_attention_tpu",
    )(plan.steps, plan.tiles, plan.limits, q, pool, *(array for array, _ in optional))
    return out, lse, logits[0] if logits else None


def _buffers(choices: Choices, pool: Pool, num_rows: int, head_dim: int) -> Buffers:
    """The kernel's memory, for tiles of `num_rows` rows."""
    heads, stages, pages = choices.shape.heads, choices.shape.stages, choices.shape.pages
    slots = pages * choices.page_size

    def of_pages(stored: Pages) -> Pages:
        scales = tuple(pltpu.VMEM((stages, pages, *of.shape[1:]), of.dtype) for of in stored.scales)
        return Pages(pltpu.VMEM((stages, heads, slots, stored.codes.shape[3]), stored.codes.dtype), scales, stored.form)

    def rows_of(stored: Pages) -> tuple[Any, ...]:
        row = (pages, 1, head_dim) if stored.form.is_per_channel else (1, slots)
        return tuple(pltpu.VMEM((stored.codes.shape[1], *row), jnp.float32) for _ in stored.scales)

    return Buffers(
        keys=of_pages(pool.keys),
        values=of_pages(pool.values),
        positions=pltpu.VMEM((stages, pages, choices.page_size), jnp.int32),
        ids=pltpu.SMEM((_ROWS_OF_IDS, pool.table.shape[-1]), jnp.int32),
        acc=pltpu.VMEM((heads, num_rows, head_dim), jnp.float32),
        maximum=pltpu.VMEM((heads, num_rows, 1), jnp.float32),
        total=pltpu.VMEM((heads, num_rows, 1), jnp.float32),
        state=pltpu.SMEM((3,), jnp.int32),
        pages_in=pltpu.SemaphoreType.DMA((stages,)),
        ids_in=pltpu.SemaphoreType.DMA((_ROWS_OF_IDS,)),
        key_rows=rows_of(pool.keys),
        value_rows=rows_of(pool.values),
        logits=pltpu.VMEM((heads, num_rows, slots), jnp.float32) if choices.has_logits else None,
        logits_out=pltpu.SemaphoreType.DMA if choices.has_logits else None,
    )
