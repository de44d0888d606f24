"""The definition of paged attention, in numpy float64: one query, one head, one slot after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.kernels.formats import Stored
from kvjax.kernels.paged_attention.arguments import Attention, Queries, Rows

HostArray = np.ndarray | Array


def paged_attention(
    q: HostArray,
    keys: HostArray | Stored,
    values: HostArray | Stored,
    positions: HostArray,
    rows: Rows,
    queries: Queries,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_logits: HostArray | None = None,
    sink_query: HostArray | None = None,
    page_list: HostArray | None = None,
    open_keys: HostArray | None = None,
    last_logits: int = 0,
    max_query_length: int | None = None,
) -> Attention:
    """Attend every query token to the visible slots of its sequence.

    A slot is visible if its position is from the sequence's start up to the query's own, and either less than the
    layer's window away or one of the sequence's first `rows.sinks`.

    Args:
        q: [tokens, heads, head_dim], rotated, packed.
        keys, values: [pages, heads_per_group, page_size, head_dim], or stored in a format; where that rotates, queries
            come rotated and outputs leave rotated.
        positions: int32 [pages, page_size], -1 where empty.
        rows, queries: the pages of the layer and the tokens of the step.
        scale: factor of the logits.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        sink_logits: [heads], a logit more in each head's softmax that has no value.
        sink_query: [tokens, heads, head_dim], takes the place of `q` for the slots of the first `rows.sinks` positions.
        page_list: int32 [kv_heads, seqs, n], ids of the pages to read in place of all, 0 for none; for steps of at most
            one query token a sequence.
        open_keys: [layers, groups, seqs, heads_per_group, page_size, head_dim], keys of the page that a row's
            `end_slot` lies in, if it is not full: for formats that are per channel.
        last_logits: how many of each sequence's last queries to return the logits of (static).
        max_query_length: unused here.

    Returns: float64 arrays; see `Attention`.
    """
    q, keys, values = np.asarray(q, np.float64), decoded(keys), decoded(values)
    layer = Layer.of(rows, positions, page_list, keys.shape[1])
    if open_keys is not None:
        keys = layer.with_open(keys, np.asarray(open_keys, np.float64)[int(rows.layer)])
    seen_by_sinks = q if sink_query is None else np.asarray(sink_query, np.float64)
    sinks = None if sink_logits is None else np.asarray(sink_logits, np.float64)
    heads_per_kv_head = q.shape[1] // layer.kv_heads
    out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf)
    lengths = np.asarray(queries.lengths).tolist()
    logits = np.full((len(lengths), last_logits, q.shape[1], layer.num_slots), -np.inf)
    for sequence, i, place, position, start in each_query(queries):
        for head in range(q.shape[1]):
            kv_head = head // heads_per_kv_head
            seen = list(layer.visible(kv_head, sequence, start, position))
            if not seen:
                continue
            within = kv_head % keys.shape[1]
            of_slots = np.array([
                scale * (keys[page, within, slot] @ (seen_by_sinks if is_sink else q)[place, head])
                for _, page, slot, is_sink in seen
            ])  # fmt: skip
            if soft_cap is not None:
                of_slots = soft_cap * np.tanh(of_slots / soft_cap)
            from_end = lengths[sequence] - i
            if from_end <= last_logits:
                logits[sequence, last_logits - from_end, head, [index for index, *_ in seen]] = of_slots
            rest = [] if sinks is None else [sinks[head]]
            highest = max([of_slots.max(), *rest])
            weights = np.exp(of_slots - highest)
            total = weights.sum() + sum(np.exp(sink - highest) for sink in rest)
            out[place, head] = weights / total @ np.array([values[page, within, slot] for _, page, slot, _ in seen])
            lse[place, head] = highest + np.log(total)
    return Attention(out, lse, logits if last_logits else None)  # pyright: ignore[reportArgumentType]


def decoded(pages: HostArray | Stored) -> np.ndarray:
    """What stored vectors stand for, float64."""
    if not isinstance(pages, Stored):
        return np.asarray(pages, np.float64)
    axis = -2 if pages.form.is_per_channel else -1
    codes, scales = np.asarray(pages.codes), [np.expand_dims(np.asarray(of, np.float64), axis) for of in pages.scales]
    if pages.form.bits_of is not None:
        codes = codes.view(jnp.dtype(pages.form.bits_of))
    if pages.form.per_code == 2:
        codes = np.concatenate([codes & 15, codes >> 4], axis=-1)
    values = codes.astype(np.float64)
    values = values * scales[0] if scales else values
    return values + scales[1] if len(scales) == 2 else values


def each_query(queries: Queries) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (sequence, number among its queries, place, position, position of the sequence's start)."""
    # In numpy before the loops: inside a callback an operation of jax could wait for the callback itself.
    of_queries = (queries.starts, queries.lengths, queries.positions, queries.start_positions)
    of_queries = zip(*(np.asarray(array).tolist() for array in of_queries), strict=True)
    for sequence, (place, length, position, start) in enumerate(of_queries):
        for i in range(length):
            yield sequence, i, place + i, position + i, start


