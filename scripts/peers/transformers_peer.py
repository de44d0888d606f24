"""transformers on the CPU: DynamicCache or QuantizedCache, float32, sdpa and a greedy loop by hand. Speaks protocol.py.

python scripts/peers/transformers_peer.py .peers/models/smollm2-135m
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from prompts import random_prompts
from protocol import Answer, serve


def caches_of(config) -> dict[str, Callable[[], object]]:
    """What makes an empty cache, by its name."""
    import transformers

    # Groups of 64 and 128 unquantised tokens, the defaults, written out as they are part of what is measured.
    hqq = dict(nbits=4, q_group_size=64, residual_length=128)
    return {
        "dynamic": lambda: transformers.DynamicCache(config=config),
        "hqq-4bit": lambda: transformers.QuantizedCache("hqq", config, **hqq),
    }


def start() -> tuple[Answer, dict]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()

    caches = caches_of(model.config)

    def first_token(cache: object, batch: int, prompt_tokens: int, seed: int):
        ids = torch.tensor(random_prompts(batch, prompt_tokens, seed, model.config.vocab_size))
        begin = time.perf_counter()
        logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1:].argmax(-1)
        return token, time.perf_counter() - begin

    @torch.inference_mode()
    def decode(
        batch: int, prompt_tokens: int, new_tokens: int, seed: int, threads: int, cache: str = "dynamic"
    ) -> Answer:
        torch.set_num_threads(threads)
        state = caches[cache]()
        token, prefill_seconds = first_token(state, batch, prompt_tokens, seed)
        tokens = [token]
        begin = time.perf_counter()
        for _ in range(new_tokens - 1):
            logits = model(input_ids=token, cache=state, use_cache=True, logits_to_keep=1).logits
            token = logits[:, -1:].argmax(-1)
            tokens.append(token)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "prefill_seconds": prefill_seconds, "tokens": torch.cat(tokens, 1).tolist()}

    @torch.inference_mode()
    def prefill(prompt_tokens: int, batch: int, seed: int, threads: int) -> Answer:
        torch.set_num_threads(threads)
        return {"seconds": first_token(caches["dynamic"](), batch, prompt_tokens, seed)[1]}

    engine = f"transformers {transformers.__version__} / torch {torch.__version__}"
    ready = {
        "engine": engine,
        "cache": "DynamicCache float32",
        "caches": sorted(caches),
        "vocab_size": model.config.vocab_size,
    }
    return ready, {"decode": decode, "prefill": prefill}


if __name__ == "__main__":
    serve(start)
