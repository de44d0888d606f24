"""The prompts that every engine in the benchmark gets; `kvjax.benchmarks.peers.random_prompts` makes the same ones."""

from __future__ import annotations

import random


def random_prompts(batch: int, prompt_tokens: int, seed: int, vocab_size: int) -> list[list[int]]:
    """`batch` rows of `prompt_tokens` ids in 3..vocab_size - 1 (0, 1 and 2 are special in the model used)."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(prompt_tokens)] for _ in range(batch)]
