"""What every backend of paged attention takes beside queries and pool."""

from __future__ import annotations

from jaxtyping import Array, Int32

from kvjax.kernels.pytree import pytree

# A finite stand-in for minus infinity: the difference of two of them is 0, not NaN.
MASKED = -0.7 * 3.4e38


@pytree
class Rows:
    """The pages of one layer.

    Attributes:
        page_table: int32 [groups, seqs, entries], ids of pages, 0 where there is none.
        first_page: int32 [groups, seqs], oldest logical page held; logical page i stands at entry `i % ring`.
        end_slot: int32 [groups, seqs], logical slot after the last token, those of this step included.
        ring: int32 [], entries used as a ring.
    """

    page_table: Int32[Array, "groups seqs entries"]
    first_page: Int32[Array, "groups seqs"]
    end_slot: Int32[Array, "groups seqs"]
    ring: Int32[Array, ""]


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
