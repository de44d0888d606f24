"""Telling a policy what it wants to know of a layer's step: new keys and values, and the attention of its queries."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax import hooks
from kvjax.cache import Cache, entry_of
from kvjax.kernels.attention_mass import xla
from kvjax.kernels.formats import decode
from kvjax.kernels.paged_attention import Attention, Queries, Rows
from kvjax.kernels.write_pages import write_pages
from kvjax.placement import Writes, end_slot
from kvjax.policy import ALL, Held, Seen
from kvjax.spec import CacheSpec
from kvjax.step import Step


def note_written(cache: Cache, step: Step, layer, k: Array, v: Array) -> Cache:
    """Store what the policy keeps of new tokens; keys come rotated, [tokens, kv_heads, head_dim]."""
    spec, writes = cache.spec, step.writes
    assert isinstance(writes, Writes)
    of_groups = lambda x: x.reshape(x.shape[0], spec.groups, spec.heads_per_group, spec.head_dim)  # noqa: E731
    slots = dict(cache.policy_state["slots"])
    noted = hooks.written(spec.policy, of_groups(k), of_groups(v), step.token_kinds, slots)
    for name, of_tokens in noted.items():
        new = of_tokens.astype(slots[name].dtype).T[:, :, None, None]
        slots[name] = write_pages(slots[name][:, None, :, None], new, *writes.of_layer(layer))[:, 0, :, 0]
    return _note_pages(_with(cache, slots=slots), writes, layer)


def _note_pages(cache: Cache, writes: Writes, layer) -> Cache:
    """Store what the policy keeps of the pages that the step has written to."""
    kept = cache.policy_state["pages"]
    if not kept:
        return cache
    ids, _, _, ends, _ = writes.of_layer(layer)
    take = lambda pool: pool.at[ids].get(mode="promise_in_bounds")  # noqa: E731
    used = jnp.arange(cache.spec.page_size, dtype=jnp.int32)[None, None] < ends[..., None]
    keys = decode(take(cache.keys), tuple(map(take, cache.key_scales)), cache.spec.key_form)
    new = cache.spec.policy.summarize(keys.astype(jnp.float32), used)
    put = lambda pool, of: pool.at[ids].set(of.astype(pool.dtype), mode="promise_in_bounds")  # noqa: E731
    pages = {name: put(pool, new[name]) for name, pool in kept.items()}
    return _before_writing(_with(cache, pages=pages))


def _before_writing(cache: Cache) -> Cache:
    """Have done with keys that were read for the policy: else XLA copies all, to write the next layer's before that."""
    noted, *keys = lax.optimization_barrier((cache.policy_state, cache.keys, cache.key_scales))
    return dataclasses.replace(cache, policy_state=noted, keys=keys[0], key_scales=keys[1])


def reads_some(spec: CacheSpec, step: Step, layer) -> bool | Bool[Array, ""]:
    """Whether a step reads only the pages of a layer that the policy chooses; traced if the layer is."""
    policy = spec.policy
    if policy.pages_read is None or not step.is_decode or policy.pages_read >= spec.pages_per_seq:
        return False
    pairs = enumerate(spec.layer_windows)
    some = np.array([number >= policy.reads_all_before and window is None for number, window in pairs])
    if some.all() or not some.any():
        return bool(some.all())
    return jnp.asarray(some)[layer] if isinstance(layer, Array) else bool(some[layer])


