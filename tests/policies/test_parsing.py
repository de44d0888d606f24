"""Policies as text: names, keys and values, and what is said of mistakes."""

import dataclasses
import re
from pathlib import Path

import pytest

from kvjax.errors import InputError
from kvjax.policies import H2O, POLICIES, TOVA, KNorm, Random, SlidingWindow, SnapKV, Streaming, parse_policy
from kvjax.policy import Policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("full", Policy()),
        ("sliding_window:window=8", SlidingWindow(window=8)),
        ("streaming:window=508", Streaming(window=508, sinks=4)),
        ("streaming:window=8,sinks=2", Streaming(window=8, sinks=2)),
        ("h2o:budget=256,recent=32", H2O(budget=256, recent=32)),
        ("h2o:budget=256,normalize=mean,recent=0", H2O(budget=256, recent=0, normalize="mean")),
        ("tova:budget=9,prefill=chunked", TOVA(budget=9, prefill="chunked")),
        (
            "snapkv:budget=99,observation=8,kernel=5,heads=mean",
            SnapKV(budget=99, observation=8, kernel=5, heads="mean"),
        ),
        ("knorm:budget=9", KNorm(budget=9)),
        ("random:budget=9,seed=3", Random(budget=9, seed=3)),
    ],
)
def test_names_and_values(text, policy):
    assert parse_policy(text) == policy and type(parse_policy(text)) is type(policy)
    assert POLICIES[policy.name] is type(policy)


def test_the_documents_name_every_key_and_default():
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text("utf-8")
    table = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", text[: text.index("## SmolLM2-135M")], re.MULTILINE))
    assert table.keys() == POLICIES.keys()
    for name, said in table.items():
        fields = {field.name: field.default for field in dataclasses.fields(POLICIES[name])}
        found = dict(re.findall(r"`(\w+)`(?: \((.+?)\))?", said))
        assert found.keys() == fields.keys(), name
        for key, default in fields.items():
            if default is dataclasses.MISSING:
                assert not found[key], f"{name} has no default for {key}"
            elif default is not None:
                assert found[key] == (f"{default:g}" if isinstance(default, float) else str(default)), (name, key)


def test_what_the_text_does_not_say_is_given():
    assert parse_policy("h2o", budget=64) == H2O(budget=64)
    assert parse_policy("h2o:budget=32", budget=64) == H2O(budget=32)
    assert parse_policy("full", budget=64) == Policy(), "what a policy does not have is not for it"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "policy '' is unknown: choose one of full, sliding_window, streaming, h2o"),
        ("lru:budget=4", "policy 'lru' is unknown"),
        ("H2O:budget=4", "policy 'H2O' is unknown"),
        (
            "h2o:size=4",
            "'size=4' is no key=value of policy h2o: its keys are budget, prefill, heads, recent, normalize",
        ),
        ("h2o:budget", "'budget' is no key=value of policy h2o"),
        ("full:budget=4", "'budget=4' is no key=value of policy full: its keys are none"),
        ("h2o:budget=many", "budget=many is not a whole number: give a whole number, and a comma before the next key"),
        ("tova:budget=2147483647", "budget is 2147483647: it must be a whole number from 1 to 1073741824"),
        ("snapkv:budget=99,kernel=100001", "kernel is 100001"),
        ("entropy:total_budget=99,observation=100000", "observation is 100000"),
        ("h2o:budget=4.5", "budget=4.5 is not a whole number"),
        ("h2o", "policy h2o needs budget: give h2o:budget=…"),
        ("sliding_window", "policy sliding_window needs window"),
        ("sliding_window:window=0", "window is 0"),
        ("streaming:window=8,sinks=0", "sinks is 0"),
        ("h2o:budget=4,normalize=max", "normalize is 'max': choose one of sum, mean"),
        ("tova:budget=4,prefill=", "prefill is '': choose one of exact, chunked"),
    ],
)
def test_mistakes_are_named(text, words):
    with pytest.raises(InputError, match=words):
        parse_policy(text)
