"""Which implementation serves a call, and what is said about it."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

import kvjax
from kvjax.implementations import choose


def spec(**changes) -> kvjax.CacheSpec:
    shape: dict[str, Any] = dict(
        num_layers=1, num_kv_heads=2, head_dim=64, num_pages=9, max_seqs=1, pages_per_seq=4, max_query_length=4
    )
    return kvjax.CacheSpec(**(shape | changes))


@pytest.mark.parametrize(
    "changes, heads, platform, said",
    [
        (dict(), 8, "NVIDIA H200", ("runs on NVIDIA H200", "runs on NVIDIA H200")),
        (dict(), 8, "NVIDIA H100 80GB HBM3", ("runs on", "runs on")),
        (dict(), 8, "cpu", ("cpu is no Hopper GPU", "runs on cpu")),
        (dict(), 8, None, ("cpu is no Hopper GPU", "runs on cpu")),
        (dict(), 8, "NVIDIA A100-SXM4-40GB", ("is no Hopper GPU", "runs on")),
        (dict(format="float32"), 8, "H200", ("queries of float32 are not bfloat16 or float16", "runs on H200")),
        (dict(head_dim=80), 8, "H200", ("head_dim 80 is not one of 64, 96, 128, 256", "runs on H200")),
        (dict(), 34, "H200", ("17 query heads of a KV head are not 1 to 16", "runs on H200")),
    ],
)
def test_explain_tells_which_runs_and_why(changes, heads, platform, said):
    told = kvjax.explain(spec(**changes), heads, platform)
    assert [name for name, _ in told] == ["hopper", "xla", "reference"]
    assert all(part in reason for part, (_, reason) in zip(said, told, strict=False))


def test_explain_refuses_heads_that_do_not_fit():
    with pytest.raises(kvjax.InputError, match="query_heads 3 is no multiple of the cache's 2 KV heads"):
        kvjax.explain(spec(), 3)


def on(monkeypatch, device: str):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=device)])


def test_none_takes_the_first_that_can_serve(monkeypatch):
    on(monkeypatch, "NVIDIA H200")
    assert choose(spec(), 8, "bfloat16", None) == "hopper"
    assert choose(spec(), 8, "float32", None) == "xla"
    on(monkeypatch, "cpu")
    assert choose(spec(), 8, "bfloat16", None) == "xla"


def test_a_named_one_that_cannot_serve_says_why(monkeypatch):
    with pytest.raises(NotImplementedError, match="'hopper' cannot serve this call: cpu is no Hopper GPU"):
        choose(spec(), 8, "bfloat16", "hopper")
    on(monkeypatch, "NVIDIA H200")
    with pytest.raises(NotImplementedError, match="pages of bfloat16 are not of the queries' float16"):
        choose(spec(), 8, "float16", "hopper")
    assert choose(spec(), 8, "float16", "xla") == "xla"
