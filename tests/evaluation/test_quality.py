"""Formats compared on the small trained model: against the plain forward, by hand, and in order."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.batch import cache_spec
from kvjax.evaluation.quality import Comparison, Fake, Variant, compare, read_back
from kvjax.evaluation.small_task import documents
from kvjax.evaluation.texts import Document
from kvjax.evaluation.train_small import TEST_SEED
from kvjax.kernels import dense_attention
from kvjax.kernels.formats import FORMATS
from kvjax.models.decoder import Decoder
from kvjax.models.registry import find, load_weights, read_config
from kvjax.options import Options
from kvjax.rotary import apply

LENGTH, PAGE = 120, 16  # in chunks of 64: the last has 56 tokens, the last page 8
STORED = ("float32", "int8", "fp8_e4m3", "int4")
FAKES = {
    "fake_int4": Fake(FORMATS["int4_per_channel"], FORMATS["int4_hadamard"]),
    "int4_before_rotary": Fake(FORMATS["int4_per_channel"], FORMATS["int4_hadamard"], before_rotary=True),
}


@pytest.fixture(scope="module")
def stacked():
    """The small model with its layers stacked: its programs compile faster."""
    source = find(str(Path(__file__).parent.parent / "data" / "small_model"))
    return Decoder(read_config(source), load_weights(source), scan=True)


@pytest.fixture(scope="module")
def comparison(stacked):
    full = cache_spec(stacked, [LENGTH], [1], Options(page_size=PAGE, chunk_size=64))
    variants = [
        Variant(name, dataclasses.replace(full, format=name, key_format=None, value_format=None)) for name in STORED
    ]
    variants += [Variant(name, full, fake) for name, fake in FAKES.items()]
    return Comparison(stacked, full, variants)


@pytest.fixture(scope="module")
def document():
    return Document("task", "prose", documents(1, LENGTH, seed=TEST_SEED).tokens[0])


@pytest.fixture(scope="module")
def scores(comparison, document):
    return comparison.scores(document)


@pytest.fixture(scope="module")
def errors(comparison, document):
    return {variant.name: comparison.attention_error(variant, document) for variant in comparison.variants[:-1]}


def test_full_precision_is_the_plain_forward(small_model, document, scores):
    tokens = document.tokens
    logs = np.asarray(jax.nn.log_softmax(jax.jit(small_model.dense)(jnp.asarray(tokens))))
    for name in ("full", "float32"):
        of = scores[name]
        np.testing.assert_allclose(of.nll, -logs[np.arange(LENGTH - 1), tokens[1:]], atol=1e-4)
        np.testing.assert_array_equal(of.right, logs[:-1].argmax(1) == tokens[1:])
        assert np.abs(of.kl).max() < 1e-6 and of.agrees.all()


def test_scores_of_logits_by_hand():
    random = np.random.default_rng(0)
    logits, full = random.standard_normal((2, 5, 7)).astype(np.float32)
    targets = np.array([0, 6, 3, 3, 1], np.int32)
    p, q = (np.exp(of) / np.exp(of).sum(1, keepdims=True) for of in (full, logits))
    found = compare(jnp.asarray(logits), jnp.asarray(full), jnp.asarray(targets))
    np.testing.assert_allclose(found.kl, (p * np.log(p / q)).sum(1), rtol=1e-5)
    np.testing.assert_allclose(found.nll, -np.log(q[np.arange(5), targets]), rtol=1e-5)
    np.testing.assert_array_equal(found.agrees, p.argmax(1) == q.argmax(1))
    np.testing.assert_array_equal(found.right, q.argmax(1) == targets)


def test_coarser_formats_are_further_off(scores, errors):
    kl = {name: scores[name].kl.mean() for name in STORED}
    assert kl["float32"] < 1e-6 < kl["int8"] < kl["fp8_e4m3"] < kl["int4"]
    assert errors["float32"] == 0 < errors["int8"] < errors["fp8_e4m3"] < errors["int4"]


def test_a_stand_in_for_a_real_format_measures_the_same(scores, errors):
    apart = np.abs(scores["fake_int4"].nll - scores["int4"].nll)
    # Products summed in another order let a value round to the next code now and then.
    assert np.median(apart) < 1e-4 and np.quantile(apart, 0.9) < 1e-3 and apart.max() < 0.05
    assert scores["fake_int4"].kl.mean() == pytest.approx(scores["int4"].kl.mean(), rel=0.02)
    assert errors["fake_int4"] == pytest.approx(errors["int4"], rel=0.02)


def test_keys_before_the_rotary_embedding_differ(scores):
    assert np.abs(scores["int4_before_rotary"].nll - scores["fake_int4"].nll).max() > 0.01
    assert scores["int4_before_rotary"].kl.mean() < 3 * scores["int4"].kl.mean()


def test_the_error_of_attention_by_hand(small_model, document, errors):
    """Symmetric int8 written out: a bfloat16 scale of the largest value / 127 for every vector."""
    heard = []

    def attention(state, layer, q, k, v, *_):
        q, k = (apply(small_model.rotary, x, jnp.arange(LENGTH, dtype=jnp.int32), layer) for x in (q, k))
        outs = [
            dense_attention.attend(q, *of, window=jnp.int32(LENGTH), scale=q.shape[-1] ** -0.5)
            for of in ((k, v), (stored(k), stored(v)))
        ]
        heard.append(np.linalg.norm(outs[1] - outs[0]) / np.linalg.norm(outs[0]))
        return outs[0], state

    def stored(x):
        x = np.asarray(x)
        scale = np.asarray(jnp.asarray(np.abs(x).max(-1, keepdims=True) / 127, jnp.bfloat16), np.float32)
        return jnp.asarray(np.clip(np.round(x / scale), -127, 127) * scale)

    small_model.hidden(jnp.asarray(document.tokens), attention, ())
    assert errors["int8"] == pytest.approx(np.mean(heard), rel=1e-3)


def test_open_pages_of_stand_ins_stay_in_bfloat16():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((32, 2, 8)), jnp.float32)
    seen = np.asarray(read_back(x, FORMATS["int4_per_channel"], 8, jnp.int32(21)))
    exact = np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32))
    assert np.array_equal(seen[16:], exact[16:]) and (seen[:16] != exact[:16]).any((1, 2)).all()
    pages = exact.reshape(4, 8, 2, 8)
    step = (pages.max(1) - pages.min(1)) / 15
    assert (np.abs(seen.reshape(pages.shape) - pages)[:2] < 0.51 * step[:2, None]).all()
