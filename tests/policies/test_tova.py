"""TOVA against its definition in float64: the newest query chooses, in prompts and in decode."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers.driver import DECODE, SIZE
from helpers.policies import POLICY_SPEC, SPECIAL, PolicyTwin, run_mixed, run_special, tova

from kvjax.errors import InputError
from kvjax.policies import TOVA
from kvjax.rotary import rotary

BUDGET, ROTARY = 12, rotary(POLICY_SPEC.head_dim, 10_000.0)
SPEC = dataclasses.replace(POLICY_SPEC, policy=TOVA(budget=BUDGET, prefill="chunked"))


def twin_of(spec=SPEC, **how) -> PolicyTwin:
    return PolicyTwin(spec, rule=tova(BUDGET, **how))


def test_kept_tokens_and_outputs_are_those_of_the_definition_at_every_step():
    twin = twin_of(in_chunks=True)
    run_mixed(twin)
    assert twin.dropped > 100
    kept = twin.kept(0)
    assert len(kept) == BUDGET and kept != list(range(twin.seen[0] - BUDGET, twin.seen[0]))


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_tokens(kind):
    twin = twin_of(in_chunks=True)
    run_special(twin, kind)
    assert twin.dropped > 10
    if kind in ("all zero", "equal keys"):
        assert twin.kept(0) == list(range(31 - BUDGET, 31)), "of equal ones the older goes first"
    if kind == "one huge key":
        assert twin.kept(0) == [0, *range(31 - BUDGET + 1, 31)]


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_prompts_compressed_at_their_ends(groups):
    """With pages of its own every KV head keeps what its queries attend to, wherever the sequences start."""
    spec = dataclasses.replace(POLICY_SPEC, windows=None, groups=groups, policy=TOVA(budget=BUDGET))
    options: dict[str, Any] = dict(rotary=ROTARY, tolerance=1e-4, soft_cap=2.0, starts=(2 * 10**9, 0, 600, 7))
    # The policy scores only where a prompt ends.
    twin = PolicyTwin(spec, rule=tova(BUDGET), compare_scores=False, **options)
    run_mixed(twin, as_prompts=groups == 2)
    assert twin.dropped > 100


@pytest.mark.slow
def test_a_worked_example():
    """Attention [.2, .3, .1, .4] of the fourth token: three are kept, and the third goes."""
    spec = dataclasses.replace(SPEC, num_layers=1, num_kv_heads=1, windows=None, policy=TOVA(budget=3))
    twin = PolicyTwin(spec, heads=1, scale=1.0, rule=tova(3))
    for i, row in enumerate(([1], [0.6, 0.4], [0.5, 0.1, 0.4], [0.2, 0.3, 0.1, 0.4])):
        q, k = np.log(np.pad(np.array(row, np.float32), (0, SIZE - len(row)), constant_values=1)), np.eye(SIZE)[i]
        twin.step([1, 0, 0, 0], **DECODE, qkv=tuple(of.astype(np.float32).reshape(1, 1, 1, SIZE) for of in (q, k, k)))
    assert twin.kept(0) == [0, 1, 3]


def test_the_newest_token_alone_is_no_budget():
    with pytest.raises(
        InputError, match="budget 1 of policy tova leaves no token beside the 1 that always stay: give at"
    ):
        TOVA(budget=1)
