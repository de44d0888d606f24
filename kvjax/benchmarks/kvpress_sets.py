"""Kept sets of two sides: how many are equal, and how near to the threshold the others differ."""

from __future__ import annotations

import dataclasses

import numpy as np

MARGIN = 1e-5


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How kept sets agree.

    Attributes:
        sets: how many were compared, each of a layer and a KV head.
        equal: how many of them are equal.
        margin: the greatest distance, of all tokens that only one side keeps, between the token's score and the lowest
            that is kept, over the latter's size; infinite where one side keeps more tokens.
        steps: after how many steps sets were compared.
    """

    sets: int = 0
    equal: int = 0
    margin: float = 0.0
    steps: int = 0

    def __add__(self, other: Agreement) -> Agreement:
        sums = (self.sets + other.sets, self.equal + other.equal)
        return Agreement(*sums, max(self.margin, other.margin), self.steps + other.steps)

    @property
    def is_equal(self) -> bool:
        """Whether all sets are equal."""
        return self.equal == self.sets

    @property
    def is_tied(self) -> bool:
        """Whether sets differ in no tokens but those whose scores are the threshold's, up to rounding."""
        return self.margin <= MARGIN


def compare(ours: np.ndarray, theirs: np.ndarray, scores: np.ndarray) -> Agreement:
    """Compare sets after every step up to the first that differs: what follows it sees other tokens.

    Args:
        ours, theirs: bool [steps, layers, kv_heads, tokens].
        scores: float32 of the same shape, by which theirs were chosen.
    """
    found = Agreement()
    for of_step in zip(ours, theirs, scores, strict=True):
        found += _of_step(*of_step)
        if not found.is_equal:
            break
    return found


def _of_step(ours: np.ndarray, theirs: np.ndarray, scores: np.ndarray) -> Agreement:
    equal = (ours == theirs).all(-1)
    margin = 0.0
    for place in map(tuple, np.argwhere(~equal)):
        if ours[place].sum() != theirs[place].sum():
            return Agreement(equal.size, int(equal.sum()), float("inf"), 1)
        threshold = scores[place][theirs[place]].min()
        distance = np.abs(scores[place] - threshold)[ours[place] != theirs[place]]
        # A token without a score is one that kvpress has dropped before.
        far = np.nan_to_num(distance, nan=np.inf).max() / max(abs(threshold), np.finfo(np.float32).tiny)
        margin = max(margin, float(far))
    return Agreement(equal.size, int(equal.sum()), margin, 1)
