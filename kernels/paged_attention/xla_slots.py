"""Results per slot of every row, in XLA: written page by page inside the loops, one tile [..., page_size] a page."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from kvjax.kernels.paged_attention.xla_pages import Pages, Pool


def empty_tiles(pool: Pool, *of_page: int, fill: float) -> Float32[Array, "tiles ..."]:
    """One tile [*of_page, page_size] for every (sequence, group, entry), and one that nobody reads."""
    rows = pool.rows.page_table.shape[2] * pool.groups
    return jnp.full((rows * pool.entries + 1, *of_page, pool.page_size), fill, jnp.float32)


def tile_index(pool: Pool, sequence: Int32[Array, " n"], pages: Pages) -> Int32[Array, "groups n block"]:
    """Tiles of pages; the last one for pages that are not live."""
    seqs, groups = pool.rows.page_table.shape[2], pool.groups
    row = sequence[None, :, None] * groups + jnp.arange(groups, dtype=jnp.int32)[:, None, None]
    return jnp.where(pages.live, row * pool.entries + pages.entry, seqs * groups * pool.entries)


def empty_logits(pool: Pool, last: int, heads: int) -> Float32[Array, "tiles last heads page_size"] | None:
    """Logits of no slots for the last queries of all sequences; None if none are asked for."""
    return empty_tiles(pool, last, heads // pool.groups, fill=-jnp.inf) if last else None


def put_logits(
    tiles: Float32[Array, "tiles last heads page_size"],
    logits: Float32[Array, "n kv_heads queries slots"],
    visible: Bool[Array, ...],
    pool: Pool,
    sequence: Int32[Array, " n"],
    pages: Pages,
) -> Float32[Array, "tiles last heads page_size"]:
    """Write a block's logits; queries are the heads of a KV head times the last query alone, or all the last ones."""
    n, kv_heads, queries, _ = logits.shape
    groups, size = pool.groups, pool.page_size
    heads = tiles.shape[2] * groups // kv_heads
    logits = jnp.where(visible, logits, -jnp.inf)
    logits = logits.reshape(n, groups, kv_heads // groups, heads, queries // heads, -1, size)
    logits = logits.transpose(1, 0, 5, 4, 2, 3, 6).reshape(groups, n, -1, queries // heads, tiles.shape[2], size)
    first = tiles.shape[1] - queries // heads
    return tiles.at[tile_index(pool, sequence, pages), first:].set(logits, mode="promise_in_bounds")


def in_rows(
    tiles: Float32[Array, "tiles last heads page_size"], pool: Pool
) -> Float32[Array, "seqs last all_heads slots"]:
    """Bring the tiles of all pages into the order of the rows' entries, and of all heads."""
    _, last, heads, size = tiles.shape
    tiles = tiles[:-1].reshape(-1, pool.groups, pool.entries, last, heads, size)
    return tiles.transpose(0, 3, 1, 4, 2, 5).reshape(-1, last, pool.groups * heads, pool.entries * size)
