"""Their side of the comparison with kvpress: cases, and the process in an environment of its own that answers them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.benchmarks.measure import Notify, cores
from kvjax.benchmarks.peers import find_repository
from kvjax.errors import InputError
from kvjax.policies import H2O, TOVA, KNorm, SnapKV, Streaming
from kvjax.policy import Policy

SETUP = "make kvpress"
SINKS = 4


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule of eviction by its names on both sides.

    Attributes:
        name: of the rule.
        press, options: the class of kvpress, and its arguments.
        policy: the policy that keeps so many tokens of a prompt.
        in_decode: whether both drop the same tokens in decode too.
        generating: the policy that holds so many tokens while it generates, where that is another.
    """

    name: str
    press: str
    options: dict[str, int]
    policy: Callable[[int], Policy]
    in_decode: bool = False
    generating: Callable[[int], Policy] | None = None

    @property
    def renumbers(self) -> bool:
        """Whether positions are those in the cache, which kvpress has with KeyRerotationPress."""
        return self.name == "streaming"


def rules(window: int, kernel: int) -> tuple[Rule, ...]:
    """Return the rules that are the same on both sides.

    In decode one alone is: under DecodingPress, KnormPress may drop the newest token at once, which kvjax keeps,
    StreamingLLMPress takes slots for positions, and ObservedAttentionPress sees one query.

    Args:
        window, kernel: of SnapKV.
    """
    snapkv = dict(window_size=window, kernel_size=kernel)
    return (
        Rule("snapkv", "SnapKVPress", snapkv, lambda n: SnapKV(budget=n, observation=window, kernel=kernel)),
        Rule("tova", "TOVAPress", {}, lambda n: TOVA(budget=n), in_decode=True),
        Rule(
            "observed attention", "ObservedAttentionPress", {}, lambda n: H2O(budget=n, recent=0, normalize="mean")
        ),
        # A query sees itself within the window.
        Rule(
            "streaming", "StreamingLLMPress", dict(n_sink=SINKS), lambda n: Streaming(window=n - SINKS + 1, sinks=SINKS)
        ),
        Rule(
            "knorm", "KnormPress", {}, lambda n: KNorm(budget=n, recent=0),
            # kvpress keeps all that follows a prompt; key norms alone would drop most of that.
            generating=lambda n: KNorm(budget=n, recent=n // 2),
        ),
    )  # fmt: skip


def tokens_kept(prompt: int, ratio: float) -> int:
    """Tokens that kvpress keeps of a prompt at a compression ratio."""
    return max(1, int(prompt * (1 - ratio)))


class Case(NamedTuple):
    """What kvpress is asked; `scripts/peers/kvpress_peer.py` says what the parts mean."""

    press: str | None
    options: dict[str, float]
    prompt: list[int]
    continuation: list[int]
    rerotate: bool = False
    target: int | None = None
    logits: int = 0


class Answer(NamedTuple):
    """What kvpress answers to a case; see `scripts/peers/kvpress_peer.py`."""

    logits: np.ndarray
    nll: np.ndarray
    bytes: np.ndarray
    kept: np.ndarray | None = None
    scores: np.ndarray | None = None


def environment() -> tuple[Path, Path]:
    """Return the Python that has kvpress, and the model folder. Raises InputError where they are missing."""
    root = find_repository()
    python, model = (
        (root or Path()) / ".peers" / of for of in ("kvpress/bin/python", "models/smollm2-135m/config.json")
    )
    if root is None or not python.exists() or not model.exists():
        raise InputError(f"the environment of kvpress is not set up: run {SETUP} in the repository of kvjax")
    return python, model.parent


def ask(model: Path, cases: Sequence[Case], notify: Notify) -> tuple[str, list[Answer]]:
    """Return the versions of the engine, and its answers. Raises InputError if it fails."""
    root, (python, _) = find_repository(), environment()
    assert root is not None, "environment has found it"
    worker = root / "scripts" / "peers" / "kvpress_peer.py"
    # Threads that spin while they wait take the time of whoever else runs.
    threads = {"OMP_NUM_THREADS": str(cores()), "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.npz"
        request.write_text(json.dumps([case._asdict() for case in cases]))
        command = [str(python), str(worker), str(model), str(request), str(answer)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | threads) as process:
            assert process.stderr is not None
            last = ""
            for line in process.stderr:
                last = line.strip() or last
                notify(last)
        if process.returncode:
            raise InputError(f"kvpress ended with {process.returncode}: {last}: {SETUP} sets it up anew")
        with np.load(answer) as found:
            return str(found["engine"]), [_answer(found, number) for number in range(len(cases))]


def _answer(found: Any, number: int) -> Answer:
    present = {name: found[f"{number}.{name}"] for name in Answer._fields if f"{number}.{name}" in found}
    return Answer(**present)
