"""Entropy-guided budgets against the definition in plain Python, and what makes them good budgets."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import DECODE, PREFILL, jit
from helpers.policies import POLICY_SPEC, PolicyTwin
from helpers.programs import faults, lowered

from kvjax.errors import InputError
from kvjax.policies import Entropy, parse_policy
from kvjax.policies.entropy import shared_out

SPEC = dataclasses.replace(POLICY_SPEC, num_layers=4, windows=(None, 11, None, None), num_pages=128)
POLICY = Entropy(total_budget=50, sinks=2, recent=4, observation=8)
FREE, LEAST = (0, 2, 3), POLICY.protected


def shares_by_definition(total, weights, least, most):
    """The multiple of the weights by halving, and whole numbers by largest remainders."""
    weights = np.asarray(weights, np.float64)
    weights = np.maximum(weights / weights.max(), 1e-6) if weights.max() > 0 else np.ones_like(weights)
    target = min(max(total, sum(least)), sum(most))
    low, high = 0.0, max(most) / weights.min() + 1
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(middle * weights, least, most).sum() < target else (low, middle)
    ideal = np.clip(high * weights, least, most)
    shares = np.floor(ideal + 1e-6).astype(int)
    for i in sorted(range(len(shares)), key=lambda i: (shares[i] - ideal[i], i))[: target - shares.sum()]:
        shares[i] += 1
    return shares


@dataclasses.dataclass
class EntropyTwin(PolicyTwin):
    """Rows that are shortened when all layers have been seen."""

    compare_scores: bool = False

    def __post_init__(self):
        self.budgets, self.attention = [], {}
        super().__post_init__()

    def draw_tokens(self, count):
        q, k, v = super().draw_tokens(count)
        return q * np.array([0.2, 1, 4, 1], np.float32)[:, None, None, None], k, v

    def drop(self, layer, group, sequence, p, ended):
        if ended and p.shape[1] > 1:
            self.attention.setdefault(sequence, {}).setdefault(layer, []).append(p[:, -POLICY.observation :])

    def after(self, lengths, q, k, v, ended):
        out = super().after(lengths, q, k, v, ended)
        for sequence, of_layers in self.attention.items():
            of_heads = {layer: np.concatenate(parts) for layer, parts in of_layers.items()}
            self.shorten(sequence, of_heads)
        self.attention = {}
        return out

    def shorten(self, sequence, of_heads):
        entropy = []
        for layer in FREE:
            p = of_heads[layer]
            sees = self.counts(layer, sequence) - np.arange(p.shape[1])[::-1]
            of_queries = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1).mean(0)
            entropy.append(of_queries.sum() / np.log(sees).sum())
        counts = [self.counts(layer, sequence) for layer in FREE]
        least = [min(LEAST, count) for count in counts]
        shares = shares_by_definition(POLICY.total_budget, entropy, least, counts)
        self.budgets.append((entropy, shares))
        for layer, share in zip(FREE, shares, strict=True):
            received = of_heads[layer].astype(np.float32).mean(0).sum(0)
            for group in self.groups:
                row, last = self.rows[layer][group][sequence], self.seen[sequence] - POLICY.recent
                order = sorted(range(len(row)), key=lambda i, received=received: received[i])
                others = [i for i in order if POLICY.sinks <= row[i].position < last]
                dropped = others[: len(row) - share]
                self.rows[layer][group][sequence] = [token for i, token in enumerate(row) if i not in dropped]

    def counts(self, layer, sequence):
        return len(self.rows[layer][0][sequence])


@pytest.mark.parametrize("groups", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_batch_keeps_what_the_definition_keeps(groups):
    twin = EntropyTwin(spec=dataclasses.replace(SPEC, policy=POLICY, groups=groups))
    twin.step([18, 5, 0, 0], ends=[False, True, True, True], **PREFILL)
    twin.step([12, 0, 9, 0], ends=[True, True, False, True], **PREFILL)
    (_, short), (entropy, shares) = twin.budgets
    assert short.tolist() == [5, 5, 5], "a prompt that is smaller than its budgets stays"
    assert sum(shares) == 50 and entropy[1] < min(entropy[0], entropy[2]) and shares[1] == min(shares)
    assert twin.fork(0, 3)
    for _ in range(3):
        twin.step([1, 1, 0, 1], **DECODE)
    assert [twin.counts(layer, 0) for layer in FREE] == (shares + 3).tolist(), "what is generated is added"
    assert twin.held()[2, 0, 3].keys() == twin.held()[2, 0, 0].keys()
    twin.step([14, 0, 8, 2], ends=[True] * 4, **PREFILL)
    assert len(twin.budgets) == 5 and all(sum(of) == 50 for _, of in twin.budgets[2:4]), "and the next turn is judged"
    twin.release(range(4))
    assert int(twin.cache.pages_used) == 0 and not np.asarray(twin.cache.policy_state["rows"]["budget"]).any()


def test_spread_attention_has_entropy_1_and_attention_to_one_token_0():
    twin = EntropyTwin(spec=dataclasses.replace(SPEC, policy=POLICY))
    q, k, v = twin.draw(4, 20, 4, 8), np.zeros((4, 20, 2, 8), np.float32), twin.draw(4, 20, 2, 8)
    k[2, 0], q[2] = 100, 1
    twin.step([20, 0, 0, 0], qkv=(q, k, v), ends=[True] * 4, **PREFILL)
    of_cache = np.asarray(twin.cache.policy_state["rows"]["entropy"])[:, 0, 0]
    np.testing.assert_allclose(of_cache[list(FREE)], [1, 0, 1], atol=1e-6)
    assert twin.budgets[0][1].tolist() == [20, 10, 20], "what layers cannot use goes to the others"
    assert twin.kept(0, layer=2) == [0, 1, *range(12, 20)]


@pytest.mark.slow
def test_the_pool_is_changed_in_place_where_layers_are_unrolled():
    program, spec = lowered("prefill", scan=False, policy=Entropy(total_budget=128))
    assert not faults(program.compile(), spec)


def share(total, weights, least, most):
    column = lambda x, dtype: jnp.asarray(np.array(x), dtype)[:, None]  # noqa: E731
    given = (column(weights, jnp.float32), column(least, jnp.int32), column(most, jnp.int32))
    return np.asarray(SHARED(total, *given))[:, 0]


SHARED = jit(lambda total, *of: shared_out(total, *of), static_argnums=0)


def test_budgets_are_in_proportion_to_entropy():
    assert share(400, [0.2, 0.4, 0.6, 0.8], [0] * 4, [1000] * 4).tolist() == [40, 80, 120, 160]
    assert share(400, [0.3] * 4, [20] * 4, [1000] * 4).tolist() == [100] * 4
    assert share(402, [0.0] * 4, [20] * 4, [1000] * 4).tolist() == [101, 101, 100, 100], "remainders to lower layers"


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_exact_and_within_their_bounds(seed):
    rng = np.random.default_rng(seed)
    weights, most = rng.random(8) ** rng.choice([0.5, 1, 8]), rng.integers(1, 500, 8)
    least, total = np.minimum(most, rng.integers(0, 30)), int((20, 1000, 4000)[seed % 3])
    shares = share(total, weights, least, most)
    assert shares.sum() == min(max(total, least.sum()), most.sum())
    assert (shares >= least).all() and (shares <= most).all()
    assert shares.tolist() == shares_by_definition(total, weights, least, most).tolist()
    free = (shares > least) & (shares < most)
    assert (np.diff(shares[free][np.argsort(weights[free])]) >= -1).all(), "more entropy, more tokens"


def test_mistakes_are_named():
    with pytest.raises(InputError, match="total_budget 18 of policy entropy leaves no token beside the 6 .* 19"):
        dataclasses.replace(SPEC, policy=dataclasses.replace(POLICY, total_budget=18))
    with pytest.raises(InputError, match="policy entropy judges a prompt by its end: give prefill=exact"):
        parse_policy("entropy:total_budget=64,prefill=chunked")
    with pytest.raises(InputError, match="gamma is nan: give a number of at least 0"):
        parse_policy("entropy:total_budget=64,gamma=nan")
    with pytest.raises(InputError, match="shares a budget between all layers, and skip_layers"):
        dataclasses.replace(SPEC, policy=POLICY, skip_layers=[0], skip_format="float32")
    with pytest.raises(InputError, match="policy entropy drops tokens of layers without a window, and every layer has"):
        dataclasses.replace(SPEC, policy=POLICY, windows=[11] * 4)
