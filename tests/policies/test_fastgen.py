"""FastGen: the policy of every head, and what it keeps, against the definition in plain Python."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.decoders import tiny_decoder
from helpers.driver import DECODE, PREFILL, Twin
from helpers.policies import POLICY_SPEC, PolicyTwin

from kvjax.batch import Batch
from kvjax.errors import InputError
from kvjax.models.loading import LanguageModel
from kvjax.models.tokenizer import Tokenizer
from kvjax.options import Options
from kvjax.policies import FastGen, parse_policy
from kvjax.streaming import TextStream

POLICY = FastGen(recovery=0.95, sinks=1)
SPEC = dataclasses.replace(POLICY_SPEC, policy=POLICY, groups=2, num_layers=3, windows=(None, 11, None))
OTHER, SPECIAL, PUNCTUATION = range(3)
EVERYTHING, TO_LOCAL, TO_FREQUENT, TO_PUNCTUATION, TO_SPECIAL = range(5)


@dataclasses.dataclass
class FastGenTwin(PolicyTwin):
    """Every token has a kind by its place; a head's row is judged when a prompt ends."""

    kinds: tuple[int, ...] = (OTHER,) * 64

    def __post_init__(self):
        self.chosen = {}
        super().__post_init__()

    def kind(self, sequence, token):
        place = token.position - self.start[sequence]
        return SPECIAL if place < POLICY.sinks else self.kinds[place]

    def drop(self, layer, group, sequence, p, ended):
        row = self.rows[layer][group][sequence]
        p = p.astype(np.float32).mean(0).astype(np.float64)
        for token, received in zip(row, p.sum(0), strict=True):
            token.score += float(received)
        if ended and len(p) > 1:
            self.chosen[layer, group, sequence] = self.choose(row, sequence, p)
        if not ended or (layer, group, sequence) not in self.chosen:
            return
        columns, newest = self.kept_of(row, sequence, *self.chosen[layer, group, sequence])
        kept = [token for token in row if token.position in columns or self.age(sequence, token) <= newest]
        self.dropped += len(row) - len(kept)
        self.rows[layer][group][sequence] = kept

    def age(self, sequence, token):
        return self.start[sequence] + self.seen[sequence] - token.position

    def kept_of(self, row, sequence, keeps, window, frequent):
        """Positions that a row keeps whatever their age, and how many newest tokens beside."""
        if keeps == EVERYTHING:
            return {token.position for token in row}, 1
        kinds = {SPECIAL, PUNCTUATION} if keeps <= TO_PUNCTUATION else {SPECIAL}
        newest = window if keeps == TO_LOCAL else 1
        marked = {token.position for token in row if self.kind(sequence, token) in kinds}
        others = [t for t in row if t.position not in marked and self.age(sequence, t) > newest]
        others.sort(key=lambda token: (-token.score / self.age(sequence, token), -token.position))
        return marked | {t.position for t in others[: frequent if keeps <= TO_FREQUENT else 0]}, newest

    def choose(self, row, sequence, p):
        """The cheapest policy whose tokens have enough of the attention p [queries, tokens] of the prompt."""
        length, positions = self.seen[sequence], np.array([token.position for token in row])
        window, frequent = max(int(POLICY.local * length + 1e-6), 1), math.ceil(POLICY.frequent * length - 1e-6)
        last = self.start[sequence] + length - 1
        distance = np.arange(last - len(p) + 1, last + 1)[:, None] - positions[None]
        for keeps in (TO_SPECIAL, TO_PUNCTUATION, TO_FREQUENT, TO_LOCAL):
            columns, _ = self.kept_of(row, sequence, keeps, window, frequent)
            counted = np.isin(positions, sorted(columns))[None] | ((keeps == TO_LOCAL) & (distance < window))
            if (p * counted).sum() / len(p) >= POLICY.recovery:
                return keeps, window, frequent
        return EVERYTHING, window, frequent

    def run(self, lengths, qkv, *, num_tokens, ends=None, **shape):
        places = [seen + i for seen, length in zip(self.seen, lengths, strict=True) for i in range(length)]
        kinds = np.zeros(num_tokens, np.int8)
        kinds[: len(places)] = [self.kinds[place] for place in places]
        return super().run(lengths, qkv, num_tokens=num_tokens, ends=ends, kinds=kinds, **shape)


