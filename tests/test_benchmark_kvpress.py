"""What kvpress keeps, recorded, is what kvjax keeps; how the comparison counts; and the comparison itself (slow)."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from kvjax.benchmarks import kvpress, kvpress_peer, kvpress_report
from kvjax.benchmarks.kvpress_caches import Caches
from kvjax.benchmarks.kvpress_peer import Case
from kvjax.benchmarks.kvpress_sets import MARGIN, compare
from kvjax.errors import InputError

REFERENCE = Path(__file__).parent / "reference" / "kvpress.npz"
MODEL = Path(__file__).parent / "data" / "small_model"


def recorded():
    """The recorded cases of kvpress and its answers."""
    with np.load(REFERENCE) as found:
        arrays = dict(found)
    cases = [Case(**case) for case in json.loads(str(arrays["cases"]))]
    names = kvpress_peer.Answer._fields
    answers = [{name: arrays[f"{i}.{name}"] for name in names if f"{i}.{name}" in arrays} for i in range(len(cases))]
    return cases, [kvpress_peer.Answer(**answer) for answer in answers]


CASES, ANSWERS = recorded()
PRESSES = list(dict.fromkeys((case.press, case.target) for case in CASES))


@pytest.fixture(scope="module")
def caches(request):
    return Caches(request.getfixturevalue("small_model"), page_size=8)


@pytest.mark.parametrize(("press", "target"), PRESSES)
def test_keeps_what_kvpress_keeps(caches, press, target):
    chosen = [pair for pair in zip(CASES, ANSWERS, strict=True) if (pair[0].press, pair[0].target) == (press, target)]
    assert len(chosen) == 2, "a text without repeated tokens, and one with"
    says = press == "SnapKVPress" or target is not None  # each of both ways is another program to compile
    for number, (case, answer) in enumerate(chosen):
        options = case.options
        rules = kvpress_peer.rules(int(options.get("window_size", 1)), int(options.get("kernel_size", 1)))
        rule = next(rule for rule in rules if rule.press == press)
        kept = kvpress_peer.tokens_kept(len(case.prompt), options["compression_ratio"])
        tokens = case.prompt, case.continuation if says else []
        run = caches.run(rule.policy(kept), *tokens, in_decode=target is not None, logits=case.logits)
        length = run.kept.shape[-1]
        assert answer.kept is not None and answer.scores is not None
        assert (answer.kept.sum(-1) == kept).all() and len(run.kept) == len(answer.kept)
        agreement = compare(run.kept, answer.kept[..., :length], answer.scores[..., :length])
        assert agreement.is_tied, agreement
        # Tokens that come twice have keys of the same norm in the first layer.
        assert agreement.is_equal or (press == "KnormPress" and number == 1), agreement
        if says:
            np.testing.assert_allclose(run.logits, answer.logits, atol=kvpress_report.LOGITS_LIMIT, rtol=0)
            np.testing.assert_allclose(run.nll, answer.nll, atol=kvpress_report.LOGITS_LIMIT, rtol=0)


def test_recorded_sets_change_where_texts_repeat_tokens():
    """The fixture tests something: sets differ between presses, heads and texts, and steps of decode move them."""
    first = {case.press: answer.kept for case, answer in zip(CASES, ANSWERS, strict=True) if case.target is None}
    sets = [kept for kept in first.values() if kept is not None]
    assert all((a != b).any() for i, a in enumerate(sets) for b in sets[:i])
    snapkv = first["SnapKVPress"]
    assert snapkv is not None and (snapkv[0, :, 0] != snapkv[0, :, 1]).any()
    decode = next(answer.kept for case, answer in zip(CASES, ANSWERS, strict=True) if case.target is not None)
    assert decode is not None and (decode[1:] != decode[:-1]).any(-1).all(), "each step brings one and drops one"


def sets(*rows):
    return np.array(rows, bool)[None, None]


def test_tokens_at_the_threshold_may_differ():
    scores = np.array([[[[3, 2, 2, 1]]]], np.float32)
    found = compare(sets([1, 0, 1, 0]), sets([1, 1, 0, 0]), scores)
    assert (found.sets, found.equal, found.margin, found.is_equal, found.is_tied) == (1, 0, 0.0, False, True)
    scores[..., 2] = 2 * (1 - 3 * MARGIN)
    found = compare(sets([1, 0, 1, 0]), sets([1, 1, 0, 0]), scores)
    assert found.margin == pytest.approx(3 * MARGIN, rel=1e-2) and not found.is_tied


def test_other_differences_are_faults():
    scores = np.array([[[[3, 2, np.nan, 1]]]], np.float32)
    more = compare(sets([1, 1, 0, 1]), sets([1, 1, 0, 0]), scores)
    dropped_before = compare(sets([1, 0, 1, 0]), sets([1, 1, 0, 0]), scores)
    assert more.margin == dropped_before.margin == np.inf


def test_steps_behind_a_difference_do_not_count():
    scores = np.broadcast_to(np.array([3, 2, 2, 1], np.float32), (3, 1, 1, 4))
    theirs = np.broadcast_to(np.array([1, 1, 0, 0], bool), (3, 1, 1, 4))
    ours = theirs.copy()
    ours[1] = [1, 0, 1, 0]
    ours[2] = [0, 0, 1, 1]
    found = compare(ours, theirs, scores)
    assert (found.sets, found.equal, found.steps, found.is_tied) == (2, 1, 2, True)


ROW = dict(rule="tova", press="TOVAPress", policy="tova:budget=48", ratio=0.5, kept=48, sets=8, equal=7, steps=1)
SET = ROW | dict(margin=0.0, is_tied=True, logits=1e-5, logits_of=1)
QUALITY = dict(rule="tova", ratio=0.5, how="generated", policy="tova:budget=55", kept=55, perplexity=9.0)
QUALITY |= dict(perplexity_kvpress=9.1, ratio_of_perplexities=0.99, standard_errors=-1.0)
QUALITY |= dict(bytes=[2000, 2100], bytes_kvpress=[1800, 2200])
REPORT = dict(
    engine="kvpress 0", machine=dict(jax="0", cpu="cpu"), settings=dataclasses.asdict(kvpress.Settings()),
    logits_without_press=2e-5, perplexity_without_press=8.0, sets=[SET], decode=[], quality=[QUALITY],
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(), None),
        (dict(sets=[SET | dict(margin=0.1, is_tied=False)]), "sets: tova at ratio 0.5: kept sets differ in tokens"),
        (dict(sets=[SET | dict(logits=2e-4)]), "logits are 2.0e-04 apart"),
        (dict(sets=[SET | dict(logits=None)]), None),
        (dict(decode=[SET | dict(is_tied=False)]), "decode: tova"),
        (dict(quality=[QUALITY | dict(standard_errors=3.0, ratio_of_perplexities=1.02)]), "perplexity is 1.0200 of"),
        (dict(quality=[QUALITY | dict(standard_errors=1.9, ratio_of_perplexities=1.02)]), None),
        (dict(quality=[QUALITY | dict(standard_errors=9.0, ratio_of_perplexities=1.00001)]), None),
        (dict(quality=[QUALITY | dict(bytes=[1, 2300])]), "2300 bytes, more than 2200"),
    ],
)
def test_limits(changes, words):
    report = REPORT | changes
    lines = kvpress_report.missed(report)
    assert len(lines) == (words is not None) and (words is None or words in lines[0])
    text = kvpress_report.table(report | dict(missed=lines))
    assert "tova:budget=48" in text and all(f"missed: {line}" in text for line in lines)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (dict(documents=0), "documents is 0"),
        (dict(ratios=(1.0,)), "ratio 1.0 leaves 1 of 512 tokens"),
        (dict(ratios=(-0.5,)), "ratio -0.5 leaves 768"),
        (dict(ratios=(0.9,)), "that leaves more than 64"),
        (dict(page_size=12), "page_size 12"),
    ],
)
def test_bad_settings(values, words):
    with pytest.raises(InputError, match=words):
        kvpress.Settings(**values)


def test_a_missing_environment_is_said_in_a_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(kvpress_peer, "find_repository", lambda: tmp_path)
    assert kvpress_report.main(["--quick"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "run make kvpress" in err


def make_root(folder: Path, worker: str) -> Path:
    """A repository with a worker that this interpreter runs."""
    for part in (".peers/kvpress/bin", ".peers/models/smollm2-135m", "scripts/peers"):
        (folder / part).mkdir(parents=True)
    python = folder / ".peers/kvpress/bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / ".peers/models/smollm2-135m/config.json").write_text("{}")
    (folder / "scripts/peers/kvpress_peer.py").write_text(worker)
    return folder


WORKER = """
import json, sys
import numpy as np
print("case 1 of 1", file=sys.stderr)
length = len(json.load(open(sys.argv[2]))[0]["prompt"])
if length == 13:
    sys.exit("no press for 13 tokens")
