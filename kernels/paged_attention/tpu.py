"""Paged attention on TPUs, in Pallas Mosaic: see `tpu_kernel.py` and `docs/kernels.md`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from kvjax.kernels.formats import FORMATS, Stored
from kvjax.kernels.paged_attention.arguments import Attention, Queries, Rows
from kvjax.kernels.paged_attention.limits import Limits
from kvjax.kernels.paged_attention.tiles import Tiles, tiles_of
from kvjax.kernels.paged_attention.tpu_codes import Pages
from kvjax.kernels.paged_attention.tpu_fetch import Pool
from kvjax.kernels.paged_attention.tpu_kernel import attend_tiles
from kvjax.kernels.paged_attention.tpu_logits import slot_logits
from kvjax.kernels.paged_attention.tpu_plan import LANES, Choices, Shape, plan_steps, table_of

HEAD_DIMS = (128, 256)
PAGE_SIZES = (8, 16, 32, 64, 128)
DTYPES = ("bfloat16", "float32")
MOST_HEADS = 16  # query heads of a KV head
LEAST_PAGE_OF_BYTES = 32  # of codes of 8 bits: rows of a tile of memory
LEAST_PAGE_OF_INT4 = 64  # of codes of 4 bits: smaller pages have scales too large to be copied
MOST_ENTRIES = 1 << 15  # of a row of the page table: three rows take 384 KB of 1 MB of scalar memory
MOST_STEPS = 1 << 14
_BLOCK_BYTES = 1 << 20  # of keys and values, enough to hide the latency of a copy behind the one before
_TILE_ELEMENTS = 1 << 18  # of a tile's queries
_ROWS = 256  # of a tile: intensity as high as the chips' operations for a byte of HBM


_KEYS = tuple(name for name, form in FORMATS.items() if form.is_quantized)
_VALUES = tuple(name for name in _KEYS if not FORMATS[name].is_per_channel)
_LIMITS = Limits(HEAD_DIMS, PAGE_SIZES, DTYPES, MOST_HEADS, _KEYS, _VALUES)


def refuses(*, head_dim: int, page_size: int, key_format: str, value_format: str, **call: Any) -> str | None:
    """Say why the kernel cannot serve a call, or None if it can; see `Limits.refuses`."""
    stored = dict(key_format=key_format, value_format=value_format)
    reason = _LIMITS.refuses(head_dim=head_dim, page_size=page_size, **stored, **call)
    if reason is not None:
        return reason
    for name in stored.values():
        form = FORMATS[name]
        least = (LEAST_PAGE_OF_INT4 if form.per_code == 2 else LEAST_PAGE_OF_BYTES) if form.is_quantized else 1
        if head_dim // form.per_code < LANES:
            return f"head_dim {head_dim} of {name} takes {head_dim // form.per_code} bytes, less than {LANES} lanes"
        if page_size < least:
            return f"page_size {page_size} of {name} is less than {least}"
    return None


def shape_of(
    heads_per_group: int, query_heads: int, page_size: int, head_dim: int, slot_bytes: int, *, is_decode: bool
) -> Shape:
    """Choose steps and blocks that fill about 10 MB of vector memory, and tiles that use the matrix unit.

    `slot_bytes` are those of a key and a value as they are stored, without scales.
    """
    tile_tokens = 1 if is_decode else _ROWS // query_heads
    rows = -(-tile_tokens * query_heads // 8) * 8
    most = min(_TILE_ELEMENTS // (rows * head_dim), 4 * _BLOCK_BYTES // (LANES * slot_bytes))
    heads = max(n for n in range(1, heads_per_group + 1) if heads_per_group % n == 0 and n <= most)
    slots = _BLOCK_BYTES // (heads * slot_bytes)
    # A tile of many rows has logits enough with fewer slots.
    slots = min(max(slots // LANES, 1), 8 if is_decode else 2) * LANES
    return Shape(heads, slots // page_size, tile_tokens)


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
    shape: Shape | None = None,
    interpret: Any = None,
) -> Attention:
    """Attend every query token to the visible slots of its sequence; see `reference.paged_attention`.

    Args:
        keys, values: where keys are per channel, every page that is read is full (`Rows.full_only`).
        last_logits: in a prefill they cost a launch of their own, for the last queries alone.
        max_query_length: static bound of `queries.lengths`; 1 chooses tiles of one token.
        shape: static choices, `shape_of` by default.
        interpret: `pltpu.InterpretParams` to run without a TPU.

    Returns: outputs in the dtype of `q`; softmax and accumulation are float32.

    Raises: NotImplementedError for what the kernel cannot serve.
    """
    keys, values = Stored.of(keys), Stored.of(values)
    (_, in_group, page_size, _), is_decode = keys.codes.shape, max_query_length == 1
    kv_heads, num_tokens, seqs = in_group * rows.page_table.shape[1], q.shape[0], queries.lengths.shape[0]
    heads, head_dim = q.shape[1] // kv_heads, q.shape[2]
    slot_bytes = sum(of.codes.shape[3] * of.codes.dtype.itemsize for of in (keys, values))
    steps_heads = in_group if page_list is None else 1
    shape = shape or shape_of(steps_heads, heads, page_size, head_dim, slot_bytes, is_decode=is_decode)
    tiles = None if is_decode else tiles_of(queries, num_tokens, shape.tile_tokens)
    entries, num_tiles = (rows.page_table if page_list is None else page_list).shape[-1], seqs
    if tiles is not None:
        num_tiles = tiles.tokens.shape[0]
    reason = refuses(
        head_dim=head_dim,
        page_size=page_size,
        dtype=str(q.dtype),
        key_format=keys.form.name,
        value_format=values.form.name,
        heads_per_kv_head=heads,
    )
    reason = reason or _refuses_lone_heads(keys, values)
    reason = reason or _refuses_sizes(
        entries, kv_heads // shape.heads * num_tiles, 0 if is_decode else last_logits, heads
    )
    if reason is not None:
        raise NotImplementedError(f"the TPU kernel cannot serve this call: {reason}")
    given = [q] if sink_query is None else [q, sink_query]
    launch = functools.partial(
        _launch, (keys, values, positions), rows, page_list, sink_logits, scale=scale, soft_cap=soft_cap,
        last_logits=last_logits, interpret=interpret,
    )  # fmt: skip
    if tiles is None:
        places = jnp.minimum(queries.starts, num_tokens - 1)
        attended, lse, logits = launch([of[:, None] for of in given], queries, None, places, shape)
    else:
        places = jnp.arange(num_tiles, dtype=jnp.int32)
        attended, lse, logits = launch([of[tiles.places] for of in given], queries, tiles, places, shape)
        if last_logits:
            recent, number = queries.last(last_logits), jnp.arange(last_logits, dtype=jnp.int32)
            at = jnp.clip(recent.starts[:, None] + number[None], 0, num_tokens - 1)
            shape = dataclasses.replace(shape, tile_tokens=last_logits)
            logits = launch([of[at] for of in given], recent, None, jnp.arange(seqs, dtype=jnp.int32), shape)[2]
    out = _untile_rows(attended, tiles, queries, q.shape, 0)
    return Attention(out, _untile_rows(lse, tiles, queries, (*q.shape[:2], 1), -jnp.inf)[..., 0], logits)


def _refuses_lone_heads(*pools: Stored) -> str | None:
    """Scales of one head to a page are copied at twice their size, and of smaller pages padded further."""
    _, in_group, page_size, _ = pools[0].codes.shape
    for form in (of.form for of in pools):
        if in_group == 1 and page_size < LANES and form.is_quantized and not form.is_per_channel:
            return f"page_size {page_size} of {form.name} is less than {LANES} where a page has one head"
    return None


def _refuses_sizes(entries: int, steps: int, last_logits: int, heads: int) -> str | None:
    if last_logits * heads > _ROWS:
        return f"logits of the last {last_logits} queries of {heads} heads are more than {_ROWS} rows"
    if entries > MOST_ENTRIES:
        return f"rows of {entries} pages are more than {MOST_ENTRIES}, whose ids fit scalar memory"
    if steps > MOST_STEPS:
        return f"{steps} tiles and slices of heads are more than {MOST_STEPS}, whose plan fits scalar memory"
    return None


def _launch(
    pool, rows: Rows, page_list, sink_logits, tokens, queries: Queries, tiles: Tiles | None, places, shape: Shape, *,
    scale: float, soft_cap: float | None, last_logits: int, interpret: Any,
):  # fmt: skip
    """Run the kernel once; logits of slots are returned where each sequence has one tile.

    `tokens` holds the queries, and those for sinks if there are any: [places, tokens of a tile, heads, head_dim].
    """
    (keys, values, positions), (table, layer, piece) = pool, table_of(rows, page_list)
    in_group, page_size, _ = keys.codes.shape[1:]
    kv_heads, has_logits, is_listed = (
        in_group * rows.page_table.shape[1],
        last_logits > 0 and tiles is None,
        page_list is not None,
    )
    plan = plan_steps(
        rows, queries, tiles, layer, places, page_size=page_size, slices=in_group // shape.heads,
        listed=table.shape[-1] if is_listed else None,
    )  # fmt: skip
    heads = tokens[0].shape[2] // kv_heads
    choices = Choices(
        shape, page_size, heads, piece, rows.sinks, scale, soft_cap, len(tokens) > 1, sink_logits is not None,
        has_logits, rows.full_only, is_listed,
    )  # fmt: skip
    num_rows = -(-shape.tile_tokens * heads // 8) * 8
    q, *sink_query = [_tile_rows(of, kv_heads, num_rows) for of in tokens]
    if sink_logits is not None:
        of_heads = sink_logits.astype(jnp.float32).reshape(kv_heads, heads)
        sink_logits = jnp.tile(of_heads, (1, -(-num_rows // heads)))[:, :num_rows, None]
    in_hbm = Pool(_pages(keys), _pages(values), positions, table)
    out, lse, logits = attend_tiles(
        q, in_hbm, plan, sink_query[0] if sink_query else None, sink_logits, choices, interpret
    )
    if logits is not None:
        logits = slot_logits(
            logits, plan, queries.lengths, entries=(page_list if is_listed else rows.page_table).shape[-1],
            pinned=choices.pinned, page_size=page_size, query_heads=heads, last=last_logits,
        )  # fmt: skip
    return out, lse, logits


def _pages(stored: Stored) -> Pages:
    """Pages as the kernel takes them: Mosaic knows no float16."""
    bits = (lax.bitcast_convert_type(of, jnp.uint16) if of.dtype == jnp.float16 else of for of in stored.scales)
    return Pages(stored.codes, tuple(bits), stored.form)


def _tile_rows(tokens: Array, kv_heads: int, num_rows: int):
    """[places, tokens, heads, head_dim] -> [places, kv_heads, rows, head_dim]: a row is a token and a query head."""
    places, tile_tokens, _, head_dim = tokens.shape
    tiled = tokens.reshape(places, tile_tokens, kv_heads, -1, head_dim).swapaxes(1, 2)
    tiled = tiled.reshape(places, kv_heads, -1, head_dim)
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
