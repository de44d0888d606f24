"""The static choices of the Hopper kernel and what its warpgroups share: arrays, shared memory, barriers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.formats import Format
from kvjax.kernels.paged_attention.tiles import sink_blocks

ROWS = 64  # of one warpgroup's product
_OUT_COLUMNS = 128  # of the result in shared memory at a time
_CODES_IN_FLIGHT = 48 << 10  # bytes: about 36 KB hide a microsecond of latency at full rate
_SHARED_BYTES = 219 << 10  # of 227 KB: each array begins at a multiple of 1 KB


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static choices.

    Attributes:
        block: slots of a block.
        stages: blocks in flight; a multiple of the consumers that take turns. Pages of codes have stages of their own.
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


@dataclasses.dataclass(frozen=True)
class Config:
    """All that is static about a call.

    Attributes:
        shape: how the work is cut.
        page_size, heads_per_group: of the pool.
        head_dim: of queries, keys and values.
        forms: formats of keys and of values.
        heads: query heads of a KV head.
        tile_tokens: most tokens of a tile.
        kinds: 2 if the sinks are seen by a query of their own, else 1.
        sinks: first tokens that every query sees.
        is_listed: tables hold the pages of each KV head, in any order and with gaps.
        has_logits: whether the logits are wanted.
        scale, soft_cap: of the logits.
        is_interpreted: whether the interpreter runs this.
    """

    shape: Shape
    page_size: int
    heads_per_group: int
    head_dim: int
    forms: tuple[Format, Format]
    heads: int
    tile_tokens: int
    kinds: int
    sinks: int
    is_listed: bool
    has_logits: bool
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

    @property
    def parts(self) -> int:
        """Parts of a tile's rows, one for each consumer that has rows of its own."""
        return self.readers

    @property
    def rows(self) -> int:
        """Rows of a part that may hold tokens, a multiple of 8."""
        return ROWS if self.tile_tokens > 1 else -(-self.heads // 8) * 8

    @property
    def pinned(self) -> int:
        """Pages that hold the sinks."""
        return -(-self.sinks // self.page_size)

    @property
    def sink_blocks(self) -> int:
        """Blocks for the sinks that a tile's list begins with."""
        return sink_blocks(self.sinks, self.shape.block)

    @property
    def columns(self) -> int:
        """Columns of a result that one copy stores."""
        return tile_columns(self.head_dim)

    @property
    def is_coded(self) -> bool:
        """Whether pages hold codes, which a warpgroup of its own converts."""
        return self.forms[0].is_quantized

    @property
    def stages(self) -> int:
        """Blocks in shared memory as the products read them, a multiple of the consumers that take turns."""
        return self.shape.consumers if self.is_coded else self.shape.stages

    @property
    def code_stages(self) -> int:
        """Blocks in flight where pages hold codes."""
        block = self.shape.block
        of_codes = sum(self.head_dim // form.per_code * jnp.dtype(form.dtype).itemsize for form in self.forms) * block
        of_channels = lambda form: self.pieces * self.head_dim if form.is_per_channel else block  # noqa: E731
        of_scales = sum(2 * form.num_scales * of_channels(form) for form in self.forms)
        arrays = [of for of in self.scratch(jnp.bfloat16).values() if not isinstance(of, plgpu.Barrier)]
        used = sum(math.prod(of.shape) * jnp.dtype(of.dtype).itemsize for of in arrays)
        return min(-(-_CODES_IN_FLIGHT // of_codes), (_SHARED_BYTES - used) // (of_codes + of_scales + 4 * block))

    @property
    def tile_columns(self) -> int:
        """Columns of a swizzled tile; a tile of codes has as many, so that both are written by the same threads."""
        return min(tile_columns(self.head_dim // form.per_code) for form in self.forms)

    @property
    def sums_queries(self) -> bool:
        """Whether slots have minima that the sum of a query multiplies."""
        return self.forms[0].num_scales == 2 and not self.forms[0].is_per_channel

    def scratch(self, dtype) -> dict[str, Any]:
        """Shared memory and barriers for `Scratch`."""
        shape, stages, columns = self.shape, self.stages, self.tile_columns
        # pyright takes these classes for abstract ones.
        transforms = (
            plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
            plgpu.SwizzleTransform(2 * columns),  # pyright: ignore[reportAbstractUsage]
        )
        # Queries for the sinks take the place of a buffer; where logits are stored, two would cost registers.
        copies = 1 if self.kinds > 1 or self.has_logits else min(self.head_dim, _OUT_COLUMNS) // self.columns
        arrivals = (1, self.readers, 1, self.readers) if self.is_coded else (
            2 * self.pieces, self.readers, self.pieces, self.readers
        )  # fmt: skip
        barriers = [plgpu.Barrier(num_arrivals=count, num_barriers=stages) for count in arrivals]
        # Numbers of 8-bit floats, and weights times their scales, need the range of bfloat16.
        value_dtype = jnp.bfloat16 if self.is_coded else dtype
        scratch = dict(
            queries=plgpu.SMEM((self.kinds, self.parts, ROWS, self.head_dim), dtype, transforms=transforms),
            keys=plgpu.SMEM((stages, shape.block, self.head_dim), dtype, transforms=transforms),
            values=plgpu.SMEM((stages, shape.block, self.head_dim), value_dtype, transforms=transforms),
            positions=plgpu.SMEM((stages, shape.block), jnp.int32),
            out=plgpu.SMEM((shape.consumers, copies, ROWS, self.columns), jnp.float32),
            stats=plgpu.SMEM((shape.consumers, 2, ROWS), jnp.float32),
            q_full=plgpu.Barrier(num_arrivals=self.kinds * self.parts),
            q_free=plgpu.Barrier(num_arrivals=shape.consumers),
            zeroed=plgpu.Barrier(num_arrivals=1),
            **dict(zip(("k_full", "k_free", "v_full", "v_free"), barriers, strict=True)),
        )
        for name, form in zip(("key_scales", "value_scales"), self.forms, strict=True):
            if form.num_scales and not form.is_per_channel:
                scratch[name] = plgpu.SMEM((stages, form.num_scales, shape.block), jnp.float32)
        if self.sums_queries:
            scratch["query_sums"] = plgpu.SMEM((shape.consumers, self.kinds, ROWS), jnp.float32)
        return scratch


class Inputs(NamedTuple):
    """The kernel's inputs in device memory.

    Attributes:
        q: [tiles, kv_heads, kinds, parts, rows, head_dim], unscaled; the second kind is for sinks.
        keys, values, positions: the pool; keys and values as they are stored, without scales.
        page_table, rings, windows: of all layers; see `Rows`.
        layer: int32 [1].
        sequence, tokens, position, start: of tiles; see `Tiles`.
        first_piece, end_piece, empty_slot, begin_block, end_block, per_worker, first_tile, end_tile: see `Work`.
    """

    q: Any
    keys: Any
    values: Any
    positions: Any
    page_table: Any
    rings: Any
    windows: Any
    layer: Any
    sequence: Any
    tokens: Any
    position: Any
    start: Any
    first_piece: Any
    end_piece: Any
    empty_slot: Any
    begin_block: Any
    end_block: Any
    per_worker: Any
    first_tile: Any
    end_tile: Any


class Scratch(NamedTuple):
    """The kernel's shared memory and barriers.

    Attributes:
        queries: [kinds, parts, 64, head_dim].
        keys, values: [stages, block, head_dim], numbers where pages hold codes.
        positions: int32 [stages, block].
        out: float32 [consumers, copies, 64, columns].
        stats: float32 [consumers, 2, 64], maximum and total.
        q_full, k_full, v_full: a copy has arrived.
        q_free, k_free, v_free: its readers have done.
        zeroed: the first consumer has zeroed the values of empty slots.
        key_scales, value_scales: float32 [stages, 1 or 2, block], scales and minima of slots, where they have any.
        query_sums: float32 [consumers, kinds, 64], where slots of keys have minima.
    """

    queries: Any
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
    key_scales: Any = None
    value_scales: Any = None
    query_sums: Any = None


def tile_columns(head_dim: int) -> int:
    """Columns of a swizzled tile in shared memory."""
    return 64 if head_dim % 64 == 0 else 32
