"""Writing keys and values of new tokens into their pages on NVIDIA Hopper, in Pallas Mosaic GPU: in place, one launch.

A CTA serves some slots of one touched page. Rows of all heads go from the packed tokens to shared memory and from there
to their slots by TMA; no thread touches them. Only what changes is moved: new tokens, and zeros behind the last one.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32, Shaped

_SHARED_BYTES = 64 << 10  # for the rows of a CTA: three of them fit a processor
_TMA_BYTES = 16  # a row must be a multiple
_MOST_BARRIERS = 32  # of a group; a slot has one
_SHARED_ALIGNMENT = 128  # bytes, of what TMA copies in shared memory


def refuses(*, head_dim: int, pool_dtype: str) -> str | None:
    """Say why the kernel cannot serve a call, or None if it can."""
    row = head_dim * jnp.dtype(pool_dtype).itemsize
    return f"rows of {row} bytes are no multiple of {_TMA_BYTES}" if row % _TMA_BYTES else None


def write_pages(
    pools: tuple[Shaped[Array, "pages heads page_size _"], ...],
    new: tuple[Shaped[Array, "groups tokens heads _"], ...],
    pages: Int32[Array, "layers groups touched"],
    first_tokens: Int32[Array, "layers groups touched"],
    begins: Int32[Array, "layers groups touched"],
    ends: Int32[Array, "layers groups touched"],
    blanks: Int32[Array, "layers groups touched"],
    layer: Int32[Array, ""],
    *,
    interpret: Any = None,
) -> tuple[Shaped[Array, "pages heads page_size _"], ...]:
    """Store tokens page by page and zero what is behind the last one, in all pools at once; see `kernels.write_pages`.

    Args:
        pools: keys and values, or their codes, of one page size and number of heads. In a jitted program that donates
            them they are changed where they are.
        new: what each pool gets.
        pages, first_tokens, begins, ends, blanks: those of all layers, so that no slice of them need be made.
        layer: the one that is written.
        interpret: `plgpu.InterpretGPUParams` to run without a GPU.

    Raises: NotImplementedError for rows that TMA cannot copy.
    """
    for pool in pools:
        reason = refuses(head_dim=pool.shape[3], pool_dtype=str(pool.dtype))
        if reason is not None:
            raise NotImplementedError(f"the Hopper kernel cannot serve this call: {reason}")
    size = pools[0].shape[2]
    rows = [(_aligned_heads(pool), pool.shape[3]) for pool in pools]
    of_slot = sum(math.prod(row) * pool.dtype.itemsize for row, pool in zip(rows, pools, strict=True))
    chunk = size
    while chunk > 1 and (chunk > _MOST_BARRIERS or chunk * of_slot > _SHARED_BYTES):
        chunk //= 2
    new = tuple(of.astype(pool.dtype) for of, pool in zip(new, pools, strict=True))
    refs = tuple(jax.new_ref(pool) for pool in pools)
    plgpu.kernel(
        lambda *refs: _write(*refs, count=len(pools), chunk=chunk),
        grid=(size // chunk, pages.shape[2], pages.shape[1]),
        grid_names=("chunk", "touched", "group"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=[
            *(plgpu.SMEM((chunk, *row), pool.dtype) for row, pool in zip(rows, pools, strict=True)),
            *(plgpu.SMEM((_repeats(row), *row), pool.dtype) for row, pool in zip(rows, pools, strict=True)),
            plgpu.Barrier(num_arrivals=len(pools), num_barriers=chunk),
        ],
        interpret=interpret,
    )(*new, pages, first_tokens, begins, ends, blanks, layer[None], *refs)
    return tuple(jax.freeze(ref) for ref in refs)


def _aligned_heads(pool) -> int:
    """Heads of a slot in shared memory, the last of which may stand empty: every slot begins where TMA can copy it."""
    step = _SHARED_ALIGNMENT // math.gcd(pool.shape[3] * pool.dtype.itemsize, _SHARED_ALIGNMENT)
    return -(-pool.shape[1] // step) * step


def _repeats(row: tuple[int, int]) -> int:
    """Rows of zeros that the 128 threads of a warpgroup can store together."""
    return 128 // math.gcd(math.prod(row), 128)


def _write(*refs, count: int, chunk: int) -> None:
    """The kernel's body: new rows of every pool, five arrays of where they go, the layer, the pools, scratch."""
    new, (*where, layer), rest = refs[:count], refs[count : count + 6], refs[count + 6 :]
    pools, rows, zeros, arrived = rest[:count], rest[count : 2 * count], rest[2 * count : 3 * count], rest[-1]
    group, touched = lax.axis_index("group"), lax.axis_index("touched")
    page, first, begin, end, blank = (of[layer[0], group, touched] for of in where)
    first_slot = lax.axis_index("chunk") * chunk
    mine, behind, unused = (jnp.clip(slot - first_slot, 0, chunk) for slot in (begin, end, blank))

    def fetch(i, _):
        for source, target in zip(new, rows, strict=True):
            token = first + first_slot + i - begin
            plgpu.copy_gmem_to_smem(source.at[group, token], target.at[i, pl.ds(0, source.shape[2])], arrived.at[i])
        return _

    def store(i, _):
        plgpu.barrier_wait(arrived.at[i])
        for row, pool in zip(rows, pools, strict=True):
            plgpu.copy_smem_to_gmem(row.at[i, pl.ds(0, pool.shape[1])], pool.at[page, :, first_slot + i])
        return _

    def clear(i, _):
        for zero, pool in zip(zeros, pools, strict=True):
            plgpu.copy_smem_to_gmem(zero.at[0, pl.ds(0, pool.shape[1])], pool.at[page, :, first_slot + i])
        return _

    @pl.when(page > 0)
    def _():
        lax.fori_loop(mine, behind, fetch, jnp.int32(0))
        for zero in zeros:
            zero[...] = jnp.zeros(zero.shape, zero.dtype)
        plgpu.commit_smem()
        lax.fori_loop(unused, chunk, clear, jnp.int32(0))
        lax.fori_loop(mine, behind, store, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
