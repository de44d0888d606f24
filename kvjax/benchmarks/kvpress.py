"""The comparison with kvpress: what both keep, what the model then says, and quality at equal bytes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.benchmarks import kvpress_peer as peer
from kvjax.benchmarks.kvpress_caches import Caches, Run, page_costs
from kvjax.benchmarks.kvpress_peer import Answer, Case, Rule, tokens_kept
from kvjax.benchmarks.kvpress_sets import Agreement, compare
from kvjax.benchmarks.measure import Notify, machine
from kvjax.errors import InputError, whole_number
from kvjax.models.decoder import Decoder
from kvjax.policy import Policy
from kvjax.spec import check_page_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to compare.

    Attributes:
        documents: texts.
        prompt, continuation: tokens of each that are compressed, and those that follow.
        ratios: shares of a prompt that kvpress drops.
        window, kernel: of SnapKV.
        page_size: of all caches; the smallest there is by default, as kvpress rounds nothing to pages.
        logits: tokens of a continuation whose logits are compared.
    """

    documents: int = 3
    prompt: int = 512
    continuation: int = 64
    ratios: tuple[float, ...] = (0.5, 0.75)
    window: int = 64
    kernel: int = 5
    page_size: int = 8
    logits: int = 8

    def __post_init__(self):
        object.__setattr__(self, "documents", whole_number("documents", self.documents, 1))
        check_page_size(self.page_size)
        for ratio in self.ratios:
            if not 0 < ratio < 1 or tokens_kept(self.prompt, ratio) <= max(self.window, self.page_size * 3):
                raise InputError(
                    f"ratio {ratio} leaves {tokens_kept(self.prompt, ratio)} of {self.prompt} tokens: give one above 0 "
                    f"that leaves more than {max(self.window, self.page_size * 3)}"
                )


QUICK = dict(documents=1, prompt=256, ratios=(0.5,))


class Comparison:
    """A model on both sides, fed the same documents.

    Args:
        decoder: the model.
        folder: the same model as transformers reads it.
        documents: tokens of each, a prompt and its continuation.
        settings: what to compare.
        notify: is called with lines of progress.
    """

    def __init__(
        self, decoder: Decoder, folder: Path, documents: Sequence[Sequence[int]], settings: Settings, notify: Notify
    ):
        self.caches = Caches(decoder, settings.page_size)
        self.folder, self.settings, self.notify = folder, settings, notify
        self.rules = peer.rules(settings.window, settings.kernel)
        self.texts = [(list(of[: settings.prompt]), list(of[settings.prompt :])) for of in documents]

    def run(self) -> dict[str, Any]:
        """Return the report."""
        full = self._full()
        engine, theirs = peer.ask(self.folder, list(self._cases().values()), self.notify)
        self.theirs: dict[tuple, Answer] = dict(zip(self._cases(), theirs, strict=True))
        same = [self._difference(run, self.theirs["full", number]) for number, run in enumerate(full)]
        plain = [self.theirs["full", number] for number in range(len(full))]
        rows: dict[str, list[dict[str, Any]]] = dict(sets=[], decode=[], quality=[])
        for ratio in self.settings.ratios:
            for rule in self.rules:
                self.notify(f"kvjax: {rule.name}, ratio {ratio}")
                rows["sets"].append(self._sets(rule, ratio))
                if rule.in_decode:
                    rows["decode"].append(self._decode(rule, ratio))
                rows["quality"] += self._quality(rule, ratio)
                # The next rule has programs of its own, and a process can map only so much memory for them.
                jax.clear_caches()
        report = dict(engine=engine, machine=machine(), settings=dataclasses.asdict(self.settings))
        return report | dict(logits_without_press=max(same), perplexity_without_press=_perplexity(plain)) | rows

    def _cases(self) -> dict[tuple, Case]:
        """What kvpress is asked, by (kind, document) and (kind, document, rule, ratio)."""
        cases: dict[tuple, Case] = {}
        for number, (prompt, continuation) in enumerate(self.texts):
            common: dict[str, Any] = dict(prompt=prompt, continuation=continuation, logits=self.settings.logits)
            cases["full", number] = Case(None, {}, **common)
            for ratio in self.settings.ratios:
                for rule in self.rules:
                    common |= dict(press=rule.press, options=rule.options | dict(compression_ratio=ratio))
                    cases["once", number, rule.name, ratio] = Case(**common)
                    if rule.renumbers:
                        cases["renumbered", number, rule.name, ratio] = Case(**common, rerotate=True)
                    if rule.in_decode:
                        target = tokens_kept(len(prompt), ratio)
                        cases["decode", number, rule.name, ratio] = Case(**common, target=target)
        return cases

    def _full(self) -> list[Run]:
        """Runs without a policy; says how long the whole will take, by the first of them."""
        texts, seconds = [*self.texts, self.texts[-1]], []
        runs = []
        for text in texts:
            begin = time.perf_counter()
            runs.append(self._run(Policy(), *text, in_decode=False))
            seconds.append(time.perf_counter() - begin)
        settings = self.settings
        kinds = len(settings.ratios) * sum(2 + (2 if rule.in_decode else 1) for rule in self.rules)
        first, again = seconds[0], seconds[-1]
        # A run of kvpress takes about as long as one of ours that is compiled.
        total = kinds * (max(first - again, 0) + 2 * len(self.texts) * again)
        self.notify(f"about {total / 60:.1f} minutes: {kinds} kinds of caches, {len(self.texts)} documents each")
        return runs[:-1]

    def _run(self, policy: Policy, prompt: list[int], continuation: list[int], *, in_decode: bool) -> Run:
        return self.caches.run(policy, prompt, continuation, in_decode=in_decode, logits=self.settings.logits)

    def _pairs(self, kind: str, rule: Rule, ratio: float, policy: Policy, *, in_decode: bool):
        """Our runs and kvpress's answers, a pair a document."""
        return [
            (self._run(policy, *text, in_decode=in_decode), self.theirs[kind, number, rule.name, ratio])
            for number, text in enumerate(self.texts)
        ]

    @staticmethod
    def _difference(ours: Run, theirs: Answer) -> float:
        return float(np.abs(ours.logits - theirs.logits).max())

    def _sets(self, rule: Rule, ratio: float) -> dict[str, Any]:
        """Kept sets of prompts, and the logits behind those that are equal."""
        kept = tokens_kept(self.settings.prompt, ratio)
        pairs = self._pairs("once", rule, ratio, rule.policy(kept), in_decode=False)
        # Where positions are those in the cache, so is the attention of the prompt: other logits are no fault.
        row = _row(rule, ratio, kept, pairs, with_logits=not rule.renumbers)
        return row if rule.renumbers else row | _perplexities(pairs)

    def _decode(self, rule: Rule, ratio: float) -> dict[str, Any]:
        """Kept sets after every token of a continuation, where both hold the same number of tokens."""
        kept = tokens_kept(self.settings.prompt, ratio)
        pairs = self._pairs("decode", rule, ratio, rule.policy(kept), in_decode=True)
        return _row(rule, ratio, kept, pairs, with_logits=True) | _perplexities(pairs)

    def _quality(self, rule: Rule, ratio: float) -> list[dict[str, Any]]:
        """Perplexity of the continuation at no more bytes than kvpress holds, which keeps all that follows a prompt.

        In two ways: with what follows kept too, at no more bytes after the prompt and at the end; and, where the policy
        drops tokens in decode, token by token, at no more bytes at the end.
        """
        rows, kind = [], "renumbered" if rule.renumbers else "once"
        drops = rule.renumbers or rule.policy(tokens_kept(self.settings.prompt, ratio)).in_decode
        ways = [("compressed once", False)] * (not rule.renumbers) + [("generated", True)] * drops
        for how, in_decode in ways:
            limit = self.theirs[kind, 0, rule.name, ratio].bytes[int(in_decode)]
            policy = self._policy_within(int(limit), rule, in_decode=in_decode)
            pairs = self._pairs(kind, rule, ratio, policy, in_decode=in_decode)
            row = dict(rule=rule.name, ratio=ratio, how=how, policy=_text(policy), kept=_budget(policy))
            rows.append(row | _perplexities(pairs))
        return rows

    def _policy_within(self, limit: int, rule: Rule, *, in_decode: bool) -> Policy:
        """The largest policy of a rule whose pages take no more bytes."""
        settings, size = self.settings, self.settings.page_size
        largest = rule.policy(tokens_kept(settings.prompt, min(settings.ratios)))
        spec = self.caches.spec(largest, settings.prompt, settings.continuation)
        fixed, of_page = page_costs(spec)
        pages = (limit - fixed) // (of_page * spec.num_layers * spec.groups)
        if rule.renumbers:
            # A page for sinks, and one more that the window has begun but not filled.
            return rule.policy(size * (pages - 2) + peer.SINKS - 1)
        if in_decode:
            # A row holds one token more until it drops one.
            return (rule.generating or rule.policy)(size * pages - 1)
        return rule.policy(size * pages)


