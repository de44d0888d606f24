"""Paged attention on TPUs, in Pallas Mosaic: see `tpu_kernel.py` and `docs/kernels_tpu.md`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.kernels.paged_attention.arguments import Attention, Queries, Rows
from kvjax.kernels.paged_attention.tiles import Tiles, tiles_of
from kvjax.kernels.paged_attention.tpu_kernel import attend_tiles
from kvjax.kernels.paged_attention.tpu_plan import LANES, Choices, Shape, plan_steps, table_of

HEAD_DIMS = (128, 256)
PAGE_SIZES = (8, 16, 32, 64, 128)
DTYPES = ("bfloat16", "float32")
MOST_HEADS = 16  # query heads of a KV head
MOST_ENTRIES = 1 << 15  # of a row of the page table: three rows take 384 KB of 1 MB of scalar memory
MOST_STEPS = 1 << 14
_BLOCK_BYTES = 1 << 20  # of keys and values, enough to hide the latency of a copy behind the one before
_TILE_ELEMENTS = 1 << 18  # of a tile's queries
_ROWS = 256  # of a tile: intensity as high as the chips' operations for a byte of HBM


def refuses(*, head_dim: int, page_size: int, dtype: str, pool_dtype: str, heads_per_kv_head: int) -> str | None:
    """Say why the kernel cannot serve a call, or None if it can."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if page_size not in PAGE_SIZES:
        return f"page_size {page_size} is not one of {', '.join(map(str, PAGE_SIZES))}"
    if dtype not in DTYPES:
        return f"queries of {dtype} are not {' or '.join(DTYPES)}"
    if pool_dtype != dtype:
        return f"pages of {pool_dtype} are not of the queries' {dtype}"
    if not 1 <= heads_per_kv_head <= MOST_HEADS:
        return f"{heads_per_kv_head} query heads of a KV head are not 1 to {MOST_HEADS}"
    return None


