"""One JSON object a line: requests on stdin, answers on stdout, as `kvjax.benchmarks.peers.Peer` speaks it.

The worker first says {"ready": true, "engine": ...}. Then it answers
    {"op": "decode", "batch": b, "prompt_tokens": n, "new_tokens": m, "seed": s, "threads": t}
        with {"seconds": time of the m - 1 steps after the first token, "prefill_seconds": ..., "tokens": [[...], ...]};
        a worker that has several caches takes "cache": one of the names that it gives in "caches" when ready,
    {"op": "prefill", "prompt_tokens": n, "seed": s, "threads": t} with {"seconds": ...},
    {"op": "quit"} by ending.
A request that fails is answered with {"error": "..."}, and the worker lives on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]
DEFAULTS = {"batch": 1, "seed": 0, "threads": 2}


def serve(start: Callable[[], tuple[Answer, dict[str, Callable[..., Answer]]]]) -> None:
    """Runs `start`, which returns what to say when ready and a handler an operation, then answers until quit."""
    # Libraries print; what they print goes to stderr, so that stdout carries answers and nothing else.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(answer: Answer) -> None:
        answers.write(json.dumps(answer) + "\n")

    try:
        ready, handlers = start()
    except Exception as error:
        say({"error": f"could not start: {_readable(error)}"})
        raise SystemExit(1) from error
    say({"ready": True} | ready)
    for line in sys.stdin:
        try:
            request = DEFAULTS | json.loads(line)
            operation = request.pop("op")
            if operation == "quit":
                return
            if operation not in handlers:
                raise ValueError(f"unknown op {operation!r}; known are {sorted(handlers)} and 'quit'")
            say(handlers[operation](**request))
        except Exception as error:
            say({"error": _readable(error)})


def _readable(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
