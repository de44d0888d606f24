"""The small model through the paged cache: the logits of the plain forward, and its tasks solved."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.cache import init_cache
from kvjax.evaluation import train_small
from kvjax.evaluation.small_task import Tag, documents, score
from kvjax.evaluation.train_small import TEST_SEED, Phase
from kvjax.generation import generate
from kvjax.invariants import check
from kvjax.models.decoder import Decoder
from kvjax.models.registry import find, load_weights, read_config
from kvjax.options import Options
from kvjax.spec import CacheSpec
from kvjax.step import begin_step, end_step

DOCUMENTS, LENGTH = 32, 128
WINDOW = 48
# Every token leads the second likeliest by 3.9 nats or more.
GOLDEN = [
    [45, 47, 55, 38, 43, 50, 41, 60, 58, 37, 42, 52, 46, 33],
    [39, 62, 3, 35, 4, 54, 63, 3, 34, 4, 39, 62, 3, 35],
]


@pytest.fixture(scope="module")
def made():
    return documents(DOCUMENTS, LENGTH, seed=TEST_SEED)


@pytest.fixture(scope="module")
def dense(small_model, made):
    return np.asarray(jax.jit(jax.vmap(small_model.dense))(jnp.asarray(made.tokens)))


@pytest.fixture(scope="module")
def streamed(small_model, made):
    return stream(small_model, made.tokens)


def empty_cache(config, seqs, max_query_length):
    pages_per_seq = LENGTH // 8
    return init_cache(
        CacheSpec(
            num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            num_pages=config.num_layers * seqs * pages_per_seq + 1, max_seqs=seqs, pages_per_seq=pages_per_seq,
            max_query_length=max_query_length, page_size=8, format="float32", windows=config.windows,
        )
    )  # fmt: skip


def stream(decoder, tokens):
    """Feed all documents together, a token of each at a time; logits [documents, length, vocab]."""
    graph, state = nnx.split(decoder)
    count = len(tokens)

    def one(state, cache, column):
        ones = jnp.ones(count, jnp.int32)
        cache, step = begin_step(cache, ones, num_tokens=count, max_query_length=1)
        logits, cache = nnx.merge(graph, state)(cache, step, column)
        return end_step(cache, step)[0], logits

    run = jax.jit(lambda state, cache, columns: jax.lax.scan(lambda c, t: one(state, c, t), cache, columns))
    cache, logits = run(state, empty_cache(decoder.config, count, 1), jnp.asarray(tokens.T))
    check(cache, held={})
    return np.asarray(logits).swapaxes(0, 1)


def in_ragged_steps(decoder, tokens, first):
    """Feed the first `first[i]` tokens of document i, all in one step, then the others in another."""
    graph, state = nnx.split(decoder)

    @jax.jit
    def one(state, cache, packed, lengths):
        cache, step = begin_step(cache, lengths, num_tokens=tokens.size, max_query_length=LENGTH)
        logits, cache = nnx.merge(graph, state)(cache, step, packed, all_tokens=True)
        return end_step(cache, step)[0], logits

    cache = empty_cache(decoder.config, len(tokens), LENGTH)
    out = np.zeros((*tokens.shape, decoder.config.vocab_size), np.float32)
    early = np.arange(LENGTH) < first[:, None]
    for part in (early, ~early):
        packed = np.zeros(tokens.size, np.int32)
        packed[: part.sum()] = tokens[part]
        cache, logits = one(state, cache, jnp.asarray(packed), jnp.asarray(part.sum(1, dtype=np.int32)))
        out[part] = np.asarray(logits)[: part.sum()]
    check(cache, held={})
    return out


def test_token_by_token_gives_the_logits_of_the_plain_forward(streamed, dense):
    np.testing.assert_allclose(streamed, dense, atol=1e-4)


def test_ragged_steps_give_the_logits_of_the_plain_forward(small_model, made, dense):
    first = np.random.default_rng(0).integers(1, LENGTH, 8)
    logits = in_ragged_steps(small_model, made.tokens[:8], first)
    np.testing.assert_allclose(logits, dense[:8], atol=1e-4)


def test_tasks_are_solved_token_by_token(streamed, made):
    found = score(streamed, made)
    # Recorded: 1.363; 0.0024 and 1.0; 0.0018 and 1.0. Filler clearly below would be a look into the future.
    assert 1.34 < found[Tag.FILLER].nll < 1.38
    assert found[Tag.COPY].nll < 0.02 and found[Tag.COPY].accuracy > 0.99
    assert found[Tag.ANSWER].nll < 0.02 and found[Tag.ANSWER].accuracy > 0.99


@pytest.mark.parametrize("depth", [0.0, 0.5, 0.95])
def test_needles_are_found_at_every_depth(small_model, depth):
    made = documents(DOCUMENTS, LENGTH, seed=TEST_SEED + 1, depth=depth)
    logits = np.asarray(jax.jit(jax.vmap(small_model.dense))(jnp.asarray(made.tokens)))
    assert score(logits, made)[Tag.ANSWER].accuracy > 0.95


def test_a_window_forgets_the_needles_before_it(small_model):
    """What left the window must be out of reach: clearly more than chance (1 in 32) would be a leak."""
    windowed = nnx.clone(small_model)
    windowed.config = dataclasses.replace(small_model.config, windows=(WINDOW, WINDOW))
    made = documents(16, LENGTH, seed=TEST_SEED + 2, depth=0.0)
    assert score(stream(windowed, made.tokens), made)[Tag.ANSWER].accuracy < 0.15


def test_greedy_text_finishes_the_copy_and_the_questions(small_model, made):
    copy_at = int(np.flatnonzero(made.tags[0] == Tag.COPY)[0])
    prompts = [made.tokens[0, :copy_at].tolist(), made.tokens[1, :-7].tolist()]
    texts = [sequence.token_ids for sequence in generate(small_model, prompts, Options(max_new_tokens=14)).sequences]
    assert texts == GOLDEN
    assert texts[0] == made.tokens[0, copy_at : copy_at + 14].tolist()
    assert texts[1][:7] == made.tokens[1, -7:].tolist()


def test_training_starts_and_its_folder_gives_the_same_logits(tmp_path, made):
    # optax does not follow the tests' strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        model = train_small.train(3, (Phase(64, 4, 1e-3, 1), Phase(64, 4, 1e-3, 1, needles=1)))
    train_small.save(model, tmp_path, dict(seed=3))
    source = find(str(tmp_path))
    loaded = Decoder(read_config(source), load_weights(source), scan=False, features_major=False)
    tokens = jnp.asarray(made.tokens[0])
    np.testing.assert_allclose(jax.jit(loaded.dense)(tokens), jax.jit(model.dense)(tokens), atol=1e-5)
    assert json.loads((tmp_path / "config.json").read_text())["training"] == dict(seed=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "--out"), (["--out", "x", "--seed", "-1"], "--seed: -1 is negative"), (["--out", __file__], "cannot make")],
)
def test_bad_arguments_exit_with_2(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        train_small.main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err
