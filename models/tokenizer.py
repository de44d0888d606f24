"""Text to token ids and back, incrementally too, and chat messages to prompts."""

from __future__ import annotations

import datetime
import functools
import json
import string
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.errors import InputError
from kvjax.models.optional import require

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# A character takes at most four byte tokens: so many undecodable ones in a row never become text.
_MAX_PENDING = 16


class Tokenizer:
    """A tokenizer with the conventions of its model; `tokenizer_files` makes one from a checkpoint.

    Attributes:
        bos_id: the token that begins a text, or None.
        eos_ids: the tokens that end a text or a turn.
        add_bos: whether the model expects `bos_id` first.
        special_ids: control tokens, which `decode` leaves out.
        vocab_size: number of tokens.
        chat_template: the jinja2 source, or None for a model without one.
    """

    def __init__(
        self,
        backend: Any,
        *,
        bos_id: int | None,
        eos_ids: Sequence[int],
        add_bos: bool,
        chat_template: str | None = None,
    ) -> None:
        """Wraps `backend`, a `tokenizers.Tokenizer`."""
        self._backend = backend
        self.bos_id, self.eos_ids = bos_id, tuple(eos_ids)
        self.add_bos = add_bos and bos_id is not None
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, added_token in added.items() if added_token.special)
        self.vocab_size: int = backend.get_vocab_size()

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`. Control tokens that it spells out are recognised.

        `add_bos` puts `bos_id` first, unless the text begins with it already (chat templates write it); None does
        what the model expects.
        """
        ids = self._backend.encode(text, add_special_tokens=False).ids
        wanted = self.add_bos if add_bos is None else add_bos
        if not wanted or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become replacement characters."""
        ids = [int(token) for token in ids]
        if any(not 0 <= token < self.vocab_size for token in ids):
            raise InputError(
                f"token ids {min(ids)} to {max(ids)} are not all in the vocabulary: use 0 to {self.vocab_size - 1}"
            )
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def decode_stream(self) -> DecodeStream:
        """An incremental decoder for one sequence of new tokens."""
        return DecodeStream(self)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt that the model's template makes of `messages` (each with at least "role" and "content").

        The template is code from a file, so it runs in jinja2's sandbox. `variables` are passed on to it.

        Raises:
            InputError: the model has no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise InputError("this model has no chat template: give a plain prompt, or use an instruction-tuned model")
        jinja2 = require("jinja2")
        try:
            template = _environment().from_string(self.chat_template)
            return template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=self._spelling(self.bos_id),
                eos_token=self._spelling(self.eos_ids[0] if self.eos_ids else None),
                **variables,
            )
        except jinja2.TemplateError as error:
            raise InputError(f"the model's chat template refuses these messages ({error}): change them") from None
        except TypeError as error:
            raise InputError(f"the model's chat template cannot read these messages ({error}): change them") from None

    @functools.cached_property
    def kinds(self) -> np.ndarray:
        """int8 [vocab_size]: 1 for control tokens, 2 for tokens of punctuation alone, 0 for all others."""
        texts = self._backend.decode_batch([[token] for token in range(self.vocab_size)], skip_special_tokens=False)
        kinds = np.array([2 * _is_punctuation(text) for text in texts], np.int8)
        kinds[np.array(sorted(self.special_ids), int)] = 1
        return kinds

    def to_json(self) -> str:
        """The tokenizer in the format of `tokenizer.json`."""
        return self._backend.to_str()

    def _spelling(self, token: int | None) -> str:
        return "" if token is None else self._backend.id_to_token(token)


class DecodeStream:
    """Turns tokens into text one by one, and never lets out half a character.

    The pieces joined are the text that `Tokenizer.decode` gives for all tokens together, with one exception: where byte
    tokens of SentencePiece are no UTF-8, `decode` replaces all of the run, whose valid beginning the stream has shown.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        # Tokens of the last complete piece and what follows it: a token's text can depend on the one before it.
        self._ids: list[int] = []
        self._complete = 0  # so many of them form complete text
        self._sent = 0  # characters of their text already returned

    def push(self, token: int) -> str:
        """The text that this token completes: often some characters, "" in the middle of one."""
        self._ids.append(int(token))
        text = self._decode(self._ids)
        if text.endswith(_INCOMPLETE) and len(self._ids) - self._complete < _MAX_PENDING:
            return ""
        piece = text[self._sent :]
        self._ids = self._ids[self._complete :]
        self._complete = len(self._ids)
        self._sent = len(self._decode(self._ids))
        return piece

    def finish(self) -> str:
        """What is left when no token follows: replacement characters for bytes that never became one."""
        piece = self._decode(self._ids)[self._sent :]
        self._ids, self._complete, self._sent = [], 0, 0
        return piece


def _is_punctuation(text: str) -> bool:
    """Whether a text is of signs that divide or join words, or of ASCII's other signs, and of nothing else."""
    signs = text.strip()
    return bool(signs) and all(unicodedata.category(sign)[0] == "P" or sign in string.punctuation for sign in signs)


def _environment() -> Any:
    """jinja2's sandbox with the settings and helpers that chat templates are written for (transformers')."""
    sandbox, jinja2 = require("jinja2.sandbox"), require("jinja2")

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
