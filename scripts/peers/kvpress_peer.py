"""kvpress on the CPU, in float32 with eager attention: what a press keeps, and what the model then says.

python scripts/peers/kvpress_peer.py MODEL REQUEST.json ANSWER.npz

The request is a list of cases, each with
    "press", "options": a class of kvpress and its arguments, `compression_ratio` among them; None for no press,
    "rerotate": whether KeyRerotationPress wraps it,
    "prompt", "continuation": token ids; the continuation is fed in one forward, or token by token where
    "target" is a number: DecodingPress then brings every layer back to so many tokens after each of them,
    "logits": of how many tokens of the continuation to return the logits.
The answer to case i holds, under "i.NAME",
    kept bool and scores float32 [steps, layers, kv_heads, prompt + continuation]: the tokens that are held after the
        prompt, and after each token where there is a target, and the scores they were chosen by (NaN: none); none of
        both without a press or where keys were rotated anew,
    logits float32 [logits, vocab]; nll float32 [continuation - 1], -log p of its tokens but the first, in nats,
    bytes int64 [2]: of the storage of keys and values after the prompt and at the end.
`engine` names the versions. Positions of a continuation are those of the text, or of the cache where keys were rotated.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import json
import os
import sys
from importlib.metadata import version
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np


class Recorder:
    """Writes down which tokens a press keeps, by the keys that it leaves, and by what scores."""

    def __init__(self, press, layers: int, heads: int, tokens: int):
        self.shape, self.heads = (layers, heads, tokens), heads
        self.steps: list[tuple[np.ndarray, np.ndarray]] = []
        self.held: dict[int, np.ndarray] = {}
        self.fed, self.scores = 0, np.empty(0)
        score, compress = press.score, press.compress

        def recorded_score(*args, **named):
            scores = score(*args, **named)
            self.scores = scores[0].numpy()
            return scores

        def recorded_compress(module, hidden_states, keys, *args, **named):
            left = compress(module, hidden_states, keys, *args, **named)
            self._note(module.layer_idx, keys[0].numpy(), left[0][0].numpy())
            return left

        press.score, press.compress = recorded_score, recorded_compress

    def feed(self, tokens: int) -> None:
        """Begin a step that brings so many tokens."""
        self.fed += tokens
        self.steps.append((np.zeros(self.shape, bool), np.full(self.shape, np.nan, np.float32)))

    def _note(self, layer: int, before: np.ndarray, after: np.ndarray) -> None:
        held = self.held.get(layer, np.empty((self.heads, 0), np.int64))
        came = np.arange(self.fed - (before.shape[1] - held.shape[1]), self.fed)
        positions = np.concatenate([held, np.broadcast_to(came, (self.heads, len(came)))], 1)
        kept, scores = (of[layer] for of in self.steps[-1])
        left = []
        for head in range(self.heads):
            slots = {row.tobytes(): slot for slot, row in enumerate(before[head])}
            if len(slots) < before.shape[1]:
                raise ValueError(f"two tokens have the same key in layer {layer}: what is kept cannot be told")
            left.append(positions[head, [slots[row.tobytes()] for row in after[head]]])
            kept[head, left[-1]] = True
            scores[head, positions[head]] = self.scores[head]
        self.held[layer] = np.stack(left)


def storage(cache) -> int:
    """Bytes of the storage that keys and values hold on to; views would hide some."""
    return sum(of.untyped_storage().nbytes() for layer in cache.layers for of in (layer.keys, layer.values))


def run(model, case: dict) -> dict[str, np.ndarray]:
    """Run one case."""
    import kvpress
    import torch
    from transformers import DynamicCache

    config, cache = model.config, DynamicCache()
    prompt, continuation = (torch.tensor(case[name]) for name in ("prompt", "continuation"))
    recorder, outer, press = None, contextlib.nullcontext, None
    if case["press"] is not None:
        press = outer = getattr(kvpress, case["press"])(**case["options"])
        tokens = len(prompt) + len(continuation)
        recorder = Recorder(press, config.num_hidden_layers, config.num_key_value_heads, tokens)
        recorder.feed(len(prompt))
        outer = kvpress.KeyRerotationPress(press) if case["rerotate"] else press
    with outer(model):
        model(input_ids=prompt[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    held = [storage(cache)]
    first = cache.get_seq_length() if case["rerotate"] else len(prompt)
    places = torch.arange(first, first + len(continuation))

    def feed(part: slice):
        ids, position_ids = continuation[None, part], places[None, part]
        return model(input_ids=ids, past_key_values=cache, use_cache=True, position_ids=position_ids).logits[0]

    if case["target"] is None:
        logits = feed(slice(None))
    else:
        assert press is not None and recorder is not None, "there is nothing to bring back without a press"
        press.compression_ratio = 0.0  # DecodingPress sets it, and says so where it was another
        rows = []
        with kvpress.DecodingPress(press, compression_interval=1, target_size=case["target"])(model):
            for i in range(len(continuation)):
                recorder.feed(1)
                rows.append(feed(slice(i, i + 1)))
        logits = torch.cat(rows)
    nll = torch.nn.functional.cross_entropy(logits[:-1], continuation[1:], reduction="none")
    found = dict(logits=logits[: case["logits"]].numpy(), nll=nll.numpy(), bytes=np.array([*held, storage(cache)]))
    if recorder is not None and recorder.held:
        found |= zip(("kept", "scores"), map(np.stack, zip(*recorder.steps, strict=True)), strict=True)
    return found


def main() -> None:
    """Answer a request."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder, request, answer = sys.argv[1:]
    with open(request) as file:
        cases = json.load(file)
    kind = dict(attn_implementation="eager", dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **kind).eval()
    versions = [f"{name} {version(name)}" for name in ("kvpress", "transformers", "torch")]
    found: dict[str, Any] = {"engine": np.array(" / ".join(versions))}
    with torch.inference_mode():
        for number, case in enumerate(cases):
            print(f"kvpress: {case['press']}, case {number + 1} of {len(cases)}", file=sys.stderr, flush=True)
            found |= {f"{number}.{name}": array for name, array in run(model, case).items()}
    np.savez(answer, **found)


if __name__ == "__main__":
    main()
