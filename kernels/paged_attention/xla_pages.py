"""Which pages a sequence reads, and reading them, in XLA: shared by all loops over pages."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from kvjax.kernels.formats import Stored
from kvjax.kernels.paged_attention.arguments import Rows
from kvjax.kernels.paged_attention.xla_numbers import Numbers, widen
from kvjax.kernels.pytree import pytree


@pytree
class Tokens:
    """Query tokens, and the same ones as the sinks see them: None if that is no different."""

    q: Float[Array, ...]
    of_sinks: Float[Array, ...] | None

    def map(self, function) -> Tokens:
        return jax.tree.map(function, self)


@dataclasses.dataclass(frozen=True)
class Pages:
    """Pages of several sequences to read together.

    Attributes:
        ids: int32 [n, groups, block]; those that are not live stand for another page of their row, whose values are
            finite: trash may hold NaN.
        entry: int32 [groups, n, block], where in the row they stand.
        live: bool [groups, n, block], whether they are asked for.
    """

    ids: Int32[Array, "n groups block"]
    entry: Int32[Array, "groups n block"]
    live: Bool[Array, "groups n block"]


@dataclasses.dataclass(frozen=True)
class Block:
    """Pages, and what some queries see of their slots.

    Attributes:
        visible: bool [n, kv_heads or 1, queries, slots].
        distance: int32, likewise, how many positions a slot lies before a query.
        is_sink: bool [n, kv_heads or 1, 1, slots], which slots see `Tokens.of_sinks`; None if none does.
    """

    pages: Pages
    visible: Bool[Array, "n heads queries slots"]
    distance: Int32[Array, "n heads queries slots"]
    is_sink: Bool[Array, "n heads 1 slots"] | None


@dataclasses.dataclass(frozen=True)
class Pool:
    """The pool and how one layer reads it; see `reference.paged_attention`."""

    keys: Stored
    values: Stored
    positions: Int32[Array, "pages page_size"]
    rows: Rows
    scale: float
    soft_cap: float | None
    sink_logits: Float[Array, " heads"] | None

    @property
    def page_size(self) -> int:
        return self.positions.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.keys.codes.shape[1] * self.rows.page_table.shape[1]

    @property
    def groups(self) -> int:
        """Sets of KV heads that read the same pages."""
        return self.rows.page_table.shape[1]

    @property
    def entries(self) -> int:
        """Pages a sequence can have."""
        return self.rows.page_table.shape[-1]

    @property
    def pinned(self) -> int:
        """Pages at the front of a row that are read on their own."""
        return self.rows.pinned(self.page_size)

    @property
    def lists_sinks(self) -> bool:
        """Whether sinks are among the pages that are not pinned."""
        return False

    @property
    def is_open(self) -> bool:
        """Whether open pages are read, which take the pinned ones' place, and nothing else."""
        return False

    @property
    def first_page(self) -> Int32[Array, "groups seqs"]:
        first = self._of_layer(self.rows.first_page)
        return jnp.maximum(first, self.pinned) if self.pinned else first

    @property
    def end_slot(self) -> Int32[Array, "groups seqs"]:
        return self._of_layer(self.rows.end_slot)

    @property
    def window(self) -> Int32[Array, ""]:
        return self._of_layer(self.rows.windows)

    @property
    def held(self) -> Int32[Array, "groups seqs"]:
        """Pages behind the pinned ones."""
        return self.end_page - self.first_page

    @property
    def end_page(self) -> Int32[Array, "groups seqs"]:
        return self.rows.end_page(self.end_slot, self.page_size)

    def _of_layer(self, of_layers: Array) -> Array:
        return lax.dynamic_index_in_dim(of_layers, self.rows.layer, keepdims=False)

    def locate(self, sequence: Int32[Array, " n"], logical: Int32[Array, "groups n block"], live) -> Pages:
        """Logical pages of sequences; those that are not `live` are replaced by the row's last one."""
        group = jnp.arange(logical.shape[0], dtype=jnp.int32)[:, None, None]
        last = (self.end_slot[:, sequence] - 1) // self.page_size
        page, ring = jnp.where(live, logical, last[..., None]), self._of_layer(self.rows.rings)
        pinned = self.rows.pinned(self.page_size)
        if pinned:
            entry = jnp.where(page < pinned, jnp.maximum(page, 0), pinned + (page - pinned) % ring)
        else:
            entry = page % ring
        where = (self.rows.layer, group, sequence[None, :, None], entry)
        ids = self.rows.page_table.at[where].get(mode="promise_in_bounds")
        # The barrier keeps the index arithmetic out of the gather loops, which would repeat it for every element.
        return Pages(lax.optimization_barrier(ids.swapaxes(0, 1)), entry, live)

    def locate_pinned(self, sequence: Int32[Array, " n"], used: Bool[Array, " n"]) -> Pages:
        """All pinned pages of sequences, live where they hold a token and `used`."""
        logical = jnp.arange(self.pinned, dtype=jnp.int32)[None, None]
        live = (logical < self.end_page[:, sequence][..., None]) & used[None, :, None]
        return self.locate(sequence, jnp.broadcast_to(logical, live.shape), live)

    def locate_from(self, sequence: Int32[Array, " n"], page: Int32[Array, " n"], used, block: int) -> Pages:
        """`block` pages of sequences from their page `page` behind the pinned ones on, live where held and `used`."""
        within = jnp.arange(block, dtype=jnp.int32)[None, None]
        logical = (self.first_page[:, sequence] + page[None])[..., None] + within
        return self.locate(sequence, logical, (logical < self.end_page[:, sequence][..., None]) & used[None, :, None])

    def read_positions(self, pages: Pages) -> Int32[Array, "n groups slots"]:
        """Positions of all slots of pages, -1 for pages that are not live."""
        positions = jnp.where(pages.live.swapaxes(0, 1)[..., None], _take(self.positions, pages.ids), -1)
        return positions.reshape(*pages.ids.shape[:2], -1)

    def read(self, stored: Stored, ids: Int32[Array, "n groups block"], dtype) -> Numbers:
        """Keys or values of all slots of pages, by KV head."""
        tiles, form = lax.optimization_barrier(self._key_tiles(ids)), stored.form
        of_heads = (ids.shape[0], self.kv_heads)

        def take(pool: Array) -> Array:
            # Gathered and converted as flat rows, each step alone: XLA on CPUs copies shorter axes, and what another
            # step is fused with, value by value.
            flat = pool.reshape(pool.shape[0] * pool.shape[1], -1)
            return lax.optimization_barrier(_take(flat, tiles.reshape(-1)))

        parts = lax.optimization_barrier(widen(take(stored.codes), form, dtype))
        width = stored.codes.shape[-1]
        shape = (*of_heads, -1, 1, width * form.per_code) if form.is_per_channel else (*of_heads, 1, -1)
        return Numbers(
            tuple(part.reshape(*of_heads, -1, width) for part in parts),
            tuple(take(scale).astype(jnp.float32).reshape(shape) for scale in stored.scales),
            form,
        )

    def _key_tiles(self, ids: Int32[Array, "n groups block"]) -> Int32[Array, "n groups heads_per_group block"]:
        heads = self.keys.codes.shape[1]
        return ids[:, :, None] * heads + jnp.arange(heads, dtype=jnp.int32)[None, None, :, None]

    def per_kv_head(self, of_groups: Array) -> Array:
        """Repeat axis 1 from head groups to KV heads, or leave it to be broadcast."""
        as_it_is = of_groups.shape[1] in (1, self.kv_heads)
        return of_groups if as_it_is else jnp.repeat(of_groups, self.keys.codes.shape[1], axis=1)

    def view(self, pages: Pages, query: Int32[Array, "n 1 queries 1"], start, *, heads: int, sinks: bool) -> Block:
        """Find what queries see of pages.

        Args:
            query: positions.
            start: positions of the sequences' first tokens, to broadcast against `query`.
            heads: how often the queries are repeated.
            sinks: whether sinks beyond the window may be among the slots.
        """
        seen = self.read_positions(pages)[:, :, None]
        distance = query - seen
        within = distance < self.window
        is_sink = seen - start < self.rows.sinks if sinks else None
        if is_sink is not None:
            within |= is_sink
            is_sink = self.per_kv_head(is_sink)
        visible = (seen >= start) & (seen <= query) & within
        visible, distance = (jnp.tile(self.per_kv_head(of), (1, 1, heads, 1)) for of in (visible, distance))
        return Block(pages, visible, distance, is_sink)

    def logits(self, tokens: Tokens, block: Block) -> Float32[Array, "n kv_heads queries slots"]:
        """Logits of scaled tokens [n, kv_heads, queries, head_dim] at all slots of a block, not capped or masked."""
        product = self.read(self.keys, block.pages.ids, tokens.q.dtype).logits
        if block.is_sink is None or tokens.of_sinks is None:
            return product(tokens.q)
        return jnp.where(block.is_sink, product(tokens.of_sinks), product(tokens.q))

    def cap(self, logits: Float32[Array, ...]) -> Float32[Array, ...]:
        """Soft-cap scaled logits."""
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def scaled(self, q: Float[Array, "n heads head_dim"]) -> Float[Array, "n kv_heads heads_per_kv_head head_dim"]:
        """Queries by KV head, times the factor of the logits."""
        scaled = (q.astype(jnp.float32) * self.scale).astype(q.dtype)
        return scaled.reshape(q.shape[0], self.kv_heads, -1, q.shape[-1])


