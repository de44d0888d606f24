"""SnapKV against its definition in float64: the end of a prompt chooses, neighbours count, decode drops nothing."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers.driver import PREFILL
from helpers.policies import POLICY_SPEC, SPECIAL, PolicyTwin, run_mixed, run_special, snapkv

from kvjax.errors import InputError
from kvjax.policies import SnapKV
from kvjax.policies.snapkv import pooled

HOW: dict[str, Any] = dict(budget=12, observation=4, kernel=3)
SPEC = dataclasses.replace(POLICY_SPEC, groups=2, policy=SnapKV(**HOW))


def twin_of(spec=SPEC, how=HOW) -> PolicyTwin:
    # The rule scores in every step, the policy only where a prompt ends.
    return PolicyTwin(spec, rule=snapkv(**how), compare_scores=False)


def test_kept_tokens_and_outputs_are_those_of_the_definition_at_every_step():
    twin = twin_of()
    run_mixed(twin, as_prompts=True)
    assert twin.dropped > 100
    assert twin.kept(0, 0, 0) != twin.kept(0, 0, 1), "heads keep tokens of their own"
    assert len(twin.kept(0)) > HOW["budget"], "what is generated is added"


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_tokens(kind):
    twin = twin_of()
    run_special(twin, kind, steps=0)
    assert twin.dropped == 2 * 5
    if kind in ("all zero", "equal keys"):
        # Zeros beyond the ends halve the scores of the first and the last before the window; the older goes first.
        assert twin.kept(0) == [*range(4, 12), *range(13, 17)]


def test_memory_comes_back_with_the_step_that_ends_the_prompt():
    twin = twin_of()
    twin.step([20, 0, 0, 0], **PREFILL, ends=[False] * 4)
    twin.step([16, 0, 0, 0], **PREFILL, ends=[False] * 4)
    assert twin.pages()[:, 0].tolist() == [5, 5]
    before = int(twin.cache.allocator.num_free)
    twin.step([4, 0, 0, 0], **PREFILL, ends=[True] * 4)
    assert twin.pages()[:, 0].tolist() == [2, 2]
    # The layer without a window has given back three pages of each head, the other one its window's.
    assert int(twin.cache.allocator.num_free) >= before + 6


@pytest.mark.slow
@pytest.mark.parametrize("changes", [dict(kernel=5, observation=8), dict(kernel=1), dict(heads="mean")], ids=str)
def test_variants(changes):
    groups = 1 if "heads" in changes else 2
    spec = dataclasses.replace(SPEC, groups=groups, windows=None, policy=SnapKV(**HOW | changes))
    twin = twin_of(spec, HOW | {name: of for name, of in changes.items() if name != "heads"})
    run_mixed(twin, as_prompts=True)
    assert twin.dropped > 50


def test_neighbours_count_as_torch_counts_them():
    scores = pooled(np.array([1, 0, 0, 0, 5], np.float32), 3)
    np.testing.assert_allclose(scores, [1 / 3, 1 / 3, 0, 5 / 3, 5 / 3], rtol=1e-6)


def test_a_last_chunk_holds_the_observation_and_is_never_one_token():
    assert SnapKV(budget=64).last_chunk == 32
    assert SnapKV(budget=64, observation=1).last_chunk == 2, "one token alone is a step of decode"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            dict(budget=32),
            "budget 32 of policy snapkv leaves no token beside the 32 that always stay: give at least 33",
        ),
        (dict(budget=64, kernel=4), "kernel 4 is even: give an odd number"),
        (dict(budget=64, kernel=0), "kernel is 0"),
        (dict(budget=64, observation=0), "observation is 0"),
        (
            dict(budget=64, prefill="chunked"),
            "prefill is 'chunked', and policy snapkv judges a prompt by its end: give p",
        ),
    ],
)
def test_bad_values_are_refused(as_a_user, how, words):
    with pytest.raises(InputError, match=words):
        SnapKV(**how)
