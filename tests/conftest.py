"""What holds for every test: jax's strict settings, shapes checked at run time, hypothesis profiles, tools."""

import os
import signal
import sys
from pathlib import Path

# Compiling is most of what the tests do, and LLVM's optimisations are most of that; results do not depend on them.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import hypothesis
import jax
import jaxtyping
import pytest

import kvjax

# Jobs in the background of a shell ignore interrupts, and what they start does too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
# kvjax.load would have every later test write its programs to disk.
jax.config.update("jax_enable_compilation_cache", False)

# From here on every kvjax module is imported with its shapes checked. jaxtyping asks only the finder of plain
# folders, which cannot see the mapping of pyproject.toml: with this it finds kvjax.kernels and kvjax.models.
kvjax.__path__.append(str(Path(__file__).parent.parent))
# The tower: an int is a float, as in every type checker.
jaxtyping.install_import_hook("kvjax", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

# helpers/ holds what several test modules share: `from helpers.driver import ...`.
sys.path.append(str(Path(__file__).parent))

from helpers.checkpoints import hf_tensors, random_weights, write_folder, write_gguf  # noqa: E402, F401
from helpers.mappings import forget_programs_if_many  # noqa: E402

# The same examples in every run, so that a failure is the commit's. For a search: HYPOTHESIS_PROFILE=search.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="module", autouse=True)
def few_mappings():
    """Keep a process that tests one module after the other below Linux's limit of mappings."""
    yield
    forget_programs_if_many()


def missing(reason: str) -> None:
    """Skip the running test because something it needs is not there; fail it where `CI` is set."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def as_a_user():
    """Turns off the checks of annotations, which would catch the mistakes that kvjax refuses before it does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def kernels_python() -> str:
    """The Python of the environment that has the GPU and TPU compilers, for checks in a subprocess."""
    path = os.environ.get("KVJAX_KERNELS_PYTHON", "")
    if not os.access(path, os.X_OK):
        missing("KVJAX_KERNELS_PYTHON does not name a Python with the kernel-checks wheels: run `make test-slow`")
    return path


@pytest.fixture(scope="session")
def small_model():
    """The trained model of `kvjax.evaluation.small_task`, 100 000 parameters, unrolled, in float32."""
    from kvjax.models.decoder import Decoder
    from kvjax.models.registry import find, load_weights, read_config

    source = find(str(Path(__file__).parent / "data" / "small_model"))
    return Decoder(read_config(source), load_weights(source), scan=False)