def kinds_of(special=(), punctuation=()):
    return tuple(SPECIAL if i in special else PUNCTUATION if i in punctuation else OTHER for i in range(64))


def attending(twin, length, wanted):
    """Tokens whose head (layer, group) gives most of its attention to the places of `wanted`, or to its neighbours."""
    q, k, v = twin.draw_tokens(length)
    q, k = q * 0.3, k * 0.3
    for (layer, group), places in wanted.items():
        mine = slice(2 * group, 2 * group + 2)
        q[layer, :, mine, 0] = 8
        k[layer, :, group, 0] = -4
        k[layer, list(places), group, 0] = 4
    return q, k, v


def test_every_head_takes_the_cheapest_policy_and_keeps_it():
    twin = FastGenTwin(spec=SPEC, kinds=kinds_of(special=(5, 27), punctuation=(3, 9, 14, 22, 24, 30)))
    qkv = attending(twin, 20, {(0, 0): (0, 5), (0, 1): (0, 3, 9, 14), (2, 0): (0, 7, 8)})
    twin.step([20, 0, 0, 0], qkv=qkv, ends=[True] * 4, **PREFILL)
    keeps = {row[:2]: keeps for row, (keeps, *_) in twin.chosen.items()}
    assert [keeps[row] for row in ((0, 0), (0, 1), (2, 0))] == [TO_SPECIAL, TO_PUNCTUATION, TO_FREQUENT]
    assert np.asarray(twin.cache.policy_state["rows"]["keeps"])[0, :, 0].tolist() == [TO_SPECIAL, TO_PUNCTUATION]
    assert twin.kept(0) == [0, 5, 19] and twin.kept(0, group=1) == [0, 3, 5, 9, 14, 19]
    assert twin.pages(0)[:, 0].tolist() == [1, 1], "20 tokens took 3 pages, and two are given back"
    for place in range(20, 34):
        twin.step([1, 0, 0, 0], **DECODE)
        special = [0, 5, *[27] * (place >= 27)]
        assert twin.kept(0) == sorted({*special, place}), "new tokens stay if they are special, and while they are new"
    assert {22, 24, 30} < set(twin.kept(0, group=1)) and len(twin.kept(0, layer=2)) == 6 + 1 + 8 + 1


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_keeps_what_the_definition_keeps(seed):
    kinds = kinds_of(special=(2, 40), punctuation=range(4, 64, 5))
    twin = FastGenTwin(spec=SPEC, seed=seed, kinds=kinds)
    q, k, v = twin.draw_tokens(24)
    strength = np.array([0.3, 1, 3], np.float32)[:, None, None, None]
    twin.step([17, 0, 7, 0], qkv=(q * strength, k, v), ends=[True] * 4, **PREFILL)
    q, k, v = twin.draw_tokens(10)
    twin.step([1, 9, 0, 0], qkv=(q * strength, k, v), ends=[True] * 4, **PREFILL)
    assert twin.fork(0, 3)
    for i in range(10):
        twin.step([1, 1, int(i % 2), 0], **DECODE)
    assert twin.dropped > 0 and len({keeps for keeps, *_ in twin.chosen.values()}) > 1
    twin.release(range(4))
    assert int(twin.cache.pages_used) == 0 and not np.asarray(twin.cache.policy_state["rows"]["keeps"]).any()


