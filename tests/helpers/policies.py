"""What a policy keeps, by its definition: rows of tokens as plain lists, attention and scores in float64.

Nothing here is of kvjax's policies, of its eviction or of its attention. `PolicyTwin` runs a cache beside such rows and
compares outputs, kept positions and scores after every step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from helpers.driver import DECODE, PREFILL, SPEC, Twin, fork, ids, poison, release, share, truncate
from helpers.oracle import dense_logits, rotate

from kvjax.cache import clear_status
from kvjax.invariants import check
from kvjax.spec import CacheSpec, pages_for

# A layer without a window and one with, rows that outgrow the budgets, and steps of PREFILL and DECODE.
POLICY_SPEC = dataclasses.replace(SPEC, num_pages=64, pages_per_seq=6, rollback=0)


@dataclasses.dataclass
class Token:
    """A token of a row, with the keys and values [heads, head_dim] of the heads that share the row's pages."""

    position: int
    key: np.ndarray
    value: np.ndarray
    written_key: np.ndarray
    score: float = 0.0


@dataclasses.dataclass
class Rule:
    """A policy as its source defines it.

    Attributes:
        budget: tokens; `sinks` first and `recent` newest ones stay.
        see: changes the scores of a row [tokens] for the attention [queries, tokens] of a step's queries, the mean
            over the heads that read the row.
        in_decode: whether lone tokens make a row drop one.
        in_chunks: whether unfinished prompts are shortened too.
        rank: of a token in a row of a sequence with `seen` tokens, by which the lowest goes first.
    """

    budget: int
    see: Callable[[list[Token], np.ndarray], None]
    recent: int = 0
    sinks: int = 0
    in_decode: bool = True
    in_chunks: bool = False
    rank: Callable[[Token, int], float] = lambda token, seen: token.score

    def kept(self, row: list[Token], start: int, seen: int, *, alone: bool) -> list[Token]:
        """The tokens that stay of a row: of equal ones the older goes first, and one that came alone stays for now."""
        excess = max(len(row) - self.budget, 0)
        recent = max(self.recent, 1) if alone and excess == 1 else self.recent
        first, last = start + self.sinks, start + seen - recent
        others = sorted(
            (token for token in row if first <= token.position < last),
            key=lambda token: (self.rank(token, start + seen), token.position),
        )
        dropped = {token.position for token in others[:excess]}
        return [token for token in row if token.position not in dropped]


