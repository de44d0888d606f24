"""Quest: bounds of pages, what is read by them, and outputs against the definition in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import DECODE, PREFILL, SPEC, Twin, fork, ids, release, share, truncate
from helpers.oracle import dense_attention
from helpers.programs import faults, lowered

from kvjax.cache import init_cache
from kvjax.errors import InputError
from kvjax.invariants import check
from kvjax.kernels.formats import decode, rotate
from kvjax.policies import Quest, parse_policy
from kvjax.sizes import cache_bytes, page_bytes
from kvjax.spec import CacheSpec

QUEST = Quest(top_pages=2, dense_layers=1)
LAYERS = dataclasses.replace(
    SPEC, num_layers=3, windows=(None, None, 11), num_pages=64, policy=QUEST, rollback=0, scrub_on_free=True
)
SIZE = SPEC.page_size


def down(x):
    """Float32 numbers rounded to bfloat16 towards minus infinity, by their bits."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    cut = bits & np.uint32(0xFFFF0000)
    below = np.where((bits != cut) & (bits >> 31 == 1), cut + np.uint32(0x10000), cut)
    return below.astype(np.uint32).view(np.float32)


def chosen_pages(q, k, top_pages):
    """Pages by their bounds for queries [heads, head_dim] that read keys [tokens, head_dim], and the newest page."""
    bounds = []
    pages = range(0, k.shape[0], SIZE)
    for begin in pages:
        of_page = k[begin : begin + SIZE]
        least, most = down(of_page.min(0)), -down(-of_page.max(0))
        bounds.append(max(np.maximum(of_head * least, of_head * most).sum() for of_head in q))
    others = sorted(range(len(pages) - 1), key=lambda page: -bounds[page])
    return sorted([*others[:top_pages], len(pages) - 1])


@dataclasses.dataclass
class QuestTwin(Twin):
    """Decode steps of layers behind the dense ones, and without a window, read chosen pages alone."""

    spec: CacheSpec = LAYERS
    is_decode: bool = False

    def step(self, lengths, *, max_query_length=20, **options):
        self.is_decode = max_query_length == 1
        return super().step(lengths, max_query_length=max_query_length, **options)

    def expected_of_sequence(self, sequence, q):
        out = super().expected_of_sequence(sequence, q)
        if not self.is_decode:
            return out
        k, v = (np.stack(parts, axis=1) for parts in zip(*self.tokens[sequence], strict=True))
        (k, v), position, policy = self.as_read(k, v), np.array([k.shape[1] - 1]), self.spec.policy
        assert isinstance(policy, Quest)
        basis = rotate if self.spec.key_form.is_rotated else lambda x: x
        for layer, window in enumerate(self.spec.layer_windows):
            if layer < policy.dense_layers or window is not None:
                continue
            for head in range(self.spec.num_kv_heads):
                mine = slice(2 * head, 2 * head + 2)
                of_queries, of_keys = (
                    np.asarray(basis(jnp.asarray(x))) for x in (q[layer, 0, mine], k[layer, :, head])
                )
                pages = chosen_pages(of_queries, of_keys, policy.top_pages)
                read = np.concatenate([np.arange(k.shape[1])[page * SIZE : (page + 1) * SIZE] for page in pages])
                keys, values = (of[layer, read, head : head + 1] for of in (k, v))
                out[layer, :, mine] = dense_attention(q[layer, :, mine], keys, values, position, read)
        return out

    def assert_bounds(self):
        """The bounds of every held page are those of its keys, or wider; none is narrower than its keys."""
        cache = self.cache
        check(cache)
        keys = np.asarray(decode(cache.keys, cache.key_scales, self.spec.key_form), np.float32)
        used = (np.asarray(cache.positions) >= 0) & (np.asarray(cache.allocator.refcounts) > 0)[:, None]
        least, greatest = (np.asarray(cache.policy_state["pages"][name], np.float32) for name in ("least", "greatest"))
        inside = (least[:, :, None] <= keys) & (keys <= greatest[:, :, None])
        assert used.any() and inside.swapaxes(1, 2)[used].all()
        free = ~used.any(-1)[1:]
        assert not least[1:][free].any() and not greatest[1:][free].any(), "what is free is scrubbed"
        q = self.draw(16, keys.shape[-1])
        bound = np.maximum(q[:, None, None] * least, q[:, None, None] * greatest).sum(-1)
        logits = np.einsum("qd,nhpd->qnhp", q, np.nan_to_num(keys))
        assert (bound[..., None] + 1e-4 >= logits)[:, used[:, None] & np.ones(keys.shape[:3], bool)].all()


