"""Page formats: error bounds on any data, exact packing, hostile values."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.kernels.formats import FORMATS, decode, encode, rotate

QUANTIZED = [name for name, form in FORMATS.items() if form.is_quantized]
DIM = 64


def stored(x, name: str) -> np.ndarray:
    """What is read back of vectors, rotated back where the format rotates."""
    form = FORMATS[name]
    values = decode(*encode(jnp.asarray(x, jnp.float32), form), form)
    return np.asarray(rotate(values) if form.is_rotated else values, np.float64)


def bound(x: np.ndarray, name: str) -> np.ndarray:
    """Largest error of an element, of the rotated vector for formats that rotate.

    Half a step of the codes plus what rounding the scale itself can clip: 2^-8 of the largest value for bfloat16.
    """
    axis = -2 if FORMATS[name].is_per_channel else -1
    most = np.abs(x).max(axis, keepdims=True)
    if name == "int8":
        return most / 127 * 0.5 * (1 + 2**-8) + most * 2**-9
    if name.startswith("fp8"):
        mantissa, largest, smallest = (3, 448, 2**-10) if name == "fp8_e4m3" else (2, 57344, 2**-17)
        step = np.maximum(np.abs(x) * 2.0 ** -(mantissa + 1), most / largest * smallest)
        return step * (1 + 2**-8) + most * 2**-9
    span = x.max(axis, keepdims=True) - x.min(axis, keepdims=True)
    return (span / 15 * 0.5 + most * 2**-10) * (1 + 2**-8) + 2**-20


@st.composite
def vectors(draw) -> np.ndarray:
    """Gaussian vectors of any size, some with channels that stand out by a constant or by their spread."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal((4, DIM)) * 10.0 ** draw(st.integers(-3, 3))
    channels = rng.choice(DIM, 4, replace=False)
    kind = draw(st.sampled_from(["plain", "offset", "spread"]))
    if kind == "offset":
        x[:, channels] += 15 * np.abs(x).std()
    elif kind == "spread":
        x[:, channels] *= 10
    return x.astype(np.float32)


@pytest.mark.parametrize("name", QUANTIZED)
@settings(max_examples=60, deadline=None)
@given(x=vectors())
def test_errors_stay_within_the_format_s_bound(name, x):
    form = FORMATS[name]
    given_values = np.asarray(rotate(jnp.asarray(x)) if form.is_rotated else x, np.float64)
    got = np.asarray(decode(*encode(jnp.asarray(x), form), form), np.float64)
    assert (np.abs(got - given_values) <= bound(given_values, name) + 1e-30).all()


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in QUANTIZED])
def test_plain_formats_only_cast(name):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, DIM)), jnp.float32)
    codes, scales = encode(x, FORMATS[name])
    assert scales == () and codes.dtype == jnp.dtype(name)
    np.testing.assert_array_equal(decode(codes, scales, FORMATS[name]), x.astype(name))


@pytest.mark.parametrize("name", QUANTIZED)
def test_arrays_are_what_the_format_says(name):
    form = FORMATS[name]
    codes, scales = encode(jnp.ones((2, 5, DIM)), form)
    assert codes.dtype == jnp.dtype(form.dtype) and codes.shape == (2, 5, DIM // form.per_code)
    assert len(scales) == form.num_scales
    vectors = DIM if form.is_per_channel else 5
    assert all(scale.shape == (2, vectors) and scale.dtype.itemsize == 2 for scale in scales)


def test_every_pair_of_nibbles_survives():
    # Values that are codes already: minimum 0 and scale 1, in one vector with both ends of the range.
    form = FORMATS["int4_hadamard"]
    low, high = (of.reshape(-1) for of in np.meshgrid(np.arange(16), np.arange(16)))
    wanted = np.stack([np.r_[a, 0, b, 15] for a, b in zip(low, high, strict=True)]).astype(np.float32)
    rotated = rotate(jnp.asarray(wanted))  # its own inverse: encode rotates it back
    codes, scales = encode(rotated, form)
    np.testing.assert_array_equal(np.asarray(codes[:, 0]), low + 16 * high)
    np.testing.assert_allclose(decode(codes, scales, form), wanted, atol=1e-5)


@pytest.mark.parametrize("name", QUANTIZED)
def test_vectors_scale_with_their_scale(name):
    x = np.random.default_rng(1).standard_normal((8, DIM)).astype(np.float32)
    np.testing.assert_allclose(stored(64 * x, name), 64 * stored(x, name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("size", [1e-5, 1e-3, 1, 1e3])
def test_the_relative_error_does_not_depend_on_the_size(name, size):
    x = np.random.default_rng(4).standard_normal((64, DIM)).astype(np.float32) * size
    most = dict(int8=0.01, fp8_e4m3=0.03, fp8_e5m2=0.06).get(name, 0.1)
    assert np.linalg.norm(stored(x, name) - x) < most * np.linalg.norm(x)


@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_come_back_as_zeros(name):
    assert not stored(np.zeros((2, DIM)), name).any()


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("hostile", [1e4, 3e38, -3e38, 1e-40, np.inf, -np.inf, np.nan], ids=str)
def test_hostile_values_stay_finite_and_in_their_vector_or_channel(name, hostile):
    x = np.random.default_rng(2).standard_normal((3, DIM)).astype(np.float32)
    spoilt = x.copy()
    spoilt[1, 5] = hostile
    got = stored(spoilt, name)
    assert np.isfinite(got).all()
    others = np.arange(DIM) != 5 if FORMATS[name].is_per_channel else np.s_[:]
    np.testing.assert_array_equal(got[[0, 2]][:, others], stored(x, name)[[0, 2]][:, others])


def test_rotation_keeps_products_and_is_its_own_inverse():
    rng = np.random.default_rng(3)
    for size in (64, 96, 128, 80):
        q, k = (jnp.asarray(rng.standard_normal((5, size)), jnp.float32) for _ in range(2))
        np.testing.assert_allclose((rotate(q) * rotate(k)).sum(-1), (q * k).sum(-1), atol=1e-4)
        np.testing.assert_allclose(rotate(rotate(q)), q, atol=1e-5)
