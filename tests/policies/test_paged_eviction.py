"""PagedEviction: prompts pruned by token, decode by page, against the definition in plain Python."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import DECODE, PREFILL, Twin
from helpers.policies import POLICY_SPEC, PolicyTwin, Rule, Token

from kvjax.cache import Status
from kvjax.errors import InputError
from kvjax.invariants import check
from kvjax.policies import PagedEviction, parse_policy
from kvjax.policy import Held

SIZE, BUDGET = POLICY_SPEC.page_size, 24


def norm_ratio(token: Token) -> float:
    of_value, of_key = (np.linalg.norm(x, axis=-1) for x in (token.value, token.written_key))
    return float((of_value / (of_key + 1e-6)).mean())


@dataclasses.dataclass
class PagedTwin(PolicyTwin):
    """Rows whose tokens stand as they came, so that each page has `SIZE` of them: only the last is ever open."""

    score: Callable[[Token], float] = norm_ratio

    def __post_init__(self):
        chunked = self.spec.policy.in_chunks
        self.rule = Rule(BUDGET, lambda row, p: None, recent=SIZE, sinks=SIZE, in_chunks=chunked)
        self.dropped_pages = 0
        super().__post_init__()

    def drop(self, layer, group, sequence, p, ended):
        row = self.rows[layer][group][sequence]
        for token in row:
            token.score = self.score(token)
        if p.shape[1] > 1:
            super().drop(layer, group, sequence, p, ended)
        elif ended and len(row) % SIZE == 0 and len(row) > BUDGET:
            means = [np.mean([token.score for token in row[i : i + SIZE]]) for i in range(SIZE, len(row) - SIZE, SIZE)]
            victim = (1 + int(np.argmin(means))) * SIZE
            del row[victim : victim + SIZE]
            self.dropped_pages += 1

    def decode(self, steps, lengths=(1, 1, 1, 0), **changes):
        """Lone tokens; afterwards every page but a row's last is full, and no row has one too many."""
        counts = []
        for _ in range(steps):
            q, k, v = self.draw_tokens(sum(lengths))
            self.step(lengths, qkv=(q, changes.get("k", k), changes.get("v", v)), **DECODE)
            self.assert_pages()
            counts.append(len(self.kept(0)))
        return counts

    def assert_pages(self):
        table = np.asarray(self.cache.page_table)[0]
        used = (np.asarray(self.cache.positions)[table] >= 0).sum(-1)
        assert (used[table > 0] == SIZE).sum() >= (table > 0).sum() - self.spec.max_seqs * self.spec.groups
        partly = (used > 0) & (used < SIZE)
        assert (partly.sum(-1) <= 1).all(), "only the last page of a row is not full"
        assert (self.pages() <= -(-BUDGET // SIZE) + 1).all()


def twin(groups=1, **options):
    policy = PagedEviction(budget=BUDGET, prefill=options.pop("prefill", "exact"))
    return PagedTwin(spec=dataclasses.replace(POLICY_SPEC, policy=policy, groups=groups), **options)


@pytest.mark.parametrize(("prefill", "groups"), [("exact", 1), pytest.param("chunked", 2, marks=pytest.mark.slow)])
def test_a_batch_keeps_what_the_definition_keeps(prefill, groups):
    rows = twin(groups, prefill=prefill)
    rows.step([17, 7, 0, 0], ends=[False, True, True, True], **PREFILL)
    rows.step([20, 0, 4, 0], ends=[False, True, True, True], **PREFILL)
    rows.step([5, 0, 0, 0], ends=[True] * 4, **PREFILL)
    assert len(rows.kept(0)) == BUDGET and rows.dropped == 18 * groups
    rows.decode(9)
    assert rows.fork(0, 3)
    before = rows.held()
    rows.decode(2 * SIZE)
    assert rows.held()[0, 0, 3] == before[0, 0, 3], "the fork has its own pages"
    assert rows.dropped_pages == 4 * groups, "24 + 25 tokens drop a page three times, 7 + 25 once, 4 + 25 never"
    rows.release([0, 1, 2, 3])
    assert int(rows.cache.pages_used) == 0


def test_a_page_is_dropped_whenever_one_is_full():
    rows = twin()
    rows.step([20, 0, 0, 0], ends=[False] * 4, **PREFILL)
    rows.step([20, 0, 0, 0], ends=[True] * 4, **PREFILL)
    counts = rows.decode(2 * SIZE, [1, 0, 0, 0])
    assert counts == [*range(BUDGET + 1, BUDGET + SIZE), BUDGET] * 2
    assert rows.kept(0)[:SIZE] == list(range(SIZE)) and rows.kept(0)[-SIZE:] == list(range(48, 56))


def test_small_values_go_first_and_of_equal_pages_the_oldest():
    rows, shape = twin(), (2, 20, 2, 8)
    q, k, v = rows.draw(2, 20, 4, 8), np.ones(shape, np.float32), np.ones(shape, np.float32)
    v[:, 10] = 1e-3
    rows.step([20, 0, 0, 0], qkv=(q, k, v), ends=[False] * 4, **PREFILL)
    v[:, 10], v[:, 11] = 1, 0
    rows.step([20, 0, 0, 0], qkv=(q, k, v), ends=[True] * 4, **PREFILL)
    assert rows.kept(0) == [*range(8), *range(23, 31), *range(32, 40)], "10 and 31 go first, then the oldest"
    ones = np.ones((2, 1, 2, 8), np.float32)
    rows.decode(SIZE, [1, 0, 0, 0], k=ones, v=ones)
    assert rows.kept(0) == [*range(8), *range(32, 48)], "the oldest of equal pages"
    rows.decode(SIZE, [1, 0, 0, 0], k=ones, v=ones * 0)
    assert rows.kept(0) == [*range(8), *range(40, 56)], "values of 0 stay while they are the newest page"
    rows.decode(SIZE, [1, 0, 0, 0], k=ones, v=ones)
    assert rows.kept(0) == [*range(8), *range(40, 48), *range(56, 64)], "and go with the next"


@pytest.mark.parametrize(("score", "by"), [("inv_k", lambda k, v: 1 / (k + 1e-6)), ("v", lambda k, v: v)])
def test_other_scores(score, by):
    k, v = np.random.default_rng(0).standard_normal((2, 5, 2, 3, 8)).astype(np.float32)
    written = PagedEviction(budget=BUDGET, score=score).write(jnp.asarray(k), jnp.asarray(v), None)
    expected = by(np.linalg.norm(k, axis=-1), np.linalg.norm(v, axis=-1)).mean(-1)
    np.testing.assert_allclose(written["score"], expected, rtol=1e-5)


def test_a_prompt_that_ends_with_one_token_is_pruned():
    rows = twin()
    rows.step([20, 0, 0, 0], ends=[False] * 4, **PREFILL)
    rows.step([20, 0, 0, 0], ends=[False] * 4, **PREFILL)
    _, report = rows.run([1, 0, 0, 0], rows.draw_tokens(1), **PREFILL, ends=[True] * 4)
    assert bool(report.ok) and len(rows.held()[0, 0, 0]) == BUDGET


def test_mistakes_are_named():
    with pytest.raises(
        InputError, match="budget 23 of policy paged_eviction leaves less than a page of 8.*at least 24"
    ):
        dataclasses.replace(POLICY_SPEC, policy=PagedEviction(budget=23))
    with pytest.raises(InputError, match="score is 'norm': choose one of v_over_k, inv_k, v"):
        parse_policy("paged_eviction:budget=64,score=norm")
    with pytest.raises(InputError, match="paged_eviction needs budget"):
        parse_policy("paged_eviction")
    assert parse_policy("paged_eviction:budget=64,prefill=chunked") == PagedEviction(budget=64, prefill="chunked")


def test_more_of_the_newest_tokens_can_stay():
    positions = jnp.arange(64, dtype=jnp.int32)
    score, of_row = jnp.linspace(1, 0, 64, dtype=jnp.float32), jnp.int32(0)
    held = Held(positions, dict(score=score), {}, of_row, jnp.int32(64), of_row, 8)
    rank, allowed = PagedEviction(budget=40, recent=20).rank(held)
    assert np.flatnonzero(np.isinf(rank)).tolist() == [*range(8), *range(44, 64)] and allowed == 40 - 28
    spec = dataclasses.replace(POLICY_SPEC, windows=None)
    with pytest.raises(InputError, match="the newest 20 tokens, which stay: give at least 36"):
        dataclasses.replace(spec, policy=PagedEviction(budget=35, recent=20))


@pytest.mark.parametrize(
    ("policy", "steps", "spoilt", "every"),
    [
        # Several prompts in turn, and more of the newest tokens than a page.
        (PagedEviction(budget=31, recent=14), [1, 19, 14, 1, 10, *[1] * 12], 1, 3),
        (PagedEviction(budget=27), [20, *[1] * 24], np.inf, 3),
        # Finite, but not their norms.
        (PagedEviction(budget=27), [20, 20, *[1] * 12], 1e20, 1),
    ],
    ids=["several prompts", "inf", "overflow"],
)
def test_rows_stay_whole_and_within_bounds(policy, steps, spoilt, every):
    spec = dataclasses.replace(POLICY_SPEC, windows=None, num_pages=100, pages_per_seq=12, policy=policy)
    rows, tokens = Twin(spec), 0
    for length in steps:
        q, k, v = rows.draw_tokens(4 * length)
        v[:, ::every] *= spoilt
        shape: dict[str, Any] = DECODE if length == 1 else dict(num_tokens=80, max_query_length=20)
        _, report = rows.run([length] * 4, (q, k, v), **shape, ends=None if length == 1 else [True] * 4)
        tokens += length
        check(dataclasses.replace(rows.cache, status=rows.cache.status & ~Status.NONFINITE_INPUT))
        table = np.asarray(rows.cache.page_table)
        held = np.sort(np.asarray(rows.cache.positions)[table].reshape(*table.shape[:3], -1), -1)
        assert bool(report.ok) and (held[..., -min(tokens, 8) :] == np.arange(tokens)[-8:]).all(), "the newest stay"
        assert length > 1 or ((table > 0).sum(-1) <= -(-policy.budget // SIZE) + 1).all()
