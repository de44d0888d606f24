"""Passkey retrieval: five digits hidden in prose, and the question for them at the end."""

from __future__ import annotations

import numpy as np

from kvjax.errors import InputError
from kvjax.evaluation.texts import Document, Text
from kvjax.models.tokenizer import Tokenizer

_INTRODUCTION = "A pass key is hidden in the text below. Find it and remember it.\n\n"
_NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
_QUESTION = "\n\nWhat is the pass key?"
_ANSWER = "The pass key is"
_PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"


def documents(text: Text, tokenizer: Tokenizer, length: int, trials: int, seed: int) -> list[Document]:
    """Return documents of exactly `length` tokens with a key each, at depths from the beginning to the end.

    The key is said twice at one place, in filler from a random place of the text; the chat template is used where the
    model has one, and the answer's first words are given. A model finds the key if each digit is its likeliest token.

    Raises: InputError for a length that leaves no room for filler, and for a text that cannot fill it.
    """
    random = np.random.default_rng((seed, length))
    filler = tokenizer.encode(text.text, add_bos=False)
    before, after = _frame(tokenizer)
    found = []
    for trial in range(trials):
        key = "".join(map(str, random.integers(0, 10, 5)))
        needle, answer = (tokenizer.encode(of, add_bos=False) for of in (_NEEDLE.format(key=key), f" {key}"))
        room = length - sum(map(len, (before, needle, after, answer)))
        if room < 8 or room > len(filler):
            least = length - room + 8
            raise InputError(
                f"a passkey length of {length} tokens leaves {room} for prose, of which {text.name} has {len(filler)}: "
                f"use {least} to {least - 8 + len(filler)} tokens"
            )
        start = int(random.integers(0, len(filler) - room + 1))
        prose, depth = filler[start : start + room], round(room * trial / max(trials - 1, 1))
        tokens = before + prose[:depth] + needle + prose[depth:] + after + answer
        digits = [any(map(str.isdigit, tokenizer.decode([token]))) for token in answer]
        found.append(
            Document(
                text.name,
                "passkey",
                np.array(tokens, np.int32),
                np.array([False] * (length - 1 - len(answer)) + digits),
            )
        )
    return found


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens before the prose, and from the question to the beginning of the answer."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(_INTRODUCTION), tokenizer.encode(f"{_QUESTION} {_ANSWER}", add_bos=False)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": _INTRODUCTION + _PLACE + _QUESTION}])
    before, _, after = chat.partition(_PLACE)
    # The template writes the token that begins a text itself where the model wants one.
    return tokenizer.encode(before, add_bos=False), tokenizer.encode(after + _ANSWER, add_bos=False)
