"""Arrays that a caller hands in, checked at the border: their kind and their shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from kvjax.errors import InputError

_KINDS = {np.integer: "integers", np.floating: "floats", np.bool_: "bools"}
_INT32 = np.iinfo(np.int32)


def array(name: str, value: object, shape: tuple[int | str, ...], kind: type = np.integer) -> np.ndarray | Array:
    """Return an array or (nested) list as an array: of jax, traced or not, if it was one, else of numpy.

    Args:
        name: what the caller calls it.
        value: what the caller has given.
        shape: its sizes; a word stands for any size.
        kind: np.integer, np.floating or np.bool_.

    Raises: InputError for another shape or kind.
    """
    try:
        given = value if isinstance(value, jax.Array) else np.asarray(value)
    except (TypeError, ValueError):
        # Rows of different lengths, or traced numbers in a list.
        given = np.asarray(None)
    if given.size == 0 and isinstance(value, list | tuple):
        given = given.astype(kind if kind is np.bool_ else np.int32)
    fits = given.ndim == len(shape) and all(
        isinstance(want, str) or got == want for got, want in zip(given.shape, shape, strict=True)
    )
    if not fits or not jnp.issubdtype(given.dtype, kind):
        what = f"{given.dtype} of shape [{', '.join(map(str, given.shape))}]" if given.dtype != object else "no array"
        raise InputError(f"{name} is {what}: give {_KINDS[kind]} of shape [{', '.join(map(str, shape))}]")
    return given


def integers(name: str, value: object, shape: tuple[int | str, ...]) -> Int32[Array, "*shape"]:
    """Return integers as an int32 array; those beyond 32 bits become the nearest ones, which no range includes."""
    given = array(name, value, shape)
    of = jnp.iinfo(given.dtype)
    if of.min < _INT32.min or of.max > _INT32.max:
        given = given.clip(max(of.min, _INT32.min), _INT32.max)
    return jnp.asarray(given.astype(np.int32))


def floats(name: str, value: object, shape: tuple[int | str, ...]) -> Array:
    """Return floats as an array of jax."""
    return jnp.asarray(array(name, value, shape, np.floating))
