"""Keeps converted weights on disk with Orbax, so that a second start converts nothing.

A stored copy is a folder with an Orbax checkpoint (`tree`, the layers stacked: a dozen large arrays restore faster
than hundreds of small ones) and `manifest.json`, the sizes and CRC-32 sums of its files. It is built under another
name and renamed when complete, so whatever stands under the final name was finished.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.models.checkpoint import Weights
from kvjax.models.optional import require

_LOG = logging.getLogger("kvjax")
_FORMAT = 1
_MANIFEST, _UNFINISHED = "manifest.json", ".unfinished-"
_DAY_S = 24 * 60 * 60


def load_or_convert(folder: Path, origin: Path, convert: Callable[[], Weights]) -> Weights:
    """The weights stored in `folder`; where there are none, or a damaged copy, those that `convert` returns.

    Converted weights are stored for the next time; copies made of earlier states of `origin` are removed. A copy that
    cannot be read or written costs a logged line, never an error. Layers are views into arrays that they share.
    """
    if folder.exists():
        try:
            return _restore(folder)
        except Exception as error:  # whatever a damaged file makes Orbax raise
            _LOG.warning("the stored weights in %s are damaged (%s): converting them again", folder, _line(error))
            shutil.rmtree(folder, ignore_errors=True)
    weights = convert()
    try:
        _store(folder, origin, weights)
        _remove_outdated(folder, origin)
    except OSError as error:
        _LOG.warning("cannot store converted weights in %s (%s): the next start converts again", folder, _line(error))
    return weights


def _store(folder: Path, origin: Path, weights: Weights) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent))
    try:
        with require("orbax.checkpoint").StandardCheckpointer() as checkpointer:
            checkpointer.save((temporary / "tree").absolute(), _stacked(weights))
        sums = {str(file.relative_to(temporary)): _size_and_sum(file) for file in _files(temporary)}
        manifest = {"format": _FORMAT, "origin": str(origin), "files": sums}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        if not folder.exists():  # else another process was faster, with the same result
            os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _restore(folder: Path) -> Weights:
    manifest = json.loads((folder / _MANIFEST).read_text())
    if manifest["format"] != _FORMAT:
        raise ValueError(f"format {manifest['format']}")
    found = {str(file.relative_to(folder)) for file in _files(folder)} - {_MANIFEST}
    if found != manifest["files"].keys():
        raise ValueError("files are missing or foreign")
    for name, expected in manifest["files"].items():
        if _size_and_sum(folder / name) != expected:
            raise ValueError(f"checksum of {name}")
    with require("orbax.checkpoint").StandardCheckpointer() as checkpointer:
        return _unstacked(checkpointer.restore((folder / "tree").absolute()))


def _remove_outdated(folder: Path, origin: Path) -> None:
    for other in folder.parent.iterdir():
        if other == folder:
            continue
        if other.name.startswith(_UNFINISHED):
            outdated = time.time() - other.stat().st_mtime > _DAY_S
        else:
            outdated = other.name.rpartition("-")[2] == folder.name.rpartition("-")[2] and _origin(other) == str(origin)
        if outdated:
            shutil.rmtree(other, ignore_errors=True)


def _origin(folder: Path) -> str | None:
    try:
        return json.loads((folder / _MANIFEST).read_text())["origin"]
    except (OSError, ValueError, KeyError):
        return None


def _stacked(weights: Weights) -> dict[str, Any]:
    layers = weights["layers"]
    return weights | {"layers": {key: np.stack([layer[key] for layer in layers]) for key in layers[0]}}


def _unstacked(tree: dict[str, Any]) -> Weights:
    layers = tree["layers"]
    count = len(next(iter(layers.values())))
    return tree | {"layers": [{key: values[index] for key, values in layers.items()} for index in range(count)]}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _size_and_sum(path: Path) -> list[int]:
    total = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            total = zlib.crc32(block, total)
        return [file.tell(), total]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
