"""Finds a model by name or path, and gives its configuration, tokenizer and weights."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from kvjax.errors import InputError
from kvjax.models import config_gguf, config_hf, packaged, tokenizer_files
from kvjax.models.checkpoint import DTYPES, Weights, read_weights
from kvjax.models.config import DecoderConfig
from kvjax.models.gguf_file import GgufFile
from kvjax.models.hf_folder import HfFolder
from kvjax.models.optional import require
from kvjax.models.tokenizer import Tokenizer
from kvjax.models.weight_store import load_or_convert
from kvjax.paths import cache_dir

# Part of the fingerprint: to be raised whenever the canonical form or its conversion changes.
_CONVERSION = 1
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
_HUB_IGNORED = ["consolidated*", "original/*"]  # the same weights once more, in another form
_SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a model's files are: one GGUF file, or a Hugging Face folder."""

    name: str
    kind: Literal["gguf", "folder"]
    path: Path

    @functools.cached_property
    def file(self) -> GgufFile | HfFolder:
        """The opened file or folder; opened once."""
        return GgufFile(self.path) if self.kind == "gguf" else HfFolder(self.path)


def find(name: str) -> Source:
    """The files of a model.

    Args:
        name: a name of `packaged.FINDERS` (smollm2-135m, gemma3-270m: files that installed packages hold), the path
            of a .gguf file or of a Hugging Face folder, or `organisation/model` on the Hugging Face hub, which is
            downloaded into `cache_dir()`.

    Raises:
        InputError: an unknown name, a missing package (with the command that installs it), a failed download.
    """
    if name in packaged.FINDERS:
        return Source(name, "gguf", packaged.FINDERS[name]())
    path = Path(name).expanduser()
    if name and path.is_dir():  # Path("") is the working folder
        return Source(path.resolve().name, "folder", path)
    if path.is_file():
        return Source(path.stem, "gguf", path)
    if name.endswith(".gguf") or name.startswith(("/", "./", "../", "~")):
        raise InputError(f"no such model file or folder: {name}: give an existing .gguf file or Hugging Face folder")
    if _HUB_NAME.fullmatch(name):
        return Source(name.replace("/", "--"), "folder", _download(name))
    raise InputError(
        f"unknown model {name!r}: use one of {', '.join(packaged.FINDERS)}, the path of a .gguf file or of a Hugging "
        f"Face folder, or organisation/model on the Hugging Face hub"
    )


def read_config(source: Source) -> DecoderConfig:
    """The model's configuration. Raises InputError for what kvjax does not support."""
    file = source.file
    if isinstance(file, HfFolder):
        return config_hf.from_hf(file.config, file.generation)
    divisors = file.read("rope_freqs.weight").tolist() if "rope_freqs.weight" in file.tensors else None
    return config_gguf.from_gguf(file.fields, file.shapes, divisors)


def read_tokenizer(source: Source) -> Tokenizer:
    """The model's tokenizer; its `eos_ids` hold those of the configuration too."""
    file = source.file
    if isinstance(file, GgufFile):
        return tokenizer_files.from_gguf(file.fields)
    tokenizer = tokenizer_files.from_folder(file.path)
    tokenizer.eos_ids = tuple(dict.fromkeys(read_config(source).eos_ids + tokenizer.eos_ids))
    return tokenizer


def load_weights(source: Source, dtype: str = "float32", *, notify: Callable[[str], None] | None = None) -> Weights:
    """The weights in the canonical form of `kvjax.models.checkpoint`, as numpy arrays.

    Weights that had to be dequantised or cast are stored in `cache_dir()/weights` and restored from there next time.
    A folder that holds `dtype` already is read directly.

    Args:
        dtype: float32, bfloat16 or float16 (norms stay float32).
        notify: is called with a line to show before a conversion, which may take minutes.

    Raises:
        InputError: an unknown dtype, damaged or unsupported files.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not supported: use one of {', '.join(DTYPES)}")
    file, config = source.file, read_config(source)

    def convert() -> Weights:
        if notify:
            notify(f"converting the weights of {source.name} to {dtype} (once)")
        return read_weights(file, config, dtype)

    if isinstance(file, HfFolder):
        first = next(iter(file.files), None)
        if first is None or file.dtype_of(first) == _SAFETENSORS_NAMES[dtype]:
            return read_weights(file, config, dtype)
    folder = cache_dir() / "weights" / f"{source.name}-{_fingerprint(source)}-{dtype}"
    return load_or_convert(folder, source.path.resolve(), convert)


def _fingerprint(source: Source) -> str:
    """Changes with the place, size and time of the files, and with the conversion."""
    files = [source.path] if source.kind == "gguf" else sorted(source.path.glob("*.safetensors"))
    files += [] if source.kind == "gguf" else [source.path / "config.json"]
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((_CONVERSION, stats)).encode()).hexdigest()[:16]


def _download(name: str) -> Path:
    hub = require("huggingface_hub")
    try:
        folder = hub.snapshot_download(
            name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED, cache_dir=cache_dir() / "hub"
        )
    except Exception as error:  # network, permission and hub errors have no common type
        reason = " ".join(str(error).split())[:160]
        raise InputError(
            f"cannot download {name!r} from the Hugging Face hub ({type(error).__name__}: {reason}): check the name "
            f"and the network, or download its folder on another machine and pass the path"
        ) from None
    return Path(folder)
