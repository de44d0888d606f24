"""The wheel: what it holds, and that every module of it can be imported from anywhere."""

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TREES = {"kvjax": "kvjax", "kernels": "kvjax.kernels", "models": "kvjax.models"}

IMPORT_ALL = """
import importlib, importlib.util, pathlib, sys
import kvjax
assert pathlib.Path(kvjax.__file__).is_relative_to(sys.prefix), kvjax.__file__
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).is_relative_to(sys.prefix), module.__file__
for name in ("kernels", "models", "scripts", "tests"):
    assert importlib.util.find_spec(name) is None, name
"""


def sources() -> dict[str, str]:
    """Every module's file in the wheel, and its name."""
    found = {}
    for top, package in TREES.items():
        for path in sorted((ROOT / top).rglob("*.py")):
            inner = Path(*package.split("."), path.relative_to(ROOT / top))
            found[str(inner)] = ".".join(inner.with_suffix("").parts).removesuffix(".__init__")
    return found


def test_packages_are_those_of_the_tree():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {name.rpartition("/")[0].replace("/", ".") for name in sources()}
    assert sorted(listed) == sorted(folders), "mend [tool.setuptools] packages in pyproject.toml"


def test_every_package_has_an_init():
    names = set(sources())
    assert {f"{name.rpartition('/')[0]}/__init__.py" for name in names} <= names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy: setuptools would pack what an earlier build left in build/."""
    source = tmp_path_factory.mktemp("source")
    for name in TREES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    built = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", built, source]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(built.glob("*.whl"))


def test_wheel_holds_the_tree(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if ".dist-info/" not in name}
    assert set(sources()) | {"kvjax/py.typed"} <= packed
    assert {name.partition("/")[0] for name in packed} == {"kvjax"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_module_imports_from_the_wheel(wheel, tmp_path):
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    # The dependencies of this environment, without its .pth files and so without the editable kvjax.
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [python, "-c", IMPORT_ALL, *sources().values()]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    version = subprocess.run([environment / "bin" / "kvjax", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert version.returncode == 0 and version.stdout.startswith("kvjax "), version.stderr
