"""A policy of one's own, as README shows it, against its definition."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from helpers.driver import DECODE
from helpers.policies import POLICY_SPEC, PolicyTwin, assert_bounded, h2o

from kvjax.policies.budget import Budgeted
from kvjax.policy import ALL


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueAware(Budgeted):
    """Keeps the newest tokens and, of the others, those of most attention times the size of their values."""

    name = "value_aware"
    in_decode = True  # decode steps drop a token too, not only the end of a prompt
    every_chunk = True  # all parts of a prompt are observed,
    decode_queries = 1  # and decode steps
    recent: int = 4

    @property
    def protected(self):  # tokens within the budget that stay whatever their score
        return self.recent

    @property
    def prompt_queries(self):  # of how many queries the attention is observed
        return ALL

    def slot_state(self):  # what is kept of each token
        return dict(attention="float32", size="float32")

    def write(self, k, v, kinds):  # of new tokens: [tokens, groups, heads, head_dim] -> [tokens, groups]
        return dict(size=jnp.abs(v.astype(jnp.float32)).sum((-2, -1)))

    def observe(self, held, seen):  # of a step's attention: seen.mass is what each token received
        before = jnp.where(seen.is_new, 0, held.slots["attention"])
        return dataclasses.replace(held, slots=held.slots | dict(attention=before + seen.mass))

    def rank(self, held):  # the lowest go first, while there are more than allowed of a finite rank
        score = held.slots["attention"] * held.slots["size"]
        return jnp.where(held.age <= self.recent, jnp.inf, score), self.budget - self.recent


def test_a_policy_of_ones_own():
    spec = dataclasses.replace(POLICY_SPEC, windows=None, policy=ValueAware(budget=12))
    by_size = lambda token, end: token.score * np.abs(token.value).sum()  # noqa: E731
    rule = dataclasses.replace(h2o(12, recent=4), rank=by_size)
    twin = PolicyTwin(spec, rule=rule, compare_scores=False)
    for i in range(36):
        twin.step([1, int(i > 5), 0, int(i % 2)], **DECODE)
        assert_bounded(twin)
    assert twin.dropped > 60 and min(twin.kept(0)) < 12
