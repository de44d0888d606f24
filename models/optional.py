"""Imports the libraries that only the models need, when they are needed: `import kvjax` stays light."""

from __future__ import annotations

import importlib
from types import ModuleType

from kvjax.errors import InputError


def require(name: str) -> ModuleType:
    """The module `name` (dotted), or an InputError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name != package:
            raise
        raise InputError(f"the package {package!r} is not installed: run pip install 'kvjax[models]'") from None
