"""Faults planted in the source of kernels: copies of modules that have one, and what notices it."""

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

from helpers.mappings import forget_programs_if_many


def with_fault(modules: Sequence[Any], module: Any, old: str, new: str) -> Any:
    """A copy of the last of `modules`, over copies of the others, of which `module` has `new` in place of `old`."""
    count = inspect.getsource(module).count(old)
    assert count == 1, f"{old!r} stands {count} times in {module.__name__}"
    copies: dict[str, Any] = {}
    for original in modules:
        text = inspect.getsource(original)
        copy = types.ModuleType(original.__name__)
        # What a copy imports is of the copies, base classes included.
        with mock.patch.dict(sys.modules, copies):
            exec(compile(text.replace(old, new) if original is module else text, original.__name__, "exec"), vars(copy))
        copies[original.__name__] = copy
    return copies[modules[-1].__name__]


def noticed_by(cases: Iterable[Callable[[], None]], forget: Callable[[], Any], first: int = 0) -> str | None:
    """Name what notices a fault: a race, a hang, or a wrong output of a case.

    Args:
        cases: raise if something is wrong.
        forget: clears the interpreter.
        first: the case that runs before the others, to save time.
    """
    for i, case in sorted(enumerate(cases), key=lambda of: of[0] != first):
        try:
            case()
        except AssertionError:
            return f"case {i}: wrong output"
        except Exception as error:  # noqa: BLE001, the interpreter raises what it likes
            return f"case {i}: {'race' if 'RACE' in str(error) else type(error).__name__}"
        finally:
            forget()
    return None


def assert_all_noticed(names: Iterable[str], notice: Callable[[str], str | None], capsys) -> None:
    """Print which case noticed each fault, and fail if none noticed one."""
    noticed = {}
    for name in names:
        noticed[name] = notice(name)
        forget_programs_if_many()
    with capsys.disabled():
        print()
        for name, by in noticed.items():
            print(f"    {name:36} {by or 'NOT NOTICED'}")
    assert all(noticed.values())
