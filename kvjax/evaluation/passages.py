"""What policies are measured on: prompts of prose and prompts with a passkey, and what is fed after each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from kvjax.errors import InputError
from kvjax.evaluation import passkey
from kvjax.evaluation.continuation import STEPS
from kvjax.evaluation.texts import Text, excerpts
from kvjax.models.loading import LanguageModel

CHUNK = 512
CUE = 8  # tokens of a repeated stretch that tell which one it is, and are not scored


@dataclasses.dataclass(frozen=True)
class Passage:
    """A prompt, and what to feed after it.

    Attributes:
        prompt: token ids.
        texts: continuations by what they measure; all but the last token of each are fed.
        scored: which tokens after a continuation's first count.
    """

    prompt: list[int]
    texts: dict[str, Int32[np.ndarray, " _"]]
    scored: dict[str, Bool[np.ndarray, " _"]]


@dataclasses.dataclass(frozen=True)
class Task:
    """Passages of one length, which are read and continued together."""

    length: int
    passages: list[Passage]

    @property
    def chunks(self) -> int:
        return -(-sum(len(passage.prompt) for passage in self.passages) // CHUNK)

    @property
    def scans(self) -> int:
        longest = [max(len(p.texts[kind]) - 1 for p in self.passages) for kind in self.passages[0].texts]
        return sum(-(-length // STEPS) for length in longest)


def tasks_of(model: LanguageModel, settings: Any, texts: Sequence[Text]) -> list[Task]:
    """Return what to measure: windows of prose first, then the passkeys of each length.

    Args:
        model: gives the tokenizer, and the most tokens that it was trained on.
        settings: `kvjax.evaluation.policies.Settings`.
        texts: for prose; the first stands around the passkeys.

    Raises: InputError for lengths that do not fit the model or the texts.
    """
    total = settings.context + settings.continuation + 1
    longest = max(total, *settings.passkey_lengths, 0)
    if longest > model.config.max_position:
        raise InputError(
            f"{longest} tokens are more than the {model.config.max_position} that {model.name} was trained on: "
            "lower the context and the passkey lengths"
        )
    windows = [window for text in texts for window in excerpts(text, model.tokenizer, settings.windows, total)]
    last = settings.context - settings.copied - 1
    starts = np.linspace(0, last, len(windows)).astype(int).tolist()
    tasks = [
        Task(settings.context, [_prose(of.tokens, start, settings) for of, start in zip(windows, starts, strict=True)])
    ]
    for length in settings.passkey_lengths:
        documents = passkey.documents(texts[0], model.tokenizer, length, settings.depths, settings.seed)
        tasks.append(Task(length, [_asked(of.tokens, of.answer) for of in documents]))
    return tasks


def _prose(tokens: Int32[np.ndarray, " _"], start: int, settings: Any) -> Passage:
    """A window of prose, parted into prompt and continuation, and a stretch of the prompt to say again."""
    texts = dict(prose=tokens[settings.context :], copy=tokens[start : start + settings.copied + 1])
    scored = dict(prose=np.ones(settings.continuation, bool), copy=np.arange(settings.copied) >= CUE - 1)
    return Passage(tokens[: settings.context].tolist(), texts, scored)


def _asked(tokens: Int32[np.ndarray, " _"], answer: Bool[np.ndarray, " _"] | None) -> Passage:
    """A prompt that asks for a passkey, up to the token before the one that predicts the first digit."""
    assert answer is not None
    first = int(answer.argmax())
    return Passage(tokens[:first].tolist(), dict(passkey=tokens[first:]), dict(passkey=answer[first:]))


def scored(task: Task, kind: str, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return what counts of the values of a kind of continuation, for each passage."""
    return [of[passage.scored[kind]] for passage, of in zip(task.passages, values, strict=True)]
