"""Key norms against their definition in float64, in pages of every format that keeps scales per token."""

import dataclasses

import pytest
from helpers.driver import DECODE, PREFILL
from helpers.policies import POLICY_SPEC, SPECIAL, PolicyTwin, knorm, run_mixed, run_special, special_tokens

from kvjax.errors import InputError
from kvjax.policies import KNorm

BUDGET = 12
SPEC = dataclasses.replace(POLICY_SPEC, windows=None, format="int8", policy=KNorm(budget=BUDGET, heads="mean"))


def twin_of(spec=SPEC, **how) -> PolicyTwin:
    return PolicyTwin(spec, rule=knorm(BUDGET, **how))


@pytest.mark.slow
def test_kept_tokens_and_outputs_are_those_of_the_definition_at_every_step():
    """Codes and scales are moved as they are: what is read is what was stored, however often a row was compacted."""
    twin = twin_of()
    run_mixed(twin)
    assert twin.dropped > 100
    kept = twin.kept(0)
    assert len(kept) == BUDGET and kept != list(range(twin.seen[0] - BUDGET, twin.seen[0]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_tokens(kind):
    twin = twin_of()
    run_special(twin, kind)
    assert twin.dropped > 10
    if kind in ("all zero", "equal keys"):
        assert twin.kept(0) == list(range(31 - BUDGET, 31)), "of equal ones the older goes first"
    if kind == "one huge key":
        assert 0 not in twin.kept(0)


@pytest.mark.slow
@pytest.mark.parametrize("huge", [1e20, 3e38])
def test_a_norm_that_overflows_is_the_first_to_go(huge):
    twin = PolicyTwin(SPEC, rule=knorm(BUDGET), compare_scores=False)
    for lengths, shape, ends, at in (([12, 0, 0, 0], PREFILL, [True] * 4, 3), ([1, 0, 0, 0], DECODE, None, None)):
        q, k, v = special_tokens(twin, lengths, "zero values")
        if at is not None:
            k[:, at] = huge
        twin.step(lengths, **shape, ends=ends, qkv=(q, k, v))
    assert twin.kept(0) == [0, 1, 2, *range(4, 13)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_e4m3", "int4_hadamard"])
def test_formats(name):
    twin = twin_of(dataclasses.replace(SPEC, windows=POLICY_SPEC.windows, format=name))
    run_mixed(twin, as_prompts=True)
    assert twin.dropped > 100


@pytest.mark.slow
def test_each_head_of_its_own_compressed_in_chunks_with_nothing_protected():
    policy = KNorm(budget=BUDGET, recent=0, prefill="chunked")
    twin = twin_of(dataclasses.replace(SPEC, groups=2, format="float32", policy=policy), recent=0, in_chunks=True)
    run_mixed(twin, as_prompts=True)
    assert twin.kept(0, 0, 0) != twin.kept(0, 0, 1)


def test_keys_with_scales_per_channel_are_refused():
    with pytest.raises(InputError, match="belong to their page: use format int4_hadamard, which has scales per token"):
        dataclasses.replace(SPEC, format="int4", page_size=64)


def test_bad_values_are_refused(as_a_user):
    with pytest.raises(InputError, match="budget 4 of policy knorm leaves no token beside the 4 that always stay"):
        KNorm(budget=4, recent=4)
    with pytest.raises(InputError, match="recent is 'x'"):
        KNorm(budget=4, recent="x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="chooses tokens for each KV head, and 2 share a page"):
        dataclasses.replace(SPEC, policy=KNorm(budget=BUDGET))
