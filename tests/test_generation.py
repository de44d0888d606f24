"""generate and stream on a tiny random model: equal to each other, to one by one, and to a loop by hand."""

import dataclasses
import types
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.decoders import tiny_decoder, unchecked_shapes

import kvjax
from kvjax import batch
from kvjax.batch import Batch, cache_spec
from kvjax.decoding import decode_scan, decode_while, prefill_step
from kvjax.models.decoder import Decoder
from kvjax.options import Options
from kvjax.policies import H2O

PROMPTS = [[5, 9, 2], list(range(1, 40)), [7], list(range(3, 20))]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_decoder(windows=(None, 20))


def tokens(result: kvjax.Generation) -> list[list[int]]:
    return [sequence.token_ids for sequence in result.sequences]


def streamed(model, prompts, options, **how) -> tuple[list[list[int]], list[str | None]]:
    out: list[list[int]] = [[] for _ in prompts]
    reasons: list[str | None] = [None] * len(prompts)
    for events in kvjax.stream(model, prompts, options, **how):
        for event in events:
            assert reasons[event.sequence] is None, "nothing comes after the end of a sequence"
            out[event.sequence] += event.token_ids
            reasons[event.sequence] = event.finish_reason
    return out, reasons


def greedy_by_hand(model: Decoder, prompt: list[int], count: int) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(int(model.dense(jnp.array(context, jnp.int32))[-1].argmax()))
    return context[len(prompt) :]


def test_generate_is_the_greedy_continuation(model):
    result = kvjax.generate(model, PROMPTS, Options(max_new_tokens=6))
    assert tokens(result) == [greedy_by_hand(model, prompt, 6) for prompt in PROMPTS]
    assert [s.finish_reason for s in result.sequences] == ["length"] * 4
    assert [s.prompt_tokens for s in result.sequences] == [3, 39, 1, 17]


@pytest.mark.parametrize("chunk_size", [7, 16])
def test_chunks_of_any_size_give_the_same_tokens(model, chunk_size):
    expected = tokens(kvjax.generate(model, PROMPTS, Options(max_new_tokens=12)))
    assert tokens(kvjax.generate(model, PROMPTS, Options(max_new_tokens=12, chunk_size=chunk_size))) == expected


def test_a_batch_is_its_prompts_one_by_one(model):
    together = tokens(kvjax.generate(model, PROMPTS, Options(max_new_tokens=12)))
    assert together == [tokens(kvjax.generate(model, [p], Options(max_new_tokens=12)))[0] for p in PROMPTS]


def test_stream_yields_what_generate_returns(model):
    options = Options(max_new_tokens=[3, 25, 1, 14], temperature=[0.0, 0.9, 0.0, 0.7], top_p=0.95, seed=3)
    result = kvjax.generate(model, PROMPTS, options)
    for steps in (1, 8):
        out, reasons = streamed(model, PROMPTS, options, steps=steps)
        assert out == tokens(result)
        assert reasons == [s.finish_reason for s in result.sequences]
    assert [len(out) for out in tokens(result)] == [3, 25, 1, 14]


def test_stop_ids_end_a_sequence_and_are_its_last_token(model):
    free = tokens(kvjax.generate(model, PROMPTS, Options(max_new_tokens=12)))
    stop = free[1][4]
    result = kvjax.generate(model, PROMPTS, Options(max_new_tokens=12, stop_ids=[stop]))
    for full, sequence in zip(free, result.sequences, strict=True):
        cut = full[: full.index(stop) + 1] if stop in full else full
        assert sequence.token_ids == cut
        assert sequence.finish_reason == ("stop" if stop in full else "length")


def test_a_stop_function_ends_a_sequence(model):
    for keep in (1, 5, 30):
        result = kvjax.generate(
            model,
            PROMPTS,
            Options(max_new_tokens=60, logprobs=0),
            stop=lambda sequence, ids, keep=keep: keep if sequence == 1 and len(ids) >= keep else None,
        )
        reasons = [sequence.finish_reason for sequence in result.sequences]
        assert reasons == ["length", "stop", "length", "length"]
        stopped = result.sequences[1]
        assert stopped.logprobs is not None and len(stopped.token_ids) == len(stopped.logprobs) == keep


def test_the_same_seed_gives_the_same_tokens_and_another_others(model):
    options = Options(max_new_tokens=20, temperature=1.0)
    first, again = (tokens(kvjax.generate(model, PROMPTS, options)) for _ in range(2))
    assert first == again
    assert first != tokens(kvjax.generate(model, PROMPTS, dataclasses.replace(options, seed=1)))


def test_repetition_penalty_counts_the_prompt_and_what_was_generated(model):
    result = kvjax.generate(model, PROMPTS[:1], Options(max_new_tokens=20, repetition_penalty=1e6))
    out = tokens(result)[0]
    assert len(set(out)) == len(out) and not set(out) & set(PROMPTS[0])


