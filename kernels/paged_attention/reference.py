"""The definition of paged attention, in numpy float64: one query, one head, one slot after another."""

from __future__ import annotations

import numpy as np

from kvjax.kernels.paged_attention.arguments import Queries, Rows


def paged_attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    positions: np.ndarray,
    rows: Rows,
    queries: Queries,
    *,
    window: int,
    scale: float,
    soft_cap: float | None = None,
    sink_logits: np.ndarray | None = None,
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
    positions = np.asarray(positions)
    out = np.zeros_like(q)
    heads_per_kv_head = q.shape[1] // (keys.shape[1] * rows.page_table.shape[0])
    sinks = None if sink_logits is None else np.asarray(sink_logits, np.float64)
    for sequence, length in enumerate(np.asarray(queries.lengths)):
        start = int(queries.start_positions[sequence])
        for i in range(length):
            token, position = int(queries.starts[sequence]) + i, int(queries.positions[sequence]) + i
            for head in range(q.shape[1]):
                group, within = divmod(head // heads_per_kv_head, keys.shape[1])
                slots = list(_visible(rows, group, sequence, positions, start, position, int(window)))
                if not slots:
                    continue
                logits = np.array([scale * (keys[page, within, slot] @ q[token, head]) for page, slot in slots])
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                rest = [] if sinks is None else [sinks[head]]
                weights = np.exp(logits - max([logits.max(), *rest]))
                total = weights.sum() + sum(np.exp(sink - max([logits.max(), *rest])) for sink in rest)
                out[token, head] = weights / total @ np.array([values[page, within, slot] for page, slot in slots])
    return out


def _visible(rows: Rows, group: int, sequence: int, positions: np.ndarray, start: int, query: int, window: int):
    """Yield (page, slot) of all visible slots of one row."""
    size = positions.shape[1]
    end_page = -(-int(rows.end_slot[group, sequence]) // size)
    for logical in range(int(rows.first_page[group, sequence]), end_page):
        page = int(rows.page_table[group, sequence, logical % int(rows.ring)])
        for slot, position in enumerate(positions[page].tolist()):
            if start <= position <= query and query - position < window:
                yield page, slot
