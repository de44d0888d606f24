"""Policies on the small trained model, whose tasks have known answers: what each keeps of filler, copies and needles.

Protocols:

- P1 feeds documents token by token; what drops tokens in decode does so from the first token too many on.
- P2 reads a document up to its questions, compresses it, and is fed the questions with their answers.
- P3 reads a document through its first question, compresses it, and has to say the second token of the answer.
- half reads the first half of a document, compresses it, and is fed the rest, for policies that drop nothing in decode
  (which then hold more than random, the control, does).
- P5 is P1 on documents of eight times the length that the model was trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from kvjax.errors import InputError
from kvjax.evaluation.budgets import Candidate, candidates, described
from kvjax.evaluation.continuation import Prompted
from kvjax.evaluation.small_task import NEEDLE_LENGTH, Tag, documents
from kvjax.evaluation.train_small import TEST_SEED
from kvjax.models import registry
from kvjax.models.decoder import Decoder
from kvjax.options import Options
from kvjax.policy import Policy

PAGE_SIZE, LENGTH, LONG, QUESTIONS = 8, 128, 1024, 2
DEFAULT_POLICIES = ("sliding_window", "streaming", "h2o", "tova", "snapkv:observation=8,kernel=5", "random")
DEFAULT_BUDGETS = (0.25, 0.375, 0.5)
FULL = Candidate("full", None)
# How many tokens of a document of so many a protocol reads before it compresses, and where it stops.
_PARTS: dict[str, Callable[[int], tuple[int, int]]] = {
    "P1": lambda length: (1, length),
    "P2": lambda length: (length - QUESTIONS * NEEDLE_LENGTH, length),
    "P3": lambda length: (length - QUESTIONS * NEEDLE_LENGTH + 3, length - QUESTIONS * NEEDLE_LENGTH + NEEDLE_LENGTH),
    "half": lambda length: (length // 2, length),
    "P5": lambda length: (1, length),
}
_OF_LONG = 64 / LONG


def find_small() -> Decoder:
    """Return the small model of the tests. Raises InputError where there is no checkout around this package."""
    folder = Path(kvjax.__file__).parents[1] / "tests" / "data" / "small_model"
    if not folder.is_dir():
        raise InputError(f"the small model is not at {folder}: run from a checkout, or name another model")
    source = registry.find(str(folder))
    return Decoder(registry.read_config(source), registry.load_weights(source), scan=True)


class Small:
    """The small model and its documents.

    Attributes:
        made: documents that training has not seen, `LENGTH` tokens each.
        long: documents of `LONG` tokens.
    """

    def __init__(self, decoder: Decoder, count: int = 32, pause: Callable[[], None] = lambda: None):
        self._decoder, self._pause = decoder, pause
        self.made = documents(count, LENGTH, seed=TEST_SEED, needles=QUESTIONS)
        self.long = documents(max(count // 4, 1), LONG, seed=TEST_SEED, needles=QUESTIONS)
        self._bytes: dict[str, float] = {}

    def row(self, protocol: str, candidate: Candidate) -> dict[str, Any]:
        """Measure one policy by one protocol; `bytes_ratio` is to the full cache where that came first."""
        made = self.long if protocol == "P5" else self.made
        read, end = _PARTS[protocol](made.tokens.shape[1])
        length = made.tokens.shape[1] if read == 1 else read
        policy = candidate.policy(length, PAGE_SIZE, self._decoder.config.num_layers)
        options = Options(format="float32", page_size=PAGE_SIZE, policy=policy)
        prompts = made.tokens[:, :read].tolist()
        prompted = Prompted(self._decoder, prompts, end - read, options, self._pause)
        followed = prompted.follow(list(made.tokens[:, read:end]))
        held = int(followed.pages.max())
        own = prompted.bytes_of(held)
        if candidate == FULL:
            self._bytes[protocol] = own
        row = dict(protocol=protocol, policy=candidate.text, budget=candidate.budget, said=described(policy))
        tags = made.tags[:, read + 1 : end]
        row |= _scores(np.stack(followed.nll), np.stack(followed.right), tags)
        full = self._bytes.get(protocol)
        return row | dict(peak_pages=held, bytes=own, bytes_ratio=None if full is None else own / full)


def applies(protocol: str, policy: Policy) -> bool:
    """Whether a protocol says anything of a policy that P1 does not, or cannot: some compress prompts alone."""
    in_decode = policy.in_decode or not policy.edits
    return (
        in_decode
        if protocol in ("P1", "P5")
        else protocol != "half" or not in_decode or policy.name in ("full", "random")
    )


def run(
    texts: Sequence[str],
    budgets: Sequence[float],
    notify: Callable[[str], None],
    pause: Callable[[], None],
    stopped: type[Exception],
) -> dict[str, Any]:
    """Measure policies by all protocols: the report, for JSON. Ends early, with what there is, if `pause` raises."""
    rows = candidates(texts, budgets, PAGE_SIZE)
    long = [Candidate(name, _OF_LONG) for name in ("sliding_window", "streaming") if name in texts]
    policies = [(of, of.policy(LENGTH, PAGE_SIZE)) for of in (FULL, *rows)]
    plan = [(name, of) for name in ("P1", "P2", "P3", "half") for of, policy in policies if applies(name, policy)]
    plan += [("P5", of) for of in (FULL, *long)]
    small = Small(find_small(), pause=pause)
    report: dict[str, Any] = dict(model="small", documents=len(small.made.tokens), length=LENGTH, page_size=PAGE_SIZE)
    report |= dict(rows=[], limits=[], complete=False)
    try:
        for number, (protocol, candidate) in enumerate(plan):
            report["rows"].append(row := small.row(protocol, candidate))
            notify(f"{number + 1} of {len(plan)}: {protocol}, {row['said']}")
        report["complete"] = True
    except stopped:
        notify(f"stopped with {len(report['rows'])} of {len(plan)} rows")
    return report | dict(limits=limits(report["rows"]))


def _scores(nll, right, tags) -> dict[str, float | None]:
    """Mean -log p by kind of token, and how many copies and answers were the likeliest; None where there are none."""
    of = lambda values, tag: float(values[tags == tag].mean()) if (tags == tag).any() else None  # noqa: E731
    quarter = nll.shape[1] // 4
    parts = [(nll[:, part], tags[:, part]) for part in (slice(quarter, 2 * quarter), slice(3 * quarter, None))]
    second, last = (float(values[kinds == Tag.FILLER].mean()) if (kinds == Tag.FILLER).any() else None
                    for values, kinds in parts)  # fmt: skip
    return dict(
        filler_nll=of(nll, Tag.FILLER), filler_second_quarter=second, filler_last_quarter=last,
        copy_nll=of(nll, Tag.COPY), copy=of(right, Tag.COPY), answer_nll=of(nll, Tag.ANSWER),
        answer=of(right, Tag.ANSWER),
    )  # fmt: skip


def limits(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the thresholds that rows allow to check: `limit`, `reached` and the figures."""
    by_row = {(row["protocol"], row["policy"], row["budget"]): row for row in rows}
    found = []

    def check(limit: str, over: float | None, needed: Sequence[tuple[str, str, float | None]], of, least: float):
        there = [by_row.get(key) for key in needed]
        if all(there):
            value = of(*there)
            reached = value >= least if over is None else value <= over
            found.append(dict(limit=limit, reached=reached, value=round(value, 4)))

    def filler(a, b):
        return a["filler_nll"] - b["filler_nll"]

    window, streaming = ("P1", "sliding_window", 0.375), ("P1", "streaming", 0.375)
    full, control = ("P1", "full", None), ("half", "random", 0.375)
    check("P1: a window loses 0.02 nats of filler to streaming", None, [window, streaming], filler, 0.02)
    check("P1: streaming loses at most 0.01 nats of filler", 0.01, [streaming, full], filler, 0)
    check("P1: h2o loses at most 0.01 nats of filler", 0.01, [("P1", "h2o", 0.375), full], filler, 0)
    of_long = [("P5", "streaming", _OF_LONG), ("P5", "full", None)]
    check("P5: streaming is 0.2 nats better than the full cache", -0.2, of_long, filler, 0)
    drift = lambda row: row["filler_last_quarter"] - row["filler_second_quarter"]  # noqa: E731
    check("P5: streaming drifts by at most 0.05 nats", 0.05, of_long[:1], drift, 0)
    answer = lambda row: row["answer"]  # noqa: E731
    for name, budget in (("snapkv:observation=8,kernel=5", 0.25), ("tova", 0.5)):
        check(f"P3: {name} answers 95 % at {budget:g}", None, [("P3", name, budget)], answer, 0.95)
    check("P2: streaming answers at most half at 0.5", 0.5, [("P2", "streaming", 0.5)], answer, 0)
    for name in ("entropy", "fastgen"):
        pair = [("half", name, 0.375), control]
        check(f"half: {name} loses less filler than random", 0.0, pair, filler, 0)
    return found
