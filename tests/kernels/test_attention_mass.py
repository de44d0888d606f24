"""Attention mass: the definition against a dense softmax, XLA against the definition, and planted errors."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import jit
from helpers.paged import case_of, with_rows

from kvjax.kernels.attention_mass import reference, xla

# 100 tokens are 13 pages, of which windows have let most go.
LENGTHS = (0, 1, 9, 100)
QUERIES = {"decode": [0, 1, 1, 1], "prefill": [0, 1, 9, 20], "mixed": [0, 1, 5, 1]}
CASES = [
    dict(), dict(window=9, ring=5, sinks_learned=True), dict(window=9, sinks=3, ring=5, groups=2),
    dict(window=9, sinks=11, has_sink_query=True, ring=5, start=500, groups=2), dict(sinks=4, has_sink_query=True),
]  # fmt: skip


class Mass:
    """A case of paged attention, with the arguments of the second pass."""

    def __init__(self, query_lengths, lengths=LENGTHS, **changes: Any):
        whole: dict[str, Any] = dict(ring=None)
        self.case = case_of(query_lengths, lengths=lengths, **whole | changes)
        q, keys, _, positions, rows, queries = self.case.arguments
        self.arguments: tuple[Any, ...] = (
            q, jnp.asarray(self.case.reference().lse, jnp.float32), keys, positions, rows, queries,
        )  # fmt: skip
        self.options = {name: of for name, of in self.case.options.items() if name != "sink_logits"}

    def reference(self, **options):
        return reference.attention_mass(*self.arguments, **self.options | options)

    def xla(self, *arguments, **options):
        longest = dict(max_query_length=1 if self.case.longest == 1 else 20)
        return _xla(*(arguments or self.arguments), **self.options | longest | options)


@functools.partial(jit, static_argnames=("max_query_length", "scale", "soft_cap", "band"))
def _xla(*arguments, **options):
    return xla.attention_mass(*arguments, **options)


def assert_close(got, wanted):
    for array, expected in zip(got, wanted, strict=True):
        assert array.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(array, np.float64), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", QUERIES)
@pytest.mark.parametrize("changes", CASES, ids=str)
@pytest.mark.parametrize("band", [None, 4])
def test_the_reference_equals_a_dense_softmax(kind, changes, band):
    mass = Mass(QUERIES[kind], **changes)
    case = mass.case
    sums, entropy = mass.reference(band=band)
    expected, spread = np.zeros_like(sums), np.zeros_like(entropy)
    learned = np.asarray(case.options.get("sink_logits", np.full(case.heads, -np.inf)), np.float64)[:, None, None]
    for seq, here, queries, at in case.each_sequence():
        logits = case.logits(seq, here, queries, at)
        p = np.exp(logits) / (np.exp(logits).sum(-1, keepdims=True) + np.exp(learned))
        spread[:, seq] = -(p * np.log(np.where(p > 0, p, 1))).sum((1, 2))
        distance = np.zeros((len(queries), sums.shape[-1]))
        tokens, slots = case.slots_in_row(seq)
        distance[:, slots] = queries[:, None] - tokens[None]
        near = (distance <= (np.inf if band is None else band))[None]
        expected[:, seq] = (p * near).sum(1).reshape(case.kv_heads, -1, p.shape[-1]).sum(1)
    np.testing.assert_allclose(sums, expected, atol=1e-6)
    np.testing.assert_allclose(entropy, spread, atol=1e-5)


@pytest.mark.parametrize("kind", QUERIES)
@pytest.mark.parametrize("changes", CASES, ids=str)
@pytest.mark.parametrize("band", [None, 4])
def test_xla_equals_the_reference(kind, changes, band):
    mass = Mass(QUERIES[kind], **changes)
    assert_close(mass.xla(band=band), mass.reference(band=band))


@pytest.mark.parametrize("changes", [dict(), dict(window=150, sinks=3, has_sink_query=True)], ids=str)
def test_several_tiles_and_blocks(changes):
    mass = Mass([140, 3], lengths=(600, 30), head_dim=8, kv_heads=1, heads=1, options=dict(scale=0.7), **changes)
    assert_close(mass.xla(max_query_length=140), mass.reference())


def test_the_mass_of_every_query_is_one():
    mass = Mass(QUERIES["prefill"])
    sums, entropy = mass.xla()
    np.testing.assert_allclose(sums.sum(-1), np.tile(2.0 * np.array(QUERIES["prefill"]), (2, 1)), rtol=1e-5)
    seen = [np.arange(length - count, length) + 1 for length, count in zip(LENGTHS, QUERIES["prefill"], strict=True)]
    most = np.array([np.log(of).sum() for of in seen])[None]
    assert ((entropy >= -1e-6) & (entropy <= most + 1e-5)).all()


@pytest.mark.parametrize("count", [1, 4])
def test_only_the_last_queries(count):
    mass = Mass(QUERIES["prefill"], window=30, ring=8)
    arguments: tuple[Any, ...] = (*mass.arguments[:5], mass.arguments[5].last(count))
    expected = reference.attention_mass(*arguments, **mass.options)
    assert_close(mass.xla(*arguments, max_query_length=count), expected)


@pytest.mark.parametrize("what", ["q", "lse", "keys"])
def test_a_sequence_that_overflowed_spoils_no_other(what):
    mass = Mass(QUERIES["prefill"])
    q, lse, keys, *rest = mass.arguments
    page = int(rest[1].page_table[1, 0, 2, 0])
    # The ninth token is the last of sequence 2; a tile of it reaches into sequence 3, and one of sequence 1 into it.
    spoilt = dict(q=(q.at[9].set(jnp.nan), lse, keys), lse=(q, lse.at[9].set(jnp.nan), keys))
    spoilt["keys"] = (q, lse, keys.at[page, :, 1].set(jnp.nan))
    sums, entropy = mass.xla(*spoilt[what], *rest)
    others = [0, 1, 3]
    expected = mass.reference()
    assert np.isnan(entropy[:, 2]).any()
    assert_close((sums[:, others], entropy[:, others]), (expected[0][:, others], expected[1][:, others]))


# Mistakes of the caller's: each must be seen in what comes back.
MUTATIONS = {
    "other lse": lambda q, lse, keys, positions, rows, queries: (q, lse + 0.1, keys, positions, rows, queries),
    "lse of another": lambda q, lse, *rest: (q, lse[::-1], *rest),
    "heads reversed": lambda q, *rest: (q[:, ::-1], *rest),
    "pages swapped": lambda *most: (*most[:4], _swapped(most[4]), most[5]),
    "window + 1": lambda *most: (*most[:4], with_rows(most[4], windows=most[4].windows[1] + 1), most[5]),
    "sinks + 1": lambda *most: (*most[:4], dataclasses.replace(most[4], sinks=most[4].sinks + 1), most[5]),
    "positions - 1": lambda *most: (*most[:5], dataclasses.replace(most[5], positions=most[5].positions - 1)),
    "starts + 1": lambda *most: (*most[:5], dataclasses.replace(most[5], starts=most[5].starts + 1)),
}


def _swapped(rows):
    table = rows.page_table[1]
    return with_rows(rows, page_table=table.at[:, 3, 3].set(table[:, 3, 4]).at[:, 3, 4].set(table[:, 3, 3]))


@pytest.mark.parametrize("name", [*MUTATIONS, "band + 1", "no sink query", "scale", "soft cap"])
def test_planted_errors_are_noticed(name):
    mass = Mass(QUERIES["mixed"], window=19, sinks=11, has_sink_query=True, ring=4)
    expected = mass.reference(band=3)
    options: dict[str, Any] = {"band + 1": dict(band=4), "no sink query": dict(sink_query=None)}.get(name, {})
    options |= {"scale": dict(scale=0.5), "soft cap": dict(soft_cap=None)}.get(name, {})
    arguments = MUTATIONS.get(name, lambda *same: same)(*mass.arguments)
    assert_close(mass.xla(band=3), expected)
    got = mass.xla(*arguments, **dict(band=3) | options)
    assert any(not np.allclose(of, wanted, atol=1e-2) for of, wanted in zip(got, expected, strict=True))
