"""Drives a cache in tests: compiled steps, a plain twin of what the cache holds, and poison for unused slots."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers.oracle import dense_attention, rotate

from kvjax import sequences, sharing
from kvjax.attention import attend
from kvjax.cache import Cache, PooledCache, init_cache
from kvjax.kernels.formats import Format, decode, encode
from kvjax.kernels.formats import rotate as hadamard
from kvjax.spec import CacheSpec
from kvjax.step import begin_step, end_step

# Shared by most tests, so that its programs are compiled once: a full layer and a windowed one, a pool that runs out.
SPEC = CacheSpec(
    num_layers=2, num_kv_heads=2, head_dim=8, num_pages=24, max_seqs=4, pages_per_seq=6, max_query_length=20,
    page_size=8, format="float32", windows=(None, 11), rollback=4, debug=True,
)  # fmt: skip
SIZE, WINDOW, ROLLBACK, HEADS = SPEC.page_size, 11, SPEC.rollback, 4
PREFILL: dict[str, Any] = dict(num_tokens=24, max_query_length=20)
DECODE: dict[str, Any] = dict(num_tokens=4, max_query_length=1)


def jit(function, **options):
    """jax.jit without LLVM's optimisations: compilation is the cost of these tests."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)


fork, truncate, release, share, retain, drop = map(
    jit,
    (
        sequences.fork, sequences.truncate, sequences.release, sharing.share, sharing.retain, sharing.drop,
    ),
)  # fmt: skip


def init(spec: CacheSpec = SPEC, **options) -> Cache:
    return init_cache(spec, **options)


def ints(*values) -> jax.Array:
    return jnp.asarray(np.array(values, np.int32))


def ids(values) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))


@functools.cache
def bookkeeping(num_tokens: int, max_query_length: int):
    """Compiled begin and end of a step without layers: (cache, lengths, index) -> (cache, step, report)."""

    def run(cache, lengths, index):
        cache, step = begin_step(cache, lengths, num_tokens=num_tokens, max_query_length=max_query_length, index=index)
        cache, report = end_step(cache, step)
        return cache, step, report

    return jit(run)


def advance(cache: Cache, lengths, *, index=None, num_tokens=24, max_query_length=20):
    """Run a step without layers; index names the sequences whose full pages are indexed."""
    indexed = np.zeros(cache.spec.max_seqs, bool)
    indexed[list(index or [])] = True
    return bookkeeping(num_tokens, max_query_length)(cache, ids(lengths), jnp.asarray(indexed))


@functools.cache
def program(num_tokens: int, max_query_length: int, static_layer: bool = False, **options):
    """Compiled step with attention: (cache, lengths, said, q, k, v, sinks) -> (cache, out [layers, ...], report).

    `said` is what else `begin_step` takes: index, prompt_ends.
    """

    def run(cache, lengths, said, q, k, v, sinks):
        cache, step = begin_step(cache, lengths, num_tokens=num_tokens, max_query_length=max_query_length, **said)

        def body(cache, of_layer):
            layer, q, k, v = of_layer
            out, cache = attend(cache, step, layer, q, k, v, sink_logits=sinks, **options)
            return cache, out

        if static_layer:
            outs = []
            for layer in range(cache.spec.num_layers):
                cache, out = body(cache, (layer, q[layer], k[layer], v[layer]))
                outs.append(out)
            out = jnp.stack(outs)
        else:
            layers = jnp.arange(cache.spec.num_layers, dtype=jnp.int32)
            cache, out = jax.lax.scan(body, cache, (layers, q, k, v))
        cache, report = end_step(cache, step)
        return cache, out, report

    return jit(run, donate_argnums=0)


def poison[C: (Cache, PooledCache)](cache: C) -> C:
    """Put NaN into every slot that holds no token, trash and free pages included, and lies into free positions."""
    if isinstance(cache, PooledCache):
        return cache.with_pools(map(_poison, cache.of_pools))
    return _poison(cache)


@jit
def _poison(cache: Cache) -> Cache:
    free = (cache.allocator.refcounts == 0).at[0].set(False)
    unused = _but_holes(cache, free[:, None] | (cache.positions < 0))[:, None]

    def spoil(pool, where=unused):
        # The bits of NaN in 8-bit floats, or large numbers.
        garbage = jnp.nan if jnp.issubdtype(pool.dtype, jnp.floating) else 127
        return jnp.where(
            where.reshape(*where.shape, *(1,) * (pool.ndim - where.ndim)), jnp.asarray(garbage, pool.dtype), pool
        )

    spoilt = cache.map_pool(spoil) if cache.open_keys is None else _poison_open(cache, spoil, unused)
    return dataclasses.replace(
        spoilt,
        positions=jnp.where(free[:, None], 0, cache.positions),
        page_span=jnp.where(free[:, None], 0, cache.page_span),
    )


