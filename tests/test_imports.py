"""Imports point downwards (the floors of CONTRIBUTING.md), and `import kvjax` stays light."""

import ast
import graphlib
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import pytest

ROOT = Path(__file__).parent.parent

# Module or package -> floor; the longest name that fits counts. A module may import its own floor and those below.
FLOORS = {
    "kvjax.kernels": 0,
    "kvjax.arguments": 1,
    "kvjax.errors": 1,
    "kvjax.paths": 1,
    "kvjax.spec": 1,
    "kvjax.policy": 1,
    "kvjax.hooks": 1,
    "kvjax.sizes": 1,
    "kvjax.cache": 1,
    "kvjax.pages": 1,
    "kvjax.formats": 1,
    "kvjax.invariants": 1,
    "kvjax.rotary": 1,
    "kvjax.sequences": 1,
    "kvjax.sharing": 1,
    "kvjax.step": 1,
    "kvjax.eviction": 1,
    "kvjax.writing": 1,
    "kvjax.placement": 1,
    "kvjax.attention": 2,
    "kvjax.implementations": 2,
    "kvjax.observation": 2,
    "kvjax.policies": 2,
    "kvjax.generation": 3,
    "kvjax.batch": 3,
    "kvjax.decoding": 3,
    "kvjax.options": 3,
    "kvjax.sampling": 3,
    "kvjax.snapshots": 3,
    "kvjax.streaming": 3,
    "kvjax.tally": 3,
    "kvjax.models": 3,
    "kvjax.engine": 4,
    "kvjax.tiers": 4,
    "kvjax.metrics": 4,
    "kvjax.llm": 5,
    "kvjax.planning": 5,
    "kvjax.routing": 5,
    "kvjax.cli": 6,
    "kvjax.evaluation": 6,
    "kvjax.benchmarks": 6,
    "kvjax.server": 6,
}
KERNELS_MAY_IMPORT = {"jax", "jaxlib", "numpy", "jaxtyping"}
HEAVY = ("transformers", "tokenizers", "gguf", "safetensors", "matplotlib", "flax", "orbax", "huggingface_hub", "jax")


def modules() -> dict[str, Path]:
    """Every module of the installed package, by its name in there."""
    found = {}
    for top, name in (("kvjax", "kvjax"), ("kernels", "kvjax.kernels"), ("models", "kvjax.models")):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            found[".".join((name, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def floor(module: str) -> int | None:
    while module not in FLOORS:
        if "." not in module:
            return None
        module = module.rpartition(".")[0]
    return FLOORS[module]


def imports(module: str, path: Path, text: str | None = None, *, when_run: bool = False) -> set[str]:
    """The names of the modules that a module imports anywhere in it, relative imports resolved.

    `when_run` leaves out those that only type checkers see.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found, tree = set(), ast.parse(path.read_text() if text is None else text)
    if when_run:
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                found.add(inner if inner in MODULES else source)
    return found


def faults(module: str, imported: set[str]) -> list[str]:
    """What is wrong with the imports of a module, a line each."""
    own = floor(module)
    if own is None:
        return [f"{module} stands on no floor: add it to FLOORS and to CONTRIBUTING.md"]
    found = []
    for name in sorted(imported):
        top = name.partition(".")[0]
        if top in ("kernels", "models", "tests", "scripts"):
            found.append(f"{module} imports {name}: no such package is installed")
        elif name == "kvjax" and own < 6:
            found.append(f"{module} imports names from kvjax: take them from their own module")
        elif top == "kvjax" and name != "kvjax":
            other = floor(name)
            if other is None or other > own:
                found.append(f"{module} (floor {own}) imports {name} (floor {other})")
        elif own == 0 and top not in KERNELS_MAY_IMPORT | sys.stdlib_module_names:
            found.append(f"{module} imports {name}: kernels import {sorted(KERNELS_MAY_IMPORT)} only")
    return found


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"kvjax"}))
def test_imports_point_downwards(module):
    found = faults(module, imports(module, MODULES[module]))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("kvjax.cache", "from kvjax.attention import attend"),
        ("kvjax.cache", "from .attention import attend"),
        ("kvjax.cache", "from . import attention"),
        ("kvjax.cache", "import kvjax.cli.main"),
        ("kvjax.cache", "def f():\n    from kvjax.models.decoder import Decoder"),
        ("kvjax.cache", "from kvjax import begin_step"),
        ("kvjax.cache", "from kernels import paged_attention"),
        ("kvjax.kernels.paged_attention.xla", "from ...errors import InputError"),
        ("kvjax.kernels.paged_attention.xla", "import flax"),
        ("kvjax.stray", "import jax"),
    ],
)
def test_upward_arrow_is_found(module, line):
    assert faults(module, imports(module, Path(f"{module.rpartition('.')[2]}.py"), line))


def test_no_circles():
    graph = {
        module: imports(module, path, when_run=True) & set(MODULES)
        for module, path in MODULES.items()
        if module != "kvjax"
    }
    for module, imported in graph.items():
        # `from package.module import x` inside a package's own __init__ is no circle.
        graph[module] = {name for name in imported if not module.startswith(f"{name}.")}
    graphlib.TopologicalSorter(graph).prepare()


def test_import_is_light():
    code = f"import kvjax, sys; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_lazy_names_resolve_and_are_typed():
    import kvjax

    for name in kvjax.__all__:
        assert getattr(kvjax, name) is not None
        assert name in dir(kvjax)
    block = next(node for node in ast.parse(MODULES["kvjax"].read_text()).body if isinstance(node, ast.If))
    typed = {a.name: n.module for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert typed == kvjax._LAZY


def test_unknown_name_is_an_attribute_error():
    import kvjax

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kvjax.nonsense


def test_wrong_shape_is_refused_in_tests():
    from kvjax.rotary import apply_angles

    x, angles = jnp.zeros((3, 2, 8)), jnp.zeros((4, 4))
    with pytest.raises(jaxtyping.TypeCheckError):
        apply_angles(x, angles, angles)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"kvjax"}))
def test_shapes_are_checked_in_tests(module):
    spec = importlib.import_module(module).__spec__
    assert spec is not None and type(spec.loader).__name__ == "_JaxtypingLoader"
