"""The definition of paged attention, in numpy float64: one query, one head, one slot after another."""

from __future__ import annotations

import numpy as np
from jaxtyping import Array

from kvjax.kernels.paged_attention.arguments import Queries, Rows

HostArray = np.ndarray | Array


def paged_attention(
    q: HostArray,
    keys: HostArray,
    values: HostArray,
    positions: HostArray,
    rows: Rows,
    queries: Queries,
    *,
    window: int | HostArray,
    scale: float,
    soft_cap: float | None = None,
    sink_logits: HostArray | None = None,
    max_query_length: int | None = None,
) -> np.ndarray:
    """Attend every query token to the visible slots of its sequence.

    A slot is visible if it holds a position from the sequence's start up to the query's own, less than `window` away.

    Args:
        q: [tokens, heads, head_dim], rotated, packed.
        keys, values: [pages, heads_per_group, page_size, head_dim].
        positions: int32 [pages, page_size], -1 where empty.
        rows, queries: the pages of the layer and the tokens of the step.
        window: most positions a query sees, itself included.
        scale: factor of the logits.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
        sink_logits: [heads], a logit more in each head's softmax that has no value.
        max_query_length: unused here.

    Returns: float64 [tokens, heads, head_dim]; zeros for padding and for queries that see nothing.
    """
    q, keys, values = (np.asarray(a, np.float64) for a in (q, keys, values))
    # All in numpy before the loops: inside a callback an operation of jax could wait for the callback itself.
    positions, table, first_page, end_slot = map(
        np.asarray, (positions, rows.page_table, rows.first_page, rows.end_slot)
    )
    of_queries = (queries.starts, queries.lengths, queries.positions, queries.start_positions)
    out = np.zeros_like(q)
    heads_per_kv_head = q.shape[1] // (keys.shape[1] * table.shape[0])
    sinks = None if sink_logits is None else np.asarray(sink_logits, np.float64)
    window, ring = int(window), int(rows.ring)
    of_queries = zip(*(np.asarray(array).tolist() for array in of_queries), strict=True)
    for sequence, (place, length, first_position, start) in enumerate(of_queries):
        for i in range(length):
            for head in range(q.shape[1]):
                group, within = divmod(head // heads_per_kv_head, keys.shape[1])
                row = (table[group, sequence], int(first_page[group, sequence]), int(end_slot[group, sequence]), ring)
                slots = list(_visible(row, positions, start, first_position + i, window))
                if not slots:
                    continue
                logits = np.array([scale * (keys[page, within, slot] @ q[place + i, head]) for page, slot in slots])
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                rest = [] if sinks is None else [sinks[head]]
                weights = np.exp(logits - max([logits.max(), *rest]))
                total = weights.sum() + sum(np.exp(sink - max([logits.max(), *rest])) for sink in rest)
                out[place + i, head] = weights / total @ np.array([values[page, within, slot] for page, slot in slots])
    return out


def _visible(row: tuple[np.ndarray, int, int, int], positions: np.ndarray, start: int, query: int, window: int):
    """Yield (page, slot) of all visible slots of one row: its table, first page, end slot and ring."""
    table, first_page, end_slot, ring = row
    for logical in range(first_page, -(-end_slot // positions.shape[1])):
        page = int(table[logical % ring])
        for slot, position in enumerate(positions[page].tolist()):
            if start <= position <= query and query - position < window:
                yield page, slot
