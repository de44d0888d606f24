"""What the kernels are measured beside: jax's own attention, paged and not, and the obvious program in XLA."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.benchmarks.kernel_cases import Case
from kvjax.kernels.paged_attention import hopper, xla
from kvjax.kernels.shapes import AttentionShape


class Contender(NamedTuple):
    """One way to compute a layer's attention.

    Attributes:
        name: for the report.
        prepare: makes the arrays that it reads from a case; NotImplementedError says why a case is not for it.
        attend: (shape, arrays, q, layer) -> outputs [tokens, heads, head_dim].
        takes_traced_layers: whether `layer` may be traced; otherwise its arrays are a leaf a layer.
        planner: returns the function that plans a step of a case for all its layers, where there is a plan.
    """

    name: str
    prepare: Callable[[Case], Any]
    attend: Callable[[AttentionShape, Any, Array, Any], Array]
    takes_traced_layers: bool = True
    planner: Callable[[Case], Callable[[], Any]] | None = None


HOPPER, XLA = "kvjax hopper", "kvjax xla"
GATHER, TRITON, CUDNN = "gather and einsum", "jax paged attention (Triton)", "jax cuDNN attention"


def contenders(device_kind: str) -> list[Contender]:
    """Return what can run on a device: the kernel for Hopper only where the device is one."""
    own = [Contender(HOPPER, _planned_pages, _hopper, planner=_planner)] if device_kind != "cpu" else []
    others = [
        Contender(XLA, _pages, _xla),
        Contender(GATHER, _pages, _gather),
        Contender(TRITON, _pages_of_heads, _triton),
        Contender(CUDNN, _contiguous, _cudnn, takes_traced_layers=False),
    ]
    return own + others


def _pages(case: Case):
    return case.keys, case.values, case.positions, case.rows, case.queries


def _planned_pages(case: Case):
    return (*_pages(case), _planner(case)())


def _planner(case: Case) -> Callable[[], Any]:
    def plan(rows, queries):
        return hopper.plan(
            rows, queries, num_tokens=case.q.shape[0], heads=case.shape.heads, head_dim=case.shape.head_dim,
            heads_per_group=case.keys.shape[1], page_size=case.shape.page_size, max_query_length=case.shape.queries,
        )  # fmt: skip

    return functools.partial(jax.jit(plan), case.rows, case.queries)


def _hopper(shape: AttentionShape, arrays, q, layer):
    *arrays, plan = arrays
    return _by(hopper, shape, arrays, q, layer, plan=plan)


def _xla(shape: AttentionShape, arrays, q, layer):
    return _by(xla, shape, arrays, q, layer)


def _by(kernel: Any, shape: AttentionShape, arrays, q, layer, **options):
    keys, values, positions, rows, queries = arrays
    rows = dataclasses.replace(rows, layer=jnp.asarray(layer, jnp.int32))
    return kernel.paged_attention(
        q, keys, values, positions, rows, queries, scale=shape.head_dim**-0.5, max_query_length=shape.queries, **options
    ).out


def _gather(shape: AttentionShape, arrays, q, layer):
    """All pages of a sequence side by side, then two products: for sequences of one length."""
    keys, values, positions, rows, queries = arrays
    ids = rows.page_table[layer, 0]
    seqs, grouped = ids.shape[0], (shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    q = q.reshape(seqs, shape.queries, *grouped)
    logits = jnp.einsum("sqkgd,sekpd->skgqep", q, keys[ids], preferred_element_type=jnp.float32)
    at = positions[ids][:, None]
    query = (queries.positions[:, None] + jnp.arange(shape.queries, dtype=jnp.int32)[None])[..., None, None]
    seen = (at >= 0) & (at <= query) & (query - at < rows.windows[layer])
    logits = jnp.where(seen[:, None, None], logits * shape.head_dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(logits, axis=(-2, -1)).astype(q.dtype)
    out = jnp.einsum("skgqep,sekpd->sqkgd", weights, values[ids], preferred_element_type=jnp.float32)
    return out.reshape(-1, shape.heads, shape.head_dim).astype(q.dtype)


def _pages_of_heads(case: Case):
    """The pool with its heads first, as jax's own kernel has it."""
    if case.shape.queries > 1 or case.shape.window:
        raise NotImplementedError("it serves decode without a window only")
    _triton_kernel()
    keys, values = (jnp.swapaxes(pool, 0, 1) for pool in (case.keys, case.values))
    return keys, values, case.rows.page_table[:, 0], case.rows.end_slot[:, 0]


def _triton_kernel():
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    except ImportError as error:
        raise NotImplementedError(f"this jax does not have it: {error}") from None
    return paged_attention


def _triton(shape: AttentionShape, arrays, q, layer, interpret=False):
    keys, values, tables, lengths = arrays
    # It takes scaled queries.
    q = q * jnp.asarray(shape.head_dim**-0.5, q.dtype)
    # Its own choices, 16 splits and blocks of 8 pages of 16 slots, as far as they divide the pages.
    splits = math.gcd(tables.shape[-1], 16)
    block = math.gcd(tables.shape[-1] // splits, max(128 // shape.page_size, 1))
    return _triton_kernel()(
        q, keys, values, tables[layer], lengths[layer], k_splits=splits, pages_per_compute_block=block,
        interpret=interpret,
    )  # fmt: skip


def _contiguous(case: Case):
    """Keys and values of the tokens that are seen, without pages, [seqs, tokens, kv_heads, head_dim] a layer."""
    shape = case.shape
    if shape.queries > 1 and (shape.queries < shape.context or shape.window):
        raise NotImplementedError("its causal mask begins at the first key: no queries behind a prefix, no windows")
    slots = jnp.arange(max(shape.context - case.window, 0), shape.context, dtype=jnp.int32)
    entries, offsets = slots // shape.page_size % case.rows.rings[0], slots % shape.page_size
    ids = case.rows.page_table[:, 0][:, :, entries]
    return tuple(
        tuple(pool[ids[layer], :, offsets[None]] for layer in range(case.layers)) for pool in (case.keys, case.values)
    )


def _cudnn(shape: AttentionShape, arrays, q, layer, implementation: Literal["cudnn", "xla"] = "cudnn"):
    keys, values = (of_layers[layer] for of_layers in arrays)
    out = jax.nn.dot_product_attention(
        q.reshape(keys.shape[0], -1, *q.shape[1:]), keys, values, scale=shape.head_dim**-0.5,
        is_causal=shape.queries > 1, implementation=implementation,
    )  # fmt: skip
    return out.reshape(q.shape)
