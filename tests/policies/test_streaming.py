"""StreamingLLM against dense attention over what is kept, numbered 0 to n - 1, in float64, for three windows."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import DECODE, PREFILL, SPEC, Twin, assert_same, fork, ids, leaves, release, share, table, truncate
from helpers.oracle import dense_attention, rotate

from kvjax.cache import Status, clear_status
from kvjax.errors import InputError
from kvjax.invariants import check
from kvjax.policies import Streaming
from kvjax.rotary import rotary
from kvjax.spec import pages_for

SINKS, WINDOW, FAR = 3, 13, 2 * 10**9
STREAM = dataclasses.replace(
    SPEC, windows=None, num_pages=80, pages_per_seq=8, policy=Streaming(window=WINDOW, sinks=SINKS)
)
SIZE, ROTARY = STREAM.page_size, rotary(STREAM.head_dim, 10_000.0)


@dataclasses.dataclass
class StreamTwin(Twin):
    """A stream: every query attends to the sinks and the window as if there were nothing between them."""

    def expected_of_sequence(self, sequence: int, q):
        policy = self.spec.policy
        assert policy.window_size is not None
        k, v = (np.stack(parts, axis=1) for parts in zip(*self.tokens[sequence], strict=True))
        out, before = np.zeros(q.shape), k.shape[1] - q.shape[1]
        for i in range(q.shape[1]):
            token = np.arange(before + i + 1)
            kept = token[(token < policy.num_sinks) | (token > before + i - policy.window_size)]
            place, last = np.arange(kept.size), np.array([kept.size - 1])
            phases = np.asarray(self.rotary.phases)[0]
            query, keys = rotate(q[:, i : i + 1], last, phases), rotate(k[:, kept], place, phases)
            keys, values = self.as_read(keys, v[:, kept])
            for layer in range(k.shape[0]):
                where = (query[layer], keys[layer], values[layer], last, place)
                out[layer, i : i + 1] = dense_attention(*where, soft_cap=self.soft_cap)
        return out


def twin_of(spec=STREAM, **options) -> StreamTwin:
    return StreamTwin(spec, rotary=ROTARY, tolerance=1e-4, **options)


def assert_bounded(twin: Twin) -> None:
    policy = twin.spec.policy
    assert policy.window_size is not None
    most = pages_for(policy.num_sinks, SIZE) + pages_for(policy.window_size, SIZE) + 1
    assert ((table(twin.cache) > 0).sum(-1) <= most).all()
    check(twin.cache, held={})


def feed(twin: Twin, *lengths: int) -> None:
    """Give two sequences the same tokens, a third others, and a fourth none."""
    for n in lengths:
        q, k, v = (np.concatenate([of[:, :n], of], 1) for of in twin.draw_tokens(n + n // 2))
        assert bool(twin.step([n, n, n // 2, 0], **(DECODE if n == 1 else PREFILL), qkv=(q, k, v)).ok)
        # In the same step, so that nothing but their positions differs.
        np.testing.assert_allclose(twin.out[:, :n], twin.out[:, n : 2 * n], atol=1e-6)
        assert_bounded(twin)


def test_a_stream_is_dense_attention_over_what_it_keeps_from_any_position():
    twin = twin_of(starts=(FAR, 0, 600, 0))
    feed(twin, 5, 7, 1, 9, 3, 1, 1, 8)
    held = table(twin.cache)[:, :, 0] > 0
    assert held[..., 0].all() and held.sum() < 2 * pages_for(35, SIZE), "sinks are pinned, and something has gone"
    used = []
    for _ in range(3 * WINDOW):
        feed(twin, 1)
        used.append(int(twin.cache.pages_used))
    assert len(twin.tokens[0]) > 3 * (WINDOW + SINKS) and max(used[-2 * SIZE :]) == max(used[: 2 * SIZE])
    feed(twin, 9, 2, 9)


@pytest.fixture
def stream() -> StreamTwin:
    """Two streams of 43 tokens and a shorter one."""
    twin = twin_of()
    feed(twin, 9, 9, 9, 9, 5, 1, 1)
    return twin


@pytest.mark.slow
def test_forks_share_the_sinks_and_go_their_own_ways(stream):
    used = int(stream.cache.pages_used)
    stream.cache, ok = fork(stream.cache, ids([0]), ids([3]))
    assert bool(ok)
    stream.tokens[3] = list(stream.tokens[0])
    # Open pages alone are copied; of the others the sinks' are among those with two references.
    assert int(stream.cache.pages_used) == used + STREAM.num_layers
    pinned = table(stream.cache)[:, :, 3, 0]
    assert (np.asarray(stream.cache.allocator.refcounts)[pinned] == 2).all()
    for _ in range(2 * WINDOW):
        assert bool(stream.step([1, 0, 1, 1], **DECODE).ok)
        assert_bounded(stream)
    stream.cache = release(stream.cache, ids([0]))
    stream.tokens[0] = []
    stream.step([9, 0, 0, 5], **PREFILL)
    assert_bounded(stream)


@pytest.mark.slow
def test_prefixes_of_streams_are_shared_with_their_sinks(stream):
    page, pinned = np.arange(5), STREAM.pinned
    entry = np.where(page < pinned, page, pinned + (page - pinned) % np.array(STREAM.rings)[:, None, None])
    rows, first = table(stream.cache)[:, :, 0], np.asarray(stream.cache.first)[:, :, 0, None]
    page_ids = np.where((page >= first) | (page < pinned), np.take_along_axis(rows, entry, axis=2), 0)
    assert (page_ids[0, 0] > 0).tolist() == [True, False, False, True, True]
    no_sinks = page_ids.copy()
    no_sinks[..., 0] = 0
    before = leaves(stream.cache)
    for wrong in (no_sinks, page_ids[..., :3]):
        refused, ok = share(stream.cache, jnp.int32(3), ids(wrong), jnp.int32(0))
        assert not bool(ok)
        assert_same(refused, before, but=())
    stream.cache, ok = share(stream.cache, jnp.int32(3), ids(page_ids), jnp.int32(0))
    assert bool(ok)
    stream.tokens[3] = list(stream.tokens[0][:40])
    stream.step([1, 0, 1, 7], **PREFILL)
    assert_bounded(stream)


@pytest.mark.slow
def test_streams_take_back_what_the_spec_says(stream):
    before = leaves(stream.cache)
    refused = truncate(stream.cache, ids([0]), ids([20]))
    assert int(refused.status) == Status.TRUNCATE_REFUSED
    assert_same(refused, before)
    stream.cache = truncate(clear_status(refused), ids([0]), ids([43 - STREAM.rollback]))
    assert int(stream.cache.status) == 0
    stream.tokens[0] = stream.tokens[0][: 43 - STREAM.rollback]
    for n in (1, 6, 1):
        stream.step([n, n, 0, 0], **(DECODE if n == 1 else PREFILL))
        assert_bounded(stream)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        (dict(policy=Streaming(window=WINDOW, sinks=SIZE + 1)), dict(soft_cap=2.0)),
        (dict(policy=Streaming(window=1, sinks=1), scrub_on_free=True), {}),
    ],
    ids=str,
)
def test_variants(changes, options):
    twin = twin_of(dataclasses.replace(STREAM, **changes), **options)
    feed(twin, 9, 9, 4, 9, 1, 9, *[1] * 12)


@pytest.mark.parametrize(
    ("how", "words"),
    [(dict(window=0), "window is 0"), (dict(window=4, sinks=0), "sinks is 0"), (dict(window="4"), "window is '4'")],
)
def test_bad_values_are_refused(as_a_user, how, words):
    with pytest.raises(InputError, match=words):
        Streaming(**how)


def test_models_with_windows_and_tables_that_are_too_small_are_refused():
    with pytest.raises(InputError, match="keeps the first tokens in every layer, and the model has windows of its own"):
        dataclasses.replace(STREAM, windows=(None, 11))
    with pytest.raises(InputError, match="pages_per_seq 6 is too small for layer 0: window 13, max_query_length 20"):
        dataclasses.replace(STREAM, pages_per_seq=6)


def test_layers_in_another_format_stream_too():
    spec = dataclasses.replace(STREAM, num_layers=2, skip_layers=[0])
    assert [pool.spec.policy for pool in spec.pools] == [STREAM.policy] * 2
    assert {pool.spec.layer_windows for pool in spec.pools} == {(STREAM.policy.window_size,)}
