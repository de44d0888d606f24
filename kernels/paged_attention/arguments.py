"""What every backend of paged attention takes beside queries and pool, and what it returns."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from kvjax.kernels.pytree import pytree

# A finite stand-in for minus infinity: the difference of two of them is 0, not NaN.
MASKED = -0.7 * 3.4e38


@pytree
class Rows:
    """The pages of all layers, and which layer is meant.

    All layers, so that a plan over all of them can be made once a step. Logical page i of a row stands at table entry i
    for `i < pinned`, else at `pinned + (i - pinned) % ring`.

    Attributes:
        page_table: int32 [layers, groups, seqs, entries], ids of pages, 0 where there is none.
        first_page: int32 [layers, groups, seqs], oldest logical page held behind the pinned ones.
        end_slot: int32 [layers, groups, seqs], logical slot after the last token, those of this step included.
        rings: int32 [layers], entries used as a ring.
        windows: int32 [layers], most positions a query sees, itself included; 2**31 - 1 for all.
        layer: int32 [], the layer whose attention is asked for.
        sinks: first tokens of a sequence that every query sees, whatever the window (static).
        full_only: whether the page that `end_slot` lies in is left out: formats that are per channel hold full pages
            only (static).
    """

    page_table: Int32[Array, "layers groups seqs entries"]
    first_page: Int32[Array, "layers groups seqs"]
    end_slot: Int32[Array, "layers groups seqs"]
    rings: Int32[Array, " layers"]
    windows: Int32[Array, " layers"]
    layer: Int32[Array, ""]
    sinks: int = dataclasses.field(default=0, metadata=dict(static=True))
    full_only: bool = dataclasses.field(default=False, metadata=dict(static=True))

    def pinned(self, page_size: int) -> int:
        """Pages that hold the sinks."""
        return -(-self.sinks // page_size)

    def end_page(self, end_slot, page_size: int):
        """Logical pages that rows with that `end_slot` have for reading, those no longer held included."""
        return end_slot // page_size if self.full_only else -(-end_slot // page_size)


@pytree
class Queries:
    """The packed query tokens of one step: those of sequence 0, then those of sequence 1, ..., then padding.

    Attributes:
        starts: int32 [seqs], place of a sequence's first query token.
        lengths: int32 [seqs], its query tokens.
        positions: int32 [seqs], position of its first query token; the others follow.
        start_positions: int32 [seqs], position of the first token the sequence ever had.
    """

    starts: Int32[Array, " seqs"]
    lengths: Int32[Array, " seqs"]
    positions: Int32[Array, " seqs"]
    start_positions: Int32[Array, " seqs"]

    def last(self, count: int) -> Queries:
        """Only the last `count` query tokens of every sequence."""
        left_out = jnp.maximum(self.lengths - count, 0)
        return dataclasses.replace(
            self, starts=self.starts + left_out, lengths=self.lengths - left_out, positions=self.positions + left_out
        )


@pytree
class Attention:
    """What a backend returns.

    Attributes:
        out: [tokens, heads, head_dim], zeros for padding and for queries that see nothing.
        lse: float32 [tokens, heads], natural log of the sum of exp(logit) over what a query sees, its learned sink
            included; -inf where it sees no slot.
        slot_logits: float32 [seqs, last, heads, slots], on request: scaled and capped logits, -inf where masked or not
            read. Query w of a sequence is its `last - w`th from the end (masked if it has fewer). Slots are those of
            the row's table entries in order, or of the pages of `page_list`.
    """

    out: Float[Array, "tokens heads head_dim"]
    lse: Float32[Array, "tokens heads"]
    slot_logits: Float32[Array, "seqs last heads slots"] | None = None


def page_lse(slot_logits: Float32[Array, "*rows slots"], page_size: int) -> Float32[Array, "*rows pages"]:
    """Log-sum-exp of every page; the attention that a page gets is exp(page_lse - lse).

    Returns: -inf for pages of which nothing is seen.
    """
    logits = slot_logits.reshape(*slot_logits.shape[:-1], -1, page_size)
    maximum = jnp.maximum(logits.max(-1), MASKED)
    return maximum + jnp.log(jnp.exp(logits - maximum[..., None]).sum(-1))