def test_without_kinds_the_first_tokens_are_special():
    k = jnp.ones((3, 2, 1, 8))
    assert not np.asarray(POLICY.write(k, k, None)["kind"]).any()
    kinds = POLICY.write(k, k, jnp.array([0, 1, 2], jnp.int8))["kind"]
    assert np.asarray(kinds).tolist() == [[0, 0], [1, 1], [2, 2]]


@pytest.fixture
def told():
    """A model whose tokenizer knows the kinds of tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<s>", ".", "?!", "a.", "$", "\N{MIDDLE DOT}", *(f"w{i}" for i in range(50))]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "w0"))
    backend.add_special_tokens(["<s>"])
    tokenizer, decoder = Tokenizer(backend, bos_id=0, eos_ids=(), add_bos=False), tiny_decoder(num_layers=1)
    assert tokenizer.kinds.tolist() == [1, 2, 2, 0, 2, 2] + [0] * 50
    return LanguageModel(name="tiny", decoder=decoder, config=decoder.config, tokenizer=tokenizer)


def assert_told(model, cache, sequence, tokens):
    row, positions = np.asarray(cache.page_table)[0, 0, sequence], np.asarray(cache.positions)
    of_row, kinds = positions[row], np.asarray(cache.policy_state["slots"]["kind"])[row]
    expected = np.pad(model.tokenizer.kinds, (0, 5))[tokens]
    assert of_row.max() == len(tokens) - 1 and (kinds[of_row >= 0] == expected[of_row[of_row >= 0]]).all()


def test_loops_tell_the_kinds_of_tokens(told):
    prompts = [[7, 8, 9, 10, 0, 1, 3, 2, 50, 4, 11], [1, 5, 9]]
    batch = Batch(told, prompts, Options(policy=FastGen(recovery=1.0), max_new_tokens=9, page_size=8))
    chosen = [prefilled.token.tolist() for prefilled in batch.prefill()] + batch.scan(4).token.tolist()
    fed = [[*prompt, *new][:-1] for prompt, new in zip(prompts, zip(*chosen, strict=True), strict=True)]
    for sequence, tokens in enumerate(fed):
        assert_told(told, batch.state.cache, sequence, tokens)


def test_texts_tell_them_too(told):
    text = np.array([7, 8, 9, 10, 0, 1, 3, 2, 50, 4, 11] * 2, np.int32)
    stream = TextStream(told, text, Options(policy=FastGen(recovery=1.0), page_size=8, chunk_size=32), limit=len(text))
    stream.step()
    assert_told(told, stream.state.cache, 0, text)


def test_a_prompt_in_parts_is_judged_by_itself():
    """Whether a neighbour's prompt ends in the same step changes nothing."""
    spec = dataclasses.replace(SPEC, windows=None, policy=FastGen(recovery=0.5, sinks=1, local=0.1, frequent=0.2))
    for seed in range(3):
        found = []
        for neighbour_ends in (True, False):
            twin = Twin(spec, seed=seed)
            twin.run([8, 3, 0, 0], twin.draw_tokens(11), **PREFILL, ends=[False, neighbour_ends, True, True])
            twin.run([10, 0, 0, 0], twin.draw_tokens(10), **PREFILL, ends=[True] * 4)
            table = np.asarray(twin.cache.page_table)[:, :, 0]
            found.append(np.sort(np.asarray(twin.cache.positions)[table].reshape(*table.shape[:2], -1)))
        np.testing.assert_array_equal(*found)


def test_mistakes_are_named():
    with pytest.raises(InputError, match="chooses a policy for each KV head, and 2 share a page: give groups=2"):
        dataclasses.replace(SPEC, groups=1)
    with pytest.raises(InputError, match="policy fastgen judges a prompt by its end: give prefill=exact"):
        parse_policy("fastgen:prefill=chunked")
    for text in ("recovery=0", "recovery=1.5", "local=-1", "frequent=nan"):
        with pytest.raises(InputError, match="give a number from 0 to 1"):
            parse_policy(f"fastgen:{text}")
    assert parse_policy("fastgen").last_chunk == 2**31 - 1
