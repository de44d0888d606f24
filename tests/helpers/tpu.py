"""Running the TPU kernel in the interpreter, races detected and memory poisoned."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers.paged import Paged, assert_equal
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.formats import FORMATS, Stored
from kvjax.kernels.paged_attention import tpu

DIM = 128
BLOCK = 16  # pages of 8, so that 150 tokens take two blocks


def quantized(forms: tuple[str, str], **changes) -> Paged:
    """A case with the smallest pages that the kernel takes in these formats; what no token wrote is poisoned."""
    has_int4 = any(FORMATS[form].per_code == 2 for form in forms)
    smallest: dict[str, Any] = dict(page_size=64, head_dim=2 * DIM) if has_int4 else dict(page_size=32, head_dim=DIM)
    given: dict[str, Any] = dict(kv_heads=2, heads=4, forms=forms) | smallest | changes
    case = Paged(**given)
    q, keys, values, positions, rows, queries = case.arguments
    full_only = FORMATS[forms[0]].is_per_channel
    keys, values = (_poisoned(of, positions < 0) for of in (keys, values))
    case.arguments = (q, keys, values, positions, dataclasses.replace(rows, full_only=full_only), queries)
    return case


def _poisoned(pages: Stored, is_empty) -> Stored:
    """Pages whose empty slots have NaN for scales and, where codes are floats, for codes."""
    if not pages.form.is_quantized or pages.form.is_per_channel:
        return pages
    scales = tuple(jnp.where(is_empty[:, None], jnp.nan, of) for of in pages.scales)
    poison = jnp.asarray(127, pages.codes.dtype)  # NaN in both formats of 8-bit floats
    return Stored(jnp.where(is_empty[:, None, :, None], poison, pages.codes), scales, pages.form)


def attend(case: Paged, *, mode: Any = "eager", shape=None, arguments=None, kernel=tpu, **options):
    """Run the kernel in the interpreter."""
    given = case.options | options
    arrays = {name: jnp.asarray(value) for name, value in given.items() if np.ndim(value)}
    static = {name: value for name, value in given.items() if not np.ndim(value)}
    heads = case.kv_heads // case.groups
    tile_tokens = 1 if case.longest == 1 else 32 * case.kv_heads // case.heads
    shape = shape or tpu.Shape(1 if "page_list" in options else heads, 128 // case.page_size, tile_tokens)
    run = functools.partial(
        kernel.paged_attention, shape=shape, max_query_length=1 if case.longest == 1 else 128,
        interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode, uninitialized_memory="nan"),
        **static,
    )  # fmt: skip
    # One program: compiling operation by operation takes longer.
    return jax.jit(run)(*(case.arguments if arguments is None else arguments), **arrays)


def check(attention, case: Paged, **options):
    assert_equal(attention, case.reference(**options), 0.02 if case.dtype == jnp.bfloat16 else 1e-5)
