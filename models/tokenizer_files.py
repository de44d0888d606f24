"""Makes a tokenizer from what a checkpoint holds: tokenizer.json, or the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.errors import InputError, shown
from kvjax.models.config_gguf import eos_ids
from kvjax.models.hf_folder import read_json
from kvjax.models.optional import require
from kvjax.models.tokenizer import Tokenizer

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece writes a space so
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut into words before the merges, by `tokenizer.ggml.pre`: a pattern, or None for GPT-2's own.
_PATTERNS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _WORDS % "{1,3}",
    "qwen2": _WORDS % "",
    "deepseek-r1-qwen": _WORDS % "",
}


def from_folder(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, and tokenizer_config.json for the conventions.

    Raises:
        InputError: tokenizer.json is missing or damaged.
    """
    path = Path(path)
    file = path / "tokenizer.json"
    if not file.exists():
        raise InputError(f"{path} has no tokenizer.json: download it, or save it with transformers' AutoTokenizer")
    try:
        backend = require("tokenizers").Tokenizer.from_file(str(file))
    except InputError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise InputError(f"{file} is no readable tokenizer ({error}): download it again") from None
    settings = path / "tokenizer_config.json"
    config = read_json(settings) if settings.exists() else {}
    bos, eos = (_token_id(backend, config.get(key)) for key in ("bos_token", "eos_token"))
    begins = backend.encode("", add_special_tokens=True).ids[:1]
    return Tokenizer(
        backend,
        bos_id=bos,
        eos_ids=() if eos is None else (eos,),
        add_bos=config.get("add_bos_token", bos is not None and begins == [bos]),
        chat_template=_folder_template(path, config),
    )


def from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file states: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`).

    Raises:
        InputError: no tokenizer in the file, or an unsupported kind.
    """
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = fields.get("tokenizer.ggml.model")
    if kind not in builders:
        raise InputError(f"GGUF tokenizer {kind!r} is not supported: use a file with one of {', '.join(builders)}")
    lists = ["tokens", "merges"] if kind == "gpt2" else ["tokens", "scores"]
    for name in lists:
        if not fields.get(f"tokenizer.ggml.{name}"):
            raise InputError(f"the GGUF file lacks tokenizer.ggml.{name}: download or convert it again")
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    try:
        backend = builders[kind](fields, tokens, kinds)
        _add_tokens(backend, tokens, kinds)
    except InputError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        reason = str(error).partition("\n")[0]
        raise InputError(f"the tokenizer in the GGUF file is damaged ({reason}): download it again") from None
    begins = kind == "llama" or fields.get("tokenizer.ggml.pre") == "llama-bpe"  # what llama.cpp assumes
    return Tokenizer(
        backend,
        bos_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_ids=eos_ids(fields),
        add_bos=bool(fields.get("tokenizer.ggml.add_bos_token", begins)),
        chat_template=_template("tokenizer.chat_template", fields.get("tokenizer.chat_template")),
    )


def _byte_level(fields: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Any:
    """GPT-2's byte-level BPE; the family decides how text is cut into words first."""
    tokenizers = require("tokenizers")
    name = fields.get("tokenizer.ggml.pre", "gpt-2")
    if name not in _PATTERNS:
        raise InputError(f"GGUF pre-tokenizer {name!r} is not supported: use one of {', '.join(_PATTERNS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # Llama 3's vocabulary has words that no sequence of its merges builds.
    model = tokenizers.models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name == "llama-bpe")
    backend = tokenizers.Tokenizer(model)
    pre, pattern = tokenizers.pre_tokenizers, _PATTERNS[name]
    steps = [pre.Digits(individual_digits=True)] if name == "smollm" else []
    if pattern is not None:
        steps.append(pre.Split(tokenizers.Regex(pattern), behavior="isolated"))
    steps.append(pre.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre.Sequence(steps)
    backend.decoder = tokenizers.decoders.ByteLevel()
    if name in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = tokenizers.normalizers.NFC()
    return backend


def _sentencepiece(fields: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Any:
    """SentencePiece BPE: adjacent pieces merge in the order of the score of what they form; unknown text is bytes."""
    tokenizers = require("tokenizers")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = tokenizers.models.BPE(
        vocab=vocabulary,
        merges=_merges(vocabulary, fields["tokenizer.ggml.scores"], kinds),
        unk_token=tokens[fields.get("tokenizer.ggml.unknown_token_id", 0)],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    scheme = "first" if prefix else "never"
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    decode = tokenizers.decoders
    steps = [decode.Replace(_SPACE, " "), decode.ByteFallback(), decode.Fuse()]
    backend.decoder = decode.Sequence(steps + [decode.Strip(" ", 1, 0)] * prefix)
    return backend


def _merges(vocabulary: Mapping[str, int], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Every way to form a token of two others, best score first: SentencePiece's greedy order as a merge list."""
    found = []
    for token, number in vocabulary.items():
        if kinds[number] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[number], left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_tokens(backend: Any, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens and the model author's own are found in the text before anything else happens to it."""
    added = require("tokenizers").AddedToken
    pairs = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens([added(t, normalized=False, special=True) for t, kind in pairs if kind == _CONTROL])
    backend.add_tokens([added(t, normalized=False, special=False) for t, kind in pairs if kind == _USER_DEFINED])


def _token_id(backend: Any, token: Any) -> int | None:
    """Id of a token that tokenizer_config.json names as a string or as an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None


def _folder_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {file} ({error}): download it again") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates by name
        entries = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = entries[0].get("template") if entries else None
    return _template("chat_template", template)


def _template(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InputError(f"{name} is {shown(value)}: it must be a text; download the tokenizer again")
    return value
