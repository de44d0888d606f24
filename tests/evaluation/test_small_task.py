"""The documents of the small task: what stands where, and that they are the same for ever."""

import zlib

import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.evaluation.small_task import (
    ANSWER,
    BOS,
    FILLER,
    KEY,
    NEEDLE_LENGTH,
    QUESTION,
    SYMBOLS,
    VALUE,
    VOCAB_SIZE,
    Tag,
    documents,
    score,
)

LENGTH = 160


@pytest.fixture(scope="module", params=[2, 5])
def made(request):
    return documents(50, LENGTH, seed=5, needles=request.param)


def rows(made):
    return zip(made.tokens.tolist(), made.tags, made.needles, made.asked, strict=True)


def test_questions_repeat_the_needles(made):
    for tokens, tags, needles, asked in rows(made):
        facts = [tokens[place : place + NEEDLE_LENGTH] for place in needles]
        assert all(fact[0] == KEY and fact[2] == VALUE for fact in facts)
        assert len({fact[1] for fact in facts}) == len(facts) == len(asked)
        assert {symbol for fact in facts for symbol in (fact[1], *fact[3:])} <= set(SYMBOLS)
        questions = [[QUESTION, facts[i][1], ANSWER, *facts[i][3:]] for i in asked]
        assert tokens[-len(asked) * NEEDLE_LENGTH :] == sum(questions, [])
        assert np.flatnonzero(tags == Tag.ANSWER).tolist() == [
            LENGTH - NEEDLE_LENGTH * question + place for question in range(len(asked), 0, -1) for place in (3, 4)
        ]


def test_second_copy_repeats_the_first(made):
    for tokens, tags, _, _ in rows(made):
        copy = np.flatnonzero(tags == Tag.COPY)
        assert 8 - 2 <= len(copy) <= 20 - 2 and np.array_equal(copy, np.arange(copy[0], copy[-1] + 1))
        segment = tokens[copy[0] - 2 : copy[-1] + 1]
        assert len(set(segment)) == len(segment) and set(segment) <= set(SYMBOLS)
        before = tokens[: copy[0] - 2]
        assert any(before[i : i + len(segment)] == segment for i in range(len(before)))


def test_every_token_has_a_place(made):
    for tokens, tags, _, asked in rows(made):
        assert tokens[0] == BOS and tokens.count(BOS) == 1
        assert all((token in FILLER) == (tag == Tag.FILLER) for token, tag in zip(tokens, tags, strict=True))
        segment = np.count_nonzero(tags == Tag.COPY) + 2
        inserted = 2 * segment + 2 * len(asked) * NEEDLE_LENGTH
        assert np.count_nonzero(tags == Tag.FILLER) == LENGTH - 1 - inserted


def test_filler_walks_chains_of_four_successors():
    made = documents(400, LENGTH, seed=6)
    filler = [tokens[tags == Tag.FILLER] - FILLER[0] for tokens, tags in zip(made.tokens, made.tags, strict=True)]
    pairs = np.zeros((len(FILLER), len(FILLER)))
    for walk in filler:
        np.add.at(pairs, (walk[:-1], walk[1:]), 1)
    # Eight topics of four successors: never more than 32, and half of all steps go to few of the 27 symbols.
    assert ((pairs > 0).sum(1) > 10).all()
    assert np.sort(pairs / pairs.sum(1, keepdims=True))[:, -8:].sum(1).mean() > 0.75
    within = np.stack([walk[:40] for walk in filler])
    ways = [len({tuple(pair) for pair in zip(w[:-1], w[1:], strict=True) if pair[0] == w[0]}) for w in within]
    assert max(ways) <= 4


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needles_stand_at_their_depth(depth):
    made = documents(30, LENGTH, seed=7, depth=depth)
    filler = made.tags == Tag.FILLER
    before = np.stack([filler[row, :place].sum() for row, place in enumerate(made.needles[:, 0])])
    np.testing.assert_array_equal(before, (depth * filler.sum(1)).astype(int))


def test_depths_spread_over_the_document():
    places = documents(300, LENGTH, seed=8).needles / LENGTH
    assert places.min() < 0.05 and places.max() > 0.75 and 0.35 < places.mean() < 0.55


def test_same_seed_same_documents_in_every_version():
    made = documents(3, 128, seed=(9, 1))
    assert np.array_equal(made.tokens, documents(3, 128, seed=(9, 1)).tokens)
    assert not np.array_equal(made.tokens, documents(3, 128, seed=(9, 2)).tokens)
    assert zlib.crc32(made.tokens.astype("<i4").tobytes()) == 1208994049, "numpy's random stream has changed"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(count=0, length=64), "0 documents of 64 tokens"),
        (dict(count=1, length=61), "at least 62 tokens"),
        (dict(count=1, length=64, needles=0), "1 to 32 needles"),
        (dict(count=1, length=64, needles=3), "at least 72 tokens"),
        (dict(count=1, length=64, depth=1.5), "depth 1.5 is outside"),
    ],
)
def test_impossible_documents_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        documents(**given, seed=0)


def test_score_of_certain_and_of_even_logits():
    made = documents(4, 64, seed=10)
    certain = np.zeros((4, 64, VOCAB_SIZE), np.float32)
    np.put_along_axis(certain[:, :-1], made.tokens[:, 1:, None], 50, axis=2)
    for tag, found in score(certain, made).items():
        assert found.accuracy == 1 and found.nll < 1e-6 and found.tokens == (made.tags == tag).sum()
    even = score(np.zeros_like(certain), made)
    assert set(even) == {Tag.FILLER, Tag.COPY, Tag.ANSWER}
    assert all(found.nll == pytest.approx(np.log(VOCAB_SIZE)) and found.accuracy == 0 for found in even.values())
