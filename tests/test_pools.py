"""Several pools in one cache: layers in another format, everything in step, and nothing done by halves."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import (
    DECODE,
    PREFILL,
    SIZE,
    SPEC,
    Twin,
    assert_same,
    drop,
    fork,
    ids,
    init,
    leaves,
    release,
    retain,
    share,
    truncate,
)

import kvjax
from kvjax import sizes
from kvjax.cache import PooledCache, Status, clear_status
from kvjax.invariants import check
from kvjax.policies import H2O
from kvjax.policy import Policy
from kvjax.spec import CacheSpec

LAYERS = 4
FOUR = dataclasses.replace(SPEC, num_layers=LAYERS, windows=(None, 11, None, None), num_pages=2 * SPEC.num_pages)
INT4 = dataclasses.replace(FOUR, format="int4", skip_layers=(0, -2), skip_format="float32")


def of_pools(cache) -> tuple:
    assert isinstance(cache, PooledCache)
    return cache.of_pools


def twin_of(*steps, spec=INT4, **options) -> Twin:
    twin = Twin(spec, static_layer=True, **options)
    for lengths in steps:
        assert bool(twin.step(lengths, **(DECODE if max(lengths) == 1 else PREFILL)).ok)
    return twin


def test_layers_have_the_pools_that_the_spec_says():
    first, second = INT4.pools
    assert (first.layers, second.layers) == ((1, 3), (0, 2))
    assert (first.spec.key_form.name, second.spec.key_form.name) == ("int4_per_channel", "float32")
    assert first.spec.windows == (11, None) and second.spec.windows == (None, None)
    assert first.spec.num_pages + second.spec.num_pages == INT4.num_pages
    assert [INT4.place_of(layer) for layer in range(LAYERS)] == [(1, 0), (0, 0), (1, 1), (0, 1)]
    assert len(FOUR.pools) == 1 and FOUR.pools[0].spec == FOUR


def test_pages_go_to_the_pools_by_what_a_sequence_needs():
    # Three full layers and one of a ring against one full layer.
    spec = dataclasses.replace(FOUR, skip_layers=[0], skip_format="float32")
    full, ring = spec.rings[0], spec.rings[1]
    share = round((spec.num_pages - 2) * full / (3 * full + ring)) + 1
    assert spec.pools[1].spec.num_pages == share
    assert dataclasses.replace(spec, skip_pages=9).pools[1].spec.num_pages == 9


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(skip_layers=3), "skip_layers is 3: give a list"),
        (dict(skip_layers=np.array(0)), "skip_layers is .*: give a list"),
        (dict(skip_layers="01"), "skip_layers is '01': give a list"),
        (dict(skip_layers=[4]), "a layer of skip_layers is 4: it must be a whole number from -4 to 3"),
        (dict(skip_layers=range(4)), "skip_layers names all 4 layers: give format='bfloat16'"),
        (dict(skip_layers=[0], skip_format="int4_per_channel"), "skip_format 'int4_per_channel' is not a page format"),
        (dict(skip_pages=8), "skip_pages is 8 and there are no skip_layers"),
        (dict(skip_layers=[0], skip_pages=1), "skip_pages is 1: it must be a whole number from 2 to"),
        (dict(skip_layers=[0], num_pages=5), "num_pages 5 cannot hold one sequence.*use at least 6"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("as_a_user")
def test_pools_that_cannot_be_are_refused(changes, words):
    with pytest.raises(kvjax.InputError, match=words):
        dataclasses.replace(FOUR, **changes)


def test_every_layer_attends_in_its_format():
    twin = twin_of([20, 4, 0, 0], [1, 1, 1, 0], [1, 9, 0, 7], [1, 1, 1, 1], [3, 0, 0, 20])
    int4, plain = of_pools(twin.cache)
    assert (int4.keys.dtype, plain.keys.dtype) == (jnp.uint8, jnp.float32)
    assert (int4.open_keys is None, plain.open_keys is None) == (False, True)
    check(twin.cache, held=[{}, {}])


def test_bytes_are_those_of_the_arrays():
    cache = init(INT4)
    assert cache.bytes == sizes.cache_bytes(INT4) == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    of_tokens = sum(sizes.token_bytes(pool.spec) for pool in INT4.pools)
    assert sizes.token_bytes(INT4) == of_tokens
    with pytest.raises(kvjax.InputError, match="several pools"):
        sizes.page_bytes(INT4)


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_pool_whose_layers_all_have_windows_has_nothing_to_drop(skipped):
    policy = H2O(budget=16, heads="mean")
    spec = dataclasses.replace(
        FOUR, num_layers=2, windows=(None, 11), format="int8", skip_layers=(skipped,), rollback=0, policy=policy
    )
    assert [pool.spec.policy for pool in spec.pools] == ([Policy(), policy] if skipped == 0 else [policy, Policy()])
    twin = Twin(spec, static_layer=True)
    for lengths in ([20, 3, 0, 0], [20, 0, 0, 0], [1, 1, 0, 0]):
        _, report = twin.run(lengths, twin.draw_tokens(sum(lengths)), **(DECODE if max(lengths) == 1 else PREFILL))
        assert bool(report.ok)
    check(twin.cache)
    held = [(np.asarray(cache.page_table)[:, :, 0] > 0).sum() for cache in of_pools(twin.cache)]
    assert held[skipped == 0] == 3, "16 tokens and one more, of 41"


def test_a_traced_layer_is_refused():
    with pytest.raises(kvjax.InputError, match="layer is traced, and skip_layers .* want numbers"):
        Twin(INT4).step([3, 0, 0, 0], **PREFILL)


def test_fork_truncate_and_release_act_on_all_pools():
    twin = twin_of([20, 4, 0, 0])
    twin.cache, ok = fork(twin.cache, ids([0]), ids([2]))
    assert bool(ok)
    twin.tokens[2] = list(twin.tokens[0])
    twin.step([1, 1, 1, 0], **DECODE)
    twin.cache = truncate(twin.cache, ids([2, 1]), ids([19, 2]))
    twin.truncated(2, 19)
    twin.truncated(1, 2)
    twin.step([0, 7, 6, 0], **PREFILL)
    twin.cache = release(twin.cache, ids([0]))
    twin.tokens[0] = []
    twin.step([9, 1, 1, 0], **PREFILL)
    check(twin.cache, held=[{}, {}])
    assert np.asarray(twin.cache.lengths).tolist() == [len(tokens) for tokens in twin.tokens]


@pytest.mark.parametrize("skip_pages", [8, INT4.num_pages - 8])
def test_a_pool_that_runs_out_leaves_all_as_they_were(skip_pages):
    # One of the pools has 7 pages for its two layers: two each, and one more.
    twin = twin_of([16, 0, 0, 0], spec=dataclasses.replace(INT4, skip_pages=skip_pages))
    before = leaves(twin.cache)
    report = twin.step([20, 4, 0, 0], **PREFILL)
    assert not bool(report.ok) and int(report.status) == Status.OUT_OF_PAGES == int(twin.cache.status)
    assert_same(twin.cache, before)
    twin.cache = clear_status(twin.cache)
    twin.step([0, 1, 0, 0], **DECODE)
    before = leaves(twin.cache)
    twin.cache, ok = fork(twin.cache, ids([1]), ids([3]))
    assert not bool(ok)
    assert_same(twin.cache, before, but=())
    check(twin.cache, held=[{}, {}])
    twin.step([0, 1, 0, 0], **DECODE)


def test_pages_of_all_pools_are_shared_and_held():
    spec = dataclasses.replace(INT4, windows=None)
    twin = Twin(spec, static_layer=True)
    report = twin.step([2 * SIZE, 0, 0, 0], **PREFILL, index=[0])
    full = [np.asarray(of)[:, :, 0, :2] for of in report.full_pages]
    held = [{int(page): 1 for page in of.reshape(-1)} for of in full]
    check(twin.cache, held=held)
    assert report.num_free.tolist() == [int(of.allocator.num_free) for of in of_pools(twin.cache)]
    twin.cache, ok = share(twin.cache, jnp.int32(2), [ids(of) for of in full], jnp.int32(0))
    assert bool(ok)
    twin.tokens[2] = list(twin.tokens[0])
    twin.step([1, 0, 1, 0], **DECODE)
    every = [ids(of.reshape(-1)) for of in full]
    twin.cache = drop(retain(twin.cache, every), every)
    check(twin.cache, held=held)
    before = leaves(twin.cache)
    # One of the pools has no such page.
    wrong = [ids(full[0]), ids(np.full_like(full[1], 3))]
    cache, ok = share(twin.cache, jnp.int32(3), wrong, jnp.int32(0))
    assert not bool(ok)
    assert_same(cache, before, but=())


@pytest.mark.usefixtures("as_a_user")
def test_lists_for_the_pools_are_checked():
    cache = init(INT4)
    with pytest.raises(kvjax.InputError, match=r"ids is \[1\]: give a list of 2, one for each pool"):
        kvjax.retain(cache, [1])
    mistakes: list[Any] = [{}, 5, [1, 2], [{}]]
    for held in mistakes:
        with pytest.raises(kvjax.InputError, match="held is .*: give a list of 2"):
            check(cache, held=held)
    with pytest.raises(kvjax.InputError, match=r"held is \[{}\]: give references by page id"):
        check(init(FOUR), held=[{}])


@pytest.mark.usefixtures("as_a_user")
def test_steps_of_another_kind_of_cache_are_refused():
    several, one = init(INT4), init(FOUR)
    shape = dict(num_tokens=1, max_query_length=1)
    x = jnp.zeros((1, INT4.num_kv_heads, INT4.head_dim))
    for cache, other, words in ((several, one, "this cache has several"), (one, several, "this cache has one")):
        step = kvjax.begin_step(other, [1, 0, 0, 0], **shape)[1]
        with pytest.raises(kvjax.InputError, match=words):
            kvjax.attend(cache, step, 0, x, x, x, rotary=None)


def test_pools_that_disagree_are_noticed():
    twin = twin_of([3, 0, 0, 0])
    first, second = of_pools(twin.cache)
    with pytest.raises(kvjax.CacheError, match="all pools have the same next_positions"):
        check(twin.cache.with_pools([first, kvjax.release(second, [0])]))


def test_a_spec_of_pools_is_a_key():
    again = CacheSpec(**{field.name: getattr(INT4, field.name) for field in dataclasses.fields(INT4)})
    assert again == INT4 and hash(again) == hash(INT4)
