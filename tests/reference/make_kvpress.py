"""Write kvpress.npz: what kvpress keeps of prompts with the model of tests/data/small_model (README.md).

.venv/bin/python tests/reference/make_kvpress.py      after `make kvpress`; takes seconds
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.benchmarks import kvpress_peer as peer

HERE = Path(__file__).parent
PROMPT, NEW, VOCAB = 44, 16, 64
RATIO, WINDOW, KERNEL, LOGITS = 0.5, 12, 5, 4


def texts() -> list[list[int]]:
    """Tokens of a text in which none comes twice, and of one in which most do: these tie in the first layer's keys."""
    rng = np.random.default_rng(0)
    return [(1 + rng.permutation(VOCAB - 1)[: PROMPT + NEW]).tolist(), rng.integers(1, 16, PROMPT + NEW).tolist()]


def cases() -> list[peer.Case]:
    """A case for each rule and text, through decode where the rule is the same there."""
    found = []
    for text in texts():
        for rule in peer.rules(WINDOW, KERNEL):
            options = rule.options | dict(compression_ratio=RATIO)
            target = peer.tokens_kept(PROMPT, RATIO) if rule.in_decode else None
            found.append(peer.Case(rule.press, options, text[:PROMPT], text[PROMPT:], target=target, logits=LOGITS))
    return found


def main() -> None:
    asked = cases()
    engine, answers = peer.ask(HERE.parent / "data" / "small_model", asked, lambda line: print(line, file=sys.stderr))
    arrays: dict[str, Any] = dict(cases=json.dumps([case._asdict() for case in asked]), engine=engine)
    for number, answer in enumerate(answers):
        arrays |= {f"{number}.{name}": array for name, array in answer._asdict().items() if array is not None}
    np.savez_compressed(HERE / "kvpress.npz", **arrays)


if __name__ == "__main__":
    main()