def filled(**options):
    twin = QuestTwin(**options)
    twin.step([20, 3, 0, 0], **PREFILL)
    twin.step([20, 0, 4, 0], **PREFILL)
    return twin


@pytest.mark.parametrize(
    ("form", "static_layer"),
    [
        ("float32", False),
        pytest.param("bfloat16", True, marks=pytest.mark.slow),
        pytest.param("int8", False, marks=pytest.mark.slow),
        pytest.param("int4_hadamard", False, marks=pytest.mark.slow),
    ],
)
def test_decode_reads_the_pages_of_the_largest_bounds(form, static_layer):
    tolerance = 2e-2 if form == "bfloat16" else 2e-5
    twin = filled(spec=dataclasses.replace(LAYERS, format=form), static_layer=static_layer, tolerance=tolerance)
    for lengths in ([1, 1, 1, 0], [1, 1, 0, 0], *([[1, 1, 1, 0]] * 4)):
        twin.step(lengths, **DECODE)
        twin.assert_bounds()
    twin.is_decode = False
    dense = twin.expected_of_sequence(0, twin.draw_tokens(1)[0])
    assert not np.allclose(twin.out[1, 0], dense[1, 0], atol=0.1), "not all is read"


@pytest.mark.slow
def test_layers_of_another_pool_are_dense_by_their_number_in_the_model():
    """The second pool's first layer is the model's third."""
    spec = dataclasses.replace(LAYERS, windows=None, format="int8", skip_layers=(0, 2), skip_format="float32")
    twin = filled(spec=spec, static_layer=True)
    for _ in range(3):
        twin.step([1, 1, 1, 0], **DECODE)


def test_bounds_follow_pages_that_are_copied_shared_cut_and_used_anew():
    twin = filled()
    twin.cache, ok = fork(twin.cache, ids([0, 1]), ids([2, 3]))
    assert bool(ok)
    twin.tokens[2], twin.tokens[3] = list(twin.tokens[0]), list(twin.tokens[1])
    twin.step([1, 1, 1, 1], **DECODE)
    twin.cache = truncate(twin.cache, ids([0]), ids([35]))
    twin.truncated(0, 35)
    assert not int(twin.cache.status)
    twin.assert_bounds()
    twin.step([1, 0, 1, 0], **DECODE)
    twin.cache = release(twin.cache, ids([1, 2]))
    twin.tokens[1], twin.tokens[2] = [], []
    twin.assert_bounds()
    twin.step([0, 20, 4, 0], **PREFILL)
    twin.step([1, 1, 1, 0], **DECODE)
    twin.assert_bounds()


@pytest.mark.slow
def test_a_shared_prefix_brings_its_bounds():
    twin = QuestTwin(spec=dataclasses.replace(LAYERS, windows=None))
    twin.step([20, 0, 0, 0], **PREFILL)
    twin.step([12, 0, 0, 0], **PREFILL)
    twin.cache, ok = share(twin.cache, jnp.int32(1), twin.cache.page_table[:, :, 0, :4], jnp.int32(0))
    assert bool(ok)
    twin.tokens[1] = list(twin.tokens[0])
    for _ in range(3):
        twin.step([1, 1, 0, 0], **DECODE)
    twin.assert_bounds()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["while", "prefill"])
def test_the_pool_is_changed_in_place_where_layers_are_unrolled(name):
    program, spec = lowered(name, scan=False, policy=QUEST)
    assert not faults(program.compile(), spec)


def test_bounds_are_counted():
    more = dataclasses.replace(LAYERS, num_pages=LAYERS.num_pages + 1)
    full = dataclasses.replace(LAYERS, policy=SPEC.policy)
    assert cache_bytes(more) - cache_bytes(LAYERS) == page_bytes(LAYERS)
    assert page_bytes(LAYERS) - page_bytes(full) == 4 * LAYERS.head_dim * LAYERS.num_kv_heads
    assert init_cache(LAYERS).bytes == cache_bytes(LAYERS)


def test_mistakes_are_named():
    with pytest.raises(InputError, match="top_pages is 0"):
        Quest(top_pages=0)
    with pytest.raises(InputError, match="quest needs top_pages: give quest:top_pages="):
        parse_policy("quest")
    with pytest.raises(InputError, match="quest needs the keys of open pages.*use format int4_hadamard"):
        dataclasses.replace(LAYERS, format="int4", page_size=64)
    assert parse_policy("quest:top_pages=9,dense_layers=0") == Quest(top_pages=9, dense_layers=0)
