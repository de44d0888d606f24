"""Pages of codes in the Hopper kernel: from the bytes that TMA brings to the numbers that the tensor cores multiply.

    pages in memory   codes, scales, positions, as they are stored
      | TMA, page by page          codes: k_full, v_full (filled) and k_free, v_free (emptied by the converter)
    `Codes`           `code_stages` blocks: codes, their scales and positions
      | converter warpgroup        at: k_full, v_full (filled by the converter) and k_free, v_free
    `Scratch`         `stages` blocks: numbers in 16 bits, scales and minima in float32, positions
      | wgmma                      logits = (q numbers^T) * scale + sum(q) * minimum, by columns (slots)
    registers                      out = (weights * scale) numbers + sum(weights * minimum)

Numbers (8-bit floats, integers of 8 bits, nibbles) are exact in bfloat16, so nothing is lost before the products.
Where each channel of a page has a scale and a minimum, keys get theirs on the way and are rounded to 16 bits. Slots
that hold no token get scale and minimum 0: theirs may be NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.formats import Format
from kvjax.kernels.paged_attention.hopper_shared import Config, Scratch


class Codes(NamedTuple):
    """Shared memory and barriers of blocks as they are stored.

    Attributes:
        keys, values: codes [code_stages, block, width].
        positions: int32 [code_stages, block].
        k_full, v_full: copies have arrived.
        k_free, v_free: the converter has done.
        key_scales, value_scales: [code_stages, scales, block], or [code_stages, scales, pieces, head_dim] where each
            channel of a page has them.
    """

    keys: Any
    values: Any
    positions: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    key_scales: Any = None
    value_scales: Any = None


def scratch_of_codes(config: Config) -> dict[str, Any]:
    """Shared memory and barriers for `Codes`; none where pages are plain."""
    if not config.is_coded:
        return {}
    keys, values = config.forms
    stages, block = config.code_stages, config.shape.block
    barrier = lambda arrivals: plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)  # noqa: E731
    scratch = dict(
        keys=_codes(config, keys),
        values=_codes(config, values),
        positions=plgpu.SMEM((stages, block), jnp.int32),
        k_full=barrier((2 + keys.num_scales) * config.pieces),
        k_free=barrier(1),
        v_full=barrier((1 + values.num_scales) * config.pieces),
        v_free=barrier(1),
    )
    for name, form in (("key_scales", keys), ("value_scales", values)):
        if form.num_scales:
            of_scale = (config.pieces, config.head_dim) if form.is_per_channel else (block,)
            scratch[name] = plgpu.SMEM((stages, form.num_scales, *of_scale), jnp.dtype(form.scale_dtype))
    return scratch


def _codes(config: Config, form: Format):
    dtype, columns = jnp.dtype(form.dtype), config.tile_columns
    transforms = (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(dtype.itemsize * columns),  # pyright: ignore[reportAbstractUsage]
    )
    shape = (config.code_stages, config.shape.block, config.head_dim // form.per_code)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def convert_keys(config: Config, codes: Codes, stage, at: Scratch, slot) -> None:
    """Convert a block's keys, their scales and positions, when they are there and their place is free.

    Args:
        config: static choices.
        codes, stage: where they come from.
        at, slot: where they go.
    """
    form = config.forms[0]
    plgpu.barrier_wait(codes.k_full.at[stage])
    position = plgpu.load(codes.positions.at[stage], layout=_OF_SLOTS)
    at.positions[slot] = position
    if form.is_per_channel:
        for j in range(config.pieces):
            rows, scales = pl.ds(j * config.piece, config.piece), codes.key_scales.at[stage, :, j]
            _convert(config, form, codes.keys.at[stage, rows], at.keys.at[slot, rows], scales)
    else:
        _convert(config, form, codes.keys.at[stage], at.keys.at[slot])
        _convert_scales(form, codes.key_scales, stage, at.key_scales, slot, position)
    _pass_on(codes.k_free.at[stage], at.k_full.at[slot])


def convert_values(config: Config, codes: Codes, stage, at: Scratch, slot) -> None:
    """Convert a block's values and their scales, after its keys, when they are there and their place is free."""
    form = config.forms[1]
    plgpu.barrier_wait(codes.v_full.at[stage])
    _convert(config, form, codes.values.at[stage], at.values.at[slot])
    # Only this warpgroup writes positions: they are still those of the block's keys.
    position = plgpu.load(at.positions.at[slot], layout=_OF_SLOTS)
    _convert_scales(form, codes.value_scales, stage, at.value_scales, slot, position)
    _pass_on(codes.v_free.at[stage], at.v_full.at[slot])


_OF_SLOTS = plgpu.Layout.WGMMA.reduce(0)


def _pass_on(emptied, filled) -> None:
    # Orders what was read before the copies to come, and what was written before the products.
    plgpu.commit_smem()
    plgpu.barrier_arrive(emptied)
    plgpu.barrier_arrive(filled)


def _convert_scales(form: Format, source, stage, target, slot, position) -> None:
    for i in range(form.num_scales):
        scale = plgpu.load(source.at[stage, i], layout=_OF_SLOTS).astype(jnp.float32)
        target[slot, i] = jnp.where(position >= 0, scale, 0.0)


def _convert(config: Config, form: Format, source, target, scales=None) -> None:
    """Convert codes [slots, width] to numbers [slots, head_dim], or to keys with the scales [2, head_dim] of channels.

    A part of the columns at a time, which needs few registers.
    """
    layout, columns = _rows_of_8(config.tile_columns), config.tile_columns
    width = source.shape[1]
    for begin in range(0, width, columns):
        codes = plgpu.load(source.at[:, pl.ds(begin, columns)], layout=layout)
        for half, numbers in enumerate(_numbers(codes, form, target.dtype)):
            here = pl.ds(begin + half * width, columns)
            target[:, here] = numbers if scales is None else _scaled(numbers, scales, here, layout)


def _rows_of_8(columns: int):
    """A layout of codes: a warp has 2 of 8 rows, a thread `columns / 16` neighbours of one."""
    tiling = plgpu.Tiling(((8, columns), (2, columns), (columns // 16,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _numbers(codes, form: Format, dtype) -> list[Any]:
    """What codes stand for; of two in a byte, the low ones and the high ones."""
    if form.per_code == 2:
        # Signed bytes have a fast cast and nothing but bitwise operations: the high nibbles are 16 (n - 8) there.
        low, high = codes & jnp.uint8(15), (codes & jnp.uint8(0xF0)) ^ jnp.uint8(0x80)
        low, high = (lax.bitcast_convert_type(of, jnp.int8).astype(dtype) for of in (low, high))
        return [low, high * jnp.asarray(1 / 16, dtype) + jnp.asarray(8, dtype)]
    if form.bits_of is not None:
        # The processor casts them to float16 only, which has all their values; the cast from there goes by float32.
        codes = lax.bitcast_convert_type(codes, jnp.dtype(form.bits_of)).astype(jnp.float16).astype(jnp.float32)
    return [codes.astype(dtype)]


def _scaled(numbers, scales, columns, layout):
    """numbers * scale + minimum of each column, in float32 until they are rounded."""
    scale, minimum = (plgpu.load(scales.at[i, columns], layout=layout.reduce(0)).astype(jnp.float32) for i in range(2))
    spread = lambda of: lax.broadcast_in_dim(of, numbers.shape, [1])  # noqa: E731
    return (numbers.astype(jnp.float32) * spread(scale) + spread(minimum)).astype(numbers.dtype)
