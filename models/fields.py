"""Values of a `config.json`, read with their types: a wrong one is an InputError that names the key and the value."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from kvjax.errors import InputError, shown, whole_number

Values = Mapping[str, Any]


def _wrong(key: str, value: Any, expected: str) -> InputError:
    return InputError(f"{key} is {shown(value)} in the model's configuration: it must be {expected}")


def integer(values: Values, key: str, least: int = 1, most: int = 2**31 - 1) -> int:
    """A whole number from `least` to `most`."""
    return whole_number(key, values.get(key), least, most)


def number(values: Values, key: str, *, above: float = 0.0, most: float = math.inf) -> float:
    """A finite number above `above`, `most` at most."""
    value: Any = values.get(key)
    # A whole number may be too large for a float.
    in_range = isinstance(value, int | float) and above < value <= min(most, 1e300)
    if isinstance(value, bool) or not in_range:
        limit = "" if most == math.inf else f" and at most {most:g}"
        raise _wrong(key, value, f"a number above {above:g}{limit}")
    return float(value)


def flag(values: Values, key: str) -> bool:
    """True or false; null is false."""
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return bool(value)


def mapping(values: Values, key: str) -> dict[str, Any]:
    """An object; null is an empty one."""
    value = values.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise _wrong(key, value, "an object")
    return dict(value or {})


def choice(values: Values, key: str, allowed: Collection[str]) -> str:
    """One of some words."""
    value = values.get(key)
    if not isinstance(value, str) or value not in allowed:
        raise InputError(f"{key} {shown(value)} is not supported: use one of {', '.join(allowed)}")
    return value


def token_ids(values: Values, key: str) -> list[int]:
    """A token id, or a list of them; null is an empty one."""
    value = values.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    return [whole_number(key, token, 0) for token in listed]