np.savez(sys.argv[3], engine="fake 1.0", **{"0.logits": np.zeros((length, 2)), "0.nll": [1.0], "0.bytes": [1, 2]})
"""


def test_the_worker_is_asked_and_its_last_words_are_kept(monkeypatch, tmp_path):
    root, said = make_root(tmp_path, WORKER), []
    monkeypatch.setattr(kvpress_peer, "find_repository", lambda: root)
    engine, (answer,) = kvpress_peer.ask(MODEL, [Case(None, {}, [1, 2, 3], [4])], said.append)
    assert engine == "fake 1.0" and answer.logits.shape == (3, 2) and answer.kept is None and said == ["case 1 of 1"]
    with pytest.raises(InputError, match="kvpress ended with 1: no press for 13 tokens: make kvpress"):
        kvpress_peer.ask(MODEL, [Case(None, {}, [1] * 13, [4])], said.append)


@pytest.mark.slow
def test_the_comparison_with_kvpress_itself(small_model):
    try:
        kvpress_peer.environment()
    except InputError as error:
        pytest.skip(str(error))
    settings = kvpress.Settings(
        documents=1, prompt=64, continuation=24, ratios=(0.5,), window=16, page_size=8, logits=4
    )
    text = np.random.default_rng(1).integers(1, 64, 88).tolist()
    report = kvpress.Comparison(small_model, MODEL, [text], settings, lambda line: None).run()
    faults = [line for line in kvpress_report.missed(report) if not line.startswith("quality")]
    assert not faults, faults
    assert "kvpress 0.5.5" in report["engine"] and report["logits_without_press"] < kvpress_report.LOGITS_LIMIT
    assert [row["rule"] for row in report["sets"]] == [rule.name for rule in kvpress_peer.rules(16, 5)]
    for row in report["quality"]:
        assert row["bytes"][-1] <= row["bytes_kvpress"][-1], row
        assert row["how"] == "generated" or row["bytes"][0] <= row["bytes_kvpress"][0], row
