"""Paged attention in plain XLA: the portable path, and the fast one on CPUs.

Cost follows the live pages: both loops run as often as the pages of this step ask for, whatever the sizes of the pool
and of the tables. Decode rows and longer queries take different loops (`xla_decode.py` and `xla_prefill.py`).

Sinks stand in the pinned pages of a row, a static number: these are read first, with both queries where sinks have one
of their own, and the loops go on from there. With a list of pages the loop goes over the list, pinned pages or not.
Logits are written page by page, inside the loops, into the tiles of one array (`xla_slots.py`).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.kernels.formats import Stored
from kvjax.kernels.paged_attention.arguments import Attention, Queries, Rows
from kvjax.kernels.paged_attention.xla_decode import decode
from kvjax.kernels.paged_attention.xla_pages import ListedPool, Pool, Tokens
from kvjax.kernels.paged_attention.xla_prefill import add_last_logits, prefill
from kvjax.kernels.paged_attention.xla_slots import empty_logits, in_rows


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    keys: Float[Array, "pages heads_per_group page_size head_dim"] | Stored,
    values: Float[Array, "pages heads_per_group page_size head_dim"] | Stored,
    positions: Int32[Array, "pages page_size"],
    rows: Rows,
    queries: Queries,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_logits: Float[Array, " heads"] | None = None,
    sink_query: Float[Array, "tokens heads head_dim"] | None = None,
    page_list: Int32[Array, "kv_heads seqs listed"] | None = None,
    last_logits: int = 0,
    max_query_length: int,
) -> Attention:
    """Attend every query token to the visible slots of its sequence; see `reference.paged_attention`.

    `max_query_length` (static) bounds `queries.lengths`; 1 leaves out the loop for longer queries. The result has the
    dtype of `q`; softmax and accumulation are float32. Logits of a sequence's only query come with its attention; those
    of the last of several need a second pass over the keys.

    Raises: ValueError for a `page_list` in steps of more than one query token a sequence.
    """
    tokens = Tokens(q, sink_query if rows.sinks else None)
    pool = Pool(Stored.of(keys), Stored.of(values), positions, rows, scale, soft_cap, sink_logits)
    if page_list is not None:
        if max_query_length != 1:
            raise ValueError(
                f"page_list is for steps of one query token a sequence, and max_query_length is {max_query_length}: "
                "give max_query_length=1, or no page_list"
            )
        pool = ListedPool(**vars(pool), page_list=page_list)
    return attend(tokens, pool, queries, last_logits=last_logits, max_query_length=max_query_length)


def attend(tokens: Tokens, pool: Pool, queries: Queries, *, last_logits: int, max_query_length: int) -> Attention:
    """Attend every query token to what a pool shows of its sequence."""
    q = tokens.q
    logits = empty_logits(pool, last_logits, q.shape[1])
    if max_query_length == 1:
        out, lse, logits = decode(tokens, pool, queries, num_rows=q.shape[0], tiles=logits)
        return Attention(out.astype(q.dtype), lse, None if logits is None else in_rows(logits, pool))
    is_decode = (queries.lengths == 1).astype(jnp.int32)
    tiles = prefill(tokens, pool, queries, max_query_length=max_query_length)
    num_rows = min(q.shape[0], is_decode.shape[0])
    row = jnp.cumsum(is_decode, dtype=jnp.int32) - is_decode
    token = jnp.arange(q.shape[0], dtype=jnp.int32)
    *decoded, logits = decode(tokens, pool, queries, num_rows=num_rows, tiles=logits)
    places = jnp.where(is_decode > 0, queries.starts, q.shape[0])
    owner = (places[None] == token[:, None]).argmax(1)
    decode_token = (places[None] == token[:, None]).any(1)
    row_of_token = row.at[owner].get(mode="promise_in_bounds")

    def choose(of_rows, of_tiles):
        chosen = of_rows.at[row_of_token].get(mode="clip").astype(of_tiles.dtype)
        return jnp.where(decode_token.reshape(-1, *(1,) * (chosen.ndim - 1)), chosen, of_tiles)

    out, lse = map(choose, decoded, tiles)
    if logits is None:
        return Attention(out, lse)
    return Attention(out, lse, in_rows(add_last_logits(logits, tokens, pool, queries), pool))
