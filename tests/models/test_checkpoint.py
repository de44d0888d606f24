"""Weights of both kinds of file in the canonical form, and every way a checkpoint can be wrong."""

import json

import chex
import ml_dtypes
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.models.checkpoint import half_split_rows, read_weights
from kvjax.models.config_gguf import from_gguf
from kvjax.models.config_hf import from_hf
from kvjax.models.gguf_file import GgufFile
from kvjax.models.hf_folder import HfFolder

pytest.importorskip("gguf")
pytest.importorskip("safetensors")


def read_folder(path, dtype="float32"):
    folder = HfFolder(path)
    return read_weights(folder, from_hf(folder.config), dtype)


def read_gguf(path, dtype="float32"):
    file = GgufFile(path)
    return read_weights(file, from_gguf(file.fields, file.shapes), dtype)


@pytest.fixture
def llama_folder(write_folder, random_weights, hf_tensors):
    """`llama_folder(tensors=…, remove=…, shards=…, **config)`: a folder with some tensors or settings changed."""

    def make(*, tensors=None, remove=(), shards=1, **changes):
        named = hf_tensors(random_weights()) | (tensors or {})
        named = {name: value for name, value in named.items() if name not in remove}
        path = write_folder(named, shards=shards)
        settings = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(settings))
        return path

    return make


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_folder(llama_folder, random_weights, hf_tensors, shards, tied):
    expected = random_weights(tied=tied)
    extra = {} if tied else {"lm_head.weight": expected["lm_head"]}
    path = llama_folder(tensors=hf_tensors(expected) | extra, shards=shards, tie_word_embeddings=tied)
    chex.assert_trees_all_equal(read_folder(path), expected)


SCALES = {"self_attn.k_scale": np.array(0.5, np.float32), "self_attn.v_scale": np.array([2, 3], np.float32)}


@pytest.mark.parametrize("inside", ["", "attn.", "proj."])
def test_scales_for_8_bit_caches_are_read(llama_folder, random_weights, inside):
    def named(layer, name):
        part = f"{name[10]}_proj.{name[10:]}" if inside == "proj." else inside + name[10:]
        return f"model.layers.{layer}.self_attn.{part}"

    tensors = {named(layer, name): value for layer in range(2) for name, value in SCALES.items()}
    expected = random_weights()
    for layer in expected["layers"]:
        layer |= dict(k_scale=np.full(2, 0.5, np.float32), v_scale=np.array([2, 3], np.float32))
    chex.assert_trees_all_equal(read_folder(llama_folder(tensors=tensors)), expected)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"model.layers.0.self_attn.k_scale": np.array(1, np.float32)}, "has 1 scales of keys and values"),
        (
            {f"model.layers.{i}.self_attn.{key}_scale": np.ones(3, np.float32) for i in (0, 1) for key in "kv"},
            r"k_scale in .* is \[1.0, 1.0, 1.0\]: a scale is one number above 0, or 2",
        ),
        (
            {f"model.layers.{i}.self_attn.{key}_scale": np.array(0, np.float32) for i in (0, 1) for key in "kv"},
            r"k_scale in .* is \[0.0\]: a scale is one number above 0",
        ),
    ],
)
def test_scales_of_the_wrong_number_or_size(llama_folder, tensors, message):
    with pytest.raises(InputError, match=message):
        read_folder(llama_folder(tensors=tensors))


def test_folders_of_qwen2_and_qwen3(llama_folder, random_weights, hf_tensors):
    expected = random_weights(biases=True)
    path = llama_folder(tensors=hf_tensors(expected), model_type="qwen2")
    chex.assert_trees_all_equal(read_folder(path), expected)


def test_folder_of_gemma_has_one_added_to_norms(write_folder, random_weights, hf_tensors):
    expected = random_weights(qk_norm=True, post_norms=True)
    path = write_folder(hf_tensors(expected, gemma=True))
    settings = json.loads((path / "config.json").read_text()) | dict(model_type="gemma3_text", head_dim=8)
    settings["hidden_act"] = "gelu_pytorch_tanh"
    (path / "config.json").write_text(json.dumps(settings))
    chex.assert_trees_all_close(read_folder(path), expected, atol=1e-6)


