"""What to look for in a compiled program that should update a pool of pages in place."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp

# What makes a new array of every element: in place there is no reason for any of them.
_OPERATIONS = "copy|copy-start|transpose|convert|select|broadcast|concatenate|pad|gather|reverse|all-gather"
_LINE = re.compile(rf"= \(?(\w+)\[([\d,]+)\]\S* ({_OPERATIONS})\(")


def whole_pool_operations(text: str, elements: int) -> list[str]:
    """Return the lines of an optimised program that make another array of `elements` (of all keys) or more."""
    found = []
    for line in text.splitlines():
        match = _LINE.search(line)
        if match and math.prod(int(size) for size in match[2].split(",")) >= elements:
            found.append(line.strip()[:200])
    return found


def bytes_on_a_device(tree: Any) -> int:
    """Return the bytes that a device holds of arrays or of shapes; those without a sharding lie whole on each."""
    total = 0
    for array in jax.tree.leaves(tree):
        shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
        # A random key is two words.
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        total += math.prod(shape) * (8 if is_key else array.dtype.itemsize)
    return total
