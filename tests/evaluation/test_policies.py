"""Policies measured: continuations against the plain forward, rows and what is said of them, the small protocols."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import sizes
from kvjax.evaluation import continuation, formats, policies, small_protocol
from kvjax.evaluation.budgets import RECOVERIES, Candidate, candidates, described
from kvjax.evaluation.continuation import STEPS, Prompted
from kvjax.evaluation.picture import pareto
from kvjax.evaluation.policies import Settings
from kvjax.evaluation.small_protocol import FULL, LENGTH, Small, applies, limits
from kvjax.evaluation.small_task import documents
from kvjax.evaluation.texts import Text
from kvjax.evaluation.train_small import TEST_SEED
from kvjax.evaluation.verdicts import better, verdicts
from kvjax.models.decoder import Decoder
from kvjax.models.registry import find, load_weights, read_config
from kvjax.options import Options
from kvjax.policies import H2O, FastGen, Random, parse_policy
from kvjax.policy import Policy

PAGE, READ = 8, 40
KEYS = {"policy", "budget", "ppl", "ppl_ratio", "passkey", "copy", "attention_rel_error", "peak_pages", "bytes_ratio",
        "tokens_per_s"}  # fmt: skip


@pytest.fixture(scope="module")
def stacked():
    source = find(str(Path(__file__).parent.parent / "data" / "small_model"))
    return Decoder(read_config(source), load_weights(source), scan=True)


@pytest.fixture(scope="module")
def tokens():
    return documents(3, 80, seed=TEST_SEED).tokens


def read(decoder, tokens, policy: Policy) -> Prompted:
    options = Options(format="float32", page_size=PAGE, chunk_size=64, policy=policy)
    return Prompted(decoder, tokens[:, :READ].tolist(), 2 * STEPS, options, lambda: None)


@pytest.fixture(scope="module")
def full(stacked, tokens):
    return read(stacked, tokens, Policy())


def continuations(tokens):
    """Of different lengths, none that ends with a scan; the first needs two."""
    return [tokens[i, READ : READ + length] for i, length in enumerate((STEPS + 4, 2, 9))]


@pytest.fixture(scope="module")
def followed(full, tokens):
    return full.follow(continuations(tokens))


def test_the_full_cache_says_what_the_plain_forward_says(small_model, tokens, followed):
    dense = np.asarray(jax.nn.log_softmax(jax.jit(jax.vmap(small_model.dense))(jnp.asarray(tokens))))
    for i, of in enumerate(continuations(tokens)):
        logs = dense[i, READ : READ + len(of) - 1]
        np.testing.assert_allclose(followed.nll[i], -logs[np.arange(len(of) - 1), of[1:]], atol=1e-4)
        np.testing.assert_array_equal(followed.right[i], logs.argmax(1) == of[1:])
    assert followed.tokens_per_s > 0


def test_a_cache_is_a_value_that_several_continuations_start_from(full, tokens, followed):
    again = full.follow(continuations(tokens))
    for first, second in zip(followed.nll, again.nll, strict=True):
        np.testing.assert_array_equal(first, second)


def test_pages_and_bytes_are_those_of_the_cache(full, followed):
    # Two layers; 40 tokens and 19, 1 and 8 more, in pages of 8.
    assert followed.pages.tolist() == [2 * 8, 2 * 6, 2 * 6]
    cache = full.cache
    of_page = sizes.page_bytes(full.spec)
    per_page = (cache.keys, cache.values, cache.positions, cache.page_span, cache.allocator.free_pages,
                cache.allocator.refcounts)  # fmt: skip
    assert of_page * full.spec.num_pages == sum(array.nbytes for array in per_page)
    every = sum(array.nbytes for array in jax.tree.leaves(cache))
    rows = (every - of_page * full.spec.num_pages) / 3
    assert full.bytes_of(0) == rows and full.bytes_of(16) == rows + 16 * of_page


def test_what_a_policy_drops_is_missed(stacked, full, tokens, followed):
    fewer, ends = read(stacked, tokens, Random(budget=16)), tokens[:, READ]
    assert full.attention_error(full, ends) == 0 < 0.1 < fewer.attention_error(full, ends)
    dropped = fewer.follow(continuations(tokens))
    # A slot emptied is filled again: two pages of 8 in each layer, and the open one.
    assert dropped.pages.max() <= 2 * 3 and np.abs(dropped.nll[0] - followed.nll[0]).max() > 0.1
    assert fewer.bytes_of(1) - fewer.bytes_of(0) == sizes.page_bytes(fewer.spec)


def test_what_pause_raises_ends_a_measurement(full, tokens, monkeypatch):
    calls = []

    def pause():
        calls.append(1)
        raise policies.Stopped

    monkeypatch.setattr(full, "_pause", pause)
    with pytest.raises(policies.Stopped):
        full.follow(continuations(tokens))
    assert len(calls) == 1


def test_budgets_are_shares_of_the_prompt():
    rows = candidates(["h2o", "streaming:sinks=8", "snapkv:budget=99", "full", "h2o"], [0.1, 0.5], PAGE)
    assert rows == (
        Candidate("h2o", 0.1), Candidate("h2o", 0.5), Candidate("streaming:sinks=8", 0.1),
        Candidate("streaming:sinks=8", 0.5), Candidate("snapkv:budget=99", None), Candidate("full", None),
    )  # fmt: skip
    assert rows[1].policy(1000, PAGE) == H2O(budget=500) and rows[0].policy(512, PAGE) == H2O(budget=51)
    streaming = rows[3].policy(1000, PAGE)
    assert streaming.num_sinks + (streaming.window_size or 0) == 500
    window = candidates(["sliding_window"], [0.25], PAGE)[0].policy(1000, PAGE)
    assert window.window_size == 250
    assert described(rows[4].policy(1000, PAGE)) == "snapkv:budget=99" and described(Policy()) == "full"
    assert all(parse_policy(described(row.policy(1000, PAGE))) == row.policy(1000, PAGE) for row in rows)


def test_a_total_budget_is_that_of_all_layers():
    (row,) = candidates(["entropy"], [0.5], PAGE)
    assert described(row.policy(1000, PAGE, layers=30)) == "entropy:total_budget=15000"


def test_what_a_text_names_needs_only_fit_the_budgets_that_are_asked_for():
    for text in ("snapkv:observation=1500", "h2o:recent=1500", "streaming:sinks=1500"):
        (row,) = candidates([text], [0.5], 16)
        assert row.policy(4096, 16) is not None


def test_fastgen_sweeps_its_recovery():
    rows = candidates(["fastgen", "fastgen:recovery=0.9"], [0.5], PAGE)
    assert [row.budget for row in rows] == [None] * (len(RECOVERIES) + 1)
    assert [row.policy(100, PAGE) for row in rows] == [FastGen(recovery=of) for of in (*RECOVERIES, 0.9)]


def row(policy: str, budget: float | None, ppl: float, passkey: float | None, copy: float, size: float = 0.5) -> dict:
    return dict(policy=policy, budget=budget, said=policy, ppl=ppl, ppl_ratio=ppl / 10, passkey=passkey, copy=copy,
                bytes_ratio=size)  # fmt: skip


def test_rows_side_by_side():
    rows = [
        row("random", 0.5, 12, 0.5, 0.5), row("streaming", 0.5, 11, 0.5, 0.6), row("paged_eviction", 0.5, 11.5, 1, 0.4),
        row("entropy", 0.5, 10.5, 1, 0.8), row("entropy:gamma=0", 0.5, 10.4, 0.5, 0.7), row("random", 0.1, 20, 0, 0.1),
        row("fastgen:recovery=0.9", None, 10.4, 1, 0.8, 0.6), row("fastgen:recovery=0.8", None, 10.6, 1, 0.8, 0.4),
    ]  # fmt: skip
    found = {of["limit"]: of for of in verdicts(rows)}
    assert found["streaming beats random at 0.5"] == dict(
        limit="streaming beats random at 0.5", reached=True, better=["ppl", "copy"], worse=[]
    )
    assert found["paged_eviction beats random at 0.5"]["worse"] == ["copy"]
    assert not found["paged_eviction is no worse than streaming at 0.5"]["reached"]
    assert found["entropy beats a uniform split at 0.5"] == dict(
        limit="entropy beats a uniform split at 0.5", reached=True, better=["passkey", "copy"], worse=["ppl"]
    )
    saving = found["fastgen saves 35% at 5% more perplexity"]
    assert saving["reached"] and saving["saved_and_ppl_ratio"]["fastgen:recovery=0.9"] == [0.4, 1.04]
    assert len(found) == 4 + 3 and not any("0.1" in limit for limit in found)
    assert not verdicts([*rows[:6], rows[7]])[-1]["reached"]
    assert better(row("a", None, 9, None, 0.5), row("b", None, 9, None, 0.4)) == ["copy"]


def test_the_pareto_front():
    points = [(0.5, 3.0), (0.1, 9.0), (0.3, 4.0), (0.2, 9.5), (0.6, 3.0), (0.3, 5.0)]
    assert pareto(points, -1) == [(0.1, 9.0), (0.3, 4.0), (0.5, 3.0)]
    assert pareto(points, 1) == [(0.1, 9.0), (0.2, 9.5)]


@pytest.fixture
def model(random_weights, write_gguf, monkeypatch, tmp_path):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    return formats.load(str(write_gguf(random_weights(), fields={"llama.context_length": 1024})), print)


def prose() -> Text:
    letters = "".join(map(chr, np.random.default_rng(1).integers(65, 91, 900)))
    return Text("prose", "prose", "letters", letters)


# As many prompts of prose as passkeys, of one length: one program serves both.
TINY: dict[str, Any] = dict(
    policies=["h2o:recent=8", "full"], budgets=[0.1], context=400, continuation=20, copied=12, depths=2,
    passkey_lengths=[400], page_size=16,
)  # fmt: skip


@pytest.mark.slow
def test_a_report_holds_what_was_measured(model):
    said, seen = [], []
    report = policies.run(
        model, Settings(**TINY), [prose()], said.append, on_row=lambda of: seen.append(len(of["rows"]))
    )
    assert "minutes" in said[0] and seen == [1, 2] and report["complete"]
    decode: Any = continuation._decode
    assert decode._cache_size() == 0, "programs of earlier rows take mappings from later ones"
    assert json.loads(json.dumps(report)) == report
    kept, same = report["rows"]
    assert kept.keys() >= KEYS and kept["said"] == "h2o:budget=40,recent=8" and kept["budget"] == 0.1
    assert same["budget"] is None and same["ppl_ratio"] == 1 == same["bytes_ratio"] and same["attention_rel_error"] == 0
    assert same["ppl"] == report["full"]["ppl"] and kept["tokens"] == 2 * 20
    assert kept["ppl"] == pytest.approx(kept["ppl_ratio"] * same["ppl"])
    # A tenth of 400 tokens in pages of 16, in each of the layers and heads, and an open page.
    rows_of = model.config.num_layers * model.config.num_kv_heads
    assert kept["peak_pages"] <= rows_of * (math.ceil(40 / 16) + 1)
    assert same["peak_pages"] == model.config.num_layers * math.ceil(420 / 16)
    assert kept["bytes_ratio"] < 0.3 and kept["attention_rel_error"] > 0 and kept["tokens_per_s"] > 0
    assert kept["passkey"] in (0, 0.5, 1) and kept["passkey_by_length"] == {"400": kept["passkey"]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(policies=[]), "no policy or no budget"),
        (dict(policies=["nothing"]), "policy 'nothing' is unknown"),
        (dict(policies=["h2o:size=3"]), "'size=3' is no key=value of policy h2o"),
        (dict(budgets=[1.5]), "budget 1.5 is no share of the prompt"),
        (dict(budgets=[0.0]), "budget 0.0 is no share"),
        (dict(budgets=[0.001]), "streaming with 0.001 of 1024 tokens: 1 tokens leave no window beside 4 sinks"),
        (dict(policies=["snapkv"], budgets=[0.05]), "snapkv with 0.05 of 512 tokens: budget 26 of policy snapkv"),
        (dict(context=15), "context is 15"),
        (dict(copied=1024), "copied 1024 is no part of a context of 1024"),
        (dict(continuation=1), "continuation is 1"),
        (dict(copied=8), "copied is 8"),
        (dict(windows=0), "windows is 0"),
        (dict(depths=0), "depths is 0"),
        (dict(passkey_lengths=[0]), "a passkey length is 0"),
        (dict(seed=-1), "seed is -1"),
        (dict(page_size=12), "page_size 12"),
    ],
)
def test_settings_out_of_range(given, message):
    with pytest.raises(kvjax.InputError, match=message):
        Settings(**given)


def test_lengths_and_budgets_that_do_not_fit_are_refused_before_the_first_row(model):
    with pytest.raises(kvjax.InputError, match="2048 tokens are more than the 1024 that .* was trained on"):
        policies.run(model, Settings(passkey_lengths=[2048]), [prose()], print)
    with pytest.raises(kvjax.InputError, match="paged_eviction for 400 tokens: budget 40 .* less than a page"):
        settings: dict[str, Any] = TINY | dict(policies=["paged_eviction"])
        policies.run(model, Settings(**settings), [prose()], print)


def test_protocols_of_the_small_model_and_what_they_are_for():
    snapkv, h2o = parse_policy("snapkv:budget=40"), parse_policy("h2o:budget=40")
    assert [applies(of, snapkv) for of in ("P1", "P2", "P3", "half", "P5")] == [False, True, True, True, False]
    assert [applies(of, h2o) for of in ("P1", "P2", "P3", "half", "P5")] == [True, True, True, False, True]
    assert applies("half", Random(budget=40)) and applies("half", Policy()) and applies("P1", Policy())


def test_limits_are_checked_where_their_rows_are():
    of = lambda protocol, policy, budget, filler, answer=1.0: dict(  # noqa: E731
        protocol=protocol, policy=policy, budget=budget, filler_nll=filler, answer=answer
    )
    rows = [of("P1", "full", None, 1.3), of("P1", "streaming", 0.375, 1.32), of("P1", "sliding_window", 0.375, 1.35),
            of("P3", "tova", 0.5, 0, 0.9)]  # fmt: skip
    found = {of["limit"]: of for of in limits(rows)}
    assert found["P1: a window loses 0.02 nats of filler to streaming"]["reached"]
    assert not found["P1: streaming loses at most 0.01 nats of filler"]["reached"]
    assert not found["P3: tova answers 95 % at 0.5"]["reached"] and len(found) == 3


def test_the_small_model_needs_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(small_protocol.kvjax, "__file__", str(tmp_path / "kvjax" / "__init__.py"))
    with pytest.raises(kvjax.InputError, match="run from a checkout"):
        small_protocol.find_small()


@pytest.mark.slow
def test_the_small_model_keeps_what_policies_promise():
    """The thresholds of the research note that these policies have; docs/policies.md has the figures."""
    small, rows = Small(small_protocol.find_small()), []
    snapkv = "snapkv:observation=8,kernel=5"
    for protocol, candidate in (
        ("P1", FULL), ("P1", Candidate("streaming", 0.375)), ("P1", Candidate("sliding_window", 0.375)),
        ("P1", Candidate("h2o", 0.375)), ("P2", Candidate("streaming", 0.5)), ("P3", Candidate(snapkv, 0.25)),
        ("P3", Candidate("tova", 0.5)), ("P5", FULL), ("P5", Candidate("streaming", 1 / 16)),
    ):  # fmt: skip
        rows.append(small.row(protocol, candidate))
    checked = limits(rows)
    assert len(checked) == 8 and all(of["reached"] for of in checked), checked
    # Constant memory: sinks in one page, a window of 60 tokens and the open page, in each of two layers.
    assert rows[-1]["peak_pages"] <= 2 * (1 + 8 + 1) and rows[-1]["filler_nll"] < rows[-2]["filler_nll"]
    assert rows[0]["copy"] > 0.99 and rows[0]["answer"] > 0.99 and LENGTH == 128
