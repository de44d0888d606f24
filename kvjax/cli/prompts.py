"""The prompts of `kvjax generate`: of its flags, of a file of JSON lines, or of standard input."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from kvjax.errors import InputError, whole_number


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how much to generate for it."""

    prompt: str
    max_new_tokens: int


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name prompts."""
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    group.add_argument("--prompts-file", help='JSON lines: {"prompt": str, "max_new_tokens"?: int}')
    group.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")


def read_requests(args: argparse.Namespace) -> list[Request]:
    """Return the prompts of the flags, of the file, or of standard input. Raises InputError for what is no prompt."""
    most = whole_number("--max-new-tokens", args.max_new_tokens, 1)
    requests = [Request(prompt, most) for prompt in args.prompt]
    if args.prompts_file is not None:
        requests += _read_file(args.prompts_file, most)
    elif not requests:
        requests = [Request(_standard_input(), most)]
    if not requests:
        raise InputError(f"{args.prompts_file} holds no prompt: give at least one line")
    for number, request in enumerate(requests, 1):
        if not request.prompt:
            raise InputError(f"prompt {number} is empty: give some text")
        refuse_half_characters(f"prompt {number}", request.prompt)
    return requests


def refuse_half_characters(name: str, text: str) -> None:
    """Raise InputError for text that holds lone surrogates: Python's stand-ins for bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} is no valid UTF-8 from character {error.start + 1} on: give UTF-8 text") from None


def _standard_input() -> str:
    if sys.stdin is None:
        raise InputError("standard input is closed: give --prompt or --prompts-file")
    try:
        return sys.stdin.read().rstrip("\n")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read a prompt from standard input ({error}): give UTF-8 text or --prompt") from None


def _read_file(path: str, default: int) -> list[Request]:
    if not path:
        raise InputError("--prompts-file is empty: give the path of a file of JSON lines")
    try:
        # JSON lines end with "\n" alone: other ends of lines, such as U+2028, may stand inside a string.
        lines = Path(path).read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read --prompts-file {path}: {error}") from None
    return [_request(f"{path}, line {number}", line, default) for number, line in enumerate(lines, 1) if line.strip()]


def _request(where: str, line: str, default: int) -> Request:
    try:
        entry = json.loads(line)
    except RecursionError:
        raise InputError(f'{where} is nested too deeply: write {{"prompt": "…"}}') from None
    except ValueError as error:
        raise InputError(f'{where} is no JSON ({error}): write {{"prompt": "…"}}') from None
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise InputError(f'{where} has no text under "prompt": write {{"prompt": "…"}}')
    if unknown := set(entry) - {"prompt", "max_new_tokens"}:
        raise InputError(f"{where} has the unknown key {sorted(unknown)[0]!r}: use prompt and max_new_tokens")
    most = whole_number(f"{where}: max_new_tokens", entry.get("max_new_tokens", default), 1)
    return Request(entry["prompt"], most)