def test_log_probabilities_belong_to_their_tokens(model):
    result = kvjax.generate(model, PROMPTS, Options(max_new_tokens=5, logprobs=3))
    for prompt, sequence in zip(PROMPTS, result.sequences, strict=True):
        context = list(prompt)
        assert sequence.logprobs is not None
        for token, logs in zip(sequence.token_ids, sequence.logprobs, strict=True):
            logits = np.asarray(model.dense(jnp.array(context, jnp.int32))[-1], np.float64)
            expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            np.testing.assert_allclose(logs.logprob, expected[token], atol=1e-4)
            assert list(logs.top) == np.argsort(-expected)[:3].tolist()
            context.append(token)


def test_out_of_pages_returns_what_was_generated(model):
    expected = tokens(kvjax.generate(model, PROMPTS, Options(max_new_tokens=40)))
    # The prompts take 2 + 6 + 2 + 6 pages and decoding soon wants more.
    options = Options(max_new_tokens=40, num_pages=21)
    result = kvjax.generate(model, PROMPTS, options)
    assert "out_of_pages" in [sequence.finish_reason for sequence in result.sequences]
    for full, sequence in zip(expected, result.sequences, strict=True):
        assert sequence.token_ids == full[: len(sequence.token_ids)]
        assert sequence.finish_reason in ("out_of_pages", "length")
    assert sum(len(sequence.token_ids) for sequence in result.sequences) > 4
    assert result.pages_used_peak <= 20
    assert streamed(model, PROMPTS, options)[0] == tokens(result)


def test_prompts_that_do_not_fit_together_are_served_as_far_as_they_fit(model):
    result = kvjax.generate(model, [list(range(1, 40))] * 3, Options(max_new_tokens=4, num_pages=13))
    assert [s.finish_reason for s in result.sequences] == ["length", "length", "out_of_pages"]
    assert [len(s.token_ids) for s in result.sequences] == [4, 4, 0]


def test_the_cache_is_sound_and_sized_after_a_run(model):
    run = Batch(model, PROMPTS, Options(max_new_tokens=30))
    for _ in run.prefill():
        pass
    while run.running:
        run.scan(8)
    kvjax.check(run.state.cache, held={})
    facts = kvjax.generate(model, PROMPTS, Options(max_new_tokens=30)).cache_facts()
    assert facts["pages_used_peak"] <= facts["pages_total"] == run.spec.num_pages - 1
    assert facts["bytes_used_peak"] < facts["bytes_total"] == run.state.cache.bytes


def test_similar_batches_compile_nothing_new(model):
    prompts = [[3] * 18, [4] * 33]
    kvjax.generate(model, prompts, Options(max_new_tokens=50))
    programs: list[Any] = [prefill_step, decode_while, decode_scan]
    before = [program._cache_size() for program in programs]
    kvjax.generate(model, [[9] * 20, [4] * 34], Options(max_new_tokens=49))
    assert [program._cache_size() for program in programs] == before


