"""A GGUF file: its metadata as Python values and its tensors as float32 arrays.

The header is parsed here, the blocks of weights are dequantised by the `gguf` package. That package's own reader takes
3 s of the 5 s that a second start may take (it makes an array of every string), and passes on whatever error a damaged
file causes. Source: the GGUF specification (docs/gguf.md of ggml), versions 2 and 3.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from kvjax.errors import InputError
from kvjax.models.optional import require

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


class _DamagedError(Exception):
    """The bytes contradict the format; the message says how."""


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies: shape (outermost dimension first), ggml type number, offset in the file in bytes."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """An open GGUF file, read through a memory map that lives as long as this object.

    Attributes:
        path: the file.
        fields: metadata by key, as Python values.
        tensors: where each tensor lies, by name.

    Raises:
        InputError: no such file, no GGUF file, an old version, a truncated or damaged file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._bytes = _map(self.path)
        cursor = _Cursor(self._bytes)
        try:
            tensor_count, field_count = _header(cursor)
            self.fields: dict[str, Any] = {
                cursor.string(): cursor.value(cursor.number("I")) for _ in range(field_count)
            }
            infos = [_tensor_info(cursor) for _ in range(tensor_count)]
            alignment = self.fields.get("general.alignment", 32)
            if not isinstance(alignment, int) or alignment < 1:
                raise _DamagedError(f"alignment {alignment!r}")
            start = -(-cursor.position // alignment) * alignment
            self.tensors = {name: dataclasses.replace(t, offset=start + t.offset) for name, t in infos}
        except (_DamagedError, UnicodeDecodeError) as error:
            raise InputError(f"{self.path} is no readable GGUF file ({error}): download it again") from None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by name, outermost dimension first."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Float32[np.ndarray, " ..."]:
        """The tensor `name`, dequantised. Raises InputError if it is cut off or of an unsupported type."""
        gguf = require("gguf")
        tensor = self.tensors[name]
        try:
            kind = gguf.GGMLQuantizationType(tensor.kind)
            block, size = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self._unsupported(name, f"number {tensor.kind}") from None
        *outer, row = tensor.shape
        if row % block:
            raise InputError(f"tensor {name} in {self.path} has rows of {row} values, no multiple of {block}: damaged")
        count = math.prod(outer) * (row // block) * size
        if tensor.offset + count > len(self._bytes):
            raise InputError(
                f"{self.path} is truncated: tensor {name} ends at byte {tensor.offset + count} of "
                f"{len(self._bytes)}: download it again"
            )
        data = np.frombuffer(self._bytes, np.uint8, count, tensor.offset).reshape(*outer, row // block * size)
        try:
            return gguf.quants.dequantize(data, kind)
        except NotImplementedError:
            raise self._unsupported(name, kind.name) from None

    def _unsupported(self, name: str, kind: str) -> InputError:
        return InputError(
            f"tensor {name} in {self.path} has the unsupported quantisation type {kind}: use a file quantised as "
            f"Q8_0, Q4_K_M, F16 or similar"
        )


def _map(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # an empty file cannot be mapped
        return b""
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): give the path of a .gguf file") from None


class _Cursor:
    """Reads little-endian values one after the other and never past the end."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data, self.position = data, 0

    def take(self, count: int) -> int:
        """Advances over `count` bytes and returns where they begin."""
        begin = self.position
        if count > len(self.data) - begin:
            raise _DamagedError(f"truncated at byte {len(self.data)}")
        self.position = begin + count
        return begin

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        length = self.number("Q")
        begin = self.take(length)
        return self.data[begin : begin + length].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise _DamagedError(f"unknown value type {kind}")
        return self.number(_SCALARS[kind])

    def array(self) -> list:
        kind, length = self.number("I"), self.number("Q")
        if kind == _STRING:
            return [self.string() for _ in range(length)]
        if kind not in _SCALARS:
            raise _DamagedError(f"array of value type {kind}")
        item = np.dtype(_SCALARS[kind]).newbyteorder("<")
        begin = self.take(length * item.itemsize)
        return np.frombuffer(self.data, item, length, begin).tolist()


def _header(cursor: _Cursor) -> tuple[int, int]:
    """Checks magic and version; returns the numbers of tensors and of metadata fields."""
    if bytes(cursor.data[:4]) != b"GGUF":
        raise _DamagedError("it does not begin with 'GGUF'")
    cursor.take(4)
    version = cursor.number("I")
    if version not in (2, 3):
        raise _DamagedError(f"version {version}, versions 2 and 3 are supported")
    return cursor.number("Q"), cursor.number("Q")


def _tensor_info(cursor: _Cursor) -> tuple[str, GgufTensor]:
    name, dimensions = cursor.string(), cursor.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise _DamagedError(f"tensor {name} with {dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]  # the file states the fastest first
    return name, GgufTensor(shape, cursor.number("I"), cursor.number("Q"))