class Layer(NamedTuple):
    """The rows of one layer, in numpy."""

    positions: np.ndarray
    table: np.ndarray
    first_page: np.ndarray
    end_slot: np.ndarray
    page_list: np.ndarray | None
    heads_per_group: int
    ring: int
    window: int
    sinks: int
    end_page: Callable[[int, int], int]

    @classmethod
    def of(cls, rows: Rows, positions: HostArray, page_list: HostArray | None, heads_per_group: int) -> Layer:
        """Take the layer that `rows` means."""
        layer = int(rows.layer)
        table, first_page, end_slot, rings, windows = (
            np.asarray(of)[layer] for of in (rows.page_table, rows.first_page, rows.end_slot, rows.rings, rows.windows)
        )
        page_list = None if page_list is None else np.asarray(page_list)
        return cls(
            np.asarray(positions), table, first_page, end_slot, page_list, heads_per_group, int(rings), int(windows),
            rows.sinks, rows.end_page,
        )  # fmt: skip

    @property
    def kv_heads(self) -> int:
        return self.heads_per_group * self.table.shape[0]

    @property
    def num_slots(self) -> int:
        """Slots of a row's entries, or of a list of pages."""
        return (self.table if self.page_list is None else self.page_list).shape[-1] * self.positions.shape[1]

    def with_open(self, keys: np.ndarray, open_keys: np.ndarray) -> np.ndarray:
        """Keys of all pages, with those of the open ones in their place."""
        keys, size = keys.copy(), self.positions.shape[1]
        for group, sequence in np.argwhere(self.end_slot % size > 0):
            page = self.table[group, sequence, self._entry(int(self.end_slot[group, sequence]) // size)]
            keys[page] = open_keys[group, sequence]
        return keys

    def _entry(self, logical: int) -> int:
        pinned = -(-self.sinks // self.positions.shape[1])
        return logical if logical < pinned else pinned + (logical - pinned) % self.ring

    def visible(self, kv_head: int, sequence: int, start: int, query: int) -> Iterator[tuple[int, int, int, bool]]:
        """Yield (number in the row, page, slot, whether it is a sink) of all slots visible to a query."""
        for entry, page in self._pages(kv_head, sequence):
            for slot, position in enumerate(self.positions[page].tolist()):
                is_sink = position - start < self.sinks
                if start <= position <= query and (query - position < self.window or is_sink):
                    yield entry * self.positions.shape[1] + slot, page, slot, is_sink

    def _pages(self, kv_head: int, sequence: int) -> Iterator[tuple[int, int]]:
        """Yield (entry, page) of a row, or of the list in its place."""
        if self.page_list is not None:
            yield from enumerate(self.page_list[kv_head, sequence].tolist())
            return
        group = kv_head // self.heads_per_group
        pinned = -(-self.sinks // self.positions.shape[1])
        end = self.end_page(int(self.end_slot[group, sequence]), self.positions.shape[1])
        first = max(int(self.first_page[group, sequence]), pinned)
        for logical in (*range(min(pinned, end)), *range(first, end)):
            entry = self._entry(logical)
            yield entry, int(self.table[group, sequence, entry])
