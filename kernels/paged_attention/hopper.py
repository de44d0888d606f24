"""Paged attention on NVIDIA Hopper (sm_90a), in Pallas Mosaic GPU: see `hopper_kernel.py` and `docs/kernels.md`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.kernels.paged_attention.arguments import Attention, Queries, Rows
from kvjax.kernels.paged_attention.hopper_block import ROWS, Shape
from kvjax.kernels.paged_attention.hopper_kernel import attend_tiles
from kvjax.kernels.paged_attention.tiles import join_fragments, row_limits, share_work, tiles_of

HEAD_DIMS = (64, 96, 128, 256)
PAGE_SIZES = (8, 16, 32, 64, 128)
DTYPES = ("bfloat16", "float16")
MOST_HEADS = 16  # query heads of a KV head
_PROCESSORS = 132  # of an H100 or H200


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


def shape_of(head_dim: int, kv_heads: int, *, is_decode: bool) -> Shape:
    """Choose blocks and stages that fit 227 KB of shared memory and the registers, and CTAs that fill the chip."""
    workers = max(_PROCESSORS // kv_heads, 1)
    if head_dim == 256:
        # The accumulator alone takes 128 registers of a thread, so that there is room for one consumer.
        return Shape(64, 2, workers, 1, not is_decode)
    return Shape(64, 4 if is_decode else 2, workers, 2, not is_decode)


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
    shape: Shape | None = None,
    interpret: Any = None,
) -> Attention:
    """Attend every query token to the visible slots of its sequence; see `reference.paged_attention`.

    Args:
        max_query_length: static bound of `queries.lengths`; 1 chooses tiles of one token.
        shape: static choices, `shape_of` by default.
        interpret: `plgpu.InterpretGPUParams` to run without a GPU.

    Returns: outputs in the dtype of `q`; softmax and accumulation are float32.

    Raises: NotImplementedError for what the kernel cannot serve.
    """
    kv_heads = keys.shape[1] * rows.page_table.shape[1]
    heads, head_dim, page_size = q.shape[1] // kv_heads, q.shape[2], keys.shape[2]
    reason = refuses(
        head_dim=head_dim, page_size=page_size, dtype=str(q.dtype), pool_dtype=str(keys.dtype), heads_per_kv_head=heads
    )
    if reason is not None:
        raise NotImplementedError(f"the Hopper kernel cannot serve this call: {reason}")
    is_decode = max_query_length == 1
    shape = shape or shape_of(head_dim, kv_heads, is_decode=is_decode)
    parts = shape.consumers if shape.shares_blocks else 1
    tile_tokens = 1 if is_decode else parts * ROWS // heads
    tiles = tiles_of(queries, q.shape[0], tile_tokens)
    work = share_work(
        rows, queries, tiles, page_size=page_size, piece=shape.piece(page_size), block=shape.block,
        workers=shape.workers,
    )  # fmt: skip
    part_rows = -(-heads // 8) * 8 if is_decode else ROWS
    tiled = _tile_rows(q, tiles, kv_heads, parts * part_rows).reshape(-1, kv_heads, parts, part_rows, head_dim)
    limits = jnp.repeat(row_limits(tiles, queries, rows.windows[rows.layer]), heads, axis=2)
    limits = jnp.pad(limits, ((0, 0), (0, 0), (0, parts * ROWS - limits.shape[2])), constant_values=-1)
    limits = limits.reshape(-1, 2, parts, ROWS).swapaxes(1, 2)
    out, stats = attend_tiles(
        tiled, limits, keys, values, positions, rows, tiles, work, shape=shape, scale=scale, soft_cap=soft_cap,
        interpret=interpret,
    )  # fmt: skip
    joined = out.shape[:2] + ((1, parts * part_rows) if shape.shares_blocks else (shape.consumers, part_rows))
    maximum, total = (stats[:, :, :, i, :part_rows].reshape(joined) for i in range(2))
    sinks = None if sink_logits is None else _rows_of_heads(sink_logits.reshape(kv_heads, -1), parts * part_rows)
    attended, lse = join_fragments(out.reshape(*joined, head_dim), maximum, total, work, sinks)
    out = _untile_rows(attended, tiles, q.shape, 0)
    return Attention(out.astype(q.dtype), _untile_rows(lse[..., None], tiles, (*q.shape[:2], 1), -jnp.inf)[..., 0])


def _tile_rows(q, tiles, kv_heads: int, num_rows: int):
    """[tokens, heads, head_dim] -> [tiles, kv_heads, rows, head_dim]: a row is a token and one of its query heads."""
    # Tiles of one token are the tokens in order.
    tokens = q[:, None] if tiles.places.shape[1] == 1 else q[tiles.places]
    tiled = tokens.reshape(*tiles.places.shape, kv_heads, -1, q.shape[-1]).swapaxes(1, 2)
    tiled = tiled.reshape(tiled.shape[0], kv_heads, -1, q.shape[-1])
    return jnp.pad(tiled, ((0, 0), (0, 0), (0, num_rows - tiled.shape[2]), (0, 0)))


def _rows_of_heads(of_heads, num_rows: int):
    """[kv_heads, query heads] -> [kv_heads, rows]."""
    return jnp.tile(of_heads, (1, -(-num_rows // of_heads.shape[1])))[:, :num_rows]


def _untile_rows(attended, tiles, shape: tuple[int, ...], padding: float):
    """[kv_heads, tiles, rows, head_dim] -> [tokens, heads, head_dim], `padding` for places without a token."""
    kv_heads, num_tiles, _, head_dim = attended.shape
    tile_tokens, heads = tiles.places.shape[1], shape[1] // kv_heads
    attended = attended[:, :, : tile_tokens * heads].reshape(kv_heads, num_tiles, tile_tokens, heads, head_dim)
    attended = attended.transpose(1, 2, 0, 3, 4).reshape(-1, *shape[1:])
    is_token = jnp.arange(tile_tokens, dtype=jnp.int32)[None] < tiles.tokens[:, None]
    if tile_tokens == 1:
        return jnp.where(is_token[..., None], attended, padding)
    places = jnp.where(is_token, tiles.places, shape[0]).reshape(-1)
    return jnp.full(shape, padding, attended.dtype).at[places].set(attended, mode="drop")
