"""The one way state is written down in kvjax."""

from __future__ import annotations

import dataclasses
import typing

import jax


@typing.dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
def pytree[T](cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass that is a pytree; fields with `metadata=dict(static=True)` are its structure.

    The fields' annotations say what the arrays are, but are not checked at construction even where tests check every
    call: transformations put shapes, shardings or axis numbers in the arrays' place.
    """
    frozen = dataclasses.dataclass(frozen=True, eq=False)(cls)
    frozen.__no_type_check__ = True  # pyright: ignore[reportAttributeAccessIssue]
    return jax.tree_util.register_dataclass(frozen)
