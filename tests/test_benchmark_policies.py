"""The policies benchmark on a tiny random model: its report and its flags."""

import json
import types

import pytest
from helpers.decoders import tiny_decoder

from kvjax.benchmarks import policies
from kvjax.cli import main as cli
from kvjax.errors import InputError
from kvjax.models import loading
from kvjax.policies import H2O, Streaming


def test_rows_hold_the_context_and_ratios_are_of_a_cache_that_keeps_all(monkeypatch, capsys):
    model = types.SimpleNamespace(decoder=tiny_decoder(num_layers=1))
    monkeypatch.setattr(loading, "load", lambda name, dtype, notify: model)
    flags = ("--policies", "streaming", "tova", "--context=24", "--new-tokens=4", "--batch=2", "--repeats=1")
    assert cli.main(["benchmark", "policies", "--json", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["engine"] for row in report["rows"]] == ["full", "streaming", "tova"]
    assert report["rows"][0]["ratio"] == 1 and all(row["ms_per_token"] > 0 for row in report["rows"])
    assert set(report["summary"]) == {"streaming_over_full_b2", "tova_over_full_b2"}


def test_what_a_text_leaves_out_is_the_context():
    settings = policies.Settings(context=100)
    assert settings.policy("streaming") == Streaming(window=96, sinks=4)
    assert settings.policy("streaming:sinks=8") == Streaming(window=92, sinks=8)
    assert settings.policy("h2o:recent=10") == H2O(budget=99, recent=10, normalize="sum")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(policies=("nothing",)), "policy 'nothing' is unknown"),
        (dict(context=32), "context 32 is too small"),
        (dict(batches=(0,)), "batches"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        policies.Settings(**changes)
