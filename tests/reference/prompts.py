"""Real prompts for the reference values: Austen, Python's own source, sentences of ours and one chat turn.

Part of `make_reference.py`. Only token ids are committed, so the tests read neither these texts nor a tokenizer.
"""

from __future__ import annotations

import inspect
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

Encode = Callable[[str], list[int]]

SENTENCES = (
    "The capital of France is Paris, and the capital of Italy is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who had three daughters. The eldest",
    "To make a good loaf of bread you need flour, water, salt and yeast. First, mix the flour with the salt. Then",
    "Water boils at 100 degrees at sea level, but on a high mountain it boils at a lower temperature because",
    "1, 1, 2, 3, 5, 8, 13, 21, 34,",
)
QUESTION = "Why is the sky blue in the day and red at sunset? Answer in two sentences."
# First lines that open a chapter's prose, one a prompt, so that no two prompts share a passage.
OPENINGS = (
    "It is a truth universally acknowledged",
    "Emma Woodhouse, handsome, clever, and rich",
    "The family of Dashwood had long been settled",
    "No one who had ever seen Catherine Morland",
    "Sir Walter Elliot, of Kellynch Hall",
    "About thirty years ago Miss Maria Ward",
)


def read_novels(rdb: Path) -> list[str]:
    """The novels in an R lazy-load database of the Debian package r-cran-janeaustenr, as one string each."""
    data, at, novels = rdb.read_bytes(), 0, []
    while at < len(data):
        inflater = zlib.decompressobj()
        record = inflater.decompress(data[at + 4 :])
        at = len(data) - len(inflater.unused_data)
        lines = list(_character_vector(record))
        if len(lines) > 1000:
            novels.append(_unwrap(lines))
    return novels


def _character_vector(record: bytes) -> Iterator[str]:
    """Strings of one R serialisation (XDR, format 2 or 3) whose root is a character vector; nothing for others."""
    version = struct.unpack(">i", record[2:6])[0]
    at = 14
    if version == 3:
        at += 4 + struct.unpack(">i", record[at : at + 4])[0]
    flags, count = struct.unpack(">ii", record[at : at + 8])
    if flags & 0xFF != 16:
        return
    at += 8
    for _ in range(count):
        size = struct.unpack(">i", record[at + 4 : at + 8])[0]
        yield record[at + 8 : at + 8 + max(size, 0)].decode("utf-8", "replace")
        at += 8 + max(size, 0)


def _unwrap(lines: list[str]) -> str:
    paragraphs = "\n".join(lines).split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in paragraphs if part.strip())


def passage(novels: list[str], opening: int, skip: int = 0) -> str:
    """Text from one of OPENINGS on, `skip` characters later, cut at a word."""
    for novel in novels:
        start = novel.find(OPENINGS[opening])
        if start >= 0:
            text = novel[start + skip :]
            return text[text.index(" ") + 1 :] if skip else text
    raise ValueError(f"no novel holds {OPENINGS[opening]!r}")


def source_code(module: str) -> str:
    """Source of a standard-library module of the running Python."""
    return inspect.getsource(__import__(module))


def build(wanted: list[tuple[str, int]], novels: list[str], encode: Encode) -> list[tuple[str, list[int]]]:
    """(kind, ids) of each wanted (kind, tokens); a kind is `sentence:i`, `austen:i[:skip]` or `code:module`."""
    built = []
    for kind, length in wanted:
        source, *rest = kind.split(":")
        if source == "sentence":
            text = SENTENCES[int(rest[0])]
        elif source == "austen":
            text = passage(novels, int(rest[0]), *(int(part) for part in rest[1:]))
        else:
            text = source_code(rest[0])
        ids = encode(text[: 8 * length + 64])[:length]
        if len(ids) != length:
            raise ValueError(f"{kind} has {len(ids)} tokens, {length} are wanted")
        built.append((kind, ids))
    return built
