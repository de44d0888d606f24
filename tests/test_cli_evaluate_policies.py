"""`kvjax evaluate policies`: what it prints, draws and refuses, and what Ctrl-C leaves, on a tiny checkpoint."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.cli import arguments, evaluate_policies
from kvjax.cli.main import main
from kvjax.evaluation import formats, small_protocol
from kvjax.models import registry

TINY = ["--context", "48", "--continuation", "16", "--copied", "12", "--windows", "2", "--passkey-lengths",
        "--page-size", "16"]  # fmt: skip

KEYS = {"policy", "budget", "ppl", "ppl_ratio", "passkey", "copy", "attention_rel_error", "peak_pages", "bytes_ratio",
        "tokens_per_s"}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path_factory.getbasetemp() / "kvjax-cache"))


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["evaluate", "policies", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def given(tmp_path, random_weights, write_gguf) -> list[str]:
    file = tmp_path / "text.txt"
    file.write_text("".join(map(chr, np.random.default_rng(0).integers(65, 91, 300))))
    return ["--model", str(write_gguf(random_weights())), "--text", str(file), *TINY]


def test_a_table_and_a_picture_and_what_an_interrupt_leaves(capsys, tmp_path, given, monkeypatch):
    picture = tmp_path / "picture.png"
    argv = [*given, "--policies", "full", "sliding_window", "--plot", str(picture)]
    own, progress = signal.getsignal(signal.SIGINT), arguments.progress

    def interrupted(line: str) -> None:
        progress(line)
        if line.startswith("full: perplexity"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(arguments, "progress", interrupted)
    code, out, err = run(capsys, *argv)
    assert code == 130 and picture.read_bytes().startswith(b"\x89PNG") and "minutes" in err and "stopping soon" in err
    assert "pages of 16" in out and "(stopped: not all rows)" in out and "sliding_window" not in out
    code, out, _ = run(capsys, *argv, "--json", "--quick")
    report = json.loads(out)
    assert code == 130 and not report["complete"] and report["quick"] and report["context"] == 48
    (row,) = report["rows"]
    assert row.keys() >= KEYS and row["policy"] == "full" and row["budget"] is row["passkey"] is None
    assert row["ppl_ratio"] == row["bytes_ratio"] == 1 and row["peak_pages"] > 0
    assert signal.getsignal(signal.SIGINT) is own


def test_an_interrupt_before_anything_is_measured(capsys, given, monkeypatch):
    def interrupted(line: str) -> None:
        if line.startswith("loading"):
            monkeypatch.setattr(evaluate_policies, "stoppable", at_once)

    def at_once(stopped):
        from contextlib import contextmanager

        @contextmanager
        def stoppable():
            def pause():
                raise stopped

            yield pause

        return stoppable()

    monkeypatch.setattr(arguments, "progress", interrupted)
    code, out, _ = run(capsys, *given, "--policies", "full")
    assert code == 130 and out == "stopped before anything was measured\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--policies", "nothing"], "policy 'nothing' is unknown"),
        (["--policies", "h2o:budget=3.5"], "budget=3.5 is not a whole number"),
        (["--budgets", "2"], "budget 2.0 is no share of the prompt"),
        (["--policies", "snapkv", "--budgets", "0.01"], "snapkv with 0.01 of 1024 tokens: budget 10"),
        (["--context", "0"], "context is 0"),
        (["--windows", "-1"], "windows is -1"),
        (["--page-size", "7"], "page_size 7"),
        (["--text", "/nonexistent.txt"], "cannot read --text /nonexistent.txt"),
        (["--plot", "picture.doc"], "--plot picture.doc has no ending of a picture"),
        (["--model", "nosuchmodel"], "unknown model 'nosuchmodel'"),
        (["--model", "small", "--quick"], "--quick says nothing to --model small"),
        (["--model", "small", "--passkey-lengths", "9"], "--passkey-lengths says nothing to --model small"),
        (["--model", "small", "--policies", "h2o:x=1"], "'x=1' is no key=value of policy h2o"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_loaded(capsys, monkeypatch, argv, words):
    monkeypatch.setattr(formats, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(registry, "load_weights", lambda *_, **__: pytest.fail("loaded"))
    code, out, err = run(capsys, *argv)
    lines = [line for line in err.splitlines() if line.startswith("kvjax: error:")]
    assert code == 2 and out == "" and len(lines) == 1 and words in lines[0]


def test_the_small_model_makes_a_table_of_protocols(capsys, monkeypatch):
    report = dict(
        documents=32, length=128, page_size=8, complete=True,
        limits=[dict(limit="P1: a limit", reached=False, value=1)],
        rows=[dict(protocol="P3", policy="tova", budget=0.5, filler_nll=None, copy_nll=None, copy=None, answer_nll=0.25,
                   answer=1.0, peak_pages=16, bytes_ratio=0.5)],
    )  # fmt: skip
    monkeypatch.setattr(small_protocol, "run", lambda *_: report)
    code, out, _ = run(capsys, "--model", "small")
    assert code == 0 and "missed   P1: a limit (value 1)" in out
    assert "P3   tova" in out and "0.250" in out and "100%" in out
    assert json.loads(run(capsys, "--model", "small", "--json")[1]) == report


@pytest.mark.slow
def test_smollm2_policies_against_random():
    """What is promised of policies (docs/policies.md), on few tokens: the control is beaten, and memory is saved."""
    try:
        registry.find("smollm2-135m")
    except kvjax.InputError as error:
        # A missing package is a visible skip, and a failure in CI.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))
    script = Path(__file__).parent.parent / "scripts" / "evaluate.py"
    command = [sys.executable, script, "policies", "--model", "smollm2-135m", "--quick", "--json", "--budgets", "0.5"]
    # A process of its own: in this one programs are compiled without optimisations.
    plain = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "KVJAX_CACHE")}
    command += ["--policies", "snapkv", "random", "--windows", "1", "--depths", "2"]
    done = subprocess.run(command, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    snapkv, random = report["rows"]
    assert report["complete"] and report["full"]["passkey"] == 1 and report["full"]["copy"] > 0.8
    assert snapkv["ppl_ratio"] < min(1.1, random["ppl_ratio"]) and snapkv["passkey"] >= random["passkey"]
    assert snapkv["attention_rel_error"] < random["attention_rel_error"]
    # Half of the prompt, and with SnapKV all that follows it.
    assert random["bytes_ratio"] < 0.55 and snapkv["bytes_ratio"] < 0.65
