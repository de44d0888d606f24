"""Which implementation of paged attention serves a call, and why."""

from __future__ import annotations

from typing import Any

import jax

from kvjax.errors import InputError
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
