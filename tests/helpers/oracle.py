"""Attention and rotary embedding in float64 over plain arrays: no pages, no packing, no masks by index."""

import numpy as np


def dense_logits(
    q, k, query_positions, key_positions, *, window=None, sinks=0, sink_query=None, scale=None, soft_cap=None
):
    """Scaled and capped logits of q [n, heads, d] at k [m, kv_heads, d]; float64 [heads, n, m], -inf if not seen."""
    q, k = (np.asarray(array, np.float64) for array in (q, k))
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    of_sinks = q if sink_query is None else np.asarray(sink_query, np.float64)
    is_sink = np.asarray(key_positions) < sinks
    logits = np.where(is_sink, np.einsum("nhd,mhd->hnm", of_sinks, k), np.einsum("nhd,mhd->hnm", q, k))
    logits = logits * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    distance = np.asarray(query_positions, np.int64)[:, None] - np.asarray(key_positions, np.int64)[None]
    seen = distance >= 0 if window is None else (distance >= 0) & ((distance < window) | is_sink)
    return np.where(seen[None], logits, -np.inf)


def dense_attention(q, k, v, query_positions, key_positions, *, sink_logits=None, **options):
    """Attend q [n, heads, d] to k, v [m, kv_heads, d] at the given positions; float64 [n, heads, d]."""
    logits = dense_logits(q, k, query_positions, key_positions, **options)
    v = np.repeat(np.asarray(v, np.float64), q.shape[1] // v.shape[1], axis=1)
    if sink_logits is not None:
        sink = np.broadcast_to(np.asarray(sink_logits, np.float64)[:, None, None], (*logits.shape[:2], 1))
        logits, v = np.concatenate([logits, sink], -1), np.concatenate([v, np.zeros_like(v[:1])])
    top = logits.max(-1, keepdims=True, initial=-1e300)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("hnm,mhd->nhd", weights / np.where(total > 0, total, 1), v)


def rotate(x, positions, phases):
    """Half-split rotation of x [..., n, heads, d] by uint32 phases [d / 2] a position, in float64."""
    turns = (np.asarray(positions, np.uint64)[:, None] * np.asarray(phases, np.uint64)[None]) % 2**32
    angle = (turns.astype(np.float64) / 2**32 * 2 * np.pi)[:, None, :]
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
