"""Random sequences in shuffled pages, for kernels that the interpreter runs: everything unused is poisoned."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from helpers.driver import ids
from helpers.oracle import dense_attention

from kvjax.kernels.paged_attention import Queries, Rows

NO_WINDOW = 2**31 - 1


@dataclasses.dataclass
class Paged:
    """Sequences with `lengths` tokens, of which the last `query_lengths` (1 by default) query.

    Attributes:
        arguments: what a backend gets: q, keys, values, positions, rows, queries.
        options: scale, soft_cap and sink_logits for the backend and the oracle.
    """

    lengths: list[int]
    query_lengths: list[int] | None = None
    page_size: int = 8
    head_dim: int = 64
    kv_heads: int = 1
    heads: int = 2
    groups: int = 1
    dtype: Any = jnp.bfloat16
    start: int = 0
    options: dict = dataclasses.field(default_factory=dict)
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        size, in_group, seqs = self.page_size, self.kv_heads // self.groups, len(self.lengths)
        counts = np.array([min(1, n) for n in self.lengths] if self.query_lengths is None else self.query_lengths)
        entries = max(-(-max(self.lengths) // size), 1)
        num_pages = 2 + self.groups * seqs * entries
        # As stored: what is lost by rounding is not the kernel's.
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), self.dtype)  # noqa: E731
        self.q = draw(counts.sum() + 2, self.heads, self.head_dim)
        self.k, self.v = ([draw(n, self.kv_heads, self.head_dim) for n in self.lengths] for _ in range(2))
        keys, values = (np.full((num_pages, in_group, size, self.head_dim), np.nan, np.float32) for _ in range(2))
        positions = np.full((num_pages, size), -1, np.int32)
        table = np.zeros((self.groups, seqs, entries), np.int32)
        free = iter(rng.permutation(np.arange(1, num_pages)).tolist())
        for group, seq in np.ndindex(self.groups, seqs):
            heads = slice(group * in_group, (group + 1) * in_group)
            for logical in range(-(-self.lengths[seq] // size)):
                page = table[group, seq, logical] = next(free)
                slots = np.arange(logical * size, min((logical + 1) * size, self.lengths[seq]))
                for pool, new in ((keys, self.k), (values, self.v)):
                    pool[page, :, : len(slots)] = np.asarray(new[seq], np.float32)[slots, heads].swapaxes(0, 1)
                positions[page, : len(slots)] = slots + self.start
        ends = np.broadcast_to(np.array(self.lengths), (self.groups, seqs))
        rows = Rows(ids(table), ids(np.zeros(ends.shape)), ids(ends), jnp.int32(entries))
        begin = np.array(self.lengths) - counts + self.start
        queries = Queries(
            ids(np.cumsum(counts) - counts), ids(counts), ids(begin), ids(np.full(seqs, self.start))
        )  # fmt: skip
        self.counts = counts.tolist()
        pool = (jnp.asarray(keys, self.dtype), jnp.asarray(values, self.dtype), jnp.asarray(positions))
        self.arguments: tuple[Any, ...] = (self.q, *pool, rows, queries)

    def expected(self, window: int = NO_WINDOW) -> np.ndarray:
        """The oracle's outputs, float64; zeros for places without a token."""
        out, place = np.zeros(self.q.shape), 0
        for seq, count in enumerate(self.counts):
            at = np.arange(self.lengths[seq])
            q = np.asarray(self.q[place : place + count], np.float64)
            k, v = (np.asarray(new[seq], np.float64) for new in (self.k, self.v))
            limited = None if window == NO_WINDOW else window
            out[place : place + count] = dense_attention(
                q, k, v, at[len(at) - count :], at, window=limited, **self.options
            )
            place += count
        return out
