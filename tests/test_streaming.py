"""Streams of texts and of a model's own output: what is scored, constant memory, far positions, and resuming."""

import os
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.decoders import tiny_decoder

import kvjax
from kvjax import snapshots
from kvjax.options import Options
from kvjax.policies import H2O, Streaming
from kvjax.policy import Policy
from kvjax.step import begin_step, end_step
from kvjax.streaming import OwnStream, Piece, TextStream
from kvjax.tally import RECENT, Tally

TEXT = np.random.default_rng(1).integers(0, 61, 400, np.int32)
WINDOW = Streaming(window=40, sinks=4)
PAGES = 1 + 4  # that with the sinks, and those that 40 tokens touch


@pytest.fixture(scope="module")
def model():
    return tiny_decoder(num_layers=1)


def options(**changes: Any) -> Options:
    given: dict[str, Any] = dict(policy=WINDOW, chunk_size=17) | changes
    return Options(**given)


def run(stream) -> list[Piece]:
    pieces = []
    while (piece := stream.step()) is not None:
        pieces.append(piece)
    return pieces


def joined(pieces: list[Piece]) -> Piece:
    return Piece(np.concatenate([p.tokens for p in pieces]), np.concatenate([p.nll for p in pieces]))


def dense_nll(model, tokens) -> np.ndarray:
    """-log p of all tokens but the first, by attention without a cache."""
    logits = jax.nn.log_softmax(model.dense(jnp.asarray(tokens))[:-1])
    return -np.asarray(jnp.take_along_axis(logits, jnp.asarray(tokens[1:, None]), axis=1)[:, 0])


def test_every_token_but_the_first_is_scored_in_chunks_of_any_size(model):
    by_size = [run(TextStream(model, TEXT, options(chunk_size=size))) for size in (1, 17)]
    assert [len(piece.tokens) for piece in by_size[1]] == [17] * 23 + [9]
    one, many = map(joined, by_size)
    np.testing.assert_array_equal(many.tokens, TEXT)
    np.testing.assert_allclose(many.nll, one.nll, rtol=1e-5)
    full = dense_nll(model, TEXT)
    np.testing.assert_allclose(one.nll[:39], full[:39], rtol=1e-5)
    assert len(one.nll) == len(full) == 399
    assert np.abs(one.nll - full)[44:].max() > 1e-2, "nothing was forgotten"


def test_a_limit_ends_a_text_early_and_scores_its_last_token(model):
    stream = TextStream(model, TEXT, options(), limit=100)
    read = joined(run(stream))
    assert len(read.tokens) == len(read.nll) == 100
    np.testing.assert_array_equal(read.nll, joined(run(TextStream(model, TEXT, options()))).nll[:100])


def test_pages_stay_what_they_are_after_the_fill(model):
    stream, pages = TextStream(model, np.tile(TEXT, 4), options()), []
    tally = Tally(stream.spec)
    while (piece := stream.step()) is not None:
        tally.add(piece, stream.pages)
        pages.append(int(stream.state.cache.pages_used))
    kvjax.check(stream.state.cache)
    assert tally.tokens == 1600 and tally.pages_after_fill == tally.pages_end == max(pages) == PAGES
    assert min(pages[4:]) >= PAGES - 1


def test_memory_does_not_depend_on_how_long_a_stream_runs(model):
    sizes = {TextStream(model, TEXT, options(), limit=limit).spec for limit in (None, 1, 399)}
    sizes |= {TextStream(model, TEXT[:90], options(), limit=None).spec}
    assert len(sizes) == 1
    own = {OwnStream(model, TEXT[:30], options(), limit=limit).spec for limit in (None, 1, 10**9)}
    assert len(own) == 1


def test_the_same_text_at_position_two_thousand_million(model):
    """-log p of up to 50 nats to a relative error of 1e-5: angles between tokens are the same, up to rounding."""
    near, far = (TextStream(model, TEXT[:200], options(), start_position=at) for at in (0, 2 * 10**9))
    first, second = joined(run(near)).nll, joined(run(far)).nll
    assert int(far.state.cache.next_position[0]) == 2 * 10**9 + 200
    np.testing.assert_allclose(second, first, rtol=1e-5)


@pytest.mark.slow
def test_smollm2_says_the_same_at_position_two_thousand_million():
    """Logits to 3e-4, of up to 40, beyond the window; the likeliest token is the same everywhere."""
    try:
        loaded = kvjax.load("smollm2-135m")
    except kvjax.InputError as error:
        # A missing package is a visible skip, and a failure in CI.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))
    text = loaded.tokenizer.encode("\n".join(topics[name] for name in sorted(topics))[:5000])
    policy = Streaming(window=220, sinks=4)
    stream = TextStream(loaded, np.array(text), options(policy=policy, chunk_size=64))
    graph, weights = nnx.split(loaded.decoder)

    def run(weights, cache, tokens):
        cache, step = begin_step(cache, jnp.array([64], jnp.int32), num_tokens=64, max_query_length=64)
        logits, cache = nnx.merge(graph, weights)(cache, step, tokens, all_tokens=True)
        cache, report = end_step(cache, step)
        return cache, logits, report.ok

    step = jax.jit(run, donate_argnums=1)
    near, far = (kvjax.init_cache(stream.spec, start_positions=[at]) for at in (0, 2 * 10**9))
    for begin in range(0, 320, 64):
        tokens = jnp.asarray(text[begin : begin + 64], jnp.int32)
        (near, expected, ok), (far, logits, served) = step(weights, near, tokens), step(weights, far, tokens)
        assert ok and served
        np.testing.assert_allclose(logits, expected, rtol=0, atol=3e-4)
        np.testing.assert_array_equal(logits.argmax(1), expected.argmax(1))


