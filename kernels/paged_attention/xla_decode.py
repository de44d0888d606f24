"""The decode loop: one query token a row, several blocks of pages, of any rows, an iteration."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from kvjax.kernels.paged_attention.arguments import MASKED, Queries
from kvjax.kernels.paged_attention.xla_pages import Pages, Pool, Tokens
from kvjax.kernels.paged_attention.xla_slots import put_logits
from kvjax.kernels.paged_attention.xla_softmax import Partial, attend_block, empty_partial, finish, merge

# Pages of a block: many where a row has them, as an iteration has fixed costs; few for what is left. Measured on CPUs.
BLOCK_SLOTS = (512, 128)


def decode(
    tokens: Tokens, pool: Pool, queries: Queries, *, num_rows: int, tiles: Float32[Array, ...] | None
) -> tuple[Float32[Array, "rows heads head_dim"], Float32[Array, "rows heads"], Float32[Array, ...] | None]:
    """Attend the queries of all sequences that bring one token; rows are those sequences in order, then padding.

    The blocks of all rows form one list, of which an iteration reads the next few, so a short sequence never waits for
    a long one: the cost is that of the live pages.

    Returns: outputs, log-sum-exp, and `tiles` with the logits of these queries.
    """
    is_decode, heads = queries.lengths == 1, tokens.q.shape[1:]
    rank = jnp.cumsum(is_decode, dtype=jnp.int32)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    used = row < rank[-1]
    sequence = jnp.where(used, (rank[None] <= row[:, None]).sum(1, dtype=jnp.int32), 0)
    held = pool.held.max(0).at[sequence].get(mode="promise_in_bounds")
    shape = (pool.kv_heads, heads[0] // pool.kv_heads)
    items = min(num_rows, 8)
    # `items` rows of padding let an iteration update the rows from any owner on.
    done = empty_partial((num_rows if num_rows == 1 else num_rows + items, *shape), heads[1])
    if pool.pinned:
        part, tiles = _attend(tokens, pool, queries, sequence, pool.locate_pinned(sequence, used), tiles, sinks=True)
        done = _put_first(done, part, used)
    begin = jnp.zeros(num_rows, jnp.int32)
    for slots in () if pool.is_open else BLOCK_SLOTS:
        pages = max(1, slots // pool.page_size)
        is_last = slots == BLOCK_SLOTS[-1]
        if not is_last and pool.entries < pages:
            continue
        pages = min(pages, pool.entries)
        # A block that is nearly full is cheaper than several small ones.
        left, spare = jnp.maximum(held - begin, 0), pages - 1 if is_last else pages // 4
        counts = jnp.where(used, (left + spare) // pages, 0)
        blocks = _Blocks(sequence, begin, counts, pages, items)
        done, tiles = _attend_blocks((done, tiles), tokens, pool, queries, blocks)
        begin = begin + counts * pages
    sinks = None if pool.sink_logits is None else pool.sink_logits.reshape(shape)
    out, lse = finish(done, sinks)
    return out[:num_rows].reshape(num_rows, *heads), lse[:num_rows].reshape(num_rows, heads[0]), tiles


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Blocks of pages to attend to: `counts[row]` of `pages` pages each, from a row's page `begins[row]` on."""

    sequence: Int32[Array, " rows"]
    begins: Int32[Array, " rows"]
    counts: Int32[Array, " rows"]
    pages: int
    items: int


def _attend_blocks(carry: tuple[Partial, Array | None], tokens, pool: Pool, queries: Queries, blocks: _Blocks):
    ends = jnp.cumsum(blocks.counts, dtype=jnp.int32)
    num_rows, items = ends.shape[0], blocks.items

    def body(state):
        place, (done, tiles) = state
        places = place + jnp.arange(items, dtype=jnp.int32)
        owner = jnp.minimum((ends[None] <= places[:, None]).sum(1, dtype=jnp.int32), num_rows - 1)
        of_owner = lambda rows: rows.at[owner].get(mode="promise_in_bounds")  # noqa: E731
        page = of_owner(blocks.begins) + (places - of_owner(ends - blocks.counts)) * blocks.pages
        # Rows without a block may lie between the owners: those too far from the first wait for the next iteration.
        used = (places < ends[-1]) & (owner - owner[0] < items)
        sequence = of_owner(blocks.sequence)
        pages = pool.locate_from(sequence, page, used, blocks.pages)
        part, tiles = _attend(tokens, pool, queries, sequence, pages, tiles, sinks=pool.lists_sinks)
        done = merge(done, part) if num_rows == 1 else _add(done, part, owner, used)
        return place + used.sum(dtype=jnp.int32), (done, tiles)

    return lax.while_loop(lambda state: state[0] < ends[-1], body, (jnp.int32(0), carry))[1]


def _attend(tokens: Tokens, pool: Pool, queries: Queries, sequence, pages: Pages, tiles, *, sinks: bool):
    """Attend the query of every `sequence` to its pages, and write its logits if they are asked for."""
    query = queries.positions[sequence][:, None, None, None]
    start = queries.start_positions[sequence][:, None, None, None]
    block = pool.view(pages, query, start, heads=1, sinks=sinks)
    place = queries.starts[sequence]
    taken = tokens.map(lambda q: pool.scaled(q.at[place].get(mode="promise_in_bounds")))
    part, logits = attend_block(taken, block, pool)
    if tiles is not None:
        tiles = put_logits(tiles, logits, block.visible, pool, sequence, pages)
    return part, tiles


def _put_first(done: Partial, part: Partial, used: Bool[Array, " rows"]) -> Partial:
    """Set the first rows of `done` where they are used."""
    used = used[:, None, None, None]
    put = lambda all, some: all.at[: used.shape[0]].set(jnp.where(used, some, all[: used.shape[0]]))  # noqa: E731
    return jax.tree.map(put, done, part)


def _add(done: Partial, part: Partial, owner: Int32[Array, " items"], used: Bool[Array, " items"]) -> Partial:
    """Merge the items' results into the rows that own them; owners rise, so they lie close together."""
    items = owner.shape[0]
    first = owner[0]
    near = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, first, items), done)
    row = first + jnp.arange(items, dtype=jnp.int32)
    mine = (owner[:, None] == row[None]) & used[:, None]
    maximum = jnp.where(mine[..., None, None, None], part.maximum[:, None], MASKED / 2).max(0)
    maximum = jnp.maximum(near.maximum, maximum)
    old = jnp.exp(near.maximum - maximum)
    new = jnp.exp(part.maximum - maximum.at[owner - first].get(mode="clip"))

    # A product with 0 would carry a NaN of one row into the others.
    bad = ~(jnp.isfinite(part.total) & jnp.isfinite(part.out).all(-1, keepdims=True))
    bad_row = (mine[..., None, None, None] & bad[:, None]).any(0)

    def add(sums, parts):
        parts = jnp.where(used[:, None, None, None] & ~bad, parts * new, 0)
        joined = sums * old + jnp.einsum("ir,ikgd->rkgd", mine.astype(jnp.float32), parts, precision="highest")
        return jnp.where(bad_row, jnp.nan, joined)

    merged = Partial(maximum, add(near.total, part.total), add(near.out, part.out))
    return jax.tree.map(lambda all, some: lax.dynamic_update_slice_in_dim(all, some, first, 0), done, merged)