def _but_holes(cache: Cache, unused):
    """Unused slots, but of rows with a slot that a policy has emptied those that the next step does not zero.

    These are that slot, where the step brings several tokens, and those behind the last token, where it brings one.
    """
    if cache.write_slot is None:
        return unused
    hole = cache.write_slot < cache.next_slot
    for slot in (cache.write_slot, cache.next_slot - 1):
        page = slot[..., None] // cache.spec.page_size
        ids = jnp.take_along_axis(cache.page_table, page, axis=-1, mode="clip")[..., 0]
        unused = unused.at[jnp.where(hole, ids, 0)].set(False)
    return unused.at[0].set(True)


def _poison_open(cache: Cache, spoil, unused) -> Cache:
    """As `poison`, with keys per channel: open pages have no codes of keys, open keys end with the last token."""
    assert cache.open_keys is not None
    slot, size = jnp.arange(cache.spec.page_size), cache.spec.page_size
    behind = slot[None, None, None] >= (cache.next_slot % size)[..., None]
    return dataclasses.replace(
        cache,
        keys=spoil(cache.keys, unused.any((1, 2))),
        key_scales=tuple(spoil(scale, unused.any((1, 2))) for scale in cache.key_scales),
        values=spoil(cache.values),
        value_scales=tuple(spoil(scale) for scale in cache.value_scales),
        open_keys=spoil(cache.open_keys.swapaxes(3, 4), behind).swapaxes(3, 4),
    )


