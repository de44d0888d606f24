"""Which implementation of paged attention serves a call, and why; and calling it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.errors import InputError
from kvjax.kernels.paged_attention import Attention, reference
from kvjax.spec import CacheSpec

IMPLEMENTATIONS = ("hopper", "tpu", "xla", "reference")  # in the order in which they are tried
_HOPPER = ("H100", "H200", "H800", "H20", "GH200")


def candidates(spec: CacheSpec, query_heads: int, dtype: str, implementation: str | None) -> list[str]:
    """Return the implementations that can serve a call, the one that is to run first: the named one, or all that can.

    Args:
        spec: of the cache.
        query_heads: heads of the queries.
        dtype: of the queries.
        implementation: a name, or None.

    Raises: InputError for an unknown name, NotImplementedError with the reason for one that cannot serve the call.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise InputError(f"implementation {implementation!r} is unknown: use one of {', '.join(IMPLEMENTATIONS)}")
    device = _device()
    if implementation is None:
        return [name for name in IMPLEMENTATIONS if _refusal(name, spec, query_heads, dtype, device) is None]
    reason = _refusal(implementation, spec, query_heads, dtype, device)
    if reason is not None:
        raise NotImplementedError(f"implementation {implementation!r} cannot serve this call: {reason}")
    return [implementation]


def explain(spec: CacheSpec, query_heads: int, platform: str | None = None) -> list[tuple[str, str]]:
    """Tell which implementation `attend` runs, and why.

    Args:
        spec: of the cache; the queries are taken to have the dtype of its pages, bfloat16 for quantised ones.
        query_heads: heads of the queries.
        platform: a device kind or platform such as "H200" or "cpu"; this machine's by default.

    Returns: (implementation, reason) in the order in which they are tried. The first whose reason begins with "runs" is
        the one that does; those behind it would serve the call too where theirs does.

    Raises: InputError if query_heads is no multiple of the cache's KV heads.
    """
    if query_heads < 1 or query_heads % spec.num_kv_heads:
        raise InputError(f"query_heads {query_heads} is no multiple of the cache's {spec.num_kv_heads} KV heads")
    device = platform or _device()
    refusals = ((name, _refusal(name, spec, query_heads, spec.query_dtype, device)) for name in IMPLEMENTATIONS)
    return [(name, f"runs on {device}" if reason is None else reason) for name, reason in refusals]


def _device() -> str:
    """The kind of device that programs are compiled for: that of the mesh in use, else of this machine."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return device.device_kind if device is not None else jax.devices()[0].device_kind


def _refusal(implementation: str, spec: CacheSpec, query_heads: int, dtype: str, device: str) -> str | None:
    if implementation not in ("hopper", "tpu"):
        return None
    words = device.upper().replace("-", " ").split()
    shape: dict[str, Any] = dict(
        head_dim=spec.head_dim, page_size=spec.page_size, dtype=dtype, key_format=spec.key_form.name,
        value_format=spec.value_form.name,
        heads_per_kv_head=query_heads // spec.num_kv_heads,
    )  # fmt: skip
    if implementation == "hopper":
        if not any(name in words for name in _HOPPER):
            return f"{device} is no Hopper GPU ({', '.join(_HOPPER)})"
        from kvjax.kernels.paged_attention import hopper

        return hopper.refuses(**shape)
    if "TPU" not in words:
        return f"{device} is no TPU"
    from kvjax.kernels.paged_attention import tpu

    return tpu.refuses(**shape)


def run_first(names: list[str], arguments, open_keys: Array | None, options: dict[str, Any], plan) -> Attention:
    """Attend by the first implementation that takes the call."""
    *others, last = names
    for name in others:
        # What only the call tells may still be too much for a kernel; then the next one serves it.
        with contextlib.suppress(NotImplementedError):
            return _run(name, arguments, open_keys, options, plan)
    return _run(last, arguments, open_keys, options, plan)


def _run(name: str, arguments: tuple[Any, ...], open_keys: Array | None, options: dict[str, Any], plan) -> Attention:
    """Attend by the implementation of that name."""
    backend: Callable[..., Attention]
    if name == "reference":
        return _on_host(arguments, open_keys, options)
    if name == "hopper":
        from kvjax.kernels.paged_attention import hopper

        backend = functools.partial(hopper.paged_attention, plan=plan)
    elif name == "tpu":
        from kvjax.kernels.paged_attention import tpu

        backend = tpu.paged_attention
    else:
        from kvjax.kernels.paged_attention import xla

        backend = xla.paged_attention
    if open_keys is None:
        return backend(*arguments, **options)
    from kvjax.kernels.paged_attention import open_pages

    return open_pages.paged_attention(backend, *arguments, open_keys=open_keys, **options)


def _on_host(arguments, open_keys: Array | None, options: dict[str, Any]) -> Attention:
    """Attend by the definition."""
    q, rows, last = arguments[0], arguments[4], options.get("last_logits", 0)
    static = {name: options[name] for name in ("scale", "soft_cap")} | dict(last_logits=last)

    def attend(arguments, given):
        of = reference.paged_attention(*arguments, **given, **static)
        return jax.tree.map(lambda like, array: np.asarray(array, like.dtype), like, (of.out, of.lse, of.slot_logits))

    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    listed = options.get("page_list")
    slots = arguments[3].shape[1] * (rows.page_table if listed is None else listed).shape[-1]
    logits = shape(jnp.float32, rows.page_table.shape[2], last, q.shape[1], slots) if last else None
    like: Any = (shape(q.dtype, *q.shape), shape(jnp.float32, *q.shape[:2]), logits)
    given = {name: options[name] for name in ("sink_logits", "sink_query")}
    given |= dict(open_keys=open_keys, page_list=listed)
    return Attention(*jax.pure_callback(attend, like, arguments, given))
