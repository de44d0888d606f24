"""Random sequences in shuffled pages of several layers, as the kernels get them, and what they should make of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.kernels.paged_attention import Queries, Rows, reference
from kvjax.kernels.shapes import AttentionShape
from kvjax.spec import pages_for

NO_WINDOW = 2**31 - 1
# Standard deviation of the logits: few slots have most of the weight, as in a model, and outputs stay far from 0.
_SPREAD = 3.0


@dataclasses.dataclass(frozen=True)
class Case:
    """The arguments of paged attention for a shape.

    Attributes:
        shape: heads, page size and window; lengths where all sequences are alike.
        lengths, counts: tokens of each sequence, and how many of them (the last) query.
        layers: layers with pages of their own in the pool; `rows.layer` is 0.
        q: [tokens, heads, head_dim].
        keys, values, positions: the pool. NaN in pages that nobody holds; values behind a last token are 0.
        rows, queries: see `kvjax.kernels.paged_attention`. A window's row holds only the pages that it sees.
    """

    shape: AttentionShape
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    layers: int
    q: Array
    keys: Array
    values: Array
    positions: Array
    rows: Rows
    queries: Queries

    @property
    def window(self) -> int:
        """Positions that a query sees."""
        return self.shape.window or NO_WINDOW


def case_of(
    shape: AttentionShape,
    lengths: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
    *,
    layers: int = 1,
    seed: int = 0,
) -> Case:
    """Draw a case in bfloat16 on the default device.

    Args:
        shape: heads, page size and window, and the sizes of all sequences where `lengths` and `counts` are None.
        lengths, counts: tokens and query tokens of each sequence, counts from 1 to its length.
        layers: each gets other pages with other contents.
        seed: of contents and of the order of pages.
    """
    lengths = tuple(lengths or [shape.context] * shape.batch)
    counts = tuple(counts or [shape.queries] * len(lengths))
    table, first, positions = _lay_out(shape, lengths, counts, layers, seed)
    starts = np.cumsum(counts) - counts
    ints = lambda of: jnp.asarray(np.asarray(of, np.int32))  # noqa: E731
    ends = np.broadcast_to(np.asarray(lengths), (layers, 1, len(lengths)))
    of_layers = lambda value: ints(np.full(layers, value))  # noqa: E731
    rows = Rows(
        ints(table), ints(first), ints(ends), of_layers(table.shape[-1]), of_layers(shape.window or NO_WINDOW),
        jnp.int32(0),
    )  # fmt: skip
    begins = np.asarray(lengths) - counts
    queries = Queries(ints(starts), ints(counts), ints(begins), ints(np.zeros(len(lengths))))
    of_pages, of_queries = jax.random.split(jax.random.key(seed))
    positions = ints(positions)
    keys, values = _contents(of_pages, positions, shape.kv_heads, shape.head_dim)
    q = _SPREAD * jax.random.normal(of_queries, (sum(counts), shape.heads, shape.head_dim), jnp.bfloat16)
    return Case(shape, lengths, counts, layers, q, keys, values, positions, rows, queries)


def _lay_out(shape: AttentionShape, lengths, counts, layers: int, seed: int):
    """Page table, oldest pages and positions; one page at the end belongs to nobody."""
    size = shape.page_size
    oldest = [
        max(length - count - shape.window + 1, 0) // size if shape.window else 0
        for length, count in zip(lengths, counts, strict=True)
    ]
    held = [pages_for(length, size) - first for length, first in zip(lengths, oldest, strict=True)]
    table = np.zeros((layers, 1, len(lengths), max(held)), np.int32)
    num_pages = 2 + layers * sum(held)
    positions = np.full((num_pages, size), -1, np.int32)
    ids = np.random.default_rng(seed).permutation(np.arange(1, num_pages - 1))
    for layer, seq in np.ndindex(layers, len(lengths)):
        own, ids = ids[: held[seq]], ids[held[seq] :]
        logical = np.arange(oldest[seq], oldest[seq] + held[seq])
        table[layer, 0, seq, logical % table.shape[-1]] = own
        slots = logical[:, None] * size + np.arange(size)
        positions[own] = np.where(slots < lengths[seq], slots, -1)
    return table, np.broadcast_to(np.asarray(oldest), (layers, 1, len(lengths))), positions


@functools.partial(jax.jit, static_argnums=(2, 3))
def _contents(key, positions, kv_heads: int, head_dim: int):
    shape = (positions.shape[0], kv_heads, positions.shape[1], head_dim)
    of_keys, of_values = jax.random.split(key)
    nan, zero = (jnp.asarray(value, jnp.bfloat16) for value in (jnp.nan, 0))
    filled, owned = positions[:, None, :, None] >= 0, (positions >= 0).any(1)[:, None, None, None]
    keys = jnp.where(filled, jax.random.normal(of_keys, shape, jnp.bfloat16), nan)
    values = jnp.where(filled, jax.random.normal(of_values, shape, jnp.bfloat16), jnp.where(owned, zero, nan))
    return keys, values


def ragged_case(shape: AttentionShape) -> Case:
    """Draw sequences with lengths around page edges; the shape gives heads, page size, window and decode or prefill."""
    size = shape.page_size
    lengths = [1, size - 1, size, size + 1, 2 * size, 5 * size + 3]
    counts = [1] * len(lengths) if shape.queries == 1 else [1, size - 1, 1, 3, 2 * size, size + 5]
    return case_of(dataclasses.replace(shape, queries=max(counts)), lengths, counts)


def reference_output(case: Case) -> np.ndarray:
    """The definition's outputs, float64 [tokens, heads, head_dim]; slow, for short sequences."""
    arguments = (case.q, case.keys, case.values, case.positions, case.rows, case.queries)
    return np.asarray(reference.paged_attention(*arguments, scale=case.shape.head_dim**-0.5).out)


def samples(case: Case, layer: int = 0) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (token, query head, output [head_dim]) for some tokens and heads, in float64 from the pages themselves."""
    starts = np.cumsum(case.counts) - case.counts
    for seq in {0, len(case.lengths) - 1}:
        for number in {0, case.counts[seq] - 1}:
            position = case.lengths[seq] - case.counts[seq] + number
            for head in {0, case.shape.heads - 1}:
                token = int(starts[seq]) + number
                yield token, head, _output(case, layer, seq, token, head, position)


def _output(case: Case, layer: int, seq: int, token: int, head: int, position: int) -> np.ndarray:
    kv_head = head // (case.shape.heads // case.shape.kv_heads)
    ids = case.rows.page_table[layer, 0, seq]
    keys, values, positions, q = (
        np.asarray(of, np.float64)
        for of in (case.keys[ids, kv_head], case.values[ids, kv_head], case.positions[ids], case.q[token, head])
    )
    seen = (positions >= 0) & (positions <= position) & (position - positions < case.window)
    logits = keys[seen] @ q * case.shape.head_dim**-0.5
    weights = np.exp(logits - logits.max())
    return weights @ values[seen] / weights.sum()
