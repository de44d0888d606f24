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
import numpy as np
from helpers.programs import faults, lowered
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax import sizes


def main(name: str) -> None:
    target = (Path(__file__).parent / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc("h200", platform="cuda", topology="1x1x1", target_config=target)
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def place(shapes):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program, spec = lowered(name, scan=True, dtype="bfloat16", place=place)
        compiled = program.compile()
    report = dict(
        device=topology.devices[0].device_kind,
        pool=sizes.pool_bytes(spec),
        memory=str(compiled.memory_analysis()),
        faults=faults(compiled, spec),
    )
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