def pages_to_read(
    cache: Cache, step: Step, layer, q: Float[Array, "tokens heads head_dim"]
) -> Int32[Array, "kv_heads seqs n"]:
    """Return the pages that the policy wants a decode step to read, the newest first, 0 for none.

    Args:
        cache: the cache, with the step's tokens.
        step, layer: of the attention.
        q: its queries, as the backend takes them.
    """
    spec, most = cache.spec, cache.spec.policy.pages_read
    assert most is not None, "the policy chooses"
    ids = cache.page_table[layer]
    kept = jax.tree.map(lambda of: of.at[ids].get(mode="promise_in_bounds"), cache.policy_state["pages"])
    of_seqs = q.at[step.starts].get(mode="clip").astype(jnp.float32)
    scores = spec.policy.score_pages(of_seqs.reshape(spec.max_seqs, spec.num_kv_heads, -1, spec.head_dim), kept)
    newest = entry_of(spec, jnp.maximum(end_slot(cache, step.lengths) - 1, 0) // spec.page_size)[layer]
    is_newest = jnp.arange(spec.pages_per_seq, dtype=jnp.int32)[None, None] == newest[..., None]
    of_heads = lambda of_groups: jnp.repeat(of_groups, spec.heads_per_group, axis=0)  # noqa: E731
    ids, is_newest = of_heads(ids), of_heads(is_newest)
    scores = jnp.where(ids == 0, -jnp.inf, jnp.where(is_newest, jnp.inf, scores))
    best, entry = lax.top_k(scores, most)
    chosen = jnp.take_along_axis(ids, entry, axis=-1, mode="promise_in_bounds")
    return jnp.where(best == -jnp.inf, 0, chosen)


def decode_logits(cache: Cache, step: Step) -> int:
    """Of how many last queries the attention of a step must return the logits, for `note_attention`."""
    return cache.spec.policy.decode_queries if step.is_decode else 0


def note_attention(
    cache: Cache,
    step: Step,
    layer,
    q: Float[Array, "tokens heads head_dim"],
    attention: Attention,
    where: tuple[Rows, Queries],
    options: dict[str, Any],
    *,
    in_kernel: bool,
) -> Cache:
    """Let the policy observe the attention of a layer's last queries.

    Args:
        cache: the cache, with the step's tokens.
        step, layer: of the attention.
        q: its queries, as the backend took them.
        attention: what the backend returned.
        where: rows and queries that the backend took.
        options: static ones of the attention.
        in_kernel: whether the kernel for Hopper sums the attention of prompts, or XLA.
    """
    policy = cache.spec.policy
    if step.is_decode:
        return _noted(cache, step, layer, _of_decode(cache, step, attention)) if policy.decode_queries else cache
    if not policy.prompt_queries:
        return cache

    def observe(cache: Cache) -> Cache:
        return _noted(cache, step, layer, _of_prompt(cache, step, q, attention, where, options, in_kernel))

    if policy.every_chunk or policy.in_chunks:
        return observe(cache)
    return lax.cond(step.ends.any(), observe, lambda cache: cache, cache)


def _with(cache: Cache, **kept) -> Cache:
    return dataclasses.replace(cache, policy_state=cache.policy_state | kept)


def _noted(cache: Cache, step: Step, layer, seen: dict[str, Any]) -> Cache:
    """Give the policy one layer's tokens and attention, and store what it makes of them."""
    spec, state = cache.spec, cache.policy_state
    entries = spec.decode_entries if step.is_decode else spec.pages_per_seq
    observed = step.lengths > 0
    if not (step.is_decode or spec.policy.every_chunk or spec.policy.in_chunks):
        observed &= step.ends  # of others the policy waits for the prompt's end
    ids = jnp.where(observed[None, :, None], cache.page_table[layer, :, :, :entries], 0)
    take = lambda of_slots: of_slots.at[ids].get(mode="promise_in_bounds").reshape(*ids.shape[:-1], -1)  # noqa: E731
    positions = take(cache.positions)
    slots, rows = jax.tree.map(take, state["slots"]), {name: of[layer] for name, of in state["rows"].items()}
    after, start = (cache.next_position + step.lengths)[None], cache.start_position[None]
    first, of_row = layer * (spec.groups * spec.max_seqs), (spec.groups, spec.max_seqs)
    number = first + jnp.arange(spec.groups * spec.max_seqs, dtype=jnp.int32).reshape(of_row)
    held = Held(positions, slots, rows, number, after, start, spec.page_size)
    is_new = positions >= cache.next_position[None, :, None]
    held = hooks.observed(spec.policy, held, Seen(**seen, lengths=step.lengths, is_new=is_new, ends=step.ends))
    put = lambda pool, of: pool.at[ids].set(of.reshape(*ids.shape, -1).astype(pool.dtype), mode="promise_in_bounds")  # noqa: E731
    slots = {name: put(pool, held.slots[name]) for name, pool in state["slots"].items()}
    rows = {name: of.at[layer].set(held.rows[name].astype(of.dtype)) for name, of in state["rows"].items()}
    return _before_writing(_with(cache, slots=slots, rows=rows))


def _of_decode(cache: Cache, step: Step, attention: Attention) -> dict[str, Any]:
    """The attention of every sequence's only query."""
    assert attention.slot_logits is not None
    lse = attention.lse.at[step.starts].get(mode="clip")
    # Sequences without a query have logits of -inf, and the lse of somebody else.
    mass = jnp.exp(attention.slot_logits[:, -1] - lse[..., None])
    mass = mass.reshape(mass.shape[0], cache.spec.groups, -1, mass.shape[-1]).mean(2).swapaxes(0, 1)
    return dict(mass=mass, entropy=None, queries=step.lengths, banded=None)


def _of_prompt(cache: Cache, step: Step, q, attention: Attention, where, options, in_kernel: bool) -> dict[str, Any]:
    """The attention of the last queries of every sequence, summed in a second pass over the keys."""
    policy, (rows, queries) = cache.spec.policy, where
    last = queries if policy.prompt_queries == ALL else queries.last(policy.prompt_queries)
    where = (cache.positions, rows, last)
    groups, heads = cache.spec.groups, q.shape[1] // cache.spec.groups
    static: dict[str, Any] = {name: options[name] for name in ("scale", "soft_cap")}
    static["max_query_length"] = min(step.max_query_length, policy.prompt_queries)

    def sums(band=None):
        mass, entropy = _mass(cache, q, attention.lse, where, static, band, in_kernel)
        mass = mass.reshape(groups, -1, *mass.shape[1:]).sum(1) / heads
        return mass, entropy.reshape(groups, -1, entropy.shape[-1]).mean(1)

    mass, entropy = sums()
    return dict(mass=mass, entropy=entropy, queries=last.lengths, banded=lambda band: sums(band)[0])


def _mass(cache: Cache, q, lse, where, static: dict[str, Any], band, in_kernel: bool):
    """Column sums and entropy, by the kernel for Hopper if that can serve the call."""
    if in_kernel and band is None and not cache.spec.key_form.is_quantized:
        from kvjax.kernels.attention_mass import hopper

        with contextlib.suppress(NotImplementedError):
            return hopper.attention_mass(q, lse, cache.keys, *where, **static)
    return xla.attention_mass(q, lse, cache.stored[0], *where, **static, band=band)
