"""The decode benchmark on a tiny random model: its report, its two caches, its flags, and the memory figure."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.decoders import tiny_decoder, unchecked_shapes

from kvjax.benchmarks import against_peers, decode, loops, memory
from kvjax.benchmarks.measure import interleaved, ratio, row
from kvjax.benchmarks.peers import Peer
from kvjax.cache import init_cache
from kvjax.cli import main as cli
from kvjax.errors import InputError
from kvjax.models import loading
from kvjax.models.decoder import Decoder

PEERS = {"transformers": {"command": "make peers"}, "openvino": {"command": "make peers"}}


def tiny(scan: bool = False) -> Decoder:
    """A model with a window and a soft cap."""
    return tiny_decoder(scan=scan, windows=(None, 20), attention_soft_cap=30.0)


@pytest.fixture
def quick_compiles():
    """Leave out what compilers take their time for."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `kvjax benchmark decode` on a tiny model; returns the exit code, stdout and stderr."""
    one_layer = types.SimpleNamespace(decoder=tiny_decoder(num_layers=1))
    monkeypatch.setattr(loading, "load", lambda name, dtype, notify: one_layer)
    monkeypatch.setattr(decode, "slots_used_share", lambda: 0.5)

    def run(*flags: str) -> tuple[int, str, str]:
        try:
            code = cli.main(["benchmark", "decode", *flags])
        except SystemExit as error:
            code = int(error.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def canned_engines(monkeypatch):
    """Engines that only say a time, by what they are and where."""

    def paged(model, point, pool=1, table=1):
        return lambda: point.context * (1 + (pool > 1) + point.batch / 100 + (table > 1) * 2)

    monkeypatch.setattr(decode, "PagedEngine", paged)
    monkeypatch.setattr(decode, "ContiguousEngine", lambda model, point: lambda: 2.0 * point.steps)


def test_report_of_a_real_run(command, quick_compiles):
    code, out, err = command("--json", "--repeats", "2", "--batch", "1", "--context", "24", "--new-tokens", "4")
    report = json.loads(out)
    assert code == 0
    assert list(report) == ["benchmark", "machine", "rows", "summary", "peers"]
    assert report["benchmark"] == "decode"
    assert {"cpu", "cores", "load", "python", "jax"} <= set(report["machine"])
    assert report["peers"] == PEERS
    assert list(report["summary"]) == list(decode.SUMMARY)
    measured = {name for name, value in report["summary"].items() if value is not None}
    assert measured == {"paged_over_contiguous_b1", "pool16_over_pool1", "table16_over_table1", "slots_used_share"}
    assert all(report["summary"][name] > 0 for name in measured)
    rows = report["rows"]
    assert len(rows) == 4
    assert all(set(r) == {"engine", "batch", "context", "ms_per_token", "tokens_per_s", "spread"} for r in rows)
    assert all(r["tokens_per_s"] == pytest.approx(1e3 / r["ms_per_token"], rel=1e-2) for r in rows)
    assert "batch 1, context 24" in err


def test_summary_takes_the_worst(command, canned_engines):
    code, out, _ = command("--json", "--new-tokens", "10", "--context", "100", "20")
    report = json.loads(out)
    assert code == 0
    assert [(r["engine"][:10], r["batch"], r["context"]) for r in report["rows"]][:6] == [
        ("paged", 1, 100), ("contiguous", 1, 100), ("paged", 1, 20), ("contiguous", 1, 20), ("paged, pag", 1, 20),
        ("paged, poo", 1, 20),
    ]  # fmt: skip
    assert len(report["rows"]) == 2 * (2 + 4)
    summary = report["summary"]
    assert summary["paged_over_contiguous_b1"] == pytest.approx(100 * 1.01 / 20)
    assert summary["paged_over_contiguous_b8"] == pytest.approx(100 * 1.08 / 20)
    assert summary["pool16_over_pool1"] == pytest.approx(2.01 / 1.01, abs=1e-4)
    assert summary["table16_over_table1"] == pytest.approx(3.01 / 1.01, abs=1e-4)


def test_table(command, canned_engines):
    code, out, _ = command()
    assert code == 0
    assert "paged, pool x16" in out and "make peers" in out
    assert "not measured" in next(line for line in out.splitlines() if line.startswith("vs_openvino_b8"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--repeats", "0"], "repeats 0"),
        (["--new-tokens", "-3"], "new_tokens -3"),
        (["--batch", "1", "0"], "batches 1, 0"),
        (["--context", "32"], "context 32"),
        (["--context", "many"], "invalid int"),
        (["--speed"], "--speed"),
    ],
)
def test_bad_flags(command, flags, words):
    code, out, err = command(*flags)
    assert code == 2 and not out
    assert words in err


def test_bad_dtype_and_model_and_command():
    for flags in (["decode", "--model", "no-such-model"], ["decode", "--dtype", "int3"], [], ["encode"]):
        try:
            code = cli.main(["benchmark", *flags])
        except SystemExit as error:
            code = error.code
        assert code == 2


@pytest.mark.parametrize("scan", [False, True])
def test_both_caches_give_the_same_tokens(scan, quick_compiles):
    model = tiny(scan)
    graph, weights = nnx.split(model)
    point = loops.Point(batch=3, context=48, steps=48, dtype="float32")
    first = jnp.array([3, 17, 40], jnp.int32)
    states = {
        loops.advance_paged: init_cache(loops.paged_spec(model, point)),
        loops.advance_contiguous: loops.empty_contiguous(model, 3, 48, "float32"),
    }
    last = []
    for advance, state in states.items():
        tokens = [first]
        for _ in range(48):
            state, token = loops.decode_loop(advance, graph, weights, state, tokens[-1], jnp.int32(1))
            tokens.append(token)
        last.append(np.array(tokens))
    np.testing.assert_array_equal(*last)


@pytest.mark.parametrize("engine", [loops.PagedEngine, loops.ContiguousEngine])
def test_an_engine_measures_the_same_stretch_again(engine, quick_compiles):
    made = engine(tiny(), loops.Point(batch=2, context=40, steps=5, dtype="float32"))
    ends = []
    for _ in range(2):
        assert made() > 0
        state = made.state
        ends.append(state.lengths if isinstance(made, loops.PagedEngine) else state.position)
    np.testing.assert_array_equal(*ends)
    assert (np.asarray(ends) == 40).all()


def test_contiguous_loop_copies_no_cache():
    model = tiny()
    graph, weights = nnx.split(model)
    state = loops.empty_contiguous(model, 2, 4096, "float32")
    total = sum(x.nbytes for x in jax.tree.leaves(state))
    token, steps = jnp.zeros(2, jnp.int32), jnp.int32(1)
    with unchecked_shapes():
        compiled = loops.decode_loop.lower(loops.advance_contiguous, graph, weights, state, token, steps).compile()
    figures, text = compiled.memory_analysis(), compiled.as_text()
    assert figures is not None and text is not None
    assert figures.alias_size_in_bytes >= total
    assert not [line for line in text.splitlines() if " copy(" in line and "f32[2,2,4096,8]" in line]


def test_turns_and_ratios():
    order = []
    engines = {name: lambda name=name: float(order.append(name) or len(order)) for name in "ab"}
    times = interleaved(engines, 2)
    assert "".join(order) == "ababab"
    assert times == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert ratio([3.0, 5.0, 8.0], [1.0, 5.0, 4.0]) == 2.0
    assert row("e", 8, 128, [1.0, 2.0, 4.0], 20) == dict(
        engine="e", batch=8, context=128, ms_per_token=100.0, tokens_per_s=80.0, spread=1.5
    )


class SlowPeer(Peer):
    """A peer slower than anything, with tokens of its own; the other one is not set up."""

    @property
    def engine(self) -> str:
        return "slow 1.0"

    def available(self) -> bool:
        return self.name == "transformers"

    def decode(
        self, batch: int, prompt_tokens: int, new_tokens: int, *, seed: int = 0, cache: str | None = None
    ) -> float:
        self.last = {"tokens": [[-1] * new_tokens] * batch}
        return 1e6

    def prefill(self, prompt_tokens: int, *, batch: int = 1, seed: int = 0) -> float:
        return 1e6


def test_against_peers(monkeypatch, quick_compiles):
    monkeypatch.setattr(against_peers, "Peer", SlowPeer)
    for name, tokens in dict(PROMPT_TOKENS=5, NEW_TOKENS=4, PREFILL_TOKENS=16).items():
        monkeypatch.setattr(against_peers, name, tokens)
    lines: list[str] = []
    rows, summary, peers = against_peers.compare(
        tiny_decoder(num_layers=1), "smollm2-135m", "float32", (2,), 1, lines.append
    )
    assert set(summary) == {"vs_transformers_b2", "prefill_vs_transformers"}
    assert all(value > 1 for value in summary.values())
    assert peers["openvino"] == {"command": "make peers"}
    assert peers["transformers"] == {"engine": "slow 1.0", "differing_tokens_share_b2": 1.0}
    assert {r["engine"] for r in rows} == {
        "kvjax: generate", "slow 1.0", "kvjax: generate: prefill", "slow 1.0: prefill",
    }  # fmt: skip
    assert any("openvino is not set up" in line for line in lines)


def test_peers_have_one_model_only():
    lines: list[str] = []
    assert against_peers.compare(tiny(), "other", "float32", (1,), 1, lines.append) == ([], {}, PEERS)
    assert "smollm2-135m" in lines[0]


def test_slots_used_share():
    share = memory.slots_used_share()
    assert 0.96 <= share < 1
    assert memory.slots_used_share(page_size=64, steps=1000) < share
    with pytest.raises(InputError, match="steps 3"):
        memory.slots_used_share(steps=3)
