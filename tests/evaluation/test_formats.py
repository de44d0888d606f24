"""The report of formats: its figures from scores by hand, its bytes from the arrays of a real cache."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

import kvjax
from kvjax.evaluation import formats
from kvjax.evaluation.formats import Settings
from kvjax.evaluation.quality import Scores
from kvjax.evaluation.texts import Document, Text

KEYS = {"format", "bytes_ratio", "bytes_ratio_at_1024", "ppl", "ppl_ratio", "kl", "agreement", "passkey",
        "attention_rel_error"}  # fmt: skip
NAMES = ("bfloat16", "int4_per_channel/int4_hadamard", "int4_before_rotary")


@pytest.fixture
def model(random_weights, write_gguf, monkeypatch, tmp_path):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    return formats.load(str(write_gguf(random_weights(), fields={"llama.context_length": 1024})), print)


def text(kind: str, seed: int) -> Text:
    letters = "".join(map(chr, np.random.default_rng(seed).integers(65, 91, 900)))
    return Text(kind, kind, "letters", letters)


def test_a_report_holds_what_was_measured(model):
    settings = Settings(formats=NAMES, context=100, windows=2, passkey_lengths=[400], trials=1, page_size=16)
    said = []
    report = formats.run(model, settings, [text("code", 0), text("prose", 1)], said.append)
    assert "minutes" in said[0] and len(said) > 3
    assert json.loads(json.dumps(report)) == report
    assert [row["format"] for row in report["rows"]] == list(NAMES)
    assert [row["stored"] for row in report["rows"]] == [True] * 2 + [False]
    for row in report["rows"]:
        assert row.keys() >= KEYS and row["passkey"] in (0, 1) and row["passkey_trials"] == 1
        assert row["tokens"] == 2 * 99 and row["kl"] == row["texts"]["prose"]["kl"] > 0
        assert row["ppl"] == pytest.approx(row["ppl_ratio"] * report["full"]["ppl"])
        assert row["texts"]["code"]["ppl_ratio"] != row["ppl_ratio"]
    by_name = {row["format"]: row for row in report["rows"]}
    assert by_name["bfloat16"]["kl"] < by_name["int4_per_channel/int4_hadamard"]["kl"]
    assert report["full"]["kl"] == 0 and report["full"]["agreement"] == 1 and report["pooled"] == ["prose"]
    assert by_name["bfloat16"]["bytes_ratio"] == by_name["bfloat16"]["bytes_ratio_at_1024"] == 1
    assert by_name["int4_per_channel/int4_hadamard"]["bytes_ratio"] == by_name["int4_before_rotary"]["bytes_ratio"]


@pytest.mark.parametrize("name", ["bfloat16", "fp8_e4m3", "int8", "int4", "int4_hadamard"])
def test_bytes_are_those_of_the_arrays(small_model, name):
    full, (variant,) = formats.caches(small_model, 1024, Settings(formats=[name], page_size=64))
    cache = kvjax.init_cache(variant.spec)
    assert isinstance(cache, kvjax.Cache)
    allocator = (cache.allocator.free_pages, cache.allocator.refcounts)
    parts = (
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        cache.positions,
        cache.page_span,
        allocator,
    )
    of_page = sum(array.nbytes for array in jax.tree.leaves(parts)) / variant.spec.num_pages
    pages = variant.spec.num_layers * 1024 / 64
    open_keys = 0 if cache.open_keys is None else cache.open_keys.nbytes
    assert (open_keys > 0) == (name == "int4")
    # Two layers of two heads of 32 values; positions, two ends of a span, an entry of the stack and a count.
    plain = 2 * 2 * 64 * 32 * 2 + 4 * 64 + 2 * 4 + 4 + 4
    found = formats.bytes_of(variant, full)
    assert found["bytes_per_token"] == of_page * 2 / 64
    assert found["bytes_ratio"] == pytest.approx(of_page / plain)
    assert found["bytes_ratio_at_1024"] == pytest.approx((pages * of_page + open_keys) / (pages * plain))


def made(nll, kl=0.0, agrees: bool | list[bool] = True, right: bool | list[bool] = True) -> Scores:
    return Scores(*(np.broadcast_to(np.asarray(of), (4,)) for of in (np.asarray(nll, np.float32), kl, agrees, right)))


def test_figures_of_scores_by_hand():
    plain = lambda name: Document(name, name, np.zeros(5, np.int32))  # noqa: E731
    key = lambda length: Document("prose", "passkey", np.zeros(length, np.int32), np.arange(4) > 1)  # noqa: E731
    documents = [plain("prose"), plain("prose"), plain("code"), key(5), key(5), key(9)]
    right = [True, False, True, [False, False, True, True], [True, True, True, False], True]
    own = [
        made([1, 2, 3, 4], 0.1),
        made(3, 0.3, [True, False, True, True]),
        made(9),
        *[made(0, right=r) for r in right[3:]],
    ]
    full = [made(2), made(2.5), made(1), made(0), made(0), made(0)]
    scores = [dict(own=a, full=b) for a, b in zip(own, full, strict=True)]
    found = formats.quality(documents, scores, "own", ["prose"])
    assert found["tokens"] == 8 and found["ppl"] == pytest.approx(math.exp(2.75))
    assert found["ppl_ratio"] == pytest.approx(math.exp(0.5)) and found["ppl_ratio_error"] == 0
    assert found["kl"] == pytest.approx(0.2) and found["agreement"] == pytest.approx(7 / 8)
    assert found["passkey"] == pytest.approx(2 / 3) and found["passkey_by_length"] == {"5": 0.5, "9": 1.0}
    assert found["texts"]["code"]["ppl_ratio"] == pytest.approx(math.exp(8))
    assert found["texts"]["code"]["ppl_ratio_error"] is None
    spread = formats.quality(documents, scores, "own", ["prose", "code"])
    assert spread["ppl_ratio_error"] == pytest.approx(
        spread["ppl_ratio"] * np.std([0.5, 0.5, 8], ddof=1) / math.sqrt(3)
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(formats=[]), "no format"),
        (dict(formats=["int3"]), "format 'int3' is not a page format"),
        (dict(formats=["int8/int3"]), "value_format 'int3'"),
        (dict(formats=["int8/int4_per_channel"]), "value_format 'int4_per_channel'"),
        (dict(context=1), "context is 1"),
        (dict(windows=0), "windows is 0"),
        (dict(trials=0), "trials is 0"),
        (dict(passkey_lengths=[0]), "a passkey length is 0"),
        (dict(seed=-1), "seed is -1"),
        (dict(page_size=12), "page_size 12"),
        (dict(formats=["fp8_e4m3_hadamard"], page_size=24), "page_size 24 does not divide chunks"),
    ],
)
def test_settings_out_of_range(given, message):
    with pytest.raises(kvjax.InputError, match=message):
        Settings(**given)


def test_settings_name_formats_once_and_by_their_own_names():
    settings = Settings(formats=["fp8", "fp8_e4m3", "int8/fp8", "int4_before_rotary"])
    assert settings.formats == ("fp8_e4m3", "int8/fp8_e4m3", "int4_before_rotary")


def test_lengths_beyond_the_model_are_refused(model):
    short = dataclasses.replace(model, config=dataclasses.replace(model.config, max_position=128))
    with pytest.raises(kvjax.InputError, match="2048 tokens are more than the 128 that .* was trained on"):
        formats.run(short, Settings(), [text("prose", 0)], print)
