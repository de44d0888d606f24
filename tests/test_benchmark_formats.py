"""The formats benchmark on a tiny random model: its report, its peer, its flags."""

import json
import types

import jax
import numpy as np
import pytest
from helpers.decoders import tiny_decoder

from kvjax.benchmarks import formats, loops
from kvjax.benchmarks.peers import Peer, PeerError
from kvjax.cli import main as cli
from kvjax.formats import best_page_size
from kvjax.models import loading


@pytest.fixture
def quick_compiles():
    """Leave out what compilers take their time for."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `kvjax benchmark formats` on a tiny model; returns the exit code, stdout and stderr."""
    one_layer = types.SimpleNamespace(decoder=tiny_decoder(num_layers=1))
    monkeypatch.setattr(loading, "load", lambda name, dtype, notify: one_layer)

    def run(*flags: str) -> tuple[int, str, str]:
        try:
            code = cli.main(["benchmark", "formats", *flags])
        except SystemExit as error:
            code = int(error.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def canned_engines(monkeypatch):
    """Engines that only say a time, by their format and batch."""
    seconds = {"float32": 1.0, "int8": 0.5, "int4_hadamard": 0.25}
    monkeypatch.setattr(formats, "PagedEngine", lambda model, point: lambda: point.batch * seconds[point.dtype])
    monkeypatch.setattr(formats, "_PAUSE_S", 0)


class SlowPeer(Peer):
    """A peer that is set up and takes three seconds a step at context 1024."""

    has_cache = True

    @property
    def engine(self) -> str:
        return "slow 1.0"

    def start(self) -> None:
        return

    def available(self) -> bool:
        return True

    def decode(
        self, batch: int, prompt_tokens: int, new_tokens: int, *, seed: int = 0, cache: str | None = None
    ) -> float:
        if not self.has_cache:
            raise PeerError("peer transformers: ImportError: You need to install `HQQ`")
        assert cache == "hqq-4bit"
        return 3.0 * (new_tokens - 1) * (prompt_tokens + new_tokens - 1 == 1024)


def test_report_of_a_real_run(command, quick_compiles):
    flags = ("--repeats", "2", "--batch", "1", "--context", "24", "--new-tokens", "4", "--formats", "int8", "int4")
    code, out, err = command("--json", *flags)
    report = json.loads(out)
    assert code == 0
    assert list(report) == ["benchmark", "machine", "rows", "summary", "peers"]
    assert [row["engine"] for row in report["rows"]] == ["float32", "int8", "int4"]
    assert report["rows"][0]["ratio"] == 1
    for row in report["rows"]:
        assert row["ms_per_token"] > 0
        low, high = row["ratio_range"]
        assert low <= row["ratio"] <= high
    assert set(report["summary"]) == {"int8_over_float32_b1", "int4_over_float32_b1"}
    assert report["peers"] == {"transformers": {"command": "make peers"}}
    assert "batch 1, context 24" in err


def test_ratios_by_format_and_batch(command, canned_engines, monkeypatch):
    monkeypatch.setattr(formats, "Peer", SlowPeer)
    code, out, _ = command("--json", "--peers", "--formats", "int8", "int4_per_token_head")
    report = json.loads(out)
    assert code == 0
    assert report["summary"] == {
        "int8_over_float32_b1": 0.5, "int4_hadamard_over_float32_b1": 0.25,
        "transformers_hqq-4bit_over_int4_hadamard_b1": 3 * 32 / 0.25,
        "int8_over_float32_b8": 0.5, "int4_hadamard_over_float32_b8": 0.25,
        "transformers_hqq-4bit_over_int4_hadamard_b8": 3 * 32 / 2,
    }  # fmt: skip
    assert report["peers"] == {"transformers": {"engine": "slow 1.0", "cache": "hqq-4bit"}}
    assert report["rows"][-1]["engine"] == "slow 1.0: hqq-4bit"
    assert report["rows"][-1]["ms_per_token"] == 3000


def test_table(command, canned_engines):
    code, out, _ = command("--formats", "int8")
    assert code == 0
    assert out.splitlines()[2].split()[-1] == "ratio"
    assert out.splitlines()[4].split()[-1] == "0.50"
    assert "int8_over_float32_b8" in out


def test_a_peer_without_the_cache_is_set_up_again(command, canned_engines, monkeypatch):
    monkeypatch.setattr(formats, "Peer", SlowPeer)
    monkeypatch.setattr(SlowPeer, "has_cache", False)
    code, out, err = command("--peers", "--formats", "int8")
    assert code == 2 and not out
    assert "HQQ" in err and "make peers" in err


def test_the_peer_has_one_model_only(command, canned_engines):
    code, _, err = command("--peers", "--formats", "int8", "--dtype", "bfloat16")
    assert code == 0
    assert "smollm2-135m in float32 only" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--repeats", "0"], "repeats 0"),
        (["--batch", "1", "0"], "batches 1, 0"),
        (["--context", "32"], "context 32"),
        (["--formats", "int3"], "'int3' is not a page format"),
        (["--formats"], "--formats"),
    ],
)
def test_bad_flags(command, flags, words):
    code, out, err = command(*flags)
    assert code == 2 and not out
    assert words in err


@pytest.mark.parametrize("name", formats.FORMATS)
def test_engines_read_pages_of_random_values_in_their_format(name):
    model = tiny_decoder(num_layers=1)
    engine = loops.PagedEngine(
        model, loops.Point(batch=2, context=140, steps=4, dtype=name, page_size=best_page_size(name))
    )
    keys, values = engine.state.stored
    assert engine.state.spec.format == name and engine.state.spec.page_size == best_page_size(name)
    for stored in (keys, values):
        assert len(np.unique(np.asarray(stored.codes[1], np.float32))) > 8
        assert all((np.asarray(scale, np.float32) != 0).all() for scale in stored.scales)
    np.testing.assert_array_equal(engine.state.lengths, [136, 136])
