"""Compile the programs that the benchmark of the kernels times, for an H200, and print what became of each.

python tests/deviceless/benchmark_programs.py, in an environment with the GPU compilers.
"""

import dataclasses
import json
import os

# Else the CUDA plugin looks for a driver.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from kvjax.benchmarks import kernels
from kvjax.benchmarks.deviceless import h200_mesh, placed
from kvjax.benchmarks.kernel_cases import case_of
from kvjax.benchmarks.kernel_contenders import CUDNN, contenders

LAYERS = 3


def main() -> None:
    mesh = h200_mesh()
    rows = []
    for shape in kernels.benchmark_shapes()[:2]:
        # The programs of short sequences are those of long ones, and their arrays fit this machine.
        context = 64 if shape.queries == 1 else shape.queries // 64
        small = dataclasses.replace(shape, batch=2, context=context, queries=min(shape.queries, context))
        case = case_of(small, layers=LAYERS)
        for contender in contenders("NVIDIA H200"):
            # cuDNN is no part of the compilers.
            if contender.name == CUDNN:
                continue
            try:
                arrays = contender.prepare(case)
            except NotImplementedError as error:
                rows.append(dict(kernel=shape.kernel, contender=contender.name, reason=str(error)))
                continue
            program = jax.jit(kernels._loop(small, contender, LAYERS, 2 * LAYERS))
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                text = program.trace(*placed((arrays, case.q), mesh)).lower().compile().as_text()
            assert text is not None
            facts = dict(kernel=shape.kernel, contender=contender.name, reason=None)
            rows.append(facts | dict(counted=f'"known_trip_count":{{"n":"{2 * LAYERS}"' in text))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
