"""Generation with kvjax and with other engines on the same prompts, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.batch import Batch
from kvjax.benchmarks.measure import Notify, cores, interleaved, ratio, row
from kvjax.benchmarks.peers import MODELS, Peer, random_prompts
from kvjax.generation import generate
from kvjax.models.decoder import Decoder
from kvjax.options import Options

PROMPT_TOKENS = 128
NEW_TOKENS = 128
PREFILL_TOKENS = 1024
_MODEL = "smollm2-135m"
# Idle workers may spin for a moment before they sleep, which would slow down whoever comes next.
_PAUSE_S = 0.3


class _Engines:
    """The engines that are set up, as functions that measure, and the tokens they chose."""

    def __init__(self, model: Decoder, dtype: str, peers: Sequence[Peer]):
        self._model, self._dtype, self._peers = model, dtype, peers
        self.tokens: dict[str, list[list[int]]] = {}

    def decode(self, batch: int) -> dict[str, Callable[[], float]]:
        """Seconds of the decode steps after the first token."""
        prompts = random_prompts(batch, PROMPT_TOKENS, 0, self._model.config.vocab_size)
        options = Options(max_new_tokens=NEW_TOKENS, format=self._dtype)

        def ours() -> float:
            time.sleep(_PAUSE_S)
            result = generate(self._model, prompts, options)
            self.tokens["kvjax"] = [sequence.token_ids for sequence in result.sequences]
            return result.decode_s

        def theirs(peer: Peer) -> float:
            time.sleep(_PAUSE_S)
            seconds = peer.decode(batch, PROMPT_TOKENS, NEW_TOKENS)
            self.tokens[peer.name] = peer.last["tokens"]
            return seconds

        return {"kvjax": ours} | {peer.name: lambda peer=peer: theirs(peer) for peer in self._peers}

    def prefill(self) -> dict[str, Callable[[], float]]:
        """Seconds from a prompt to its first token."""
        prompts = random_prompts(1, PREFILL_TOKENS, 0, self._model.config.vocab_size)

        def ours() -> float:
            time.sleep(_PAUSE_S)
            run = Batch(self._model, prompts, Options(max_new_tokens=NEW_TOKENS, format=self._dtype))
            jax.block_until_ready(run.state)
            begin = time.perf_counter()
            for chosen in run.prefill():
                jax.block_until_ready(chosen.token)
            return time.perf_counter() - begin

        def theirs(peer: Peer) -> float:
            time.sleep(_PAUSE_S)
            return peer.prefill(PREFILL_TOKENS)

        return {"kvjax": ours} | {peer.name: lambda peer=peer: theirs(peer) for peer in self._peers}


def not_compared() -> dict[str, Any]:
    """Return the `peers` of a report that compares with nobody: what to run."""
    return {name: {"command": Peer(name).how_to_install()} for name in MODELS}


def compare(
    model: Decoder, name: str, dtype: str, batches: Sequence[int], repeats: int, notify: Notify
) -> tuple[list[dict[str, Any]], dict[str, float], dict[str, Any]]:
    """Measure decoding and prefill against all peers that are set up; their models are SmolLM2-135M in float32.

    Returns: rows, the `vs_` values of the summary that could be measured, and the `peers` of the report.
    """
    report = not_compared()
    if name != _MODEL or dtype != "float32":
        notify(f"peers run {_MODEL} in float32 only: not compared")
        return [], {}, report
    available = [peer for peer in (Peer(name, threads=cores()) for name in MODELS) if peer.available()]
    for missing in set(MODELS) - {peer.name for peer in available}:
        notify(f"peer {missing} is not set up: {report[missing]['command']}")
    try:
        for peer in available:
            notify(f"starting {peer.name}")
            report[peer.name] = {"engine": peer.engine}
        return _measure(_Engines(model, dtype, available), available, report, batches, repeats, notify)
    finally:
        for peer in available:
            peer.close()


def _measure(engines: _Engines, peers: Sequence[Peer], report, batches, repeats: int, notify: Notify):
    rows: list[dict[str, Any]] = []
    summary: dict[str, float] = {}
    for batch in batches if peers else ():
        notify(f"against peers: batch {batch}, {PROMPT_TOKENS} prompt tokens and {NEW_TOKENS} new ones")
        times = interleaved(engines.decode(batch), repeats)
        for name, seconds in times.items():
            label = _label(name, report)
            rows.append(row(label, batch, PROMPT_TOKENS + NEW_TOKENS - 1, seconds, NEW_TOKENS - 1))
        for peer in peers:
            summary[f"vs_{peer.name}_b{batch}"] = ratio(times[peer.name], times["kvjax"])
            differing = np.array(engines.tokens["kvjax"]) != np.array(engines.tokens[peer.name])
            report[peer.name][f"differing_tokens_share_b{batch}"] = round(float(differing.mean()), 4)
    if peers:
        notify(f"against peers: prefill of {PREFILL_TOKENS} tokens")
        times = interleaved(engines.prefill(), repeats)
        rows += [
            row(f"{_label(name, report)}: prefill", 1, PREFILL_TOKENS, seconds, PREFILL_TOKENS)
            for name, seconds in times.items()
        ]
        summary |= {f"prefill_vs_{peer.name}": ratio(times[peer.name], times["kvjax"]) for peer in peers}
    return rows, summary, report


def _label(name: str, report) -> str:
    return f"{name}: generate" if name == "kvjax" else report[name]["engine"]
