"""Which implementation serves a call, and what is said about it."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.implementations import candidates
from kvjax.kernels import write_pages_hopper
from kvjax.kernels.paged_attention import hopper
from kvjax.kernels.write_pages import write_pages


def spec(**changes) -> kvjax.CacheSpec:
    shape: dict[str, Any] = dict(
        num_layers=1, num_kv_heads=2, head_dim=64, num_pages=9, max_seqs=1, pages_per_seq=4, max_query_length=4
    )
    return kvjax.CacheSpec(**(shape | changes))


@pytest.mark.parametrize(
    "changes, heads, platform, reasons",
    [
        (dict(), 8, "NVIDIA H200", dict(hopper="runs on NVIDIA H200", tpu="NVIDIA H200 is no TPU", xla="runs on")),
        (dict(), 8, "NVIDIA H100 80GB HBM3", dict(hopper="runs on")),
        (dict(), 8, "cpu", dict(hopper="cpu is no Hopper GPU", tpu="cpu is no TPU", xla="runs on cpu")),
        (dict(), 8, None, dict(hopper="cpu is no Hopper GPU", xla="runs on cpu")),
        (dict(), 8, "NVIDIA A100-SXM4-40GB", dict(hopper="is no Hopper GPU", xla="runs on")),
        (dict(format="float32"), 8, "H200", dict(hopper="float32 are not bfloat16 or float16", xla="runs on")),
        (dict(head_dim=80), 8, "H200", dict(hopper="head_dim 80 is not one of 64, 96, 128, 256", xla="runs on H200")),
        (dict(), 34, "H200", dict(hopper="17 query heads of a KV head are not 1 to 16", xla="runs on H200")),
        (dict(head_dim=128), 8, "TPU v5 lite", dict(hopper="is no Hopper GPU", tpu="runs on TPU v5 lite")),
        (dict(), 8, "TPU v6 lite", dict(tpu="head_dim 64 is not one of 128, 256", xla="runs on")),
    ],
)  # fmt: skip
def test_explain_tells_which_runs_and_why(changes, heads, platform, reasons):
    told = dict(kvjax.explain(spec(**changes), heads, platform))
    assert list(told) == ["hopper", "tpu", "xla", "reference"]
    assert all(reason in told[name] for name, reason in reasons.items())


def test_explain_refuses_heads_that_do_not_fit():
    with pytest.raises(kvjax.InputError, match="query_heads 3 is no multiple of the cache's 2 KV heads"):
        kvjax.explain(spec(), 3)


def on(monkeypatch, device: str):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=device)])


def test_none_takes_the_first_that_can_serve(monkeypatch):
    on(monkeypatch, "NVIDIA H200")
    assert candidates(spec(), 8, "bfloat16", None) == ["hopper", "xla", "reference"]
    assert candidates(spec(), 8, "float32", None) == ["xla", "reference"]
    on(monkeypatch, "TPU v5 lite")
    assert candidates(spec(head_dim=128), 8, "bfloat16", None) == ["tpu", "xla", "reference"]
    on(monkeypatch, "cpu")
    assert candidates(spec(), 8, "bfloat16", None) == ["xla", "reference"]


def test_a_named_one_that_cannot_serve_says_why(monkeypatch):
    with pytest.raises(NotImplementedError, match="'hopper' cannot serve this call: cpu is no Hopper GPU"):
        candidates(spec(), 8, "bfloat16", "hopper")
    with pytest.raises(NotImplementedError, match="'tpu' cannot serve this call: cpu is no TPU"):
        candidates(spec(), 8, "bfloat16", "tpu")
    on(monkeypatch, "NVIDIA H200")
    with pytest.raises(NotImplementedError, match="pages of bfloat16 are not of the queries' float16"):
        candidates(spec(), 8, "float16", "hopper")
    assert candidates(spec(), 8, "float16", "xla") == ["xla"]


def test_what_only_the_call_can_refuse_goes_to_the_next(monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("too large")

    on(monkeypatch, "NVIDIA H200")

    def write(pools, new, *where):
        of_layer = [of[0] for of in where[:-1]]
        return tuple(write_pages(pool, rows, *of_layer) for pool, rows in zip(pools, new, strict=True))

    monkeypatch.setattr(hopper, "paged_attention", refuse)
    monkeypatch.setattr(write_pages_hopper, "write_pages", write)
    cache, step = kvjax.begin_step(kvjax.init_cache(spec()), [2], num_tokens=2, max_query_length=2)
    q, k = jnp.ones((2, 4, 64), jnp.bfloat16), jnp.ones((2, 2, 64), jnp.bfloat16)
    out, _ = kvjax.attend(cache, step, 0, q, k, k, rotary=None)
    np.testing.assert_allclose(np.asarray(out, np.float32), 1, atol=0.01)
    with pytest.raises(NotImplementedError, match="too large"):
        kvjax.attend(cache, step, 0, q, k, k, rotary=None, implementation="hopper")
