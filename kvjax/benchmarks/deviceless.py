"""Compiling for an H200 or a TPU on a machine without one.

Needs the plugin and compilers of the extra `kernel-checks`, and an environment of its own for them: with the plugin
installed, every start of JAX looks for a GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.errors import InputError

# An H200 as XLA describes it (GpuTargetConfigProto).
_H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
"""


TARGETS = ("h200", "v5e", "v6e")


def mesh_of(target: str, devices: int = 1) -> Mesh:
    """Return a mesh of devices that are not there, by their name in TARGETS (of TPUs at most 4)."""
    if target == "h200":
        return h200_mesh(devices)
    topology = topologies.get_topology_desc(f"{target}:2x2", platform="tpu")
    return Mesh(np.array(topology.devices[:devices]), ("x",), axis_types=(AxisType.Auto,))


def h200_mesh(devices: int = 1) -> Mesh:
    """Return a mesh of H200s that are not there, for `jax.sharding.use_abstract_mesh` and shardings."""
    topology = topologies.get_topology_desc(
        "h200", platform="cuda", topology=f"1x1x{devices}", target_config=_H200
    )  # fmt: skip
    return Mesh(np.array(topology.devices[:devices]), ("x",), axis_types=(AxisType.Auto,))


def placed(tree, mesh: Mesh):
    """Arrays or shapes as shapes that lie whole on each device of a mesh."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def python_with_compilers() -> str:
    """Return the Python that has the compilers: KVJAX_KERNELS_PYTHON, or that of `make kernel-checks`.

    Raises: InputError if there is none.
    """
    made = Path(__file__).parents[2] / ".venv-kernels" / "bin" / "python"
    python = os.environ.get("KVJAX_KERNELS_PYTHON", str(made))
    if not os.access(python, os.X_OK):
        raise InputError(
            f"no Python with the GPU compilers at {python}: run `make kernel-checks`, or let KVJAX_KERNELS_PYTHON name "
            f"one that has the extra kernel-checks (now {sys.executable})"
        )
    return python