def h2o(budget: int, recent: int | None = None, normalize: str = "sum", **how) -> Rule:
    """Zhang et al. 2023, algorithm 1: attention received so far; the mean divides by the queries that saw it."""

    def see(row: list[Token], p: np.ndarray) -> None:
        for token, received in zip(row, p.sum(0), strict=True):
            token.score += float(received)

    by_mean = lambda token, end: token.score / (end - token.position)  # noqa: E731
    rank = by_mean if normalize == "mean" else Rule.rank
    return Rule(budget, see, budget // 2 if recent is None else recent, rank=rank, **how)


def tova(budget: int, **how) -> Rule:
    """Oren et al. 2024: the attention of the last query; the newest token stays, as in kvpress."""

    def see(row: list[Token], p: np.ndarray) -> None:
        for token, received in zip(row, p[-1], strict=True):
            token.score = float(received)

    return Rule(budget, see, recent=1, **how)


def snapkv(budget: int, observation: int = 32, kernel: int = 7) -> Rule:
    """Li et al. 2024, listing 1, with average pooling that counts the padding."""

    def see(row: list[Token], p: np.ndarray) -> None:
        row = sorted(row, key=lambda token: token.position)
        prefix = p[-observation:].sum(0)[: max(len(row) - observation, 0)]
        padded = np.pad(prefix, kernel // 2)
        for i, token in enumerate(row):
            token.score = float(padded[i : i + kernel].sum() / kernel) if i < len(prefix) else 0.0

    return Rule(budget, see, recent=observation, in_decode=False)


def knorm(budget: int, recent: int = 1, **how) -> Rule:
    """Devoto et al. 2024: small key norms stay."""

    def see(row: list[Token], p: np.ndarray) -> None:
        for token in row:
            token.score = -float(np.linalg.norm(token.written_key, axis=-1).mean())

    return Rule(budget, see, recent, **how)


@dataclasses.dataclass
class PolicyTwin(Twin):
    """A cache with a policy that drops tokens, and its rows by `rule`, [layer][group][sequence]."""

    spec: CacheSpec = POLICY_SPEC
    rule: Rule | None = None
    compare_scores: bool = True

    def __post_init__(self):
        super().__post_init__()
        self.rows = [[[[] for _ in range(self.spec.max_seqs)] for _ in self.groups] for _ in self.layers]
        self.seen = [0] * self.spec.max_seqs
        self.start = [0] * self.spec.max_seqs if self.starts is None else list(self.starts)
        self.dropped = 0

    @property
    def layers(self) -> range:
        return range(self.spec.num_layers)

    @property
    def groups(self) -> range:
        return range(self.spec.groups)

    def all_rows(self):
        """Indices and tokens of every row."""
        for layer in self.layers:
            for group in self.groups:
                for sequence in range(self.spec.max_seqs):
                    yield (layer, group, sequence), self.rows[layer][group][sequence]

    def step(self, lengths, *, num_tokens=24, max_query_length=20, index=None, qkv=None, ends=None):
        """Bring new tokens, drop by the rule, and compare everything with the cache; returns the report."""
        lengths, shape = list(lengths), dict(num_tokens=num_tokens, max_query_length=max_query_length)
        q, k, v = self.draw_tokens(sum(lengths)) if qkv is None else qkv
        out, report = self.run(lengths, (q, k, v), **shape, index=index, ends=ends)
        if bool(report.ok):
            ended = [True] * self.spec.max_seqs if ends is None else list(ends)
            expected = self.after(lengths, q, k, v, ended)
            np.testing.assert_allclose(out[:, : sum(lengths)], expected, atol=self.tolerance, rtol=self.tolerance)
        else:
            assert int(self.cache.status) and not out.any(), "a refused step returns zeros"
        self.out = out
        self.assert_equal()
        return report

    def after(self, lengths, q, k, v, ended) -> np.ndarray:
        """Outputs of a step by the rows, which then change."""
        out, place = np.zeros(q.shape), 0
        read_keys, read_values, written = self.as_written(lengths, k, v)
        for sequence, length in enumerate(lengths):
            new = slice(place, place + length)
            place += length
            if not length:
                continue
            positions = self.start[sequence] + self.seen[sequence] + np.arange(length)
            self.seen[sequence] += length
            q_of = q[:, new] if self.rotary is None else rotate(q[:, new], positions, np.asarray(self.rotary.phases)[0])
            for layer in self.layers:
                of = (read_keys[layer, new], read_values[layer, new], written[layer, new])
                out[layer, new] = self.of_row(layer, sequence, q_of[layer], positions, of, ended[sequence])
        return out

    def as_written(self, lengths, k, v):
        """Keys and values as they are read, and keys as they were given, rotated."""
        if self.rotary is not None:
            starts = [start + seen for start, seen in zip(self.start, self.seen, strict=True)]
            positions = np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)])
            k = rotate(k, positions, np.asarray(self.rotary.phases)[0])
        return *self.as_read(k, v), np.asarray(k, np.float64)

    def of_row(self, layer, sequence, q, positions, new, ended) -> np.ndarray:
        """Outputs [tokens, heads, head_dim] of one layer and sequence; every group keeps tokens of its own."""
        assert self.spec.windows is not None
        window, in_group, of_group = self.spec.windows[layer], self.spec.heads_per_group, self.heads // self.spec.groups
        outs = []
        for group in self.groups:
            row, kv = self.rows[layer][group][sequence], slice(group * in_group, (group + 1) * in_group)
            row += [Token(int(p), *(of[i, kv] for of in new)) for i, p in enumerate(positions)]
            keys, values, places = (
                np.stack([getattr(token, name) for token in row]) for name in ("key", "value", "position")
            )
            mine = slice(group * of_group, (group + 1) * of_group)
            options: dict[str, Any] = dict(window=window, scale=self.scale, soft_cap=self.soft_cap)
            logits = dense_logits(q[:, mine], keys, positions, places, **options)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            p = weights / weights.sum(-1, keepdims=True)
            outs.append(np.einsum("hnm,mhd->nhd", p, np.repeat(values, of_group // in_group, axis=1)))
            if window is None:
                self.drop(layer, group, sequence, p, ended)
        return np.concatenate(outs, axis=1)

    def drop(self, layer, group, sequence, p, ended) -> None:
        """Shorten a row by the rule after attention p [heads, queries, tokens]."""
        rule, row = self.rule, self.rows[layer][group][sequence]
        assert rule is not None
        # Attention below the least float32 is none.
        rule.see(row, p.astype(np.float32).astype(np.float64).mean(0))
        if (ended or rule.in_chunks) and (rule.in_decode or p.shape[1] > 1):
            kept = rule.kept(row, self.start[sequence], self.seen[sequence], alone=p.shape[1] == 1)
            self.dropped += len(row) - len(kept)
            self.rows[layer][group][sequence] = kept

    def held(self) -> dict[tuple[int, int, int], dict[int, float]]:
        """What the cache holds: scores, or 0, by position, of every row."""
        held = {}
        for pool, of in zip(self.cache.of_pools, self.spec.pools, strict=True):
            table, positions = np.asarray(pool.page_table), np.asarray(pool.positions)
            scores = pool.policy_state["slots"].get("score")
            scores = np.zeros(positions.shape) if scores is None else np.asarray(scores)
            for layer, group, sequence in np.ndindex(table.shape[:3]):
                pages = table[layer, group, sequence]
                pages = pages[pages > 0]
                of_row = [(p, s) for p, s in zip(positions[pages].flat, scores[pages].flat, strict=True) if p >= 0]
                row = held[of.layers[layer], group, sequence] = {int(p): float(s) for p, s in of_row}
                assert len(row) == len(of_row), "no token is held twice"
        return held

    def assert_equal(self) -> None:
        """Compare kept positions, scores and pages with the cache, and check its invariants; then poison it."""
        check(clear_status(self.cache), held=[{}] * len(self.cache.of_pools) if self.spec.skip_layers else {})
        assert self.cache.lengths.tolist() == self.seen
        held = self.held()
        for (layer, group, sequence), row in self.all_rows():
            of_cache = held[layer, group, sequence]
            assert self.spec.windows is not None
            if self.spec.windows[layer] is not None:
                continue
            assert sorted(of_cache) == sorted(token.position for token in row), (layer, group, sequence)
            if self.compare_scores:
                expected = [token.score for token in row]
                scores = [of_cache[token.position] for token in row]
                np.testing.assert_allclose(scores, expected, atol=2e-5, rtol=1e-4)
        self.cache = poison(self.cache)

    def kept(self, sequence: int, layer: int = 0, group: int = 0) -> list[int]:
        """Positions of a row, in order."""
        return sorted(token.position for token in self.rows[layer][group][sequence])

    def pages(self, layer: int = 0) -> np.ndarray:
        """Pages [groups, seqs] of the rows of a layer."""
        pool, within = self.spec.place_of(layer)
        return (np.asarray(self.cache.of_pools[pool].page_table)[within] > 0).sum(-1)

    def copy_row(self, source: int, target: int) -> None:
        """Let a sequence hold copies of another's tokens."""
        for layer in self.layers:
            for group in self.groups:
                rows = self.rows[layer][group]
                rows[target] = [dataclasses.replace(token) for token in rows[source]]
        self.seen[target], self.start[target] = self.seen[source], self.start[source]

    def fork(self, source: int, target: int) -> bool:
        """Fork a sequence; nothing changes where that is refused."""
        self.cache, ok = fork(self.cache, ids([source]), ids([target]))
        if bool(ok):
            self.copy_row(source, target)
        self.assert_equal()
        return bool(ok)

    def share(self, source: int, target: int, pages: int) -> bool:
        """Put copies of the first pages of a sequence that has lost nothing into an empty one."""
        page_ids = np.asarray(self.cache.page_table)[:, :, source, :pages]
        self.cache, ok = share(self.cache, jnp.int32(target), ids(page_ids), jnp.int32(self.start[source]))
        if bool(ok):
            self.copy_row(source, target)
            self.cut(target, pages * self.spec.page_size)
        self.assert_equal()
        return bool(ok)

    def release(self, sequences: Sequence[int]) -> None:
        """Empty sequences."""
        self.cache = release(self.cache, ids(sequences))
        for sequence in sequences:
            for layer in self.layers:
                for group in self.groups:
                    self.rows[layer][group][sequence] = []
            self.seen[sequence] = self.start[sequence] = 0
        self.assert_equal()

    def truncate(self, sequence: int, length: int) -> bool:
        """Truncate a sequence; the scores that taken-back queries have given stay."""
        self.cache = truncate(self.cache, ids([sequence]), ids([length]))
        ok = not int(self.cache.status)
        if ok:
            self.cut(sequence, length)
            self.assert_equal()
        return ok

    def cut(self, sequence: int, length: int) -> None:
        """Let a sequence end after `length` tokens."""
        end = self.start[sequence] + length
        for layer in self.layers:
            for group in self.groups:
                row = self.rows[layer][group][sequence]
                self.rows[layer][group][sequence] = [token for token in row if token.position < end]
        self.seen[sequence] = min(self.seen[sequence], length)

    def is_whole(self, sequence: int) -> bool:
        """Whether no row of a sequence has lost a token."""
        return all(len(row) == self.seen[sequence] for (_, _, of), row in self.all_rows() if of == sequence)


def assert_bounded(twin: PolicyTwin, chunk: int = 0) -> None:
    """Compare the pages of rows without a window with what the budget promises."""
    rule, size, windows = twin.rule, twin.spec.page_size, twin.spec.windows
    assert rule is not None and windows is not None
    most = pages_for(rule.budget + chunk, size) + 1
    assert all((twin.pages(layer) <= most).all() for layer in twin.layers if windows[layer] is None)


# Prompts in parts, ragged, ended together and apart; then decode, a second turn in parts, and decode again.
MIXED = (
    (PREFILL, [20, 4, 0, 0], [False, True, True, True]),
    (PREFILL, [7, 0, 1, 16], [False, True, True, False]),
    (PREFILL, [9, 0, 3, 11], [True] * 4),
    *[(DECODE, [1, 1, 1, 1], None)] * 9,
    *[(DECODE, [1, 0, 1, 0], None)] * 3,
    (PREFILL, [5, 1, 13, 0], [False, False, True, True]),
    (PREFILL, [1, 1, 0, 0], [False, False, True, True]),
    (DECODE, [0, 0, 1, 1], None),
    (PREFILL, [2, 6, 0, 1], [True] * 4),
    *[(DECODE, [1, 1, 1, 1], None)] * 9,
)


def run_mixed(twin: PolicyTwin, *, as_prompts: bool = False) -> None:
    """Take the steps of MIXED and hold the rows to their pages wherever no prompt is unfinished.

    Lone tokens may come as if each ended a prompt, which is the same to policies that drop nothing in decode.
    """
    assert twin.rule is not None
    unfinished = set()
    for shape, lengths, ends in MIXED:
        if as_prompts and ends is None:
            shape, ends = PREFILL, [True] * 4
        assert bool(twin.step(lengths, **shape, ends=ends).ok)
        if ends is not None:
            unfinished |= {i for i in range(4) if lengths[i] and not ends[i]}
            unfinished -= {i for i in range(4) if lengths[i] and ends[i]}
        if twin.rule.in_decode and (twin.rule.in_chunks or not unfinished):
            assert_bounded(twin)


def special_tokens(twin: PolicyTwin, lengths, kind: str):
    """Queries, keys and values in small whole numbers, so that what is equal is equal in float32 too."""
    spec, count = twin.spec, sum(lengths)
    q, k, v = (twin.rng.integers(1, 3, of.shape).astype(np.float32) for of in twin.draw_tokens(count))
    if kind == "equal keys":
        k[:] = np.arange(spec.head_dim) % 3
    elif kind == "zero values":
        v[:] = 0
    elif kind == "all zero":
        q[:], k[:], v[:] = 0, 0, 0
    elif kind == "one huge key":
        # The first of each sequence draws all attention: that to others is 0 in float32.
        starts = np.cumsum([0, *lengths])[:-1]
        first = [start for start, n, seen in zip(starts, lengths, twin.seen, strict=True) if n and not seen]
        k[:, first] = 500
    return q, k, v


SPECIAL = ("equal keys", "zero values", "all zero", "one huge key")


def run_special(twin: PolicyTwin, kind: str, steps: int = 14) -> None:
    """A prompt each of two sequences and lone tokens behind them, of `special_tokens`."""
    for lengths, shape, ends in (([17, 5, 0, 0], PREFILL, [True] * 4), *[([1, 1, 0, 0], DECODE, None)] * steps):
        twin.step(lengths, **shape, ends=ends, qkv=special_tokens(twin, lengths, kind))
