"""H2O against its definition in float64: accumulated attention, recent tokens, sums and means.

What is not slow of this is a worked example here, and any order of operations in test_eviction.py.
"""

import dataclasses

import numpy as np
import pytest
from helpers.driver import DECODE, SIZE
from helpers.policies import POLICY_SPEC, SPECIAL, PolicyTwin, h2o, run_mixed, run_special

from kvjax.errors import InputError
from kvjax.policies import H2O

BUDGET = 12
SPEC = dataclasses.replace(POLICY_SPEC, windows=None, groups=2, policy=H2O(budget=BUDGET))


@pytest.mark.slow
def test_kept_tokens_and_outputs_are_those_of_the_definition_at_every_step():
    twin = PolicyTwin(SPEC, rule=h2o(BUDGET))
    run_mixed(twin)
    assert twin.dropped > 200
    rows = [twin.kept(0, 0, group) for group in (0, 1)]
    assert rows[0] != rows[1], "heads keep tokens of their own"
    assert all(len(row) == BUDGET < twin.seen[0] for row in rows)
    assert min(rows[0]) < twin.seen[0] - 2 * BUDGET, "heavy hitters are older than a window would be"


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_tokens(kind):
    twin = PolicyTwin(SPEC, rule=h2o(BUDGET))
    run_special(twin, kind)
    assert twin.dropped > 20
    if kind == "all zero":
        # Uniform attention adds up to more for older tokens: the first and the recent ones stay.
        assert twin.kept(0) == [*range(BUDGET // 2), *range(31 - BUDGET // 2, 31)]
    if kind == "one huge key":
        # The others have no score at all, and the older ones go first.
        assert twin.kept(0) == [0, *range(31 - BUDGET + 1, 31)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (dict(normalize="mean", recent=0), dict(normalize="mean", recent=0)),
        (dict(recent=1, prefill="chunked"), dict(recent=1, in_chunks=True)),
    ],
    ids=str,
)
def test_variants(changes, rule):
    spec = dataclasses.replace(SPEC, windows=POLICY_SPEC.windows, policy=H2O(budget=BUDGET, **changes))
    twin = PolicyTwin(spec, rule=h2o(BUDGET, **rule))
    run_mixed(twin, as_prompts=True)
    assert twin.dropped > 100


@pytest.mark.slow
def test_the_mean_of_heads_that_share_pages():
    policy = H2O(budget=BUDGET, heads="mean")
    twin = PolicyTwin(dataclasses.replace(POLICY_SPEC, policy=policy), rule=h2o(BUDGET))
    run_mixed(twin, as_prompts=True)
    assert twin.dropped > 100


# Attention of tokens 0 to 5, each to those before it and itself: what a row of three tokens keeps is known.
GIVEN = ([1], [0.6, 0.4], [0.5, 0.1, 0.4], [0.2, 0.3, 0.1, 0.4], [0.1, 0, 0.2, 0.5, 0.2], [0, 0, 0, 0.35, 0.05, 0.6])


@pytest.mark.parametrize(
    ("normalize", "last"), [("sum", [0, 4, 5]), pytest.param("mean", [3, 4, 5], marks=pytest.mark.slow)]
)
def test_a_worked_example(normalize, last):
    """Keys are unit vectors, queries the logarithms of what they give to each."""
    policy = H2O(budget=3, recent=2, normalize=normalize)
    spec = dataclasses.replace(SPEC, num_layers=1, num_kv_heads=1, windows=None, groups=1, policy=policy)
    twin = PolicyTwin(spec, heads=1, scale=1.0, rule=h2o(3, recent=2, normalize=normalize))
    kept = []
    for i, row in enumerate(GIVEN):
        q = np.log(np.maximum(np.pad(np.array(row, np.float32), (0, SIZE - len(row))), 1e-30))
        k = np.eye(SIZE, dtype=np.float32)[i]
        twin.step([1, 0, 0, 0], **DECODE, qkv=tuple(of.reshape(1, 1, 1, SIZE) for of in (q, k, k)))
        kept.append(twin.kept(0))
    # Token 1 goes with .8 of 2.3; then 2; then 3 by sums (1.25 of 2.4) and 0 by means (.400 of .417).
    assert kept == [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], last]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (dict(budget=0), "budget is 0"),
        (dict(budget=1.5), "budget is 1.5"),
        (dict(budget=8, recent=8), "budget 8 of policy h2o leaves no token beside the 8 that always stay: give at le"),
        (dict(budget=8, recent=-1), "recent is -1"),
        (dict(budget=8, normalize="max"), "normalize is 'max': choose one of sum, mean"),
        (dict(budget=8, prefill="lazy"), "prefill is 'lazy': choose one of exact, chunked"),
        (dict(budget=8, heads="all"), "heads is 'all': choose one of each, mean"),
    ],
)
def test_bad_values_are_refused(as_a_user, how, words):
    with pytest.raises(InputError, match=words):
        H2O(**how)


def test_heads_that_share_pages_have_no_tokens_of_their_own():
    with pytest.raises(
        InputError, match="chooses tokens for each KV head, and 2 share a page: give groups=2, or heads=m"
    ):
        dataclasses.replace(SPEC, groups=1)
