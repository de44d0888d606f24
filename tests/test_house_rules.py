"""Sizes of files and functions, and no notes to oneself."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [path for top in ("kvjax", "kernels", "models", "scripts") for path in sorted((ROOT / top).rglob("*.py"))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


@pytest.mark.parametrize("path", FILES, ids=name)
def test_sizes(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    limit = 100 if path.is_relative_to(ROOT / "kernels") else 50
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {function.name: code_lines(function) for function in functions if code_lines(function) > limit}
    assert not long, f"more than {limit} lines: {long}"


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.py")), ids=name)
def test_scripts_are_fronts(path):
    assert len(path.read_text().splitlines()) < 15


@pytest.mark.parametrize("path", FILES + sorted((ROOT / "tests").rglob("*.py")), ids=name)
def test_no_notes_to_oneself(path):
    assert not re.search(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b", path.read_text())


@pytest.mark.parametrize("path", FILES, ids=name)
def test_modules_say_what_they_are(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
