"""The control: what is protected stays, and of the others every one is as likely to go."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers.driver import advance, ids
from helpers.policies import POLICY_SPEC

from kvjax.cache import init_cache
from kvjax.errors import InputError
from kvjax.invariants import check
from kvjax.policies import Random

BUDGET, SINKS, RECENT = 12, 2, 2
SPEC = dataclasses.replace(
    POLICY_SPEC, groups=2, windows=None, policy=Random(budget=BUDGET, sinks=SINKS, recent=RECENT, seed=5)
)


def places(cache) -> np.ndarray:
    """Which tokens [layers, groups, seqs, kept] the rows hold, by place in their sequence."""
    table, start = np.asarray(cache.page_table), np.asarray(cache.start_position)
    held = np.asarray(cache.positions)[table].reshape(*table.shape[:3], -1)
    return np.array([np.sort(held[row][held[row] >= 0]) - start[row[2]] for row in np.ndindex(held.shape[:3])])


def test_every_token_that_is_not_protected_is_as_likely_to_go():
    dropped, rounds, tokens = np.zeros(20), 12, 20
    for i in range(rounds):
        cache = init_cache(SPEC, start_positions=ids([1000 * i + 7 * s for s in range(4)]))
        for lengths in ([20, 0, 0, 0], [0, 20, 0, 0], [0, 0, 20, 0], [0, 0, 0, 20]):
            cache, _, _ = advance(cache, lengths)
        kept = places(cache)
        assert kept.shape == (16, BUDGET) and len({tuple(row) for row in kept}) > 12, "rows choose on their own"
        dropped += [(kept != place).all(1).sum() for place in range(tokens)]
    assert (dropped[:SINKS] == 0).all() and (dropped[-RECENT:] == 0).all()
    others, likely = dropped[SINKS:-RECENT], (tokens - BUDGET) / (tokens - SINKS - RECENT)
    mean, deviation = 16 * rounds * likely, np.sqrt(16 * rounds * likely * (1 - likely))
    assert (abs(others - mean) < 5 * deviation).all()


def test_decode_drops_one_a_step_and_the_same_seed_the_same_ones():
    runs = []
    for _ in range(2):
        cache, _, _ = advance(init_cache(SPEC), [12, 12, 0, 0])
        kept = [places_of(cache, 0)]
        for _ in range(14):
            cache, _, _ = advance(cache, [1, 1, 0, 0], num_tokens=4, max_query_length=1)
            kept.append(places_of(cache, 0))
            check(cache, held={})
        runs.append(kept)
    assert runs[0] == runs[1]
    for i, (before, after) in enumerate(zip(runs[0], runs[0][1:], strict=False)):
        assert len(after) == BUDGET and after - before == {12 + i} and {0, 1, 11 + i} <= after
    assert len({min(before - after) for before, after in zip(runs[0], runs[0][1:], strict=False)}) > 8


def places_of(cache, sequence: int) -> set[int]:
    row = np.asarray(cache.page_table)[0, 0, sequence]
    held = np.asarray(cache.positions)[row]
    return {int(position) for position in held[held >= 0]}


def test_half_of_what_the_sinks_leave_is_recent_where_nobody_says():
    assert Random(budget=24).protected == 4 + 10 and Random(budget=6).protected == 5
    policy = Random(budget=BUDGET, sinks=SINKS)
    cache, _, _ = advance(init_cache(dataclasses.replace(SPEC, policy=policy)), [20, 0, 0, 0])
    held, newest = places_of(cache, 0), {15, 16, 17, 18, 19}
    assert len(held) == BUDGET and {0, 1} | newest <= held and min(held - newest - {0, 1}) < 14


def test_bad_values_are_refused(as_a_user):
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        (dict(budget=5), "budget 5 of policy random leaves no token beside the 5 that always stay: give at least 6"),
        (dict(budget=9, sinks=-1), "sinks is -1"),
        (dict(budget=9, recent=0), "recent is 0"),
        (dict(budget=9, sinks=None), "sinks is None"),
        (dict(budget=9, seed=-1), "seed is -1"),
    )
    for how, words in cases:
        with pytest.raises(InputError, match=words):
            Random(**how)
