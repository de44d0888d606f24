"""Deterministic random weights for the tiny configurations of every model family.

Only the logits and the configurations are committed; the maker of the fixtures and the tests both draw the weights
here, from the parameter's name and shape. numpy only, so that it runs in the environment of either.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

EMBEDDING_SCALE = 0.4
BIAS_SCALE = 0.5
NORM_SPREAD = 0.2
GAIN = 1.5


def draw_weight(name: str, shape: Sequence[int], *, seed: int, norm_center: float) -> np.ndarray:
    """One float32 parameter, a function of its checkpoint name, its shape and the seed alone.

    Norms scatter around `norm_center` (1, or 0 for Gemma, which multiplies by 1 + w), so that a forgotten or doubled
    one shows. Matrices keep the scale of their input times `GAIN`, which makes attention peaked enough for a key at a
    wrong position to move the logits.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()) + seed)
    unit = rng.normal(size=tuple(shape))
    if "norm" in name:
        values = norm_center + NORM_SPREAD * unit
    elif name.endswith(".bias"):
        values = BIAS_SCALE * unit
    elif "embed_tokens" in name:
        values = EMBEDDING_SCALE * unit
    else:
        values = GAIN / np.sqrt(shape[-1]) * unit
    return values.astype(np.float32)


def draw_weights(shapes: Mapping[str, Sequence[int]], *, seed: int, norm_center: float) -> dict[str, np.ndarray]:
    """All parameters of a checkpoint, in the order of their sorted names."""
    return {name: draw_weight(name, shapes[name], seed=seed, norm_center=norm_center) for name in sorted(shapes)}


def checksum(weights: Mapping[str, np.ndarray]) -> int:
    """CRC-32 over all parameters; tells a changed random stream apart from a wrong model."""
    value = 0
    for name in sorted(weights):
        value = zlib.crc32(np.ascontiguousarray(weights[name], dtype="<f4").tobytes(), value)
    return value
