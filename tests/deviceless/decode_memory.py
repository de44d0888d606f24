"""Compile a program of generation for an H200 on a machine without one, and print what its memory looks like.

python tests/deviceless/decode_memory.py step|while|scan|prefill, in an environment with the GPU compilers.
"""

import json
import os
import sys
from pathlib import Path

# Else the CUDA plugin looks for a driver.
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.append(str(Path(__file__).parents[1]))

import jax
from helpers.programs import faults, lowered

from kvjax import sizes
from kvjax.benchmarks.deviceless import h200_mesh, placed


def main(name: str) -> None:
    mesh = h200_mesh()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program, spec = lowered(name, scan=True, dtype="bfloat16", place=lambda shapes: placed(shapes, mesh))
        compiled = program.compile()
    report = dict(
        device=mesh.devices.flat[0].device_kind,
        pool=sizes.pool_bytes(spec),
        memory=str(compiled.memory_analysis()),
        kernels=(compiled.as_text() or "").count("mosaic_gpu"),
        faults=faults(compiled, spec),
    )
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
