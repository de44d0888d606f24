"""A Hugging Face model folder: config.json and safetensors files, in one piece or in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from kvjax.errors import InputError
from kvjax.models.optional import require

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class HfFolder:
    """A folder as `save_pretrained` writes it; tensors are read one by one, on demand.

    Attributes:
        path: the folder.
        config, generation: the parsed config.json and generation_config.json (empty where there is none).
        files: the file that holds each tensor, by tensor name.

    Raises:
        InputError: no such folder, a missing or damaged file, a missing shard.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise InputError(f"{path} is no folder: give a folder with config.json and model.safetensors")
        self.config = read_json(self.path / "config.json")
        generation = self.path / "generation_config.json"
        self.generation = read_json(generation) if generation.exists() else {}
        self.files = self._find_tensors()

    def read(self, name: str) -> Shaped[np.ndarray, " ..."]:
        """The tensor `name` in the dtype of the file (bfloat16 through ml_dtypes)."""
        path = self.files[name]
        with _open(path) as file:
            try:
                return file.get_tensor(name)
            except Exception as error:  # safetensors has an error type of its own, not exported by every version
                raise InputError(f"cannot read tensor {name} of {path} ({_line(error)}): download it again") from None

    def dtype_of(self, name: str) -> str:
        """The name that safetensors gives the tensor's dtype: F32, BF16, F16 ..."""
        with _open(self.files[name]) as file:
            return file.get_slice(name).get_dtype()

    def _find_tensors(self) -> dict[str, Path]:
        single, index = self.path / _SINGLE, self.path / _INDEX
        if single.exists():
            with _open(single) as file:
                return dict.fromkeys(file.keys(), single)
        if not index.exists():
            raise InputError(
                f"{self.path} has neither {_SINGLE} nor {_INDEX}: give a folder with weights in safetensors format"
            )
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise InputError(f"{index} has no weight_map of file names: download it again")
        held = {shard: self._tensors_of(shard) for shard in sorted(set(weight_map.values()))}
        for name, shard in weight_map.items():
            if name not in held[shard]:
                raise InputError(f"tensor {name} is missing from {self.path / shard}: download it again")
        return {name: self.path / shard for name, shard in weight_map.items()}

    def _tensors_of(self, shard: str) -> set[str]:
        path = self.path / shard
        if not path.exists():
            raise InputError(f"the shard {shard} that {_INDEX} names is missing in {self.path}: download it as well")
        with _open(path) as file:
            return set(file.keys())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises InputError if the file is missing or holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): the folder needs it") from None
    except RecursionError:
        raise InputError(f"{path} is nested too deeply: download it again") from None
    except ValueError as error:
        raise InputError(f"{path} is no valid JSON ({_line(error)}): download it again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a {type(value).__name__}, not a JSON object: download it again")
    return value


def _open(path: Path) -> Any:
    try:
        return require("safetensors").safe_open(path, framework="numpy")
    except InputError:
        raise
    except Exception as error:  # safetensors has an error type of its own, not exported by every version
        raise InputError(
            f"{path} is a damaged or truncated safetensors file ({_line(error)}): download it again"
        ) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
