"""`kvjax evaluate`: what it prints, draws and refuses, on a tiny checkpoint; and the real model within its bounds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.cli.main import main
from kvjax.evaluation import formats
from kvjax.models import registry

# Bytes of bfloat16, perplexity over that of full precision, KL, passkeys of four.
LIMITS = {"fp8_e4m3": (0.52, 1.015, 0.015, 1), "int8": (0.52, 1.003, 0.003, 1), "int4": (0.30, 1.03, 0.05, 0.95)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path_factory.getbasetemp() / "kvjax-cache"))


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["evaluate", "formats", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_table_a_picture_and_json(capsys, tmp_path, random_weights, write_gguf):
    file, picture = tmp_path / "text.txt", tmp_path / "picture.png"
    file.write_text("".join(map(chr, np.random.default_rng(0).integers(65, 91, 300))))
    argv = ["--model", str(write_gguf(random_weights())), "--text", str(file), "--formats", "int8"]
    argv += ["--context", "64", "--windows", "2", "--passkey-lengths", "--page-size", "16"]
    code, out, err = run(capsys, *argv, "--plot", str(picture))
    assert code == 0 and picture.read_bytes().startswith(b"\x89PNG") and "minutes" in err
    assert "int8" in out and "full precision (float32 pages): perplexity" in out and str(file) in out
    code, out, _ = run(capsys, *argv, "--json", "--quick")
    report = json.loads(out)
    assert code == 0 and report["quick"] and report["context"] == 64
    assert [row["format"] for row in report["rows"]] == ["int8"]
    assert all(row["passkey"] is None and row["kl"] > 0 for row in report["rows"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--formats", "int3"], "format 'int3'"),
        (["--context", "0"], "context is 0"),
        (["--windows", "-1"], "windows is -1"),
        (["--trials", "0"], "trials is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--page-size", "7"], "page_size is 7"),
        (["--passkey-lengths", "-3"], "a passkey length is -3"),
        (["--text", "/nonexistent.txt"], "cannot read --text /nonexistent.txt"),
        (["--plot", "picture.doc"], "--plot picture.doc has no ending of a picture"),
        (["--plot", "/nonexistent/picture.png"], "cannot write --plot /nonexistent/picture.png"),
        (["--model", "nosuchmodel"], "unknown model 'nosuchmodel'"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_loaded(capsys, monkeypatch, argv, words):
    monkeypatch.setattr(formats, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(registry, "load_weights", lambda *_, **__: pytest.fail("loaded"))
    code, out, err = run(capsys, *argv)
    lines = [line for line in err.splitlines() if line.startswith("kvjax: error:")]
    assert code == 2 and out == "" and len(lines) == 1 and words in lines[0]


def test_a_picture_needs_matplotlib(capsys, monkeypatch):
    monkeypatch.setattr("kvjax.evaluation.picture.find_spec", lambda _: None)
    code, _, err = run(capsys, "--plot", "picture.png")
    assert code == 2 and 'pip install "kvjax[plots]"' in err


def test_a_picture_is_not_left_empty_and_not_overwritten_early(capsys, tmp_path):
    old, new = tmp_path / "old.png", tmp_path / "new.png"
    old.write_bytes(b"before")
    for path in (old, new):
        assert run(capsys, "--plot", str(path), "--model", "nosuchmodel")[0] == 2
    assert old.read_bytes() == b"before" and not new.exists()


@pytest.mark.slow
def test_smollm2_keeps_its_quality():
    """The figures that are promised (docs/formats.md), on few tokens."""
    try:
        registry.find("smollm2-135m")
    except kvjax.InputError as error:
        # A missing package is a visible skip, and a failure in CI.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))
    script = Path(__file__).parent.parent / "scripts" / "evaluate.py"
    command = [sys.executable, script, "formats", "--model", "smollm2-135m", "--quick", "--json"]
    # A process of its own: in this one programs are compiled without optimisations.
    plain = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "KVJAX_CACHE")}
    done = subprocess.run([*command, "--windows", "1", "--trials", "2"], env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["quick"] and {row["format"] for row in report["rows"]} == set(LIMITS)
    assert report["full"]["passkey"] == 1
    for row in report["rows"]:
        size, ppl_ratio, kl, passkey = LIMITS[row["format"]]
        assert row["bytes_ratio"] <= size and row["ppl_ratio"] <= ppl_ratio and row["kl"] <= kl
        assert row["passkey"] >= passkey and row["tokens"] >= 2047
