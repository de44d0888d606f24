"""Sampling: the options against plain numpy, reproducibility, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.sampling import log_probabilities, sample, sampling

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.06, 0.04], np.float32))
DRAWS = 4000


def keys(count: int, seed: int = 0):
    return jax.random.split(jax.random.key(seed), count)


def shares(**options) -> np.ndarray:
    """How often each of the five tokens is drawn."""
    how = sampling(DRAWS, **{"temperature": 1.0, **options})
    drawn = jax.jit(sample)(jnp.tile(jnp.asarray(LOGITS)[None], (DRAWS, 1)), how, keys(DRAWS))
    return np.bincount(np.asarray(drawn), minlength=5) / DRAWS


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.06, 0.04]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
        ({"top_k": 99}, [0.5, 0.25, 0.15, 0.06, 0.04]),
        # 0.5 alone does not reach 0.7, with 0.25 it does.
        ({"top_p": 0.7}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0, 0]),
        # 0.25 >= 0.4 * 0.5, 0.15 is not.
        ({"min_p": 0.4}, [2 / 3, 1 / 3, 0, 0, 0]),
        # Squared probabilities: 0.25, 0.0625, 0.0225, 0.0036, 0.0016.
        ({"temperature": 0.5}, np.array([0.25, 0.0625, 0.0225, 0.0036, 0.0016]) / 0.3402),
        # Top-k first: of 0.5 and 0.25 renormalised, 0.667 reaches 0.6 alone.
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0, 0]),
    ],
)
def test_draws_follow_the_restricted_distribution(options, expected):
    drawn = shares(**options)
    np.testing.assert_allclose(drawn, expected, atol=0.03)
    assert (drawn[np.asarray(expected) == 0] == 0).all()


def test_each_sequence_has_options_of_its_own():
    how = sampling(3, temperature=[0.0, 1.0, 1.0], top_k=[0, 1, 2])
    logits = jnp.tile(jnp.asarray(LOGITS)[None], (3, 1))
    drawn = np.stack([np.asarray(sample(logits, how, keys(3, seed))) for seed in range(40)])
    assert (drawn[:, :2] == 0).all() and set(drawn[:, 2].tolist()) == {0, 1}


def test_the_same_key_draws_the_same_token():
    how = sampling(8, temperature=1.0)
    logits = jnp.tile(jnp.asarray(LOGITS)[None], (8, 1))
    first, again = sample(logits, how, keys(8)), sample(logits, how, keys(8))
    np.testing.assert_array_equal(first, again)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    how = sampling(2, repetition_penalty=[2.0, 1.0])
    logits = jnp.array([[3.0, 2.0, -1.0], [3.0, 2.0, -1.0]])
    seen = jnp.array([[True, False, False], [True, False, False]])
    # 3 / 2 falls below 2; without a penalty 3 stays the greatest.
    assert sample(logits, how, keys(2), seen).tolist() == [1, 0]
    negative = jnp.array([[-1.0, -1.5, -9.0]])
    assert sample(
        negative, sampling(1, repetition_penalty=2.0), keys(1), jnp.array([[True, False, False]])
    ).tolist() == [1]


def test_log_probabilities_are_those_of_the_model():
    own, ids, top = log_probabilities(jnp.asarray(LOGITS)[None], jnp.array([3], jnp.int32), 2)
    np.testing.assert_allclose(own, [np.log(0.06)], rtol=1e-5)
    assert ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(top, [np.log([0.5, 0.25])], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature -0.1 is out of range: it must be at least 0"),
        ({"top_p": 0.0}, "top_p 0 is out of range"),
        ({"top_p": 1.5}, "top_p 1.5 is out of range"),
        ({"top_k": -1}, "top_k -1 is out of range"),
        ({"min_p": 2.0}, "min_p 2 is out of range"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0 is out of range"),
        ({"temperature": float("nan")}, "temperature nan is out of range"),
        ({"temperature": [0.0, 1.0, 2.0]}, "temperature has 3 values for 2 sequences"),
        ({"top_k": float("inf")}, "top_k inf is out of range"),
        ({"top_k": 1.5}, "top_k 1.5 is out of range"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty inf is out of range"),
        ({"temperature": float("inf")}, "temperature inf is out of range"),
        ({"heat": 1.0}, "unknown sampling option 'heat'"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        sampling(2, **options)
