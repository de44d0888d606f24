"""The definition of attention mass, in numpy float64: one query, one head, one slot after another."""

from __future__ import annotations

import numpy as np

from kvjax.kernels.formats import Stored
from kvjax.kernels.paged_attention.arguments import Queries, Rows
from kvjax.kernels.paged_attention.reference import HostArray, Layer, decoded, each_query


def attention_mass(
    q: HostArray,
    lse: HostArray,
    keys: HostArray | Stored,
    positions: HostArray,
    rows: Rows,
    queries: Queries,
    *,
    scale: float,
    soft_cap: float | None = None,
    band: int | HostArray | None = None,
    sink_query: HostArray | None = None,
    max_query_length: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sum the attention probabilities of a step's queries over the queries.

    Args:
        q, keys, positions, rows, queries, scale, soft_cap, sink_query: as `paged_attention` had them; `queries` may be
            only the last of them, `queries.last(n)`.
        lse: [tokens, heads], as `paged_attention` returned it: probabilities are exp(logit - lse).
        band: sum only over pairs with `query position - slot position <= band` (static); None for all pairs. XLA takes
            int32 [seqs] too, a band of each sequence.
        max_query_length: unused here.

    Returns: float64 arrays (float32 from other backends):
        column_sums: [kv_heads, seqs, slots], what each slot of a row's table entries receives from all queries, and
            from all query heads of the KV head.
        entropy: [heads, seqs], in nats, -sum(p * log(p)) over the slots, whatever the band, summed over the queries.
    """
    q, lse, keys = np.asarray(q, np.float64), np.asarray(lse, np.float64), decoded(keys)
    layer = Layer.of(rows, positions, None, keys.shape[1])
    seen_by_sinks = q if sink_query is None else np.asarray(sink_query, np.float64)
    seqs, heads_per_kv_head = layer.table.shape[1], q.shape[1] // layer.kv_heads
    sums, entropy = np.zeros((layer.kv_heads, seqs, layer.num_slots)), np.zeros((q.shape[1], seqs))
    bands = np.broadcast_to(np.inf if band is None else np.asarray(band), seqs)
    for sequence, _, place, query, start in each_query(queries):
        for head in range(q.shape[1]):
            kv_head = head // heads_per_kv_head
            for index, page, slot, is_sink in layer.visible(kv_head, sequence, start, query):
                of_head = (seen_by_sinks if is_sink else q)[place, head]
                logit = scale * (keys[page, kv_head % keys.shape[1], slot] @ of_head)
                if soft_cap is not None:
                    logit = soft_cap * np.tanh(logit / soft_cap)
                log_p = logit - lse[place, head]
                entropy[head, sequence] -= np.exp(log_p) * log_p
                if query - layer.positions[page, slot] <= bands[sequence]:
                    sums[kv_head, sequence, index] += np.exp(log_p)
    return sums, entropy
