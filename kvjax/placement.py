"""Where the tokens of a step go: the pages they touch, new ones allocated, and the positions stored there."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from kvjax import pages
from kvjax.cache import EMPTY_SPAN, Cache, Status, entry_of, raise_status, ring_of
from kvjax.kernels.pytree import pytree
from kvjax.spec import CacheSpec


@pytree
class Writes:
    """The pages that a step's tokens go to, int32 [layers, groups, touched] each; see `kernels.write_pages`.

    Attributes:
        pages: ids, 0 for padding.
        first_tokens: place of the first packed token of each page.
        begins, ends: the slots that receive tokens.
        blanks: the first slot behind them that holds none.
        sequence: whose page it is.
    """

    pages: Int32[Array, "layers groups touched"]
    first_tokens: Int32[Array, "layers groups touched"]
    begins: Int32[Array, "layers groups touched"]
    ends: Int32[Array, "layers groups touched"]
    blanks: Int32[Array, "layers groups touched"]
    sequence: Int32[Array, "layers groups touched"]

    @property
    def where(self) -> tuple[Array, Array, Array, Array, Array]:
        """The arrays that writing takes."""
        return self.pages, self.first_tokens, self.begins, self.ends, self.blanks

    def of_layer(self, layer) -> tuple[Array, ...]:
        """Those of one layer, which may be traced."""
        return tuple(of_all[layer] for of_all in self.where)


@dataclasses.dataclass(frozen=True)
class Touched:
    """Pages that receive tokens in a step: [layers, groups, touched] each, padded at the end."""

    sequence: Int32[Array, "layers groups touched"]
    page: Int32[Array, "layers groups touched"]
    used: Bool[Array, "layers groups touched"]
    new: Bool[Array, "layers groups touched"]


def touched_bound(spec: CacheSpec, num_tokens: int, max_query_length: int) -> int:
    """Most pages of one layer and group that `num_tokens` tokens of at most `max_query_length` each can touch."""
    active = min(spec.max_seqs, num_tokens)
    of_all = (num_tokens + active * (spec.page_size - 2)) // spec.page_size + active
    of_each = ((max_query_length + spec.page_size - 2) // spec.page_size + 1) * active
    return min(num_tokens, of_all, of_each)


def begin_slot(cache: Cache, lengths: Int32[Array, " seqs"]) -> Int32[Array, "layers groups seqs"]:
    """Logical slot of the first of `lengths` new tokens: one alone fills what a policy has emptied."""
    if cache.write_slot is None:
        return cache.next_slot
    return jnp.where(lengths[None, None] == 1, cache.write_slot, cache.next_slot)


def end_slot(cache: Cache, lengths: Int32[Array, " seqs"]) -> Int32[Array, "layers groups seqs"]:
    """Logical slot behind the last token, after `lengths` new ones."""
    after = begin_slot(cache, lengths) + lengths[None, None]
    return after if cache.write_slot is None else jnp.maximum(after, cache.next_slot)


def touched_pages(cache: Cache, lengths, num_tokens: int, longest: int) -> Touched:
    """Lay out the pages that `lengths` new tokens of each sequence touch."""
    size, first = cache.spec.page_size, begin_slot(cache, lengths)
    begin = first // size
    end = jnp.where(lengths > 0, -(-(first + lengths[None, None]) // size), begin)
    bound = touched_bound(cache.spec, num_tokens, longest)
    layout = jax.vmap(jax.vmap(lambda counts: pages.ragged(counts, bound)))
    sequence, within, used = layout(end - begin)
    page = of_rows(begin, sequence) + within
    new = used & (page * size >= of_rows(cache.next_slot, sequence))
    return Touched(sequence, page, used, new)


def of_rows(rows: Int32[Array, "layers groups seqs"], sequence: Int32[Array, "layers groups n"]):
    """Values of the rows that belong to sequences, in every layer and group."""
    return jnp.take_along_axis(rows, sequence, axis=2, mode="promise_in_bounds")


def entry_ids(cache: Cache, sequence, page):
    """Ids that the table holds for logical pages [layers, groups, n] of sequences [layers, groups, n]."""
    layer, group, _ = jnp.ix_(*map(jnp.arange, sequence.shape))
    where = (layer, group, sequence, entry_of(cache.spec, page))
    return cache.page_table.at[where].get(mode="promise_in_bounds"), where


def allocate_pages(cache: Cache, touched: Touched, ok, allowed):
    """Pop a page for every new one; all or nothing, and nothing where it is not allowed.

    Returns: the cache, the ids of the touched pages (0 where none), and whether there were pages enough.
    """
    fits_row = touched.page - of_rows(cache.first, touched.sequence) < ring_of(cache.spec)
    wanted = touched.new.sum(dtype=jnp.int32)
    enough = (wanted <= cache.allocator.num_free) & (fits_row | ~touched.used).all()
    cache = raise_status(cache, Status.OUT_OF_PAGES, ok & ~enough)
    served = ok & enough
    ok = served & allowed

    def allocate(allocator, table):
        allocator, ids = pages.pop(allocator, (touched.new & ok).reshape(-1))
        _, where = entry_ids(cache, touched.sequence, touched.page)
        # Entries without a page are 0, so adding writes the new ids and lets padding change nothing.
        return allocator, table.at[where].add(ids.reshape(touched.new.shape), mode="promise_in_bounds")

    allocator, table = jax.lax.cond(ok & (wanted > 0), allocate, lambda *same: same, cache.allocator, cache.page_table)
    cache = dataclasses.replace(cache, allocator=allocator, page_table=table)
    ids, _ = entry_ids(cache, touched.sequence, touched.page)
    return cache, jnp.where(touched.used & ok, ids, 0), served


def write_positions(cache: Cache, lengths, touched: Touched, ids) -> Cache:
    """Write the positions of the step's tokens, in all layers at once, and the span of every page they touch."""
    size = cache.spec.page_size
    slot = touched.page[..., None] * size + jnp.arange(size, dtype=jnp.int32)[None, None, None]
    begin = of_rows(begin_slot(cache, lengths), touched.sequence)
    count = lengths.at[touched.sequence].get(mode="promise_in_bounds")
    offset = slot - begin[..., None]
    written = (offset >= 0) & (offset < count[..., None])
    old = jnp.where(touched.new[..., None], -1, cache.positions.at[ids].get(mode="promise_in_bounds"))
    position = cache.next_position.at[touched.sequence].get(mode="promise_in_bounds")[..., None] + offset
    rows = jnp.where((ids > 0)[..., None], jnp.where(written, position, old), -1)
    return set_positions(cache, ids.reshape(-1), rows.reshape(-1, size))


