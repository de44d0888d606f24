"""What a device can do: bytes it copies and products it computes in a second."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Rates:
    """Measured rates of a device: bytes read and written, and floating-point operations of bfloat16 products."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float


def measure_rates(*, copy_bytes: int = 1 << 30, matmul_size: int = 8192, loops: int = 20, repeats: int = 5) -> Rates:
    """Measure the default device.

    Args:
        copy_bytes: of an array that is read and written whole in every iteration.
        matmul_size: rows and columns of square matrices.
        loops: iterations of a measurement.
        repeats: measurements; the median counts.
    """
    array = jnp.zeros(copy_bytes // 4, jnp.int32)
    copied = 2 * array.size * 4
    x = jax.random.normal(jax.random.key(0), (matmul_size, matmul_size), jnp.bfloat16)
    # So scaled, products stay as large as their factors.
    w = x * jnp.asarray(matmul_size**-0.5, x.dtype)
    return Rates(
        copied / _seconds(functools.partial(_increments, loops=loops), (array,), loops, repeats),
        2 * matmul_size**3 / _seconds(functools.partial(_products, loops=loops), (x, w), loops, repeats),
    )


def _increments(x, *, loops: int):
    # A copy that XLA cannot leave out.
    return jax.lax.fori_loop(0, loops, lambda _, x: x + 1, x)


def _products(x, w, *, loops: int):
    return jax.lax.fori_loop(0, loops, lambda _, x: x @ w, x)


def _seconds(function: Any, arguments: tuple[Any, ...], loops: int, repeats: int) -> float:
    program = jax.jit(function)
    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append(time.perf_counter() - began)
    return statistics.median(times) / loops
