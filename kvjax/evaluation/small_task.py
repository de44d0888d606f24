"""The small model's task: documents of filler, copies and needles over 64 symbols, made from a seed alone.

A document is `BOS`, then filler with four insertions, then two questions:

- filler walks a Markov chain over 27 symbols; which of eight chains it walks (its topic) changes now and then;
- a segment of distinct random symbols stands twice at random places: a copy;
- two needles `KEY k VALUE v1 v2` with different keys stand at random depths;
- `QUESTION k ANSWER v1 v2` ends the document, once for each needle, in random order.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int8, Int32, Shaped

from kvjax.errors import InputError

VOCAB_SIZE = 64
BOS, KEY, VALUE, QUESTION, ANSWER = range(5)
FILLER = range(5, 32)
SYMBOLS = range(32, 64)

NEEDLE_LENGTH = 5  # of a needle, and of its question with the answer
SEGMENT_LENGTHS = (8, 20)

_TOPICS = 8
_TOPIC_SEED = 1234
_TOPIC_LENGTHS = (40, 120)
_SUCCESSOR_PROBABILITIES = (0.55, 0.25, 0.15, 0.05)
_DEEPEST = 0.95


class Tag(enum.IntEnum):
    """What a token is; OTHER cannot be foreseen (or, like `ANSWER`, is no work to foresee) and is not scored."""

    OTHER = 0
    FILLER = 1
    COPY = 2
    ANSWER = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents:
    """Documents of one length.

    Attributes:
        tokens: the token ids.
        tags: a `Tag` each; COPY from the third token of the second copy on, ANSWER for `v1` and `v2` of the questions.
        needles: place of the `KEY` token of each needle.
        asked: the needle that each question asks for.
    """

    tokens: Int32[np.ndarray, "documents length"]
    tags: Int8[np.ndarray, "documents length"]
    needles: Int32[np.ndarray, "documents needles"]
    asked: Int32[np.ndarray, "documents needles"]


class Score(NamedTuple):
    """Mean negative log-likelihood (nats), share of tokens that were the likeliest, and their number."""

    nll: float
    accuracy: float
    tokens: int


def documents(
    count: int, length: int, *, seed: int | Sequence[int], needles: int = 2, depth: float | None = None
) -> Documents:
    """Make documents; the same arguments give the same documents.

    Args:
        count: how many.
        length: tokens of each.
        seed: as numpy's `default_rng` takes it. Training draws from pairs (seed, step), step from 1 on.
        needles: needles in a document, and questions at its end (`NEEDLE_LENGTH` tokens each).
        depth: share of the filler before all needles; None draws one for each, from 0 to 0.95.

    Raises: InputError for a length that does not hold the longest insertions, or a depth outside [0, 1].
    """
    _check(count, length, needles, depth)
    random = np.random.default_rng(seed)
    segment_length = random.integers(SEGMENT_LENGTHS[0], SEGMENT_LENGTHS[1] + 1, count)
    filler_length = length - 1 - 2 * segment_length - 2 * needles * NEEDLE_LENGTH
    filler = _filler(random, count, int(filler_length.max()))
    facts = _needles(random, count, needles)
    depths = random.uniform(0, _DEEPEST, (count, needles)) if depth is None else np.full((count, needles), depth)
    copies_at = random.integers(0, filler_length[:, None] + 1, (count, 2))
    at = np.concatenate([copies_at, (depths * filler_length[:, None]).astype(np.int64)], axis=1)
    sizes = np.stack([segment_length] * 2 + [np.full(count, NEEDLE_LENGTH)] * needles, axis=1)
    starts, filler_places = _places(random, at, sizes, filler.shape[1])

    tokens, tags = np.zeros((count, length), np.int32), np.zeros((count, length), np.int8)
    tokens[:, 0] = BOS
    real = np.arange(filler.shape[1]) < filler_length[:, None]
    _put(tokens, filler_places, filler, real)
    _put(tags, filler_places, np.full_like(filler, Tag.FILLER), real)
    _put_copies(random, tokens, tags, starts[:, :2], segment_length)
    for needle in range(needles):
        _put(tokens, starts[:, 2 + needle, None] + np.arange(NEEDLE_LENGTH), facts[:, needle])
    asked = random.random((count, needles)).argsort(1)
    _put_questions(tokens, tags, np.take_along_axis(facts, asked[..., None], axis=1))
    return Documents(tokens=tokens, tags=tags, needles=starts[:, 2:].astype(np.int32), asked=asked.astype(np.int32))


def _check(count: int, length: int, needles: int, depth: float | None) -> None:
    shortest = 1 + 2 * SEGMENT_LENGTHS[1] + 2 * needles * NEEDLE_LENGTH + 1
    if count < 1 or not 1 <= needles <= len(SYMBOLS) or length < shortest:
        raise InputError(
            f"{count} documents of {length} tokens with {needles} needles: ask for at least 1 document, 1 to "
            f"{len(SYMBOLS)} needles and, for so many, at least {shortest} tokens"
        )
    if depth is not None and not 0 <= depth <= 1:
        raise InputError(f"depth {depth} is outside [0, 1]: it is the share of the filler before the needles")


def score(logits: Float[np.ndarray, "documents length vocab"], made: Documents) -> dict[Tag, Score]:
    """Score the logits of every place against the token after it, by the tag of that token (OTHER is left out)."""
    wide = logits[:, :-1].astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    target = made.tokens[:, 1:]
    nll = np.log(np.exp(wide).sum(-1)) - np.take_along_axis(wide, target[..., None], axis=2)[..., 0]
    right = wide.argmax(-1) == target
    of_tag = {tag: made.tags[:, 1:] == tag for tag in Tag if tag is not Tag.OTHER}
    return {tag: Score(float(nll[w].mean()), float(right[w].mean()), int(w.sum())) for tag, w in of_tag.items()}


def _filler(random: np.random.Generator, count: int, length: int) -> Int32[np.ndarray, "documents filler"]:
    """Walk the chains of changing topics, all documents at once."""
    fixed = np.random.default_rng(_TOPIC_SEED)
    symbols, ways = len(FILLER), len(_SUCCESSOR_PROBABILITIES)
    successors = fixed.random((_TOPICS, symbols, symbols)).argsort(-1)[..., :ways]
    changes = -(-length // _TOPIC_LENGTHS[0])
    ends = random.integers(_TOPIC_LENGTHS[0], _TOPIC_LENGTHS[1] + 1, (count, changes)).cumsum(1)
    # Steps of 1 to 7 around the circle of topics: the next topic is always another one.
    topics = random.integers(1, _TOPICS, (count, changes + 1)).cumsum(1) % _TOPICS
    way = np.searchsorted(np.cumsum(_SUCCESSOR_PROBABILITIES)[:-1], random.random((count, length)), side="right")
    state, rows = random.integers(0, symbols, count), np.arange(count)
    out = np.empty((count, length), np.int32)
    for place in range(length):
        out[:, place] = state
        topic = topics[rows, (ends <= place).sum(1)]
        state = successors[topic, state, way[:, place]]
    return out + np.int32(FILLER[0])


def _needles(random: np.random.Generator, count: int, many: int) -> Int32[np.ndarray, "documents needles 5"]:
    needles = np.empty((count, many, NEEDLE_LENGTH), np.int32)
    needles[..., 0], needles[..., 2] = KEY, VALUE
    needles[..., 1] = _distinct_symbols(random, count, many)
    needles[..., 3:] = random.integers(SYMBOLS.start, SYMBOLS.stop, (count, many, 2))
    return needles


def _distinct_symbols(random: np.random.Generator, count: int, many: int) -> Int32[np.ndarray, "documents many"]:
    order = random.random((count, len(SYMBOLS))).argsort(1)[:, :many]
    return (order + SYMBOLS.start).astype(np.int32)


def _places(random: np.random.Generator, at: Shaped[np.ndarray, "documents insertions"], sizes, filler: int):
    """Return the places of each insertion's first token and of every filler token.

    Args:
        at: filler tokens before each insertion; insertions at one place follow each other in random order.
        sizes: tokens of each insertion.
        filler: filler tokens of the document with the most.
    """
    order = at + random.random(at.shape)
    before = order[:, None, :] < order[:, :, None]
    starts = 1 + at + (before * sizes[:, None, :]).sum(2)
    passed = at[:, None, :] <= np.arange(filler)[None, :, None]
    return starts, 1 + np.arange(filler) + (passed * sizes[:, None, :]).sum(2)


def _put(target: Shaped[np.ndarray, "documents length"], places, values, real=None) -> None:
    """Write values [documents, n] to places [documents, n] of each document, where `real`."""
    rows = np.broadcast_to(np.arange(len(target))[:, None], places.shape)
    real = np.ones(places.shape, bool) if real is None else real
    target[rows[real], places[real]] = values[real]


def _put_copies(random: np.random.Generator, tokens, tags, starts, lengths) -> None:
    within = np.arange(SEGMENT_LENGTHS[1])
    real = within < lengths[:, None]
    segments = _distinct_symbols(random, len(tokens), SEGMENT_LENGTHS[1])
    for copy in range(2):
        _put(tokens, starts[:, copy, None] + within, segments, real)
    second = starts.max(1)[:, None] + within
    _put(tags, second, np.full(second.shape, Tag.COPY), real & (within >= 2))


def _put_questions(tokens, tags, asked: Int32[np.ndarray, "documents needles 5"]) -> None:
    """End the documents with the questions for the needles, in the order given."""
    questions = asked.copy()
    questions[..., 0], questions[..., 2] = QUESTION, ANSWER
    length = questions[0].size
    tokens[:, -length:] = questions.reshape(len(tokens), length)
    tags[:, -length:] = np.tile([Tag.OTHER] * 3 + [Tag.ANSWER] * 2, questions.shape[1])