def set_positions(cache: Cache, ids: Int32[Array, " n"], rows: Int32[Array, "n page_size"]) -> Cache:
    """Replace the positions of pages `ids` (0 for none) and recompute their spans."""
    least = jnp.where(rows >= 0, rows, EMPTY_SPAN[0]).min(-1)
    span = jnp.stack([least, rows.max(-1)], axis=-1)
    return dataclasses.replace(
        cache,
        positions=cache.positions.at[ids].set(rows, mode="promise_in_bounds"),
        page_span=cache.page_span.at[ids].set(span, mode="promise_in_bounds"),
    )


def writes_of(cache: Cache, lengths, starts, touched: Touched, ids) -> Writes:
    """Say which packed tokens go to which slots of the touched pages."""
    size = cache.spec.page_size
    of_owner = lambda per_sequence: per_sequence.at[touched.sequence].get(mode="promise_in_bounds")  # noqa: E731
    ahead = touched.page * size - of_rows(begin_slot(cache, lengths), touched.sequence)
    first_token, ends = of_owner(starts) + jnp.maximum(ahead, 0), jnp.minimum(of_owner(lengths) - ahead, size)
    blanks = ends
    if cache.write_slot is not None:
        blanks = jnp.clip(of_rows(cache.next_slot, touched.sequence) - touched.page * size, ends, size)
    return Writes(ids, first_token, jnp.maximum(-ahead, 0), ends, blanks, touched.sequence)


def drop_pages(allocator: pages.Allocator, status: Int32[Array, ""], ids: Int32[Array, " n"]):
    """Take one reference from each of the pages `ids` (0 for none).

    Returns: the allocator, the status (DOUBLE_FREE set if a reference did not exist) and the pages that became free.
    """
    allocator, freed, ok = pages.drop(allocator, ids)
    return allocator, status | jnp.where(ok, 0, int(Status.DOUBLE_FREE)).astype(jnp.int32), freed


def scrub(cache: Cache, freed: Int32[Array, " n"]) -> Cache:
    """Zero the keys and values of pages that became free, if the spec asks for it."""
    if not cache.spec.scrub_on_free:
        return cache
    return cache.map_pages(lambda pool: pool.at[freed].set(0))
