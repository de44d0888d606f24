"""Running the TPU kernel in the interpreter, races detected and memory poisoned."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers.paged import Paged, assert_equal
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.paged_attention import tpu

DIM = 128
BLOCK = 16  # pages of 8, so that 150 tokens take two blocks


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
