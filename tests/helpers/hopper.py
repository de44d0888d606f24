"""Running the Hopper kernel without a GPU."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from helpers.paged import Paged, assert_equal
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax.kernels.formats import Stored
from kvjax.kernels.paged_attention import (
    Attention,
    hopper,
    hopper_block,
    hopper_codes,
    hopper_fetch,
    hopper_join,
    hopper_kernel,
    hopper_logits,
    hopper_plan,
    hopper_run,
    hopper_shared,
    tiles,
)

# Of the kernel, those that others use first: what faults are planted in.
MODULES = (
    tiles, hopper_shared, hopper_plan, hopper_block, hopper_codes, hopper_fetch, hopper_run, hopper_kernel, hopper_join,
    hopper_logits, hopper,
)  # fmt: skip
SMALL = hopper_shared.Shape(block=64, stages=2, workers=3, consumers=2, shares_blocks=False)
PREFILL = dataclasses.replace(SMALL, shares_blocks=True)


def attend(case: Paged, *, shape=SMALL, arguments=None, kernel=hopper, **options) -> Attention:
    """Run the kernel in the interpreter."""
    given = {name: jnp.asarray(value) if np.ndim(value) else value for name, value in case.options.items()}
    return kernel.paged_attention(
        *(case.arguments if arguments is None else arguments), shape=shape,
        max_query_length=1 if case.longest == 1 else 128,
        interpret=plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"), **given | options,
    )  # fmt: skip


def check(attention: Attention, case: Paged, **options) -> None:
    """Compare with the definition."""
    assert_equal(attention, case.reference(**options), 0.02)


def forget_state() -> None:
    """After an exception the interpreter keeps its state."""
    gpu_callbacks.reset_gpu_interpret_mode_state()


def quantized(*lengths, forms: tuple[str, str], **changes) -> Paged:
    """A case of quantised pages, their full ones only where keys are per channel; garbage in slots without a token."""
    case = Paged(*lengths, forms=forms, **changes)
    q, keys, values, positions, rows, queries = case.arguments
    rows = dataclasses.replace(rows, full_only="int4_per_channel" in forms)
    case.arguments = (q, _spoilt(keys, positions), _spoilt(values, positions), positions, rows, queries)
    return case


def _spoilt(pages: Stored, positions) -> Stored:
    """Pages with NaN, or the largest code, and scales of NaN in slots that hold no token."""
    used = (positions >= 0)[:, None]
    nothing = jnp.asarray(0x7F if pages.form.is_quantized else jnp.nan, pages.codes.dtype)
    codes = jnp.where(used[..., None], pages.codes, nothing)
    if pages.form.is_per_channel:
        return dataclasses.replace(pages, codes=codes)
    return dataclasses.replace(pages, codes=codes, scales=tuple(jnp.where(used, of, jnp.nan) for of in pages.scales))
