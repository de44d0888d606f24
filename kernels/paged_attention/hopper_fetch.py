"""What the producer of the Hopper kernel copies of a page: keys, values, positions, and scales where it has any."""

from __future__ import annotations

from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.paged_attention.hopper_shared import Config


def fetch_keys(config: Config, pool: tuple[Any, ...], page, there, into, slot, j: int) -> None:
    """Fetch positions and keys, with their scales, as a piece of a block.

    Args:
        config: static choices.
        pool: keys, values, positions, then scales of keys and of values, of one KV head.
        page: its id.
        there: which of its slots.
        into: buffers, with barriers that count the copies.
        slot: which of them.
        j: number of the piece.
    """
    (keys, _, positions, *scales), here = pool, _place(config, j)
    full, form = into.k_full.at[slot], config.forms[0]
    copy_row(positions.at[page, there], into.positions.at[slot, here], full)
    plgpu.copy_gmem_to_smem(keys.at[page, there], into.keys.at[slot, here], full)
    for i, scale in enumerate(scales[: form.num_scales]):
        if form.is_per_channel:
            copy_row(scale.at[page], into.key_scales.at[slot, i, j], full)
        else:
            copy_row(scale.at[page, there], into.key_scales.at[slot, i, here], full)


def fetch_values(config: Config, pool: tuple[Any, ...], page, there, into, slot, j: int) -> None:
    """Fetch values, with their scales, as a piece of a block; see `fetch_keys`."""
    (_, values, _, *scales), here = pool, _place(config, j)
    full = into.v_full.at[slot]
    plgpu.copy_gmem_to_smem(values.at[page, there], into.values.at[slot, here], full)
    for i, scale in enumerate(scales[config.forms[0].num_scales :]):
        copy_row(scale.at[page, there], into.value_scales.at[slot, i, here], full)


def _place(config: Config, j: int):
    """Slots of the jth piece in its block."""
    return pl.ds(j * config.piece, config.piece)


def copy_row(source, target, barrier) -> None:
    """Copy what lies together in device memory, to any multiple of 16 bytes; copies with bounds need one of 128."""
    plgpu.copy_gmem_to_smem(source, target, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