def test_state_keeps_its_structure_from_step_to_step(model):
    run = Batch(model, PROMPTS, Options(max_new_tokens=9))
    for _ in run.prefill():
        pass
    before = run.state
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(before)]
    run.scan(4)
    chex.assert_trees_all_equal_structs(before, run.state)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(run.state)] == shapes


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, "no prompt was given"),
        ([[1], []], {}, "prompt 1 is empty"),
        ("hello", {}, "prompts is 'hello': give a list"),
        (["hello"], {}, "prompt 0 is 'hello': give a list"),
        ([5, 9], {}, "prompt 0 is 5: give a list"),
        (np.array([5, 9]), {}, "prompt 0 is 5: give a list"),
        (None, {}, "prompts is None"),
        ([[1], [2, 61]], {}, "token 1 of prompt 1 is 61: it must be a whole number from 0 to 60"),
        ([[-1]], {}, "token 0 of prompt 0 is -1"),
        ([[1.0]], {}, "token 0 of prompt 0 is 1.0"),
        ([np.array([1.0])], {}, "token 0 of prompt 0 is 1.0"),
        ([[True]], {}, "token 0 of prompt 0 is True"),
        ([[[1]]], {}, r"token 0 of prompt 0 is \[1\]"),
        ([[10**5000]], {}, "a number of thousands of digits"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
        ([[1]], {"max_new_tokens": "5"}, "max_new_tokens is '5'"),
        ([[1]], {"max_new_tokens": 2**31}, "max_new_tokens is 2147483648"),
        ([[1]], {"max_new_tokens": [1, 2]}, "max_new_tokens has 2 values for 1 prompts"),
        ([[1]], {"max_new_tokens": 2**30}, "the cache and the results would take .* bytes .*lower max_new_tokens"),
        ([[1]], {"num_pages": 10**9, "page_size": 80_000_000}, "would take .* bytes .*num_pages or page_size"),
        ([[1]], {"stop_ids": 5}, "stop_ids is 5: give a list"),
        ([[1]], {"stop_ids": [61]}, "token 0 of stop_ids is 61"),
        ([[1]], {"logprobs": -1}, "logprobs is -1"),
        ([[1]], {"logprobs": 62}, "logprobs is 62: it must be a whole number from 0 to 61"),
        ([[1]], {"seed": 2**63}, "seed is 9223372036854775808"),
        ([[1]], {"chunk_size": 0}, "chunk_size is 0"),
        ([[1]], {"page_size": 12}, "page_size 12"),
        ([[1]], {"format": "int3"}, "format 'int3'"),
        ([[1]], {"format": 3}, "format 3 is not a page format"),
        ([[1]], {"num_pages": 2}, "num_pages 2 cannot hold one sequence"),
        ([[1] * 100], {"num_pages": 9}, "a prompt of 100 tokens is longer than the cache"),
        ([[1]], {"temperature": -1.0}, "temperature -1"),
        (
            [[1]],
            {"policy": "h2o:budget=9"},
            "policy is 'h2o:budget=9': give a kvjax.policy.Policy, or kvjax.policies.pa",
        ),
        ([[1]], {"policy": H2O}, "policy is <class 'kvjax.policies.h2o.H2O'>: give"),
        ([[1]], {"policy": None}, "policy is None: give"),
        ([[1]], {"temperature": "hot"}, "temperature is 'hot': give a number"),
    ],
)
def test_bad_requests_are_refused(model, monkeypatch, prompts, options, words):
    monkeypatch.setattr(batch, "_memory", lambda: 10**10)
    with unchecked_shapes(), pytest.raises(kvjax.InputError, match=words):
        kvjax.generate(model, prompts, Options(**options))


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_steps_are_refused_by_the_call(model, steps):
    with unchecked_shapes(), pytest.raises(kvjax.InputError, match=f"steps is {steps}"):
        kvjax.stream(model, PROMPTS, steps=steps)


@pytest.mark.parametrize(
    "prompts",
    [
        ((5, 9, 2), (7, 1, 4)),
        [np.array([5, 9, 2], np.uint8), jnp.array([7, 1, 4])],
        np.array([[5, 9, 2], [7, 1, 4]]),
        jnp.array([[5, 9, 2], [7, 1, 4]]),
    ],
)
def test_integers_of_any_kind_are_taken(model, prompts):
    expected = tokens(kvjax.generate(model, [[5, 9, 2], [7, 1, 4]], Options(max_new_tokens=[3, 4])))
    numbers: dict[str, Any] = dict(seed=np.int64(1), page_size=np.int32(16), stop_ids=np.array([60]))
    with unchecked_shapes():
        assert tokens(kvjax.generate(model, prompts, Options(max_new_tokens=np.array([3, 4]), **numbers))) == expected


def test_a_loaded_model_stops_at_its_end_of_text(model):
    free = tokens(kvjax.generate(model, PROMPTS, Options(max_new_tokens=12)))[1]
    tokenizer = types.SimpleNamespace(eos_ids=(free[4],))
    with unchecked_shapes():
        loaded = kvjax.LanguageModel(name="tiny", decoder=model, config=model.config, tokenizer=tokenizer)  # pyright: ignore
        for options, expected in [(None, free[: free.index(free[4]) + 1]), ([], free)]:
            result = kvjax.generate(loaded, PROMPTS, Options(max_new_tokens=12, stop_ids=options))
            assert tokens(result)[1] == expected
            assert streamed(loaded, PROMPTS, Options(max_new_tokens=12, stop_ids=options))[0][1] == expected


@pytest.mark.parametrize("given", ["smollm2-135m", None, nnx.Dict()])
def test_other_models_are_refused(given):
    with unchecked_shapes(), pytest.raises(kvjax.InputError, match="give what kvjax.load returns"):
        kvjax.generate(given, PROMPTS)


def test_memory_that_runs_out_is_one_line(model, monkeypatch):
    def fail(*given, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")

    monkeypatch.setattr(batch, "prefill_step", fail)
    with pytest.raises(kvjax.InputError, match="bytes .* and the memory ran out: lower max_new_tokens"):
        kvjax.generate(model, PROMPTS)


def test_spec_respects_windows(model):
    spec = cache_spec(model, [400], [100], Options(chunk_size=32))
    # The windowed layer holds at most its ring of ceil((20 + 32) / 16) + 1 = 5 pages, the other all 32 (499 tokens).
    assert spec.num_pages - 1 >= 32 + 5 and spec.num_pages - 1 < 2 * 32
