"""OpenVINO GenAI on the CPU: ContinuousBatchingPipeline with float32 paged KV, prefix caching off. Speaks protocol.py.

python scripts/peers/openvino_peer.py .peers/models/smollm2-135m-openvino
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from prompts import random_prompts
from protocol import Answer, serve

CACHE_GIB = 2
# Room for every prompt of a request in one step, so that prefill ends with the first token of all of them.
STEP_TOKENS = 16384


class Engine:
    """The pipeline, rebuilt only when another number of threads is asked for."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.threads = 0
        self.requests = 0

    def pipeline(self, threads: int):
        import openvino_genai as genai

        if threads != self.threads:
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = CACHE_GIB
            scheduler.max_num_batched_tokens = STEP_TOKENS
            scheduler.enable_prefix_caching = False
            options = {
                "INFERENCE_NUM_THREADS": threads,
                "KV_CACHE_PRECISION": "f32",
                "INFERENCE_PRECISION_HINT": "f32",
            }
            self.pipe = genai.ContinuousBatchingPipeline(self.folder, scheduler, "CPU", options)
            self.threads = threads
        return self.pipe

    def generate(self, prompts: list[list[int]], new_tokens: int, threads: int) -> Answer:
        """Greedy tokens of all prompts; the first step's time is the prefill's, the others' are the decode's."""
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        pipe = self.pipeline(threads)
        config = genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        handles = []
        for prompt in prompts:
            handles.append(pipe.add_request(self.requests, ov.Tensor(np.array([prompt], np.int64)), config))
            self.requests += 1
        moments = [time.perf_counter()]
        # Until this has gone well the pipeline may hold requests that failed: the next call then makes a new one.
        self.threads = 0
        while pipe.has_non_finished_requests():
            pipe.step()
            moments.append(time.perf_counter())
        self.threads = threads
        tokens = [[int(i) for output in handle.read_all() for i in output.generated_ids] for handle in handles]
        # Fewer steps would mean a lost request, more a prefill in parts or a preemption: no time to compare.
        if len(moments) - 1 != new_tokens or any(len(row) != new_tokens for row in tokens):
            raise RuntimeError(f"{len(moments) - 1} steps made {[len(row) for row in tokens]} of {new_tokens} tokens")
        return {"seconds": moments[-1] - moments[1], "prefill_seconds": moments[1] - moments[0], "tokens": tokens}


def start() -> tuple[Answer, dict]:
    import openvino_genai as genai

    folder = sys.argv[1]
    vocab_size = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    engine = Engine(folder)

    def decode(batch: int, prompt_tokens: int, new_tokens: int, seed: int, threads: int) -> Answer:
        return engine.generate(random_prompts(batch, prompt_tokens, seed, vocab_size), new_tokens, threads)

    def prefill(prompt_tokens: int, batch: int, seed: int, threads: int) -> Answer:
        answer = engine.generate(random_prompts(batch, prompt_tokens, seed, vocab_size), 1, threads)
        return {"seconds": answer["prefill_seconds"]}

    ready = {
        "engine": f"openvino-genai {genai.__version__.split('-')[0]}",
        "cache": "paged float32",
        "vocab_size": vocab_size,
    }
    return ready, {"decode": decode, "prefill": prefill}


if __name__ == "__main__":
    serve(start)
