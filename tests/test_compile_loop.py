"""Generation compiled for devices that are not there: the decoder spread over devices, and what counts as a fault."""

import dataclasses
import json
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.decoders import tiny_decoder, unchecked_shapes
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import kvjax
from kvjax import sizes
from kvjax.benchmarks import compile_loop, compile_model
from kvjax.benchmarks.compile_checks import bytes_on_a_device
from kvjax.cli.main import main
from kvjax.models.decoder import Decoder
from kvjax.models.layers import Linear

DEVICES = 4
GOOD = dict(pool_bytes=4 << 30, alias_bytes=5 << 30, temp_bytes=120 << 20, pool_copies=0, kernels=3)


@pytest.mark.parametrize(
    "changes, fault",
    [
        (dict(), None),
        (dict(alias_bytes=(5 << 30) - 1), "in place"),
        (dict(temp_bytes=129 << 20), "3 %"),
        (dict(pool_copies=1), "all keys"),
        (dict(kernels=0), "no attention kernel"),
        (dict(pool_bytes=(4 << 30) - 1, temp_bytes=0), "below 4 GB"),
    ],
)
def test_broken_limits_are_named(changes, fault):
    found = compile_loop.faults(GOOD | changes, 5 << 30)
    assert not found if fault is None else len(found) == 1 and fault in found[0]


def untied(decoder: Decoder) -> Decoder:
    """The decoder with a head of its own, which turns the embedding's order around."""
    decoder.config = dataclasses.replace(decoder.config, tie_word_embeddings=False)
    decoder.head = Linear(decoder.embed[...][::-1], None, False)
    return decoder


def by_device(weight, parts):
    """The rows of a joined map with parts of these sizes, those of each device together."""
    joined = np.split(np.asarray(weight), np.cumsum(parts)[:-1], axis=1)
    shares = zip(*(np.split(part, DEVICES, axis=1) for part in joined), strict=True)
    return nnx.Param(jnp.asarray(np.concatenate([part for share in shares for part in share], axis=1)))


@pytest.fixture
def mesh():
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), (compile_model.AXIS,), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.slow
def test_a_decoder_over_several_devices_chooses_the_same_tokens(mesh):
    whole = untied(tiny_decoder(scan=True, num_heads=8, num_kv_heads=DEVICES, vocab_size=64))
    prompts, options = [[5, 9, 2, 40], [7] * 19], kvjax.Options(max_new_tokens=12)
    expected = kvjax.generate(whole, prompts, options)
    config, layer = whole.config, cast(Any, whole.layers[0])
    heads = config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2
    layer.qkv.weight = by_device(layer.qkv.weight[...], heads)
    layer.gate_up.weight = by_device(layer.gate_up.weight[...], [config.intermediate_size] * 2)
    spread = compile_model.TensorParallel(whole, DEVICES)
    graph, weights = nnx.split(spread)
    places = jax.tree.map(
        lambda of: NamedSharding(mesh, of), compile_model.spread_of_weights(weights),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )  # fmt: skip
    weights = jax.device_put(weights, places)
    found = kvjax.generate(nnx.merge(graph, weights), prompts, options)
    assert [s.token_ids for s in found.sequences] == [s.token_ids for s in expected.sequences]
    pieces = {leaf.addressable_shards[0].data.size * DEVICES // leaf.size for leaf in jax.tree.leaves(weights)}
    assert pieces == {1, DEVICES}, "some weights lie apart, some on every device"


def test_llama_has_its_eight_billion_weights_and_no_array():
    with unchecked_shapes():
        model = compile_model.abstract_decoder(compile_model.llama_8b())
    weights = jax.tree.leaves(nnx.split(model)[1])
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in weights if leaf.dtype == jnp.bfloat16)
    # As Meta states it: 8.03 billion.
    assert round(sum(leaf.size for leaf in weights if leaf.dtype == jnp.bfloat16) / 1e7) == 803


def test_the_pool_of_every_device_has_the_size_that_is_asked_for():
    for devices in (1, 8):
        spec = compile_loop.spec_of(compile_model.llama_8b(), devices)
        assert sizes.pool_bytes(spec) == devices * compile_loop.POOL_BYTES


def test_bytes_are_those_of_one_device(mesh):
    spec = compile_loop.spec_of(compile_model.llama_8b(), DEVICES)
    with unchecked_shapes():
        state = jax.eval_shape(lambda: compile_loop.state_of(spec))
        placed = compile_model.placed_by(compile_model.spread_of_state(state), state, mesh)
        assert bytes_on_a_device(state.cache) == sizes.cache_bytes(spec)
        held = bytes_on_a_device(placed.cache)
    assert held == sizes.cache_bytes(spec) - sizes.pool_bytes(spec) * (DEVICES - 1) // DEVICES


@pytest.mark.slow
def test_generation_compiles_for_one_and_for_eight_h200s(kernels_python, capsys):
    assert main(["compile-kernels", "--loop", "--target", "h200", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    plain = [(of, devices, "bfloat16", "full") for devices in (1, 8) for of in ("prefill", "generate", "stream")]
    quantized = [(of, 1, form, "full") for form in ("int8", "int4") for of in ("prefill", "generate")]
    h2o = [(of, "h2o:budget=2048") for of in ("prefill", "generate")]
    programs = [("generate", "streaming:window=2044"), *h2o, ("generate", "quest:top_pages=64")]
    kept = [(of, 1, "bfloat16", policy) for of, policy in programs]
    columns = ("program", "devices", "format", "policy")
    assert [tuple(row[name] for name in columns) for row in rows] == plain + quantized + kept
    assert not any(row["faults"] or row["pool_copies"] for row in rows)


@pytest.mark.slow
def test_generation_compiles_for_a_tpu(kernels_python, capsys):
    assert main(["compile-kernels", "--loop", "--target", "v5e", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["program"] for row in rows] == ["prefill", "generate", "stream"]
    assert not any(row["faults"] or row["pool_copies"] for row in rows)