def test_multimodal_folder_is_read_below_its_prefix(llama_folder, random_weights, hf_tensors):
    expected = random_weights()
    named = {f"language_model.{name}": value for name, value in hf_tensors(expected).items()}
    named["vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    path = llama_folder(tensors=named, remove=hf_tensors(expected))
    chex.assert_trees_all_equal(read_folder(path), expected)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(llama_folder, random_weights, hf_tensors, stored, dtype):
    named = {name: value.astype(stored) for name, value in hf_tensors(random_weights()).items()}
    weights = read_folder(llama_folder(tensors=named), dtype)
    layer = weights["layers"][0]
    assert layer["q"].dtype == weights["embed"].dtype == dtype
    assert layer["attn_norm"].dtype == weights["final_norm"].dtype == np.float32
    expected = named["model.layers.0.mlp.up_proj.weight"].astype(np.float32).astype(layer["up"].dtype)
    np.testing.assert_array_equal(layer["up"], expected)


@pytest.mark.parametrize("kind, error", [("F32", 0), ("Q8_0", 0.02), ("Q4_1", 0.3)])
def test_gguf_llama_rows_are_unpermuted(write_gguf, random_weights, kind, error):
    expected = random_weights()
    chex.assert_trees_all_close(read_gguf(write_gguf(expected, quantised=kind)), expected, atol=error)


def test_gguf_of_other_families_is_read_as_it_stands(write_gguf, random_weights):
    expected = random_weights(qk_norm=True, post_norms=True)
    path = write_gguf(expected, arch="gemma3", fields={"gemma3.attention.sliding_window": 8})
    chex.assert_trees_all_equal(read_gguf(path), expected)


def test_gguf_with_an_output_matrix(write_gguf, random_weights):
    expected = random_weights(tied=False)
    path = write_gguf(expected, extra={"output.weight": expected["lm_head"]})
    chex.assert_trees_all_equal(read_gguf(path), expected)


def test_half_split_rows_by_hand():
    # One head of 6: stored pairs (0, 1), (2, 3), (4, 5) become first halves 0, 2, 4 and second halves 1, 3, 5.
    rows = np.arange(12).reshape(12, 1)
    expected = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    np.testing.assert_array_equal(half_split_rows(rows, 2)[:, 0], expected)
    np.testing.assert_array_equal(half_split_rows(rows[:, 0], 2), expected)


LAYER = "model.layers.1."


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(remove=[LAYER + "mlp.up_proj.weight"]), f"tensor {LAYER}mlp.up_proj.weight is missing in"),
        (dict(remove=["model.norm.weight"]), "tensor model.norm.weight is missing in"),
        (dict(tie_word_embeddings=False), "tensor lm_head.weight is missing in"),
        (dict(num_key_value_heads=4), r"k_proj.weight .* shape \[16, 32\], .*4 key-value heads.* asks for \[32, 32\]"),
        (dict(num_key_value_heads=3), "wrong head counts"),
        (dict(vocab_size=99), r"embed_tokens.weight .* asks for \[99, 32\]"),
        (dict(num_hidden_layers=1), "layers.1.* has no place in a llama model of 1 layers"),
        (dict(num_hidden_layers=3), "tensor model.layers.2.* is missing"),
        (dict(model_type="qwen3", head_dim=8), "q_norm.weight is missing"),
        (dict(tensors={LAYER + "self_attn.o_proj.bias": np.zeros(32, np.float32)}), "o_proj.bias .* has no place"),
    ],
)
def test_wrong_folders(llama_folder, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        read_folder(llama_folder(**changes))
    assert "\n" not in str(caught.value)


def test_wrong_gguf(write_gguf, random_weights):
    path = write_gguf(random_weights(), drop=["blk.1.attn_v.weight"])
    with pytest.raises(InputError, match="tensor blk.1.attn_v.weight is missing in"):
        read_gguf(path)
    path = write_gguf(random_weights(), fields={"llama.attention.head_count_kv": 4})
    with pytest.raises(InputError, match=r"blk.0.attn_k.weight .* asks for \[32, 32\]"):
        read_gguf(path)
    path = write_gguf(random_weights(), extra={"blk.0.attn_output.bias": np.zeros(32, np.float32)})
    with pytest.raises(InputError, match="blk.0.attn_output.bias .* has no place"):
        read_gguf(path)


def test_rotary_frequencies_are_no_leftover(write_gguf, random_weights):
    path = write_gguf(random_weights(), extra={"rope_freqs.weight": np.ones(4, np.float32)})
    assert "q" in read_gguf(path)["layers"][0]


def test_unknown_dtype(llama_folder):
    with pytest.raises(InputError, match="dtype 'int8' is not supported: use one of float32"):
        read_folder(llama_folder(), "int8")


def damage_header(path):
    path.write_bytes(b"\xff" * 100)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_header, cut, empty])
@pytest.mark.parametrize("shards", [1, 2])
def test_damaged_safetensors(llama_folder, damage, shards):
    path = llama_folder(shards=shards)
    damage(sorted(path.glob("*.safetensors"))[0])
    with pytest.raises(InputError, match="is a damaged or truncated safetensors file .*: download it again"):
        read_folder(path)


def test_missing_and_damaged_files_of_a_folder(llama_folder, tmp_path):
    path = llama_folder(shards=2)
    index, shard = path / "model.safetensors.index.json", sorted(path.glob("*.safetensors"))[1]
    kept = shard.read_bytes()
    shard.unlink()
    with pytest.raises(InputError, match=f"the shard {shard.name} .* is missing"):
        HfFolder(path)
    shard.write_bytes(kept)
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps(dict(weight_map=weight_map | {"model.other": shard.name})))
    with pytest.raises(InputError, match="tensor model.other is missing from"):
        HfFolder(path)
    index.write_text("{}")
    with pytest.raises(InputError, match="has no weight_map"):
        HfFolder(path)
    index.unlink()
    with pytest.raises(InputError, match="neither model.safetensors nor"):
        HfFolder(path)
    for content, message in (("{", "no valid JSON"), ("[]", "not a JSON object"), ("[" * 100_000, "nested too")):
        (path / "config.json").write_text(content)
        with pytest.raises(InputError, match=message):
            HfFolder(path)
    (path / "config.json").unlink()
    with pytest.raises(InputError, match="cannot read .*config.json"):
        HfFolder(path)
    with pytest.raises(InputError, match="is no folder"):
        HfFolder(tmp_path / "nowhere")
