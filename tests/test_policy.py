"""The loops under policies: chunks, peaks of memory, and the same tokens whatever the chunks."""

import dataclasses

import pytest
from helpers.decoders import tiny_decoder

import kvjax
from kvjax.batch import Batch, cache_spec, next_chunk
from kvjax.errors import InputError
from kvjax.options import Options
from kvjax.policies import H2O, TOVA, KNorm, PagedEviction, SnapKV
from kvjax.policy import Policy
from kvjax.spec import pages_for

PROMPTS = [
    [(7 * i + 3) % 61 for i in range(44)],
    [(5 * i + 1) % 61 for i in range(9)],
    [(3 * i) % 61 for i in range(30)],
]
SIZE, LAYERS, GROUPS = 8, 2, 2


@pytest.fixture(scope="module")
def model():
    return tiny_decoder()


def options(policy: Policy, **changes) -> Options:
    return Options(max_new_tokens=10, page_size=SIZE, policy=policy, **changes)


def tokens(model, given: Options) -> list[list[int]]:
    return [sequence.token_ids for sequence in kvjax.generate(model, PROMPTS, given).sequences]


def chunks(lengths: list[int], size: int, last: int) -> list[list[tuple[int, int, int]]]:
    prompts, pending, out = [[0] * n for n in lengths], [(i, 0) for i in range(len(lengths))], []
    while pending:
        chunk, pending = next_chunk(pending, prompts, size, last)
        out.append(chunk)
    return out


def test_the_last_tokens_of_a_prompt_come_in_one_chunk():
    assert chunks([20], 8, 0) == [[(0, 0, 8)], [(0, 8, 16)], [(0, 16, 20)]]
    assert chunks([20], 8, 6) == [[(0, 0, 8)], [(0, 8, 14)], [(0, 14, 20)]]
    assert chunks([17], 16, 2) == [[(0, 0, 15)], [(0, 15, 17)]], "a token alone would be one of decode"
    assert chunks([5, 9], 8, 6) == [[(0, 0, 5), (1, 0, 3)], [(1, 3, 9)]]
    assert chunks([5, 3], 8, 6) == [[(0, 0, 5), (1, 0, 3)]]
    # What has no room for its last tokens waits.
    assert chunks([5, 5], 8, 6) == [[(0, 0, 5)], [(1, 0, 5)]]


@pytest.mark.parametrize("size", range(6, 14))
@pytest.mark.parametrize("last", [0, 2, 6])
def test_all_tokens_come_once_and_in_order(size, last):
    lengths = [1, 23, 2, 6, 7, 40]
    parts = [part for chunk in chunks(lengths, size, last) for part in chunk]
    for i, length in enumerate(lengths):
        of = [(begin, end) for sequence, begin, end in parts if sequence == i]
        assert [begin for begin, _ in of] == [0, *(end for _, end in of[:-1])] and of[-1][1] == length
        assert of[-1][1] - of[-1][0] >= min(last, length)
    assert all(sum(end - begin for _, begin, end in chunk) <= size for chunk in chunks(lengths, size, last))


def test_a_chunk_is_as_long_as_what_a_policy_must_see_at_once(model):
    spec = cache_spec(model, [44], [4], options(SnapKV(budget=40, observation=24), chunk_size=16))
    assert spec.max_query_length == 24 and spec.groups == GROUPS


@pytest.mark.parametrize(
    ("policy", "groups", "slots"),
    [
        (Policy(), 1, 44 + 9),
        (TOVA(budget=16), 1, 44),
        (TOVA(budget=16, prefill="chunked"), 1, 16 + 16),
        (H2O(budget=16, heads="mean"), 1, 44),
        (KNorm(budget=16), GROUPS, 44),
        (PagedEviction(budget=24, prefill="chunked"), 1, 24 + 16),
        (SnapKV(budget=16, observation=8), GROUPS, 44),
        (SnapKV(budget=40, observation=8), GROUPS, 40 + 9),
    ],
    ids=str,
)
def test_pools_hold_what_a_policy_needs_at_its_peak(model, policy, groups, slots):
    spec = cache_spec(model, [44], [10], options(policy, chunk_size=16))
    least = LAYERS * groups * pages_for(slots, SIZE)
    assert spec.groups == groups and least <= spec.num_pages - 1 <= 1.3 * least


@pytest.mark.slow
def test_the_same_tokens_whatever_the_chunks(model):
    given = options(SnapKV(budget=16, observation=6, kernel=3), chunk_size=128)
    expected = tokens(model, given)
    assert tokens(model, dataclasses.replace(given, chunk_size=14)) == expected
    everything = tokens(model, dataclasses.replace(given, policy=Policy()))
    assert everything != expected, "something has been dropped"
    assert everything == tokens(model, dataclasses.replace(given, policy=H2O(budget=64))), "nothing exceeds the budget"


@pytest.mark.slow
def test_chunked_prompts_take_less_than_they_are_long_and_decode_takes_no_more(model):
    policy = TOVA(budget=16, prefill="chunked")
    given = options(policy, chunk_size=8)
    run = Batch(model, PROMPTS, given)
    for _ in run.prefill():
        pass
    peak = int(run.state.peak_pages[0])
    assert peak <= LAYERS * sum(pages_for(min(len(prompt), 16 + 8), SIZE) for prompt in PROMPTS)
    assert peak < LAYERS * pages_for(len(PROMPTS[0]), SIZE) + LAYERS * 2 * pages_for(16, SIZE)
    while run.running:
        run.scan(8)
        assert int(run.state.cache.pages_used) <= LAYERS * sum(pages_for(16 + 1, SIZE) for _ in PROMPTS)
    kvjax.check(run.state.cache, held={})
    # The pool that is enough for that is too small for the whole prompt.
    small = dict(chunk_size=8, num_pages=LAYERS * pages_for(16 + 8, SIZE) + 1)
    with pytest.raises(InputError, match="a prompt of 44 tokens is longer than the cache: it needs 12 pages"):
        cache_spec(model, [44], [10], options(TOVA(budget=16), **small))
    assert cache_spec(model, [44], [10], options(policy, **small)).num_pages == small["num_pages"]