@dataclasses.dataclass(frozen=True)
class ListedPool(Pool):
    """A pool of which every KV head reads only the pages of a list; see `page_list` in `reference.paged_attention`."""

    page_list: Int32[Array, "kv_heads seqs listed"]

    @property
    def groups(self) -> int:
        return self.kv_heads

    @property
    def entries(self) -> int:
        return self.page_list.shape[-1]

    @property
    def pinned(self) -> int:
        return 0

    @property
    def lists_sinks(self) -> bool:
        return self.rows.sinks > 0

    @property
    def held(self) -> Int32[Array, "kv_heads seqs"]:
        number = jnp.arange(1, self.entries + 1, dtype=jnp.int32)
        return jnp.where(self.page_list != 0, number[None, None], 0).max(-1)

    def locate_from(self, sequence: Int32[Array, " n"], page: Int32[Array, " n"], used, block: int) -> Pages:
        number = page[None, :, None] + jnp.arange(block, dtype=jnp.int32)[None, None]
        entry = jnp.broadcast_to(jnp.minimum(number, self.entries - 1), (self.groups, *number.shape[1:]))
        head = jnp.arange(self.groups, dtype=jnp.int32)[:, None, None]
        ids = self.page_list.at[head, sequence[None, :, None], entry].get(mode="promise_in_bounds")
        live = (ids != 0) & (number < self.entries) & used[None, :, None]
        nowhere = jnp.zeros((self.rows.page_table.shape[1], sequence.shape[0], 1), jnp.int32)
        last = self.per_kv_head(self.locate(sequence, nowhere, nowhere > 0).ids)
        ids = jnp.where(live.swapaxes(0, 1), ids.swapaxes(0, 1), last)
        return Pages(lax.optimization_barrier(ids), entry, live)

    def _key_tiles(self, ids: Int32[Array, "n kv_heads block"]) -> Int32[Array, "n kv_heads block"]:
        heads = self.keys.codes.shape[1]
        return ids * heads + (jnp.arange(self.kv_heads, dtype=jnp.int32) % heads)[None, :, None]


def _take(rows: Array, ids: Int32[Array, ...]) -> Array:
    """Rows of an array by in-range ids, without the index normalisation of indexing."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, rows.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    taken = lax.gather(
        rows, ids.reshape(-1, 1), numbers, (1, *rows.shape[1:]), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS
    )
    return taken.reshape(*ids.shape, *rows.shape[1:])
