"""GGUF files: values and tensors of every kind, and every way a file can be damaged."""

import dataclasses
import struct

import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.models.gguf_file import GgufFile

gguf = pytest.importorskip("gguf")


@pytest.fixture
def path(write_gguf, random_weights):
    return write_gguf(random_weights())


def test_fields_are_python_values(write_gguf, random_weights):
    given = {
        "a.text": "größe",
        "a.flag": True,
        "a.number": 7,
        "a.real": 0.5,
        "a.texts": ["x", "", "日本"],
        "a.numbers": [1, -2, 3],
        "a.reals": [0.25, -1.5],
        "a.flags": [True, False],
    }
    fields = GgufFile(write_gguf(random_weights(), fields=given)).fields
    assert {key: fields[key] for key in given} == given
    assert fields["general.architecture"] == "llama" and len(fields["tokenizer.ggml.tokens"]) == 264


def test_agrees_with_the_reader_of_the_gguf_package(path):
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.fields == expected
    for tensor in theirs.tensors:
        assert ours.shapes[tensor.name] == tuple(tensor.shape.tolist()[::-1])
        np.testing.assert_array_equal(ours.read(tensor.name), gguf.dequantize(tensor.data, tensor.tensor_type))
    assert ours.shapes.keys() == {tensor.name for tensor in theirs.tensors}


@pytest.mark.parametrize("kind, error", [("F32", 0), ("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 0.02), ("Q4_1", 0.3)])
def test_tensors_are_dequantised(write_gguf, random_weights, kind, error):
    weights = random_weights()
    out = GgufFile(write_gguf(weights, quantised=kind)).read("blk.1.ffn_down.weight")
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, weights["layers"][1]["down"], atol=error)


def test_q4_1_blocks_by_hand(write_gguf, random_weights):
    # 32 weights: fp16 scale and minimum, 16 bytes whose low nibbles are the first 16 weights.
    weights = random_weights()
    values = np.tile(np.arange(32) % 16, (64, 1)).astype(np.float32) / 8 - 1
    weights["layers"][0]["gate"] = values
    file = GgufFile(write_gguf(weights, quantised="Q4_1"))
    start = file.tensors["blk.0.ffn_gate.weight"].offset
    block = file.path.read_bytes()[start : start + 20]
    scale, minimum = struct.unpack("<ee", block[:4])
    nibbles = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    np.testing.assert_allclose(np.array(nibbles) * scale + minimum, values[0], atol=1e-3)
    np.testing.assert_allclose(file.read("blk.0.ffn_gate.weight"), values, atol=1e-3)


def test_every_truncation_is_an_input_error(path):
    data = path.read_bytes()
    header_end = min(tensor.offset for tensor in GgufFile(path).tensors.values())
    for length in [0, 3, 4, 7, 20, 30, 100, *range(200, header_end - 40, 997)]:
        path.write_bytes(data[:length])
        with pytest.raises(InputError, match="is no readable GGUF file .*: download it again"):
            GgufFile(path)


def test_truncated_tensor(path):
    path.write_bytes(path.read_bytes()[:-400])
    file = GgufFile(path)
    last = max(file.tensors, key=lambda name: file.tensors[name].offset)
    with pytest.raises(InputError, match=f"is truncated: tensor {last} ends at byte .*: download it again"):
        file.read(last)


def test_random_damage_to_the_header_never_leaks_another_error(path):
    data = path.read_bytes()
    header_end = min(tensor.offset for tensor in GgufFile(path).tensors.values())
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data)
        for position in random.integers(0, header_end, 3):
            damaged[position] = random.integers(256)
        path.write_bytes(damaged)
        try:
            file = GgufFile(path)
            for name in file.tensors:
                file.read(name)
        except InputError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "does not begin with 'GGUF'"),
        (b"PK\x03\x04 a zip archive", "does not begin with 'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1, versions 2 and 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 99), "unknown value type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 6, 2**62), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 1), "array of value type 9"),
        (b"GGUF" + struct.pack("<IQQQ2sI", 3, 0, 1, 2, b"\xff\xfe", 4), "utf-8"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "tensor t with 9 dimensions"),
    ],
)
def test_foreign_and_damaged_files(tmp_path, content, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        GgufFile(path)


def test_unsupported_type_and_missing_file(path, tmp_path):
    file = GgufFile(path)
    info = file.tensors["blk.0.ffn_up.weight"]
    for kind in (77, int(gguf.GGMLQuantizationType.Q8_K)):
        file.tensors["blk.0.ffn_up.weight"] = dataclasses.replace(info, shape=(2, 256), kind=kind)
        with pytest.raises(InputError, match="tensor blk.0.ffn_up.weight .* unsupported quantisation type"):
            file.read("blk.0.ffn_up.weight")
    with pytest.raises(InputError, match="cannot read .*none.gguf .*: give the path"):
        GgufFile(tmp_path / "none.gguf")
