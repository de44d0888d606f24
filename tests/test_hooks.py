"""What hooks of a policy return is checked, and mistakes are named."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import hooks
from kvjax.errors import InputError
from kvjax.policy import Held, Policy, Seen

ROWS = (1, 2, 3)
SCORES = jnp.zeros((*ROWS, 8))


def own(answer: Any) -> Any:
    """A policy whose hooks return this, of what is held where it can be called."""
    hooks_of: dict[str, Any] = dict.fromkeys(("write", "settle", "rank"), lambda *_: answer)
    observe = lambda self, held, seen: answer(held) if callable(answer) else answer  # noqa: E731
    return type("Own", (Policy,), dict(name="own", observe=observe, **hooks_of))()


def held() -> Held:
    count = jnp.zeros((1, 1, 3), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (*ROWS, 8))
    rows = dict(budget=jnp.zeros(ROWS, jnp.int32))
    return Held(positions, dict(score=SCORES), rows, jnp.zeros(ROWS, jnp.int32), count + 8, count, 4)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "write of policy own returned None: give arrays by name"),
        (dict(scores=jnp.zeros((5, 2))), r"returned arrays \['scores'\]: its state has \['score'\]"),
        (dict(score=jnp.zeros((2, 5))), r"returned float32 \[2, 5\] for score: give \[5, 2\]"),
        (dict(score=np.zeros((5, 2))), r"for score: give \[5, 2\]"),
    ],
)
def test_write(answer, words):
    k = jnp.zeros((5, 2, 1, 4))
    with pytest.raises(InputError, match=words):
        hooks.written(own(answer), k, k, None, dict(score=SCORES))
    assert hooks.written(own({}), k, k, None, dict(score=SCORES)) == {}, "not every step brings all"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "observe of policy own returned None: give a kvjax.policy.Held"),
        (lambda held: dataclasses.replace(held, slots={}), r"returned arrays \[\]: its state has \['score'\]"),
        (lambda held: dataclasses.replace(held, rows=dict(budget=jnp.zeros(3, jnp.int32))), r"int32 \[3\] for budget"),
    ],
)
def test_observe(answer, words):
    mass, lengths = SCORES[0], jnp.ones(3, jnp.int32)
    seen = Seen(
        mass=mass, entropy=None, queries=lengths, lengths=lengths, is_new=mass > 0, ends=lengths > 0, banded=None
    )  # fmt: skip
    with pytest.raises(InputError, match=words):
        hooks.observed(own(answer), held(), seen)
    assert hooks.observed(own(lambda held: held), held(), seen).page_size == 4


def test_settle():
    rows, ends = held().rows, jnp.ones(3, bool)
    for answer, words in ((None, "settle of policy own"), ({}, "its state has"), (dict(budget=ends), "bool .3. for")):
        with pytest.raises(InputError, match=words):
            hooks.settled(own(answer), rows, ends, [0])
    assert hooks.settled(own(rows), rows, ends, [0]) == rows


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (SCORES, "give ranks, and how many tokens are allowed"),
        ((SCORES[0], 3), r"returned float32 \[2, 3, 8\] for ranks: give float32 \[1, 2, 3, 8\]"),
        ((SCORES > 0, 3), "returned bool"),
        ((None, 3), "returned None for ranks"),
        ((SCORES, 2.5), "returned 2.5 for what is allowed"),
        ((SCORES, None), "returned None for what is allowed"),
    ],
)
def test_rank(answer, words):
    with pytest.raises(InputError, match=words):
        hooks.ranked(own(answer), held())
    rank, allowed = hooks.ranked(own((SCORES.astype(jnp.bfloat16), 3)), held())
    assert rank.dtype == jnp.float32 and allowed == 3
