"""What policies cost in quality: perplexity, copies, passkeys and attention, beside the memory that is really held."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.batch import cache_spec
from kvjax.errors import InputError, whole_number
from kvjax.evaluation.budgets import Candidate, candidates, described
from kvjax.evaluation.continuation import Prompted
from kvjax.evaluation.passages import CHUNK, CUE, Task, scored, tasks_of
from kvjax.evaluation.quality import perplexity
from kvjax.evaluation.texts import Text
from kvjax.evaluation.verdicts import verdicts
from kvjax.models.loading import LanguageModel
from kvjax.options import Options
from kvjax.policy import Policy
from kvjax.spec import check_page_size

DEFAULT_POLICIES = (
    "streaming", "sliding_window", "h2o", "tova", "snapkv", "knorm", "paged_eviction", "entropy", "quest", "random",
)  # fmt: skip
DEFAULT_BUDGETS = (0.1, 0.25, 0.5)
_ANSWER = 16  # no fewer tokens than five digits are, in any tokenizer


class Stopped(Exception):
    """The measurement is to end, with what has been measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        policies: texts that `parse_policy` takes, each with its budget left open or not.
        budgets: tokens that are kept of a prompt, as shares of it.
        context: tokens of a prompt of prose, compressed before its continuation is fed.
        windows: prompts from each text.
        continuation: tokens scored after each.
        copied: tokens of a stretch of each prompt that is repeated after it.
        passkey_lengths: tokens of the prompts with a passkey, the answer included; none leaves passkeys out.
        depths: passkeys of each length, from the prompt's beginning to its end.
        page_size: of all caches.
        seed: of the passkeys.
    """

    policies: Sequence[str] = DEFAULT_POLICIES
    budgets: Sequence[float] = DEFAULT_BUDGETS
    context: int = 1024
    windows: int = 2
    continuation: int = 256
    copied: int = 64
    passkey_lengths: Sequence[int] = (512, 1024)
    depths: int = 4
    page_size: int = 16
    seed: int = 0
    rows: tuple[Candidate, ...] = dataclasses.field(init=False)

    @property
    def most(self) -> int:
        """Tokens that every cache has room for after a prompt: as many for all tasks, which then share programs."""
        return max(self.continuation, self.copied, _ANSWER)

    def __post_init__(self):
        check_page_size(self.page_size)
        least = dict(context=16, windows=1, continuation=2, copied=CUE + 1, depths=1, seed=0)
        for name, value in least.items():
            object.__setattr__(self, name, whole_number(name, getattr(self, name), value))
        if self.copied >= self.context:
            raise InputError(f"copied {self.copied} is no part of a context of {self.context} tokens: give fewer")
        lengths = [whole_number("a passkey length", length, 1) for length in dict.fromkeys(self.passkey_lengths)]
        object.__setattr__(self, "passkey_lengths", tuple(lengths))
        object.__setattr__(self, "rows", candidates(self.policies, self.budgets, self.page_size))
        for row in self.rows:
            for length in (self.context, *lengths):
                row.policy(length, self.page_size)


def run(
    model: LanguageModel,
    settings: Settings,
    texts: Sequence[Text],
    notify: Callable[[str], None],
    pause: Callable[[], None] = lambda: None,
    on_row: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Measure policies on a model.

    Args:
        model: a decoder with its tokenizer.
        settings: what to measure.
        texts: prose; code is left out unless there is nothing else.
        notify: is called with lines of progress.
        pause: is called between compiled calls; raises `Stopped` to have what has been measured.
        on_row: is called with the report so far after each row.

    Returns: the report, for JSON (docs/policies.md says what its keys mean).

    Raises: InputError for texts and lengths that do not fit each other or the model, and budgets that a policy or a
        cache refuses.
    """
    texts = [text for text in texts if text.kind == "prose"] or list(texts)
    tasks = tasks_of(model, settings, texts)
    for candidate in settings.rows:
        for task in tasks:
            _check(model, task, candidate, settings)
    measured = _Measured(model, settings, tasks, notify, pause)
    report: dict[str, Any] = dict(
        model=model.name, context=settings.context, continuation=settings.continuation, copied=settings.copied,
        windows=len(tasks[0].passages), passkey_lengths=list(settings.passkey_lengths), depths=settings.depths,
        chunk=CHUNK, page_size=settings.page_size, seed=settings.seed,
        texts=[dict(name=text.name, source=text.source) for text in texts],
    )  # fmt: skip
    report |= dict(full=None, rows=[], limits=[], complete=False, seconds=0.0)
    try:
        report["full"] = measured.of_full()
        for candidate in settings.rows:
            report["rows"].append(measured.row(candidate))
            report |= dict(limits=verdicts(report["rows"]), seconds=measured.seconds)
            on_row(report)
            # A row shares no programs with the next. Each maps memory, and Linux gives a process 65530 mappings.
            jax.clear_caches()
        report["complete"] = True
    except Stopped:
        notify(f"stopped with {len(report['rows'])} of {len(settings.rows)} rows")
    return report