def _row(rule: Rule, ratio: float, kept: int, pairs, *, with_logits: bool) -> dict[str, Any]:
    found = [compare(ours.kept, theirs.kept, theirs.scores) for ours, theirs in pairs]
    total = sum(found, Agreement())
    same = [pair for pair, of in zip(pairs, found, strict=True) if of.is_equal] if with_logits else []
    logits = max((Comparison._difference(*pair) for pair in same), default=None)
    row: dict[str, Any] = dict(rule=rule.name, press=rule.press, policy=_text(rule.policy(kept)), ratio=ratio)
    return row | dict(
        kept=kept, sets=total.sets, equal=total.equal, margin=total.margin, steps=total.steps,
        is_tied=total.is_tied, logits=logits, logits_of=len(same),
    )  # fmt: skip


def _perplexity(runs) -> float:
    return float(np.exp(np.concatenate([run.nll for run in runs]).mean()))


def _perplexities(pairs) -> dict[str, Any]:
    """Perplexities and bytes of both sides, and how many standard errors the mean difference is."""
    ours, theirs = zip(*pairs, strict=True)
    difference = np.concatenate([a.nll - b.nll for a, b in pairs]).astype(np.float64)
    error = difference.std(ddof=1) / np.sqrt(difference.size)
    return dict(
        perplexity=_perplexity(ours), perplexity_kvpress=_perplexity(theirs),
        ratio_of_perplexities=float(np.exp(difference.mean())),
        standard_errors=float(difference.mean() / error) if error else 0.0,
        bytes=np.max([run.bytes for run in ours], 0).tolist(),
        bytes_kvpress=np.max([run.bytes for run in theirs], 0).tolist(),
    )  # fmt: skip


def _budget(policy: Any) -> int:
    return policy.window + policy.sinks - 1 if policy.window_size else policy.budget


def _text(policy: Policy) -> str:
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    defaults = {field.name: field.default for field in dataclasses.fields(policy)}
    given = [f"{name}={value}" for name, value in fields.items() if value != defaults[name]]
    return f"{policy.name}:{','.join(given)}"
