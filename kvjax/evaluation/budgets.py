"""Policies at budgets: names with what they leave open, and shares of a prompt, made into policies for its length."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvjax.errors import InputError, shown
from kvjax.policies import POLICIES, parse_policy
from kvjax.policy import Policy

# Of FastGen, which has no budget: what to sweep where a text names none.
RECOVERIES = (0.8, 0.85, 0.9, 0.95, 0.98)
# Budgets that leave room for whatever a text names: a policy that differs between them has one.
_OF_A_KIND = (2**28, 2**29)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A row of a table: a policy as text, and the share of a prompt that it keeps; None where it has no budget."""

    text: str
    budget: float | None

    def policy(self, length: int, page_size: int, layers: int = 1) -> Policy:
        """Return the policy for prompts of `length` tokens, in a model with so many layers without a window.

        Raises: InputError for a budget that the policy refuses.
        """
        if self.budget is None:
            return parse_policy(self.text)
        try:
            return _with_budget(self.text, round(self.budget * length), page_size, layers)
        except InputError as error:
            raise InputError(f"{self.text} with {self.budget:g} of {length} tokens: {error}") from None


def candidates(texts: Sequence[str], budgets: Sequence[float], page_size: int) -> tuple[Candidate, ...]:
    """Return the rows for texts of policies: one for each budget, or for each recovery of FastGen, or a single one.

    Raises: InputError for no text or no budget, budgets outside (0, 1], and texts that are no policy.
    """
    if not texts or not budgets:
        raise InputError("no policy or no budget to measure: name at least one of each")
    for budget in budgets:
        if not 0 < budget <= 1:
            raise InputError(f"budget {shown(budget)} is no share of the prompt: give numbers above 0, up to 1")
    found = []
    for text in dict.fromkeys(texts):
        first, second = (_with_budget(text, tokens, page_size) for tokens in _OF_A_KIND)
        if first != second:
            found += [Candidate(text, float(budget)) for budget in dict.fromkeys(budgets)]
        elif hasattr(first, "recovery") and "recovery=" not in text:
            joint = "," if ":" in text else ":"
            found += [Candidate(f"{text}{joint}recovery={recovery}", None) for recovery in RECOVERIES]
        else:
            found.append(Candidate(text, None))
    return tuple(found)


def described(policy: Policy) -> str:
    """Return the text that `parse_policy` makes this policy of."""
    fields = dataclasses.fields(policy)
    values = [f"{field.name}={getattr(policy, field.name)}" for field in fields if _differs(policy, field)]
    return ":".join([policy.name, ",".join(values)] if values else [policy.name])


def _differs(policy: Policy, field: dataclasses.Field) -> bool:
    value = getattr(policy, field.name)
    return value is not None and value != field.default


def _with_budget(text: str, tokens: int, page_size: int, layers: int = 1) -> Policy:
    """The policy of a text that keeps so many tokens of a layer, where the text leaves that open."""
    name = text.partition(":")[0]
    given = dict(budget=tokens, total_budget=tokens * layers, top_pages=max(1, tokens // page_size))
    if "window" in {field.name for field in dataclasses.fields(POLICIES.get(name, Policy))}:
        given["window"] = tokens - (sinks := parse_policy(text, **given, window=1).num_sinks)
        if given["window"] < 1:
            raise InputError(
                f"{tokens} tokens leave no window beside {sinks} sinks: give a larger share, or fewer sinks"
            )
    return parse_policy(text, **given)