def test_positions_run_out_in_one_line(model):
    stream = TextStream(model, TEXT, options(), start_position=2**31 - 1 - 40)
    with pytest.raises(kvjax.InputError, match="cannot go on after 34 tokens: a sequence reached position"):
        run(stream)
    assert stream.position == 34


@pytest.mark.parametrize(
    "policy",
    [WINDOW, pytest.param(H2O(budget=24, prefill="chunked", heads="mean"), marks=pytest.mark.slow)],
    ids=["streaming", "h2o"],
)
def test_a_resumed_text_gives_the_same_scores(tmp_path, model, policy):
    whole = run(TextStream(model, TEXT, options(policy=policy)))
    stream = TextStream(model, TEXT, options(policy=policy), limit=170)
    before = run(stream)
    snapshots.save(tmp_path, stream.state, {}, stream.position)
    again = TextStream(model, TEXT, options(policy=policy))
    again.resume(*(snapshots.load(tmp_path, again.state, {}) or pytest.fail("nothing was saved")))
    np.testing.assert_array_equal(joined(before + run(again)).nll, joined(whole).nll)


def test_a_resumed_model_writes_what_it_would_have(tmp_path, model):
    how = options(temperature=[0.9], seed=3)
    whole = joined(run(OwnStream(model, TEXT[:30], how, limit=200)))
    stream = OwnStream(model, TEXT[:30], how, limit=75)
    before = run(stream)
    assert stream.position == sum(len(piece.tokens) for piece in before) == 75
    snapshots.save(tmp_path, stream.state, {}, stream.position)
    again = OwnStream(model, TEXT[:30], how, limit=200)
    again.resume(*(snapshots.load(tmp_path, again.state, {}) or pytest.fail("nothing was saved")))
    both = joined(before + run(again))
    np.testing.assert_array_equal(both.tokens, whole.tokens)
    np.testing.assert_array_equal(both.nll, whole.nll)
    assert len(whole.tokens) == 200 and again.step() is None


def test_stream_takes_no_memory_for_what_it_hands_out(model, monkeypatch):
    """`kvjax.stream` as long as it may be: the same cache, no buffers, and the tokens of a short one."""
    monkeypatch.setattr("kvjax.batch._memory", lambda: 10**6)
    # The programs of the test above.
    endless, short = (
        kvjax.stream(model, [TEXT[:30]], options(max_new_tokens=most, logprobs=0), steps=16) for most in (2**30, 2**10)
    )
    ours, theirs = next(endless), next(short)
    for _ in range(20):
        ours, theirs = next(endless), next(short)
        assert [event.token_ids for event in ours] == [event.token_ids for event in theirs]
    assert len(ours[0].token_ids) == 16 and ours[0].finish_reason is None
    with pytest.raises(kvjax.InputError, match="the cache and the results would take"):
        kvjax.generate(model, [TEXT[:30]], options(max_new_tokens=2**30))


@pytest.mark.parametrize("stream", [TextStream, OwnStream])
def test_what_grows_needs_a_limit(model, stream):
    with pytest.raises(kvjax.InputError, match="policy full holds more with every token: use one such as streaming"):
        stream(model, TEXT, options(policy=Policy()))
    assert stream(model, TEXT[:40], options(policy=Policy()), limit=30).spec.pages_per_seq >= 2


def test_prompts_kept_whole_need_a_limit(model):
    policy = H2O(budget=24, heads="mean")
    with pytest.raises(kvjax.InputError, match="policy h2o holds more with every token: give it prefill=chunked"):
        TextStream(model, TEXT, options(policy=policy))
    OwnStream(model, TEXT[:30], options(policy=policy))


def test_limits_out_of_range(model):
    with pytest.raises(kvjax.InputError, match="the text has 400 tokens and 401 are wanted"):
        TextStream(model, TEXT, options(), limit=401)
    with pytest.raises(kvjax.InputError, match="tokens is 0"):
        OwnStream(model, TEXT, options(), limit=0)


@pytest.mark.slow
def test_out_of_pages_is_one_line(model):
    stream = OwnStream(model, TEXT[:30], options(num_pages=3), limit=200)
    with pytest.raises(kvjax.InputError, match="cannot go on after .* tokens: the last step did not fit"):
        run(stream)


def test_a_tally_is_that_of_the_whole(model):
    """First and last tokens, and what is saved comes back."""
    spec = TextStream(model, TEXT, options()).spec
    nll = np.random.default_rng(0).random(5000).astype(np.float32)
    whole, parts = Tally(spec), Tally(spec)
    whole.add(Piece(np.zeros(5000), nll), 9)
    for begin in range(0, 5000, 700):
        resumed = Tally(spec)
        resumed.restore(parts.saved())
        resumed.add(Piece(np.zeros(len(nll[begin : begin + 700])), nll[begin : begin + 700]), 9)
        parts = resumed
    for tally in (whole, parts):
        assert tally.perplexity_first is not None and tally.perplexity_last is not None
        np.testing.assert_allclose(tally.perplexity_first, np.exp(nll[:RECENT].mean(dtype=np.float64)), rtol=1e-9)
        np.testing.assert_allclose(tally.perplexity_last, np.exp(nll[-RECENT:].mean(dtype=np.float64)), rtol=1e-9)
    assert parts.figures().keys() == whole.figures().keys() and parts.tokens == 5000


def test_pages_that_grow_after_the_fill_are_told(model):
    tally = Tally(TextStream(model, TEXT, options()).spec)
    piece = Piece(np.zeros(17), np.zeros(17))
    for pages in [1, 2, 3, *[4] * 30, 5]:
        tally.add(piece, pages)
    assert (tally.pages_after_fill, tally.pages_end) == (4, 5)
    assert Tally(TextStream(model, TEXT, options()).spec).figures()["perplexity_first"] is None
