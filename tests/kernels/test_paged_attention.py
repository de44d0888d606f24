"""Both backends of paged attention over shuffled page tables: a worked example, an oracle, and planted errors."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import ids, jit
from helpers.oracle import dense_attention

from kvjax.kernels.paged_attention import Queries, Rows, reference, xla

SIZE, ENTRIES, DIM = 8, 5, 16
LENGTHS = (0, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 37)
DECODES, PREFILLS, MIXED = [0, 1, 1, 1, 1, 1, 1], [0, 1, 7, 3, 9, 16, 20], [0, 1, 1, 8, 1, 5, 1]
NO_WINDOW = 2**31 - 1


@dataclasses.dataclass
class Case:
    """Sequences of the given lengths in shuffled pages; `arguments` is what a backend gets."""

    query_lengths: list[int]
    groups: int = 1
    kv_heads: int = 2
    heads: int = 4
    window: int = NO_WINDOW
    ring: int = ENTRIES
    start: int = 0
    options: dict = dataclasses.field(default_factory=dict)
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        seqs, in_group = len(LENGTHS), self.kv_heads // self.groups
        num_pages = 1 + self.groups * seqs * ENTRIES
        draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
        self.k, self.v = ([draw(length, self.kv_heads, DIM) for length in LENGTHS] for _ in range(2))
        self.q = draw(10 if max(self.query_lengths) == 1 else 60, self.heads, DIM)
        # What holds no token: keys are NaN, values are NaN in pages without any, else 0 as write_pages leaves them.
        keys, values = (np.full((num_pages, in_group, SIZE, DIM), np.nan, np.float32) for _ in range(2))
        positions = np.full((num_pages, SIZE), -1, np.int32)
        table = np.zeros((self.groups, seqs, ENTRIES), np.int32)
        first = np.zeros((self.groups, seqs), np.int32)
        free = rng.permutation(np.arange(1, num_pages)).tolist()
        for group, seq in np.ndindex(self.groups, seqs):
            heads = slice(group * in_group, (group + 1) * in_group)
            pages = -(-LENGTHS[seq] // SIZE)
            first[group, seq] = oldest = max(pages - self.ring, 0)
            for logical in range(oldest, pages):
                page = table[group, seq, logical % self.ring] = free.pop()
                slots = np.arange(logical * SIZE, min((logical + 1) * SIZE, LENGTHS[seq]))
                values[page] = 0
                keys[page, :, : len(slots)] = self.k[seq][slots, heads].swapaxes(0, 1)
                values[page, :, : len(slots)] = self.v[seq][slots, heads].swapaxes(0, 1)
                positions[page, : len(slots)] = slots + self.start
        lengths = np.array(self.query_lengths, np.int32)
        ends = np.broadcast_to(np.array(LENGTHS, np.int32), (self.groups, seqs))
        rows = Rows(ids(table), ids(first), ids(ends), jnp.int32(self.ring))
        starts = np.cumsum(lengths) - lengths
        begin = np.array(LENGTHS) - lengths + self.start
        queries = Queries(ids(starts), ids(lengths), ids(begin), ids(np.full(seqs, self.start)))
        pool = (jnp.asarray(keys), jnp.asarray(values), jnp.asarray(positions))
        self.arguments: tuple[Any, ...] = (jnp.asarray(self.q), *pool, rows, queries)

    def expected(self):
        out, place = np.zeros(self.q.shape), 0
        window = None if self.window == NO_WINDOW else self.window
        for seq, count in enumerate(self.query_lengths):
            at = np.arange(LENGTHS[seq])
            q = self.q[place : place + count]
            out[place : place + count] = dense_attention(
                q, self.k[seq], self.v[seq], at[len(at) - count :], at, window=window, **self.options
            )
            place += count
        return out


@functools.partial(jit, static_argnums=(8, 9))
def _xla(q, keys, values, positions, rows, queries, window, sinks, longest, soft_cap):
    return xla.paged_attention(
        q, keys, values, positions, rows, queries, window=window, scale=0.6, soft_cap=soft_cap, sink_logits=sinks,
        max_query_length=longest,
    )  # fmt: skip


def by_xla(case: Case, arguments=None, window=None):
    sinks = case.options.get("sink_logits")
    sinks = None if sinks is None else jnp.asarray(sinks)
    window = jnp.int32(case.window if window is None else window)
    longest = 1 if max(case.query_lengths) == 1 else 20
    return np.asarray(_xla(*(case.arguments if arguments is None else arguments), window, sinks, longest, 2.5))


def by_reference(case: Case):
    options = dict(scale=0.6, soft_cap=2.5, sink_logits=case.options.get("sink_logits"))
    return reference.paged_attention(*case.arguments, window=case.window, **options)


def case_of(query_lengths, **changes) -> Case:
    sinks = changes.pop("sinks", False)
    case = Case(query_lengths, **changes)
    case.options = dict(scale=0.6, soft_cap=2.5)
    if sinks:
        case.options["sink_logits"] = np.linspace(-2, 2, case.heads).astype(np.float32)
    return case


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_worked_example(backend):
    # One sequence of two tokens in slots 0 and 1 of page 2; values 1 and 2; the last token queries with 2, the keys
    # are 0 and ln 3 / 2: logits 0 and ln 3, weights 1/4 and 3/4, output 1/4 + 6/4 = 1.75.
    keys, values = (np.full((3, 1, 8, 2), np.nan, np.float32) for _ in range(2))
    values[2], positions = 0, np.full((3, 8), -1, np.int32)
    keys[2, 0, :2], values[2, 0, :2], positions[2, :2] = [[0, 0], [math.log(3) / 2, 0]], [[1, 1], [2, 2]], [0, 1]
    rows = Rows(ids([[[2]]]), ids([[0]]), ids([[2]]), jnp.int32(1))
    queries = Queries(ids([0]), ids([1]), ids([1]), ids([0]))
    arguments: tuple[Any, ...] = (
        jnp.asarray([[[2.0, 0.0]]]),
        *map(jnp.asarray, (keys, values, positions)),
        rows,
        queries,
    )
    if backend == "xla":
        out = xla.paged_attention(*arguments, window=jnp.int32(9), scale=1.0, max_query_length=1)
    else:
        out = reference.paged_attention(*arguments, window=9, scale=1.0)
    np.testing.assert_allclose(out, [[[1.75, 1.75]]], rtol=1e-6)


@pytest.mark.parametrize("query_lengths", [DECODES, PREFILLS, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize(
    "changes",
    [dict(), dict(window=SIZE), dict(window=SIZE + 1, start=500), dict(window=1), dict(groups=2), dict(sinks=True)],
    ids=str,
)
def test_ragged_rows_equal_the_oracle(query_lengths, changes):
    case = case_of(query_lengths, **changes)
    np.testing.assert_allclose(by_xla(case), case.expected(), atol=2e-5)


@pytest.mark.parametrize("changes", [dict(), dict(window=9, start=500), dict(groups=2, sinks=True)], ids=str)
def test_the_reference_equals_the_oracle(changes):
    case = case_of(MIXED, **changes)
    np.testing.assert_allclose(by_reference(case), case.expected(), atol=1e-12)


@pytest.mark.parametrize("query_lengths", [DECODES, MIXED], ids=["decode", "mixed"])
def test_rings_that_have_turned(query_lengths):
    # 37 tokens lie in the last three pages of a ring of three: the window of 16 needs no more.
    case = case_of([*query_lengths[:-1], 1], ring=3, window=16)
    np.testing.assert_allclose(by_xla(case), case.expected(), atol=2e-5)


def test_values_that_encode_the_token_show_the_weights():
    # Values are one-hot in the token's number, so an output is the softmax itself: zero where nothing may be seen.
    case = case_of(PREFILLS, window=5)
    values = np.array(case.arguments[2])
    for seq, length in enumerate(LENGTHS):
        for slot in range(length):
            page = int(case.arguments[4].page_table[0, seq, slot // SIZE])
            values[page, :, slot % SIZE] = np.eye(DIM)[slot % DIM]
    arguments = (*case.arguments[:2], jnp.asarray(values), *case.arguments[3:])
    out, place = by_xla(case, arguments), 0
    for length, count in zip(LENGTHS, PREFILLS, strict=True):
        for i in range(count):
            position = length - count + i
            seen = {slot % DIM for slot in range(max(position - 4, 0), position + 1)}
            for head in range(case.heads):
                assert set(np.flatnonzero(out[place + i, head])) == seen
        place += count


def test_nothing_to_see_gives_zeros():
    case = case_of(MIXED)
    hidden = dataclasses.replace(case.arguments[5], start_positions=ids(np.full(len(LENGTHS), 1000)))
    assert not by_xla(case, (*case.arguments[:5], hidden)).any()
    case.options["sink_logits"] = np.ones(case.heads, np.float32)
    assert not by_xla(case, (*case.arguments[:5], hidden)).any()


def swapped_pages(case):
    table = case.arguments[4].page_table
    return dict(page_table=table.at[0, 6, 0].set(table[0, 6, 1]).at[0, 6, 1].set(table[0, 6, 0]))


# Mistakes of the caller's: each must be seen in the outputs.
ROW_MUTATIONS = {
    "page of another sequence": lambda case: dict(
        page_table=case.arguments[4].page_table.at[0, 6, 0].set(case.arguments[4].page_table[0, 5, 0])
    ),
    "page missing": lambda case: dict(page_table=case.arguments[4].page_table.at[0, 6, 2].set(0)),
    "first page + 1": lambda case: dict(first_page=case.arguments[4].first_page + 1),
    "end a page early": lambda case: dict(end_slot=case.arguments[4].end_slot - SIZE),
    "ring - 3": lambda case: dict(ring=case.arguments[4].ring - 3),
}
QUERY_MUTATIONS = {
    "starts + 1": lambda queries: dict(starts=queries.starts + 1),
    "positions - 1": lambda queries: dict(positions=queries.positions - 1),
    "start position + 1": lambda queries: dict(start_positions=queries.start_positions + 1),
}


def differs(case, arguments, window=None):
    return np.abs(np.nan_to_num(by_xla(case, arguments, window), nan=1e3) - case.expected()).max() > 1e-2


@pytest.mark.parametrize("query_lengths", [DECODES, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", [*ROW_MUTATIONS, *QUERY_MUTATIONS, "window + 1", "window - 1", "heads", "position"])
def test_planted_errors_are_noticed(query_lengths, name):
    case = case_of(query_lengths, window=SIZE + 1 if name.startswith("window") else NO_WINDOW)
    q, keys, values, positions, rows, queries = case.arguments
    assert not differs(case, case.arguments)
    if name in ROW_MUTATIONS:
        assert differs(
            case, (q, keys, values, positions, dataclasses.replace(rows, **ROW_MUTATIONS[name](case)), queries)
        )
    elif name in QUERY_MUTATIONS:
        changed = dataclasses.replace(queries, **QUERY_MUTATIONS[name](queries))
        assert differs(case, (q, keys, values, positions, rows, changed))
    elif name.startswith("window"):
        assert differs(case, case.arguments, case.window + int(name.replace("window", "").replace(" ", "")))
    elif name == "heads":
        # The head map: query heads 1 and 2 belong to different KV heads.
        assert differs(case, (q[:, ::-1], *case.arguments[1:]))
    else:
        page = int(rows.page_table[0, 6, 1])
        assert differs(case, (q, keys, values, positions.at[page, 3].set(-1), rows, queries))


def test_order_of_pages_does_not_matter_where_positions_say_the_truth():
    case = case_of(DECODES)
    rows = dataclasses.replace(case.arguments[4], **swapped_pages(case))
    assert not differs(case, (*case.arguments[:4], rows, case.arguments[5]))


def test_all_backends_take_the_same_arguments():
    for query_lengths in (DECODES, PREFILLS):
        case = case_of(query_lengths, window=11, sinks=True)
        np.testing.assert_allclose(by_xla(case), by_reference(case), atol=2e-5)


@pytest.mark.parametrize("entries", [1, 3, 5, 17])
@pytest.mark.slow
def test_table_widths_that_no_block_divides(entries):
    size, rng = 64, np.random.default_rng(entries)
    length = entries * size - 5
    k, v = (rng.standard_normal((length, 1, DIM)).astype(np.float32) for _ in range(2))
    order = rng.permutation(np.arange(1, entries + 1))
    keys, values = (
        np.full((entries + 1, 1, size, DIM), np.nan, np.float32),
        np.zeros((entries + 1, 1, size, DIM), np.float32),
    )
    values[0], positions = np.nan, np.full((entries + 1, size), -1, np.int32)
    for slot in range(length):
        page, at = order[slot // size], slot % size
        keys[page, 0, at], values[page, 0, at], positions[page, at] = k[slot, 0], v[slot, 0], slot
    for count in (1, 33):
        q = rng.standard_normal((count, 2, DIM)).astype(np.float32)
        rows = Rows(ids(order[None, None]), ids([[0]]), ids([[length]]), jnp.int32(entries))
        queries = Queries(ids([0]), ids([count]), ids([length - count]), ids([0]))
        run = jax.jit(
            lambda *a, m=count: xla.paged_attention(*a, window=jnp.int32(2**30), scale=0.5, max_query_length=m)
        )
        out = run(jnp.asarray(q), *map(jnp.asarray, (keys, values, positions)), rows, queries)
        at = np.arange(length)
        np.testing.assert_allclose(out, dense_attention(q, k, v, at[-count:], at, scale=0.5), atol=2e-5)
