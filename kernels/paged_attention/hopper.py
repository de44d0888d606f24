"""Paged attention on NVIDIA Hopper (sm_90a), in Pallas Mosaic GPU: see `hopper_kernel.py` and `docs/kernels.md`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.kernels.formats import FORMATS, Stored
from kvjax.kernels.paged_attention.arguments import Attention, Queries, Rows
from kvjax.kernels.paged_attention.hopper_join import Parts, join_fragments
from kvjax.kernels.paged_attention.hopper_kernel import attend_tiles
from kvjax.kernels.paged_attention.hopper_logits import logits_by_slot
from kvjax.kernels.paged_attention.hopper_plan import Plan, listed_rows, make_plan, shape_of, tokens_of_tile
from kvjax.kernels.paged_attention.hopper_shared import Config, Inputs, Shape
from kvjax.kernels.paged_attention.limits import Limits
from kvjax.kernels.paged_attention.tiles import Tiles

HEAD_DIMS = (64, 96, 128, 256)
PAGE_SIZES = (8, 16, 32, 64, 128)
DTYPES = ("bfloat16", "float16")
MOST_HEADS = 16  # query heads of a KV head
_KEYS = tuple(name for name, form in FORMATS.items() if form.is_quantized)
_VALUES = tuple(name for name in _KEYS if not FORMATS[name].is_per_channel)
_LIMITS = Limits(HEAD_DIMS, PAGE_SIZES, DTYPES, MOST_HEADS, _KEYS, _VALUES)


def refuses(*, head_dim: int, key_format: str, value_format: str, **call: Any) -> str | None:
    """Say why the kernel cannot serve a call, or None if it can; see `Limits.refuses`."""
    reason = _LIMITS.refuses(head_dim=head_dim, key_format=key_format, value_format=value_format, **call)
    if reason is not None:
        return reason
    if FORMATS[key_format].is_quantized != FORMATS[value_format].is_quantized:
        return f"of keys of {key_format} and values of {value_format} only one is quantised"
    for name in (key_format, value_format):
        width = head_dim // FORMATS[name].per_code
        if width % 32:
            return f"head_dim {head_dim} of {name} takes {width} bytes, which is no multiple of 32"
    return None


def plan(
    rows: Rows, queries: Queries, *, num_tokens: int, heads: int, head_dim: int, heads_per_group: int, page_size: int,
    max_query_length: int,
) -> Plan:  # fmt: skip
    """Plan a step for all its layers, for `paged_attention`.

    Args:
        rows, queries: of the step; the plan serves any `rows.layer`.
        num_tokens: places for packed tokens (static).
        heads: query heads of a layer; head_dim, heads_per_group, page_size: of the pool.
        max_query_length: as in `paged_attention`.
    """
    kv_heads, is_decode = heads_per_group * rows.page_table.shape[1], max_query_length == 1
    shape = shape_of(head_dim, kv_heads, is_decode=is_decode)
    tile_tokens = tokens_of_tile(shape, heads // kv_heads, is_decode=is_decode)
    return make_plan(rows, queries, num_tokens=num_tokens, page_size=page_size, shape=shape, tile_tokens=tile_tokens)


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
    page_list: Int32[Array, "kv_heads seqs n"] | None = None,
    last_logits: int = 0,
    max_query_length: int,
    plan: Plan | None = None,
    shape: Shape | None = None,
    interpret: Any = None,
) -> Attention:
    """Attend every query token to the visible slots of its sequence; see `reference.paged_attention`.

    Args:
        keys, values: where keys are per channel, every page that is read is full (`Rows.full_only`).
        max_query_length: static bound of `queries.lengths`; 1 chooses tiles of one token.
        plan: what `plan` returned for this step, else it is made here.
        shape: static choices, `shape_of` by default.
        interpret: `plgpu.InterpretGPUParams` to run without a GPU.

    Returns: outputs in the dtype of `q`; softmax and accumulation are float32.

    Raises: NotImplementedError for what the kernel cannot serve; ValueError for a page list in a step that is not of
        one query token a sequence.
    """
    keys, values = Stored.of(keys), Stored.of(values)
    kv_heads = keys.codes.shape[1] * rows.page_table.shape[1]
    reason = refuses(
        head_dim=q.shape[2], page_size=keys.codes.shape[2], dtype=str(q.dtype), key_format=keys.form.name,
        value_format=values.form.name, heads_per_kv_head=q.shape[1] // kv_heads,
    )  # fmt: skip
    if page_list is not None and rows.sinks:
        reason = "a page list and sinks in one call"
    if reason is not None:
        raise NotImplementedError(f"the Hopper kernel cannot serve this call: {reason}")
    if page_list is not None and max_query_length > 1:
        raise ValueError(f"page_list goes with max_query_length 1, not {max_query_length}")
    call = Call(keys, values, positions, rows, page_list, scale, soft_cap, shape, interpret)
    queried = (q,) if sink_query is None or not rows.sinks else (q, sink_query)
    if max_query_length == 1:
        return call.attend(queried, queries, sink_logits, plan, is_decode=True, last_logits=last_logits)
    attention = call.attend(queried, queries, sink_logits, plan, is_decode=False)
    if last_logits:
        # Few queries beside those of the prefill, for which keys and values are read once more.
        last = call.attend(queried, queries.last(last_logits), None, None, is_decode=False, last_logits=last_logits)
        attention = dataclasses.replace(attention, slot_logits=last.slot_logits)
    return attention


@dataclasses.dataclass(frozen=True)
class Call:
    """A call's pool, rows and options, as `paged_attention` takes them."""

    keys: Stored
    values: Stored
    positions: Array
    rows: Rows
    page_list: Array | None
    scale: float
    soft_cap: float | None
    shape: Shape | None
    interpret: Any

    def config(self, queried: tuple[Any, ...], *, is_decode: bool, has_logits: bool) -> Config:
        """Choose what is static, for queries or their shapes."""
        (_, heads, head_dim), (_, in_group, page_size, _) = queried[0].shape, self.keys.codes.shape
        kv_heads = in_group * self.rows.page_table.shape[1]
        shape = self.shape or shape_of(head_dim, kv_heads, is_decode=is_decode)
        return Config(
            shape=shape, page_size=page_size, heads_per_group=in_group, head_dim=head_dim,
            forms=(self.keys.form, self.values.form), heads=heads // kv_heads,
            tile_tokens=tokens_of_tile(shape, heads // kv_heads, is_decode=is_decode), kinds=len(queried),
            sinks=self.rows.sinks, is_listed=self.page_list is not None, has_logits=has_logits, scale=self.scale,
            soft_cap=self.soft_cap, is_interpreted=self.interpret is not None,
        )  # fmt: skip

    def attend(
        self, queried: tuple[Array, ...], queries: Queries, sink_logits, plan: Plan | None, *, is_decode: bool,
        last_logits: int = 0,
    ) -> Attention:  # fmt: skip
        """Attend queries, of as many kinds as are given."""
        config = self.config(queried, is_decode=is_decode, has_logits=last_logits > 0)
        num_tokens, heads, _ = queried[0].shape
        rows, shape, page_size = self.rows, config.shape, config.page_size
        if self.page_list is not None:
            rows, plan = listed_rows(rows, self.page_list, page_size), None
        if plan is None or (plan.shape, plan.tile_tokens) != (shape, config.tile_tokens):
            plan = make_plan(
                rows, queries, num_tokens=num_tokens, page_size=page_size, shape=shape,
                tile_tokens=config.tile_tokens, is_ordered=self.page_list is None,
            )  # fmt: skip
        given = self._inputs(queried, rows, plan, config)
        most_blocks = config.sink_blocks + -(-rows.page_table.shape[-1] * page_size // shape.block)
        scales = (self.keys.scales, self.values.scales)
        out, stats, logits = attend_tiles(given, scales, config, most_blocks, self.interpret)
        joined, lse = join_fragments(Parts(out, stats), given, sink_logits, config, self.interpret)
        out = _untile_rows(joined, plan.tiles, queries, queried[0].shape, 0)
        lse = _untile_rows(lse[..., None], plan.tiles, queries, (num_tokens, heads, 1), -jnp.inf)
        if logits is not None:
            logits = logits_by_slot(logits, rows, queries, plan.work, config, last_logits)
        return Attention(out, lse[..., 0], logits)

    def _inputs(self, queried, rows: Rows, plan: Plan, config: Config) -> Inputs:
        kv_heads, tiles = queried[0].shape[1] // config.heads, plan.tiles
        tiled = [_tile_rows(q, tiles, kv_heads, config) for q in queried]
        return Inputs(
            jnp.stack(tiled, axis=2), self.keys.codes, self.values.codes, self.positions, rows.page_table, plan.rings,
            plan.windows, rows.layer[None], tiles.sequence, tiles.tokens, tiles.position, tiles.start,
            *vars(plan.work).values(),
        )  # fmt: skip


def _tile_rows(q, tiles: Tiles, kv_heads: int, config: Config):
    """[tokens, heads, head_dim] -> [tiles, kv_heads, parts, rows, head_dim]: a row is a token and a query head."""
    # Tiles of one token are the tokens in order.
    tokens = q[:, None] if config.tile_tokens == 1 else q[tiles.places]
    tiled = tokens.reshape(*tiles.places.shape, kv_heads, -1, q.shape[-1]).swapaxes(1, 2)
    tiled = tiled.reshape(tiled.shape[0], kv_heads, -1, q.shape[-1])
    tiled = jnp.pad(tiled, ((0, 0), (0, 0), (0, config.parts * config.rows - tiled.shape[2]), (0, 0)))
    return tiled.reshape(-1, kv_heads, config.parts, config.rows, q.shape[-1])


def _untile_rows(tiled, tiles: Tiles, queries: Queries, shape: tuple[int, ...], nothing: float):
    """[tiles, kv_heads, rows, n] -> [tokens, heads, n], `nothing` for places without a token."""
    num_tiles, kv_heads = tiled.shape[:2]
    if tiles.places.shape[1] == 1:
        return tiled.reshape(shape)
    heads, tile_tokens = shape[1] // kv_heads, tiles.places.shape[1]
    of_tokens = tiled[:, :, : tile_tokens * heads].reshape(num_tiles, kv_heads, tile_tokens, heads, shape[2])
    of_tokens = of_tokens.swapaxes(1, 2).reshape(-1, *shape[1:])
    place = jnp.arange(shape[0], dtype=jnp.int32)
    ends = queries.starts + queries.lengths
    sequence = jnp.minimum((ends[None] <= place[:, None]).sum(1, dtype=jnp.int32), ends.shape[0] - 1)
    before = jnp.cumsum(-(-queries.lengths // tile_tokens), dtype=jnp.int32) - -(-queries.lengths // tile_tokens)
    row = before[sequence] * tile_tokens + place - queries.starts[sequence]
    is_token = (place >= queries.starts[sequence]) & (place < ends[sequence])
    taken = of_tokens[jnp.where(is_token, row, 0)]
    return jnp.where(is_token[:, None, None], taken, jnp.asarray(nothing, taken.dtype))
