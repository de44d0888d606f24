"""Reading pages in XLA, shared by the decode and the prefill loop."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from kvjax.kernels.paged_attention.arguments import MASKED, Rows
from kvjax.kernels.pytree import pytree


@dataclasses.dataclass(frozen=True)
class Pool:
    """The pool and how one layer reads it; see `reference.paged_attention`."""

    keys: Float[Array, "pages heads_per_group page_size head_dim"]
    values: Float[Array, "pages heads_per_group page_size head_dim"]
    positions: Int32[Array, "pages page_size"]
    rows: Rows
    scale: float
    soft_cap: float | None
    sink_logits: Float[Array, " heads"] | None

    @property
    def page_size(self) -> int:
        return self.positions.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1] * self.rows.page_table.shape[1]

    @property
    def first_page(self) -> Int32[Array, "groups seqs"]:
        return self._of_layer(self.rows.first_page)

    @property
    def end_slot(self) -> Int32[Array, "groups seqs"]:
        return self._of_layer(self.rows.end_slot)

    @property
    def window(self) -> Int32[Array, ""]:
        return self._of_layer(self.rows.windows)

    def _of_layer(self, of_layers: Array) -> Array:
        return lax.dynamic_index_in_dim(of_layers, self.rows.layer, keepdims=False)

    def page_ids(self, sequence: Int32[Array, " n"], logical: Int32[Array, "groups n block"], live):
        """Ids of logical pages of sequences: int32 [n, groups, pages].

        Pages that are not `live` are replaced by the row's last one, whose values are finite: trash may hold NaN.
        """
        group = jnp.arange(logical.shape[0], dtype=jnp.int32)[:, None, None]
        last = (self.end_slot[:, sequence] - 1) // self.page_size
        entry = jnp.where(live, logical, last[..., None]) % self._of_layer(self.rows.rings)
        where = (self.rows.layer, group, sequence[None, :, None], entry)
        ids = self.rows.page_table.at[where].get(mode="promise_in_bounds")
        # The barrier keeps the index arithmetic out of the gather loops, which would repeat it for every element.
        return lax.optimization_barrier(ids.swapaxes(0, 1))

    def read_positions(self, ids: Int32[Array, "n groups block"], live) -> Int32[Array, "n groups slots"]:
        """Positions of all slots of pages, -1 for pages that are not `live` (bool [groups, n, block])."""
        positions = jnp.where(live.swapaxes(0, 1)[..., None], _take(self.positions, ids), -1)
        return positions.reshape(*ids.shape[:2], -1)

    def read(
        self, pool: Float[Array, "pages heads_per_group page_size head_dim"], ids: Int32[Array, "n groups block"]
    ) -> Float[Array, "n kv_heads slots head_dim"]:
        """Keys or values of all slots of pages, by KV head."""
        heads = pool.shape[1]
        tiles = ids[:, :, None] * heads + jnp.arange(heads, dtype=jnp.int32)[None, None, :, None]
        # As flat rows: the copy loop of one long axis is twice as fast as that of two short ones.
        tiles = _take(pool.reshape(pool.shape[0] * heads, -1), lax.optimization_barrier(tiles))
        return tiles.reshape(ids.shape[0], self.kv_heads, -1, pool.shape[-1])

    def per_kv_head(self, of_groups: Array) -> Array:
        """Repeat axis 1 from head groups to KV heads."""
        return of_groups if of_groups.shape[1] == 1 else jnp.repeat(of_groups, self.keys.shape[1], axis=1)

    def cap(self, logits: Float32[Array, ...]) -> Float32[Array, ...]:
        """Soft-cap scaled logits."""
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)


def _take(rows: Array, ids: Int32[Array, ...]) -> Array:
    """Rows of an array by in-range ids, without the index normalisation of indexing."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, rows.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    taken = lax.gather(
        rows, ids.reshape(-1, 1), numbers, (1, *rows.shape[1:]), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS
    )
    return taken.reshape(*ids.shape, *rows.shape[1:])


@pytree
class Partial:
    """Attention over a part of the slots, unnormalised: float32 [..., 1], [..., 1] and [..., head_dim]."""

    maximum: Float32[Array, ...]
    total: Float32[Array, ...]
    out: Float32[Array, ...]


def empty_partial(shape: tuple[int, ...], head_dim: int) -> Partial:
    """Return the partial result of no slots."""
    full = jnp.full((*shape, 1), MASKED / 2, jnp.float32)
    return Partial(full, jnp.zeros((*shape, 1), jnp.float32), jnp.zeros((*shape, head_dim), jnp.float32))


def attend_block(
    q: Float[Array, "n kv_heads queries head_dim"],
    ids: Int32[Array, "n groups block"],
    visible: Bool[Array, ...],
    pool: Pool,
) -> Partial:
    """Attend scaled queries to the slots of pages; `visible` broadcasts over [n, kv_heads, queries, slots]."""
    k = pool.read(pool.keys, ids).astype(q.dtype)
    logits = jnp.einsum("nkqd,nksd->nkqs", q, k, preferred_element_type=jnp.float32)
    # The barriers: values are gathered while one core is busy with the softmax, and the mask is computed once.
    ids, logits = lax.optimization_barrier((ids, logits))
    v = pool.read(pool.values, ids).astype(q.dtype)
    logits = jnp.where(lax.optimization_barrier(visible), pool.cap(logits), MASKED)
    # Never near MASKED itself, so that the weights of a block without visible slots are exp(-huge) = 0.
    maximum = jnp.maximum(logits.max(-1, keepdims=True), MASKED / 2)
    weights = jnp.exp(logits - maximum)
    out = jnp.einsum("nkqs,nksd->nkqd", weights, v, preferred_element_type=jnp.float32)
    return Partial(maximum, weights.sum(-1, keepdims=True), out)


def merge(a: Partial, b: Partial) -> Partial:
    """Join two partial results over disjoint slots."""
    maximum = jnp.maximum(a.maximum, b.maximum)
    fa, fb = jnp.exp(a.maximum - maximum), jnp.exp(b.maximum - maximum)
    return Partial(maximum, a.total * fa + b.total * fb, a.out * fa + b.out * fb)


def finish(
    part: Partial, sink_logits: Float[Array, "kv_heads queries"] | None
) -> tuple[Float32[Array, ...], Float32[Array, ...]]:
    """Normalise [n, kv_heads, queries, head_dim], with a learned sink logit per query head.

    Returns: outputs, zeros for no slots, and log-sum-exp [n, kv_heads, queries], -inf for no slots.
    """
    maximum, total, out = part.maximum, part.total, part.out
    if sink_logits is not None:
        sink = sink_logits.astype(jnp.float32)[None, :, :, None]
        maximum = jnp.maximum(part.maximum, sink)
        factor = jnp.exp(part.maximum - maximum)
        total, out = total * factor + jnp.exp(sink - maximum), out * factor
    total = jnp.where(total > 0, total, 1)
    lse = jnp.where(part.total == 0, -jnp.inf, maximum + jnp.log(total))
    return out / total, lse[..., 0]
