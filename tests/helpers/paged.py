"""Random sequences in shuffled pages, for every backend of the kernels: what holds no token is poisoned."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from helpers.driver import ids, jit
from helpers.oracle import dense_attention, dense_logits

from kvjax.kernels.formats import FORMATS, Stored, encode
from kvjax.kernels.paged_attention import Attention, Queries, Rows, reference, xla

NO_WINDOW = 2**31 - 1
# Of `case_of`: lengths around the edges of pages.
SIZE, DIM = 8, 16
LENGTHS = (0, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 37)


def rows_of(table, first_page, end_slot, *, ring=None, window=NO_WINDOW, sinks=0) -> Rows:
    """Rows whose layer 1 is given, between two layers that hold nothing."""
    among = lambda of: ids(np.stack([np.zeros_like(of), np.asarray(of), np.zeros_like(of)]))  # noqa: E731
    ring = np.shape(table)[-1] if ring is None else ring
    return Rows(
        among(table), among(first_page), among(end_slot), ids([1, ring, 1]), ids([1, window, 1]), jnp.int32(1), sinks
    )


def with_rows(rows: Rows, **changes) -> Rows:
    """Rows with other arrays for their layer."""
    new = {name: getattr(rows, name).at[1].set(value) for name, value in changes.items()}
    return dataclasses.replace(rows, **new)


def stored(pool, form: str, in_use) -> Stored:
    """Pages in a format; the scales of pages not in use are NaN."""
    codes, scales = encode(pool, FORMATS[form])
    return Stored(codes, tuple(jnp.where(in_use[:, None, None], of, jnp.nan) for of in scales), FORMATS[form])


@dataclasses.dataclass
class Paged:
    """Sequences with `lengths` tokens, of which the last `query_lengths` (1 by default) query.

    Attributes:
        ring: pages that a row holds behind its pinned ones; older ones are gone. None for all.
        forms: formats of keys and values, plain ones of `dtype` if None.
        behind: what value slots behind the last token of a page in use hold; everything else that is unused is NaN.
        options: soft_cap, sink_logits and scale for the backend.
        has_sink_query: whether sinks are seen by a query of their own.
        arguments: what a backend gets: q, keys, values, positions, rows, queries.
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
    window: int = NO_WINDOW
    sinks: int = 0
    has_sink_query: bool = False
    ring: int | None = None
    forms: tuple[str, str] | None = None
    behind: float = np.nan
    options: dict = dataclasses.field(default_factory=dict)
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        self.options = dict(scale=self.head_dim**-0.5) | self.options
        counts = np.array([min(1, n) for n in self.lengths] if self.query_lengths is None else self.query_lengths)
        self.counts = counts.tolist()
        # As stored: what is lost by rounding is not the kernel's.
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), self.dtype)  # noqa: E731
        self.q = draw(counts.sum() + 2, self.heads, self.head_dim)
        if self.has_sink_query:
            self.options["sink_query"] = draw(*self.q.shape)
        self.k, self.v = ([draw(n, self.kv_heads, self.head_dim) for n in self.lengths] for _ in range(2))
        pool, rows = self._lay_out(rng)
        seqs, begin = len(self.lengths), np.array(self.lengths) - counts + self.start
        queries = Queries(
            ids(np.cumsum(counts) - counts), ids(counts), ids(begin), ids(np.full(seqs, self.start))
        )  # fmt: skip
        self.arguments: tuple[Any, ...] = (self.q, *pool, rows, queries)

    def _lay_out(self, rng):
        size, in_group, seqs = self.page_size, self.kv_heads // self.groups, len(self.lengths)
        pinned = -(-self.sinks // size)
        ring = max(-(-max(self.lengths) // size) - pinned, 1) if self.ring is None else self.ring
        num_pages = 2 + self.groups * seqs * (pinned + ring)
        keys, values = (np.full((num_pages, in_group, size, self.head_dim), np.nan, np.float32) for _ in range(2))
        positions = np.full((num_pages, size), -1, np.int32)
        table = np.zeros((self.groups, seqs, pinned + ring), np.int32)
        first = np.zeros((self.groups, seqs), np.int32)
        free = iter(rng.permutation(np.arange(1, num_pages)).tolist())
        for group, seq in np.ndindex(self.groups, seqs):
            heads = slice(group * in_group, (group + 1) * in_group)
            pages = -(-self.lengths[seq] // size)
            first[group, seq] = oldest = max(pages - ring, pinned)
            for logical in (*range(min(pinned, pages)), *range(oldest, pages)):
                entry = logical if logical < pinned else pinned + (logical - pinned) % ring
                page = table[group, seq, entry] = next(free)
                slots = np.arange(logical * size, min((logical + 1) * size, self.lengths[seq]))
                values[page, :, len(slots) :] = self.behind
                for pool, new in ((keys, self.k), (values, self.v)):
                    pool[page, :, : len(slots)] = np.asarray(new[seq], np.float32)[slots, heads].swapaxes(0, 1)
                positions[page, : len(slots)] = slots + self.start
        ends = np.broadcast_to(np.array(self.lengths), (self.groups, seqs))
        pools = [jnp.asarray(pool, self.dtype) for pool in (keys, values)]
        if self.forms is not None:
            in_use = jnp.asarray((positions >= 0).any(-1))
            pools = [stored(pool, form, in_use) for pool, form in zip(pools, self.forms, strict=True)]
        pool = (*pools, jnp.asarray(positions))
        return pool, rows_of(table, first, ends, ring=ring, window=self.window, sinks=self.sinks)

    @property
    def longest(self) -> int:
        """A bound of the query lengths: 1 for decode."""
        return max(1, *self.counts)

    def reference(self, **options) -> Attention:
        """What the definition returns, with further options."""
        return self.reference_of(*self.arguments, **options)

    def reference_of(self, *arguments, **options) -> Attention:
        """What the definition returns for other arguments."""
        return reference.paged_attention(*arguments, **self.options | options)

    def each_sequence(self) -> Iterator[tuple[int, slice, np.ndarray, np.ndarray]]:
        """Yield sequences with queries: number, places and slots of the queries, and the slots of all tokens."""
        place = 0
        for seq, count in enumerate(self.counts):
            at = np.arange(self.lengths[seq])
            if count:
                yield seq, slice(place, place + count), at[-count:], at
            place += count

    def _seen(self, here: slice) -> dict[str, Any]:
        """What the oracle needs to know of the queries at some places."""
        options = {name: value for name, value in self.options.items() if name not in ("sink_query", "sink_logits")}
        sink_query = self.options["sink_query"][here] if self.has_sink_query else None
        return options | dict(window=self.window, sinks=self.sinks, sink_query=sink_query)

    def expected(self) -> np.ndarray:
        """The oracle's outputs, from plain arrays without pages: float64, zeros for places without a token."""
        out = np.zeros(self.q.shape)
        for seq, here, queries, at in self.each_sequence():
            learned = self.options.get("sink_logits")
            out[here] = dense_attention(
                self.q[here], self.k[seq], self.v[seq], queries, at, sink_logits=learned, **self._seen(here)
            )
        return out

    def slots_in_row(self, seq: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that a sequence still has, from 0, and the slots of its row, in order of entries, where they are."""
        size, rows, at = self.page_size, self.arguments[4], np.arange(self.lengths[seq])
        pinned, page = -(-self.sinks // size), at // size
        entry = np.where(page < pinned, page, pinned + (page - pinned) % int(rows.rings[1]))
        held = (page < pinned) | (page >= int(rows.first_page[1, 0, seq]))
        return at[held], (entry * size + at % size)[held]

    def logits(self, seq: int, here: slice, queries, at) -> np.ndarray:
        """The oracle's logits [heads, queries, slots of the row], -inf where nothing is seen, of one sequence."""
        dense = dense_logits(self.q[here], self.k[seq], queries, at, **self._seen(here))
        tokens, slots = self.slots_in_row(seq)
        assert (np.delete(dense, tokens, axis=-1) == -np.inf).all()
        entries = self.arguments[4].page_table.shape[-1]
        logits = np.full((*dense.shape[:2], entries * self.page_size), -np.inf)
        logits[..., slots] = dense[..., tokens]
        return logits

    def some_pages(self, count: int) -> np.ndarray:
        """A list of up to `count` pages of its own for every KV head and sequence, in any order, with gaps."""
        rng, table = np.random.default_rng(self.seed), np.asarray(self.arguments[4].page_table[1])
        listed = np.zeros((self.kv_heads, len(self.lengths), count), np.int32)
        for head, seq in np.ndindex(listed.shape[:2]):
            held = table[head // (self.kv_heads // self.groups), seq]
            taken = rng.permutation(held[held > 0])[: rng.integers(1, count + 1)]
            listed[head, seq, rng.permutation(count)[: len(taken)]] = taken
        return listed


def assert_equal(attention: Attention, expected: Attention, tolerance: float) -> None:
    """Compare all that a backend returned with the definition's."""
    for name in ("out", "lse", "slot_logits"):
        got, wanted = getattr(attention, name), getattr(expected, name)
        assert (got is None) == (wanted is None), name
        if wanted is not None:
            np.testing.assert_allclose(
                np.asarray(got, np.float64), wanted, atol=tolerance, rtol=tolerance, err_msg=name
            )


def case_of(query_lengths, *, lengths=LENGTHS, sinks_learned=False, **changes) -> Paged:
    """Values behind the last token are 0, as `write_pages` leaves them; all that is in no page in use is NaN."""
    options: dict[str, Any] = dict(scale=0.6, soft_cap=2.5)
    if sinks_learned:
        options["sink_logits"] = np.linspace(-2, 2, 4).astype(np.float32)
    case: dict[str, Any] = dict(head_dim=DIM, kv_heads=2, heads=4, dtype=jnp.float32, behind=0, ring=5, options=options)
    return Paged(list(lengths), query_lengths, **case | changes)


@functools.partial(jit, static_argnames=("max_query_length", "scale", "soft_cap", "last_logits"))
def _xla(*arguments, **options):
    return xla.paged_attention(*arguments, **options)


def by_xla(case: Paged, arguments=None, **options) -> Attention:
    """What the XLA backend returns, for other arguments than the case's and with further options."""
    given = {name: value if isinstance(value, float) else jnp.asarray(value) for name, value in case.options.items()}
    longest = 1 if case.longest == 1 else 20
    return _xla(*(case.arguments if arguments is None else arguments), max_query_length=longest, **given | options)
