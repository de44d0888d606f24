"""Recomputation: the scores are those of the right tokens, and what is compared are the same ones."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.decoders import tiny_decoder, unchecked_shapes

import kvjax
from kvjax.evaluation import recomputation
from kvjax.evaluation.policies import Stopped
from kvjax.evaluation.texts import Text
from kvjax.options import Options
from kvjax.policies import SlidingWindow, Streaming

READ = np.random.default_rng(2).integers(0, 61, 300, np.int32)


@pytest.fixture(scope="module")
def model():
    """A loaded model whose tokenizer has every letter be a token."""
    decoder = tiny_decoder(num_layers=1)
    tokenizer = types.SimpleNamespace(encode=lambda text: [ord(letter) for letter in text], add_bos=False, eos_ids=())
    with unchecked_shapes():
        return kvjax.LanguageModel(name="tiny", decoder=decoder, config=decoder.config, tokenizer=tokenizer)  # pyright: ignore


def exact(decoder, tokens) -> np.ndarray:
    """-log p of all tokens but the first."""
    logits = np.asarray(jax.nn.log_softmax(decoder.dense(jnp.asarray(tokens))))
    return -np.take_along_axis(logits[:-1], np.asarray(tokens)[1:, None], axis=1)[:, 0]


def test_the_same_tokens_are_compared(model, monkeypatch):
    for name, value in dict(STRETCH=120, BLOCK=8, BLOCKS=3).items():
        monkeypatch.setattr(recomputation, name, value)
    text = Text("letters", "prose", "drawn", "".join(map(chr, READ)))
    options, lines = Options(policy=Streaming(window=28, sinks=4), chunk_size=17), []
    report = recomputation.run(model, text, options, 240, lines.append)
    assert report["tokens"] == 240 and report["pages_after_fill"] == report["pages_end"] and "minutes" in lines[0]
    assert [(row["begin"], row["end"], row["scored"]) for row in report["rows"]] == [(0, 120, 24), (120, 240, 24)]
    first, second = ([32, 72, 112], [120, 176, 232])
    for row, starts in zip(report["rows"], (first, second), strict=True):
        anew = [exact(model.decoder, READ[at - 32 : at + 8])[-8:].mean() for at in starts]
        np.testing.assert_allclose(row["ppl_recomputed"], np.exp(np.mean(anew)), rtol=1e-5)
        np.testing.assert_allclose(row["ratio"], row["ppl"] / row["ppl_recomputed"], rtol=1e-9)
        np.testing.assert_allclose(row["ratio_window"], row["ppl_window"] / row["ppl_recomputed"], rtol=1e-9)
    # Of one layer a plain window holds all that a query depends on.
    window = [
        exact(model.decoder, READ[at - 32 + i : at + 1 + i])[-1] for at in second for i in range(8)
    ]  # fmt: skip
    np.testing.assert_allclose(report["rows"][1]["ppl_window"], np.exp(np.mean(window)), rtol=1e-4)


def test_what_has_been_compared_survives_an_interrupt(model, monkeypatch):
    for name, value in dict(STRETCH=120, BLOCK=8, BLOCKS=3).items():
        monkeypatch.setattr(recomputation, name, value)
    text = Text("letters", "prose", "drawn", "".join(map(chr, READ)))
    options, lines = Options(policy=Streaming(window=28, sinks=4), chunk_size=17), []

    def pause():
        if any("120 tokens" in line for line in lines):
            raise Stopped

    report = recomputation.run(model, text, options, 240, lines.append, pause)
    assert [row["end"] for row in report["rows"]] == [120] and not report["complete"]
    assert 120 < report["tokens"] < 240 and lines[-1] == "stopped with 1 of 2 stretches"


@pytest.mark.parametrize(
    ("policy", "tokens", "words"),
    [
        (SlidingWindow(window=32), None, "policy sliding_window is not compared"),
        (Streaming(window=508), 4095, "4095 tokens and a window of 512: give at least 4096"),
        (Streaming(window=4090), 4096, "a smaller window"),
        (Streaming(window=508), 4096, "the text has 300 tokens and 4096 are wanted"),
    ],
)
def test_what_cannot_be_compared_is_refused(model, policy, tokens, words):
    text = Text("letters", "prose", "drawn", "".join(map(chr, READ)))
    with pytest.raises(kvjax.InputError, match=words):
        recomputation.run(model, text, Options(policy=policy), tokens, print)
