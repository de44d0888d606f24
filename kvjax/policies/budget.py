"""What policies with a budget of tokens share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from kvjax.errors import InputError, whole_number
from kvjax.policy import HEADS, PREFILLS, Policy, one_of

if TYPE_CHECKING:
    from kvjax.spec import CacheSpec


# Positions are int32, and a budget is added to.
MOST_TOKENS = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgeted(Policy):
    """A policy that keeps `budget` tokens in each layer and head group.

    Attributes:
        budget: tokens; what stays whatever its score is within it.
        prefill: "exact" attends to the whole prompt and compresses it once, at its end; "chunked" compresses after
            every chunk, for prompts larger than the memory.
    """

    edits: ClassVar[bool] = True
    budget: int
    prefill: str = "exact"

    def __post_init__(self):
        object.__setattr__(self, "budget", whole_number("budget", self.budget, 1, MOST_TOKENS))
        one_of("prefill", self.prefill, PREFILLS)
        if self.budget <= self.protected:
            raise InputError(
                f"budget {self.budget} of policy {self.name} leaves no token beside the {self.protected} that always "
                f"stay: give at least {self.protected + 1}"
            )

    @property
    def protected(self) -> int:
        """Tokens within the budget that stay whatever their score."""
        return 0

    @property
    def in_chunks(self) -> bool:
        return self.prefill == "chunked"

    @property
    def bound(self) -> int | None:
        return self.budget if self.in_decode else None

    def most_slots(self, prompt: int, new: int, chunk: int, page_size: int) -> int:
        peak = min(prompt, self.budget + chunk) if self.in_chunks else prompt
        if not self.in_decode:
            return max(peak, min(prompt, self.budget) + new)
        return max(peak, min(prompt + new, self.budget + (page_size if self.by_page else 1)))

    def check(self, spec: CacheSpec) -> None:
        need_free_layer(self, spec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByHead(Budgeted):
    """A policy that is defined by KV head.

    Attributes:
        heads: "each" keeps tokens of its own for every KV head, which then needs pages of its own (`CacheSpec.groups`);
            "mean" keeps the same for the heads that share a page, by the mean of their scores.
    """

    heads: str = "each"

    @property
    def by_head(self) -> bool:
        return self.heads == "each"

    def __post_init__(self):
        super().__post_init__()
        one_of("heads", self.heads, HEADS)

    def check(self, spec: CacheSpec) -> None:
        super().check(spec)
        if self.by_head and spec.heads_per_group > 1:
            raise InputError(
                f"policy {self.name} chooses tokens for each KV head, and {spec.heads_per_group} share a page: give "
                f"groups={spec.num_kv_heads}, or heads=mean to choose for all of them together"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtPromptEnd(Policy):
    """A policy that judges a prompt by its end and has no budget for each row of its own.

    Attributes:
        prefill: "exact": such a policy has no other.
    """

    edits: ClassVar[bool] = True
    prefill: str = "exact"

    def __post_init__(self):
        one_of("prefill", self.prefill, PREFILLS)
        if self.prefill == "chunked":
            raise no_chunks(self)

    def check(self, spec: CacheSpec) -> None:
        need_free_layer(self, spec)


def need_free_layer(policy: Policy, spec: CacheSpec) -> None:
    """Raise InputError if every layer has a window, so that a policy that drops tokens has nothing to do."""
    if all(window is not None for window in spec.layer_windows):
        raise InputError(f"policy {policy.name} drops tokens of layers without a window, and every layer has one")


def no_chunks(policy: Policy) -> InputError:
    """What to say of prefill=chunked to a policy that judges a prompt by its end."""
    return InputError(
        f"prefill is 'chunked', and policy {policy.name} judges a prompt by its end: give prefill=exact, or use "
        "h2o, tova, knorm, random or paged_eviction"
    )
