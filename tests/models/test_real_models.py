"""The real models, teacher-forced on the tokens that transformers chose greedily in float32."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax import batch

REFERENCE = Path(__file__).parent.parent / "reference"
CLEAR_GAP = 0.005
CHUNK = 512


def load(name: str):
    try:
        return kvjax.load(name)
    except kvjax.InputError as error:
        # A missing package is a visible skip, and a failure in CI.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))


def reference(name: str):
    """Prompts, and transformers' next 64 tokens with the gap between the two largest logits."""
    file = np.load(REFERENCE / f"{name}.npz")
    ends = np.cumsum(file["prompt_lengths"])
    spans = zip(ends, file["prompt_lengths"], strict=True)
    prompts = [file["prompt_tokens"][end - length : end].tolist() for end, length in spans]
    return prompts, file["tokens"], file["gaps"], file["top_logits"]


def teacher_forced(model, prompts, forced):
    """Chosen token and its logit after every prompt and after every forced token, all prompts in one ragged batch."""
    options = batch.Options(chunk_size=CHUNK)
    spec = batch.cache_spec(model.decoder, [len(p) for p in prompts], [forced.shape[1]] * len(prompts), options)
    graph, weights = nnx.split(model.decoder)

    def prefill(weights, cache, tokens, lengths):
        cache, step = kvjax.begin_step(cache, lengths, num_tokens=CHUNK, max_query_length=CHUNK)
        logits, cache = nnx.merge(graph, weights)(cache, step, tokens)
        cache, report = kvjax.end_step(cache, step)
        return cache, logits.argmax(-1), logits.max(-1), report.ok

    def decode(weights, cache, forced):
        def body(cache, tokens):
            ones = jnp.ones(len(prompts), jnp.int32)
            cache, step = kvjax.begin_step(cache, ones, num_tokens=len(prompts), max_query_length=1)
            logits, cache = nnx.merge(graph, weights)(cache, step, tokens)
            cache, report = kvjax.end_step(cache, step)
            return cache, (logits.argmax(-1), logits.max(-1), report.ok)

        return jax.lax.scan(body, cache, forced)

    prefill, decode = jax.jit(prefill, donate_argnums=1), jax.jit(decode, donate_argnums=1)
    cache = kvjax.init_cache(spec)
    chosen = np.zeros((len(prompts), forced.shape[1]), np.int64)
    tops = np.zeros(chosen.shape, np.float32)
    pending = [(number, 0) for number in range(len(prompts))]
    while pending:
        chunk, pending = batch.next_chunk(pending, prompts, CHUNK)
        tokens, lengths = np.zeros(CHUNK, np.int32), np.zeros(len(prompts), np.int32)
        packed = sum((prompts[number][begin:end] for number, begin, end in chunk), [])
        tokens[: len(packed)] = packed
        for number, begin, end in chunk:
            lengths[number] = end - begin
        cache, token, top, ok = prefill(weights, cache, jnp.asarray(tokens), jnp.asarray(lengths))
        assert ok
        for number, _, end in chunk:
            if end == len(prompts[number]):
                chosen[number, 0], tops[number, 0] = token[number], top[number]
    cache, (token, top, ok) = decode(weights, cache, jnp.asarray(forced[:, :-1].T))
    assert ok.all()
    chosen[:, 1:], tops[:, 1:] = np.asarray(token).T, np.asarray(top).T
    kvjax.check(cache, held={})
    return chosen, tops, spec, cache


def assert_transformers_choice(name: str):
    model = load(name)
    prompts, forced, gaps, top_logits = reference(name)
    chosen, tops, spec, cache = teacher_forced(model, prompts, forced)
    clear = gaps >= CLEAR_GAP
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(chosen[clear], forced[clear])
    np.testing.assert_allclose(tops, top_logits, atol=1e-3)
    return model, prompts, spec, cache


def test_smollm2_chooses_what_transformers_chooses():
    assert_transformers_choice("smollm2-135m")


@pytest.mark.slow
def test_gemma3_chooses_what_transformers_chooses_beyond_its_window():
    model, prompts, spec, cache = assert_transformers_choice("gemma3-270m")
    assert sum(len(prompt) >= 700 for prompt in prompts) >= 4 and 512 in spec.layer_windows
    # Pages that windows have passed are back in the pool: 511 tokens lie in 33 pages at most.
    full = [-(-(len(prompt) + 63) // spec.page_size) for prompt in prompts]
    held = sum(min(pages, 33) if window else pages for pages in full for window in spec.layer_windows)
    assert int(cache.pages_used) <= held < 0.7 * spec.num_layers * sum(full)


def test_references_name_the_files_they_were_made_from():
    for name in ("smollm2-135m", "gemma3-270m"):
        origin = json.loads(str(np.load(REFERENCE / f"{name}.npz")["origin"]))
        assert len(origin["gguf_sha256"]) == 64
