"""Where kvjax keeps its files."""

import os
import subprocess
import sys

import pytest

from kvjax.errors import InputError
from kvjax.paths import cache_dir


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"KVJAX_CACHE": "/a/b"}, "/a/b"),
        ({"KVJAX_CACHE": "~/b"}, "/home/me/b"),
        ({"KVJAX_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/kvjax"),
        ({"KVJAX_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/me/.cache/kvjax"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/kvjax"),
        ({}, "/home/me/.cache/kvjax"),
    ],
)
def test_cache_dir(monkeypatch, environment, expected):
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("KVJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_dir()) == expected


def test_relative_cache_dir_becomes_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVJAX_CACHE", "here")
    assert cache_dir() == tmp_path / "here"


def test_a_file_is_refused(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("KVJAX_CACHE", str(file))
    with pytest.raises(InputError, match="set it to a folder"):
        cache_dir()


PROGRAM = """
import contextlib
import jax, kvjax
jax.jit(lambda x: x * 2)(2.0)
with contextlib.suppress(kvjax.InputError):
    kvjax.load("nosuchmodel")
jax.jit(lambda x: x * 3 + 1)(2.0)
"""


@pytest.mark.parametrize("users_own", [False, True])
def test_loading_keeps_small_programs(tmp_path, users_own):
    environment = {**os.environ, "KVJAX_CACHE": str(tmp_path / "ours")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    if users_own:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "theirs")
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
    assert users_own != any((tmp_path / "ours" / "xla").glob("*"))