def leaves(cache: Cache | PooledCache) -> dict[str, np.ndarray]:
    """All arrays of a cache by name, without the trash page; bfloat16 as float32, so that NaN equals NaN."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
        name, array = jax.tree_util.keystr(path), np.asarray(leaf)
        is_pool = re.search(r"\.(keys|values|key_scales|value_scales)\b|\['slots'\]", name)
        array = array.astype(np.float32) if array.dtype == jnp.bfloat16 else array
        named[name] = array[1:] if is_pool else array
    return named


def assert_same(
    cache: Cache | PooledCache, before: dict[str, np.ndarray], *, but: str | tuple[str, ...] = ".status"
) -> None:
    for name, leaf in leaves(cache).items():
        if not name.endswith(but):
            np.testing.assert_array_equal(leaf, before[name], err_msg=name)


def as_stored(x, form: Format) -> np.ndarray:
    """What is read back of vectors that were stored in a format, in the basis they came in."""
    values = decode(*encode(jnp.asarray(x, jnp.float32), form), form)
    return np.asarray(hadamard(values) if form.is_rotated else values)


@dataclasses.dataclass
class Twin:
    """What a cache holds, as plain lists of tokens, and the check of every step against float64."""

    spec: CacheSpec = SPEC
    heads: int = HEADS
    seed: int = 0
    rotary: Any = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: np.ndarray | None = None
    static_layer: bool = False
    implementation: str | None = None
    starts: tuple[int, ...] | None = None
    tolerance: float = 2e-5

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.tokens: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(self.spec.max_seqs)]
        self.cache = poison(init_cache(self.spec, start_positions=None if self.starts is None else ids(self.starts)))

    def draw(self, *shape):
        return self.rng.standard_normal(shape).astype(np.float32)

    def draw_tokens(self, count: int):
        """Queries, keys and values of new tokens: [layers, count, heads, head_dim] each."""
        spec = self.spec
        q = self.draw(spec.num_layers, count, self.heads, spec.head_dim)
        k, v = (self.draw(spec.num_layers, count, spec.num_kv_heads, spec.head_dim) for _ in range(2))
        return q, k, v

    def run(self, lengths, qkv, *, num_tokens, max_query_length, index=None, ends=None, kinds=None):
        """Run one compiled step over given tokens (padded with NaN), without judging it.

        `ends` is `prompt_ends`, `kinds` are `token_kinds`.
        """
        padding = ((0, 0), (0, num_tokens - qkv[0].shape[1]), (0, 0), (0, 0))
        padded = [jnp.asarray(np.pad(part, padding, constant_values=np.nan)) for part in qkv]
        options: dict[str, Any] = dict(rotary=self.rotary, scale=self.scale, soft_cap=self.soft_cap)
        options |= dict(implementation=self.implementation)
        indexed = np.zeros(self.spec.max_seqs, bool)
        indexed[list(index or [])] = True
        said = dict(index=jnp.asarray(indexed), prompt_ends=None if ends is None else jnp.asarray(np.array(ends, bool)))
        said |= dict() if kinds is None else dict(token_kinds=jnp.asarray(kinds))
        sinks = None if self.sinks is None else jnp.asarray(self.sinks)
        compiled = program(num_tokens, max_query_length, self.static_layer, **options)
        self.cache, out, report = compiled(self.cache, ids(lengths), said, *padded, sinks)
        return np.asarray(out), report

    def step(self, lengths, *, num_tokens=24, max_query_length=20, index=None, qkv=None):
        """Bring new tokens, compare the outputs with the oracle, and poison what is unused; returns the report."""
        q, k, v = self.draw_tokens(sum(lengths)) if qkv is None else qkv
        shape = dict(num_tokens=num_tokens, max_query_length=max_query_length)
        out, report = self.run(lengths, (q, k, v), **shape, index=index)
        if bool(report.ok):
            self.append(lengths, k, v)
            expected = self.expected(lengths, q)
            np.testing.assert_allclose(out[:, : sum(lengths)], expected, atol=self.tolerance, rtol=self.tolerance)
            assert (out[:, sum(lengths) :] == 0).all(), "padded tokens return zeros"
        else:
            assert (out == 0).all(), "a refused step returns zeros"
        self.out = out
        self.cache = poison(self.cache)
        return report

    def append(self, lengths, k, v) -> None:
        place = 0
        for sequence, length in enumerate(lengths):
            self.tokens[sequence] += [(k[:, i], v[:, i]) for i in range(place, place + length)]
            place += length

    def expected(self, lengths, q):
        """Outputs [layers, tokens, heads, head_dim] of the newest `lengths` tokens of every sequence."""
        out, place = np.zeros(q.shape), 0
        for sequence, length in enumerate(lengths):
            if length:
                of_sequence = q[:, place : place + length]
                out[:, place : place + length] = self.expected_of_sequence(sequence, of_sequence)
            place += length
        return out

    def as_read(self, k, v) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [layers, tokens, heads, head_dim] of a sequence, in the formats of all layers."""
        keys, values = np.array(k), np.array(v)
        for pool in self.spec.pools:
            layers = list(pool.layers)
            keys[layers] = self.keys_as_read(keys[layers], pool.spec.key_form)
            values[layers] = as_stored(values[layers], pool.spec.value_form)
        return keys, values

    def keys_as_read(self, k, form: Format) -> np.ndarray:
        """Keys of a sequence, of its full pages and the open one."""
        size = self.spec.page_size
        if not form.is_per_channel:
            return as_stored(k, form)
        k = np.asarray(jnp.asarray(k, jnp.bfloat16), np.float32)
        full = k.shape[1] // size * size
        by_page = k[:, :full].reshape(k.shape[0], -1, size, *k.shape[2:]).swapaxes(2, 3)
        read = as_stored(by_page, form).swapaxes(2, 3).reshape(k.shape[0], full, *k.shape[2:])
        return np.concatenate([read, k[:, full:]], axis=1)

    def truncated(self, sequence: int, length: int) -> None:
        """Forget tokens; of a page that was full and is open again, what its codes stood for is all that is left."""
        tokens, size = self.tokens[sequence], self.spec.page_size
        if self.spec.key_form.is_per_channel and tokens and length // size < len(tokens) // size:
            assert self.rotary is None, "tokens are kept as they came, and pages hold what was rotated"
            read = self.as_read(*(np.stack(of, axis=1) for of in zip(*tokens, strict=True)))[0]
            tokens = [(read[:, i], v) if i >= length // size * size else (k, v) for i, (k, v) in enumerate(tokens)]
        self.tokens[sequence] = tokens[:length]

    def expected_of_sequence(self, sequence: int, q):
        k, v = (np.stack(parts, axis=1) for parts in zip(*self.tokens[sequence], strict=True))
        positions = np.arange(k.shape[1]) + (0 if self.starts is None else self.starts[sequence])
        query_positions = positions[-q.shape[1] :]
        if self.rotary is not None:
            phases = np.asarray(self.rotary.phases)[0]
            q, k = rotate(q, query_positions, phases), rotate(k, positions, phases)
        k, v = self.as_read(k, v)
        options: dict[str, Any] = dict(scale=self.scale, soft_cap=self.soft_cap, sink_logits=self.sinks)
        return np.stack(
            [
                dense_attention(q[i], k[i], v[i], query_positions, positions, window=window, **options)
                for i, window in enumerate(self.spec.windows or ())
            ]
        )


def table(cache):
    """The page table on the host."""
    return np.asarray(cache.page_table)


def twin_of(*steps, spec=SPEC):
    """A twin that has taken prefill steps of these lengths."""
    twin = Twin(spec)
    for lengths in steps:
        assert bool(twin.step(lengths, **PREFILL).ok)
    return twin