def _options(policy: Policy, settings: Settings) -> Options:
    return Options(format="float32", page_size=settings.page_size, chunk_size=CHUNK, policy=policy)


def _layers(model: LanguageModel) -> int:
    """Layers without a window of their own, of which policies drop tokens."""
    return sum(window is None for window in model.config.windows or (None,) * model.config.num_layers)


def _check(model: LanguageModel, task: Task, candidate: Candidate, settings: Settings) -> None:
    """Raise InputError where no cache could have the policy."""
    options = _options(candidate.policy(task.length, settings.page_size, _layers(model)), settings)
    lengths = [len(passage.prompt) for passage in task.passages]
    try:
        cache_spec(model.decoder, lengths, [settings.most + 1] * len(lengths), options)
    except InputError as error:
        raise InputError(f"{candidate.text} for {task.length} tokens: {error}") from None


class _Measured:
    """Figures of caches, beside those of the full one."""

    def __init__(self, model: LanguageModel, settings: Settings, tasks: list[Task], notify, pause):
        self._model, self._settings, self._tasks, self._notify, self._pause = model, settings, tasks, notify, pause
        self._began = time.perf_counter()
        self._full: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def of_full(self) -> dict[str, Any]:
        """Measure the cache that keeps everything; `notify` hears what that means for the rest."""
        shortest = min(self._tasks, key=lambda task: task.chunks)
        began = self.seconds
        self._read(shortest, Policy())
        compiled = self.seconds
        self._read(shortest, Policy())
        quick = self.seconds - compiled
        of_chunk = quick / (shortest.chunks + shortest.scans)
        pieces = sum(task.chunks + task.scans for task in self._tasks)
        compile_s = len(self._tasks) * max(compiled - began - quick, 0.0)
        rows = 1 + len(self._settings.rows)
        self._notify(
            f"about {rows * (pieces * of_chunk + compile_s) / 60:.1f} minutes: {len(self._settings.rows)} rows and the "
            f"full cache at {pieces * of_chunk:.0f} s (measured) and {compile_s:.0f} s of compiling"
        )
        return self._figures(Candidate("full", None), "full cache")

    def row(self, candidate: Candidate) -> dict[str, Any]:
        share = "" if candidate.budget is None else f" at {candidate.budget:g}"
        return self._figures(candidate, candidate.text + share)

    def _policy(self, candidate: Candidate, task: Task) -> Policy:
        return candidate.policy(task.length, self._settings.page_size, _layers(self._model))

    def _read(self, task: Task, policy: Policy) -> tuple[Prompted, dict[str, Any]]:
        prompts = [passage.prompt for passage in task.passages]
        prompted = Prompted(self._model, prompts, self._settings.most, _options(policy, self._settings), self._pause)
        kinds = task.passages[0].texts
        return prompted, {kind: prompted.follow([passage.texts[kind] for passage in task.passages]) for kind in kinds}

    def _figures(self, candidate: Candidate, said: str) -> dict[str, Any]:
        began = self.seconds
        prose, *keys = self._tasks
        policy = self._policy(candidate, prose)
        prompted, followed = self._read(prose, policy)
        own = dict(nll=followed["prose"].nll, prompted=prompted)
        full = self._full = self._full or own
        held = int(max(of.pages.max() for of in followed.values()))
        first = np.array([passage.texts["prose"][0] for passage in prose.passages], np.int32)
        figures = dict(policy=candidate.text, budget=candidate.budget, said=described(policy))
        figures |= perplexity(list(zip(own["nll"], full["nll"], strict=True)))
        figures |= self._passkeys(candidate, keys) | dict(
            copy=float(np.concatenate(scored(prose, "copy", followed["copy"].right)).mean()),
            attention_rel_error=prompted.attention_error(full["prompted"], first),
            peak_pages=held, bytes=prompted.bytes_of(held), tokens_per_s=followed["prose"].tokens_per_s,
        )  # fmt: skip
        full.setdefault("bytes", figures["bytes"])
        figures |= dict(bytes_ratio=figures["bytes"] / full["bytes"], seconds=self.seconds - began)
        self._notify(_line(said, figures, self.seconds))
        return figures

    def _passkeys(self, candidate: Candidate, tasks: Sequence[Task]) -> dict[str, Any]:
        found: dict[str, float] = {}
        for task in tasks:
            _, followed = self._read(task, self._policy(candidate, task))
            right = scored(task, "passkey", followed["passkey"].right)
            found[str(task.length)] = float(np.mean([of.all() for of in right]))
        return dict(passkey=float(np.mean(list(found.values()))) if found else None, passkey_by_length=found)


def _line(said: str, row: dict[str, Any], seconds: float) -> str:
    keys = "" if row["passkey"] is None else f", passkeys {row['passkey']:.0%}"
    return (
        f"{said}: perplexity {row['ppl']:.2f} ({row['ppl_ratio'] - 1:+.1%}){keys}, copies {row['copy']:.0%}, "
        f"{row['bytes_ratio']:.2f} of the bytes after {seconds:.0f} s"
    )
