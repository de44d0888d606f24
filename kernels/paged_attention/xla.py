"""Paged attention in plain XLA: the portable path, and the fast one on CPUs.

Cost follows the live pages: both loops run as often as the pages of this step ask for, whatever the sizes of the pool
and of the tables. Decode rows and longer queries take different loops (`decode.py` and `prefill.py`).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.kernels.paged_attention.arguments import Attention, Queries, Rows
from kvjax.kernels.paged_attention.xla_decode import decode
from kvjax.kernels.paged_attention.xla_pages import Pool
from kvjax.kernels.paged_attention.xla_prefill import prefill


def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    keys: Float[Array, "pages heads_per_group page_size head_dim"],
    values: Float[Array, "pages heads_per_group page_size head_dim"],
    positions: Int32[Array, "pages page_size"],
    rows: Rows,
    queries: Queries,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_logits: Float[Array, " heads"] | None = None,
    max_query_length: int,
) -> Attention:
    """Attend every query token to the visible slots of its sequence; see `reference.paged_attention`.

    `max_query_length` (static) bounds `queries.lengths`; 1 leaves out the loop for longer queries. The result has the
    dtype of `q`; softmax and accumulation are float32.
    """
    pool = Pool(keys, values, positions, rows, scale, soft_cap, sink_logits)
    if max_query_length == 1:
        out, lse = decode(q, pool, queries, num_rows=q.shape[0])
        return Attention(out.astype(q.dtype), lse)
    is_decode = (queries.lengths == 1).astype(jnp.int32)
    tiles = prefill(q, pool, queries, max_query_length=max_query_length)
    num_rows = min(q.shape[0], is_decode.shape[0])
    row = jnp.cumsum(is_decode, dtype=jnp.int32) - is_decode
    token = jnp.arange(q.shape[0], dtype=jnp.int32)
    decoded = decode(q, pool, queries, num_rows=num_rows)
    places = jnp.where(is_decode > 0, queries.starts, q.shape[0])
    owner = (places[None] == token[:, None]).argmax(1)
    decode_token = (places[None] == token[:, None]).any(1)
    row_of_token = row.at[owner].get(mode="promise_in_bounds")

    def choose(of_rows, of_tiles):
        chosen = of_rows.at[row_of_token].get(mode="clip").astype(of_tiles.dtype)
        return jnp.where(decode_token.reshape(-1, *(1,) * (chosen.ndim - 1)), chosen, of_tiles)

    return Attention(*map(choose, decoded, tiles))