def shape_of(
    heads_per_group: int, query_heads: int, page_size: int, head_dim: int, itemsize: int, *, is_decode: bool
) -> Shape:
    """Choose steps and blocks that fill about 10 MB of vector memory, and tiles that use the matrix unit."""
    tile_tokens = 1 if is_decode else _ROWS // query_heads
    rows = -(-tile_tokens * query_heads // 8) * 8
    most = min(_TILE_ELEMENTS // (rows * head_dim), 4 * _BLOCK_BYTES // (2 * LANES * head_dim * itemsize))
    heads = max(n for n in range(1, heads_per_group + 1) if heads_per_group % n == 0 and n <= most)
    slots = _BLOCK_BYTES // (2 * heads * head_dim * itemsize)
    # A tile of many rows has logits enough with fewer slots.
    slots = min(max(slots // LANES, 1), 8 if is_decode else 2) * LANES
    return Shape(heads, slots // page_size, tile_tokens)


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
    sink_query: Float[Array, "tokens heads head_dim"] | None = None,
    page_list: Int32[Array, "kv_heads seqs listed"] | None = None,
    last_logits: int = 0,
    max_query_length: int,
    shape: Shape | None = None,
    interpret: Any = None,
) -> Attention:
    """Attend every query token to the visible slots of its sequence; see `reference.paged_attention`.

    Args:
        max_query_length: static bound of `queries.lengths`; 1 chooses tiles of one token.
        shape: static choices, `shape_of` by default.
        interpret: `pltpu.InterpretParams` to run without a TPU.

    Returns: outputs in the dtype of `q`; softmax and accumulation are float32.

    Raises: NotImplementedError for what the kernel cannot serve.
    """
    in_group, groups = keys.shape[1], rows.page_table.shape[1]
    kv_heads, head_dim, page_size = in_group * groups, q.shape[2], keys.shape[2]
    heads, is_decode, is_listed = q.shape[1] // kv_heads, max_query_length == 1, page_list is not None
    table, layer, piece = table_of(rows, page_list)
    shape = shape or shape_of(
        1 if is_listed else in_group, heads, page_size, head_dim, keys.dtype.itemsize, is_decode=is_decode
    )
    tiles = None if is_decode else tiles_of(queries, q.shape[0], shape.tile_tokens)
    num_tiles = queries.lengths.shape[0] if tiles is None else tiles.tokens.shape[0]
    reason = refuses(
        head_dim=head_dim, page_size=page_size, dtype=str(q.dtype), pool_dtype=str(keys.dtype), heads_per_kv_head=heads
    )
    reason = reason or _refuses_sizes(table.shape[-1], kv_heads // shape.heads * num_tiles, last_logits)
    if reason is not None:
        raise NotImplementedError(f"the TPU kernel cannot serve this call: {reason}")
    plan = plan_steps(
        rows, queries, tiles, layer, num_tokens=q.shape[0], page_size=page_size, slices=in_group // shape.heads,
        listed=table.shape[-1] if is_listed else None,
    )  # fmt: skip
    choices = Choices(
        shape, page_size, heads, piece, rows.sinks, scale, soft_cap, sink_query is not None, sink_logits is not None,
        is_listed,
    )  # fmt: skip
    num_rows = -(-shape.tile_tokens * heads // 8) * 8
    tile_rows = lambda of: _tile_rows(of, tiles, kv_heads, num_rows)  # noqa: E731
    if sink_query is not None:
        sink_query = tile_rows(sink_query)
    if sink_logits is not None:
        of_heads = sink_logits.astype(jnp.float32).reshape(kv_heads, heads)
        sink_logits = jnp.tile(of_heads, (1, -(-num_rows // heads)))[:, :num_rows, None]
    attended, lse = attend_tiles(
        tile_rows(q), keys, values, positions, table, plan, sink_query, sink_logits, choices, interpret
    )
    out = _untile_rows(attended, tiles, queries, q.shape, 0)
    return Attention(out, _untile_rows(lse, tiles, queries, (*q.shape[:2], 1), -jnp.inf)[..., 0])


def _refuses_sizes(entries: int, steps: int, last_logits: int) -> str | None:
    if last_logits:
        return "it returns no logits of slots (last_logits)"
    if entries > MOST_ENTRIES:
        return f"rows of {entries} pages are more than {MOST_ENTRIES}, whose ids fit scalar memory"
    if steps > MOST_STEPS:
        return f"{steps} tiles and slices of heads are more than {MOST_STEPS}, whose plan fits scalar memory"
    return None


def _tile_rows(q, tiles: Tiles | None, kv_heads: int, num_rows: int):
    """[tokens, heads, head_dim] -> [places, kv_heads, rows, head_dim]: a row is a token and one of its query heads."""
    tokens = q[:, None] if tiles is None else q[tiles.places]
    tiled = tokens.reshape(*tokens.shape[:2], kv_heads, -1, q.shape[-1]).swapaxes(1, 2)
    tiled = tiled.reshape(tiled.shape[0], kv_heads, -1, q.shape[-1])
    return jnp.pad(tiled, ((0, 0), (0, 0), (0, num_rows - tiled.shape[2]), (0, 0)))


def _untile_rows(attended, tiles: Tiles | None, queries: Queries, shape: tuple[int, ...], padding: float):
    """[places, kv_heads, rows, width] -> [tokens, heads, width], `padding` for places without a token."""
    kv_heads, width = attended.shape[1], attended.shape[3]
    if tiles is None:
        is_token = jnp.arange(shape[0], dtype=jnp.int32) < queries.starts[-1] + queries.lengths[-1]
        attended = attended[:, :, : shape[1] // kv_heads].reshape(shape)
        return jnp.where(is_token[:, None, None], attended, padding)
    num_tiles, tile_tokens = tiles.places.shape
    heads = shape[1] // kv_heads
    attended = attended[:, :, : tile_tokens * heads].reshape(num_tiles, kv_heads, tile_tokens, heads, width)
    attended = attended.swapaxes(1, 2).reshape(-1, *shape[1:])
    is_token = jnp.arange(tile_tokens, dtype=jnp.int32)[None] < tiles.tokens[:, None]
    places = jnp.where(is_token, tiles.places, shape[0]).reshape(-1)
    return jnp.full(shape, padding, attended.dtype).at[places].set(attended, mode="drop")
