"""Rotary embeddings against float64 trigonometry and independent formulas of every scaling."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.rotary import angles, apply, apply_angles, per_layer, rotary

LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def frequencies(head_dim, theta):
    return np.array([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])


def rotate64(x, positions, inverse, magnitude=1.0):
    """Half-split rotation in float64: the definition."""
    radians = np.asarray(positions, np.float64)[:, None] * inverse
    cos, sin = (magnitude * part[:, None, :] for part in (np.cos(radians), np.sin(radians)))
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def stored_frequencies(built):
    """Radians per position that the phases stand for."""
    return np.asarray(built.phases, np.float64)[0] / 2.0**32 * 2 * np.pi


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_worked_example():
    # head_dim 2 has one pair with frequency theta^0 = 1 radian a position; (1, 0) at position 3 is (cos 3, sin 3).
    out = apply(rotary(2, 10_000.0), jnp.asarray([[[1.0, 0.0]]]), jnp.asarray([3], jnp.int32))
    np.testing.assert_allclose(out[0, 0], [math.cos(3), math.sin(3)], atol=1e-6)


@pytest.mark.parametrize("theta", [10_000.0, 100_000.0, 1_000_000.0])
@pytest.mark.parametrize("position", [0, 1, 777, 8191, 131_072])
def test_angles_against_float64(theta, position):
    cos, sin = angles(rotary(128, theta), jnp.asarray([position], jnp.int32))
    exact = position * frequencies(128, theta)
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos[0], np.cos(exact), atol=2e-4)
    np.testing.assert_allclose(sin[0], np.sin(exact), atol=2e-4)


def test_rotation_against_float64():
    x, positions = normal(0, 5, 3, 64), np.array([0, 1, 17, 500, 2047], np.int32)
    out = apply(rotary(64, 10_000.0), jnp.asarray(x), jnp.asarray(positions))
    np.testing.assert_allclose(out, rotate64(x, positions, frequencies(64, 10_000.0)), atol=1e-5)


@pytest.mark.parametrize("distance", [0, 1, 100, 7999])
def test_scores_do_not_depend_on_the_base_position(distance):
    built = rotary(64, 10_000.0)
    q, k = (vector / np.linalg.norm(vector) for vector in (normal(1, 1, 1, 64), normal(2, 1, 1, 64)))
    exact = np.sum(rotate64(q, [distance], frequencies(64, 10_000.0)) * k)
    for base in (0, 131_072, 2_000_000_000):
        turned_q = apply(built, jnp.asarray(q), jnp.asarray([base + distance], jnp.int32))
        turned_k = apply(built, jnp.asarray(k), jnp.asarray([base], jnp.int32))
        score = np.sum(np.asarray(turned_q, np.float64) * np.asarray(turned_k, np.float64))
        np.testing.assert_allclose(score, exact, atol=1e-5)


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_layouts_agree_under_the_permutation(rotary_dim):
    x, positions = normal(3, 4, 2, 16), jnp.asarray([0, 3, 9, 1000], jnp.int32)
    # Component j of the interleaved order is component permutation[j] of the half-split one.
    order = np.arange(rotary_dim).reshape(2, -1).T.ravel()
    permutation = np.concatenate([order, np.arange(rotary_dim, 16)])
    half = apply(rotary(16, 10_000.0, rotary_dim=rotary_dim), jnp.asarray(x), positions)
    other = rotary(16, 10_000.0, rotary_dim=rotary_dim, layout="interleaved")
    interleaved = apply(other, jnp.asarray(x[..., permutation]), positions)
    np.testing.assert_allclose(interleaved, half[..., permutation], atol=1e-6)


def test_partial_rotation_leaves_the_rest():
    x, positions = normal(4, 3, 2, 16), np.array([1, 2, 3], np.int32)
    out = np.asarray(apply(rotary(16, 10_000.0, rotary_dim=4), jnp.asarray(x), jnp.asarray(positions)))
    np.testing.assert_array_equal(out[..., 4:], x[..., 4:])
    np.testing.assert_allclose(out[..., :4], rotate64(x[..., :4], positions, frequencies(4, 10_000.0)), atol=1e-6)


def test_linear_scaling():
    for key in ("rope_type", "type"):
        built = rotary(64, 10_000.0, scaling={key: "linear", "factor": 4.0})
        np.testing.assert_allclose(stored_frequencies(built), frequencies(64, 10_000.0) / 4, atol=1e-9)
        assert built.magnitude == 1.0


def test_llama3_scaling():
    expected = []
    for frequency in frequencies(128, 500_000.0):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected.append(frequency)
        elif wavelength > 8192 / 1:
            expected.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    built = rotary(128, 500_000.0, scaling=LLAMA3)
    np.testing.assert_allclose(stored_frequencies(built), expected, atol=1e-9)
    assert len({round(e / f, 3) for e, f in zip(expected, frequencies(128, 500_000.0), strict=True)}) > 3


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_scaling(truncate):
    dim, theta, factor, context = 64, 10_000.0, 4.0, 4096
    low, high = (dim * math.log(context / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in (32, 1))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    expected = []
    for i, frequency in enumerate(frequencies(dim, theta)):
        interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
        expected.append(frequency / factor * interpolated + frequency * (1 - interpolated))
    scaling = dict(rope_type="yarn", factor=factor, original_max_position_embeddings=context, truncate=truncate)
    built = rotary(dim, theta, scaling=scaling)
    np.testing.assert_allclose(stored_frequencies(built), expected, atol=1e-9)
    assert built.magnitude == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    "given, magnitude",
    [
        (dict(attention_factor=0.7), 0.7),
        (dict(mscale=1.0, mscale_all_dim=0.5), (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        (dict(factor=1.0), 1.0),
    ],
)
def test_yarn_magnitude(given, magnitude):
    scaling = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096) | given
    built = rotary(64, 10_000.0, scaling=scaling)
    assert built.magnitude == pytest.approx(magnitude)
    cos, sin = angles(built, jnp.asarray([5], jnp.int32))
    np.testing.assert_allclose(np.hypot(cos, sin), magnitude, rtol=1e-5)


def test_divisors_scaling():
    divisors = [1.0, 2.0, 4.0, 8.0]
    built = rotary(8, 100.0, scaling=dict(rope_type="divisors", divisors=divisors))
    np.testing.assert_allclose(stored_frequencies(built), frequencies(8, 100.0) / divisors, atol=1e-9)


def test_layers_choose_their_base_also_when_traced():
    local, distant = rotary(16, 10_000.0), rotary(16, 1_000_000.0, scaling=dict(rope_type="linear", factor=8.0))
    table = per_layer([local, distant], [0, 0, 1])
    assert table.phases.shape == (3, 8)
    x, positions = jnp.asarray(normal(5, 2, 1, 16)), jnp.asarray([40, 4000], jnp.int32)
    turn = jax.jit(apply)
    for layer, base in enumerate([local, local, distant]):
        expected = apply(base, x, positions, layer)
        np.testing.assert_allclose(turn(table, x, positions, jnp.int32(layer)), expected, atol=1e-6)
        np.testing.assert_allclose(apply(table, x, positions, layer), expected, atol=1e-6)


def test_dtype_is_kept_and_computed_in_float32():
    x, positions = normal(6, 3, 2, 32), jnp.asarray([1, 100, 30_000], jnp.int32)
    built = rotary(32, 10_000.0)
    low = jnp.asarray(x, jnp.bfloat16)
    out = apply(built, low, positions)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, apply(built, low.astype(jnp.float32), positions).astype(jnp.bfloat16))
    np.testing.assert_array_equal(apply_angles(low, *angles(built, positions)), out)


def test_is_a_pytree_with_a_hashable_static_part():
    built = rotary(8, 10_000.0)
    leaves, structure = jax.tree.flatten(built)
    assert len(leaves) == 1 and leaves[0].dtype == jnp.uint32
    assert hash(structure) == hash(jax.tree.structure(rotary(8, 500.0)))
    assert structure != jax.tree.structure(rotary(8, 10_000.0, layout="interleaved"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(scaling=dict(rope_type="longrope")), "'longrope' is not supported"),
        (dict(scaling=dict(rope_type="linear")), "needs the value 'factor'"),
        (dict(scaling=dict(rope_type="linear", factor=0)), "factor is 0"),
        (dict(scaling=LLAMA3 | dict(high_freq_factor=1.0)), "low_freq_factor below high_freq_factor"),
        (dict(scaling=dict(rope_type="divisors", divisors=[1.0])), "divisors"),
        (dict(rotary_dim=3), "rotary_dim 3"),
        (dict(rotary_dim=18), "rotary_dim 18"),
        (dict(layout="other"), "'other'"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(InputError, match=message):
        rotary(16, 10_000.0, **arguments)


def test_bad_theta_and_bases():
    with pytest.raises(InputError, match="theta 1"):
        rotary(16, 1.0)
    with pytest.raises(InputError, match="must agree"):
        per_layer([rotary(16, 10_000.0), rotary(8, 10_000.0)], [0, 1])
