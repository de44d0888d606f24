"""Makes the committed reference values from transformers, in float32 on the CPU.

Runs in a Python 3.11 environment with torch, transformers, accelerate, gguf and safetensors, not in the project's own
(README.md in this folder names the versions and the whole way). The tests read only the files it writes.

    python tests/reference/make_reference.py families
    python tests/reference/make_reference.py smollm2 --gguf SmolLM2.gguf --austen Rdata.rdb
    python tests/reference/make_reference.py gemma3 --gguf gemma3.gguf --austen Rdata.rdb
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import families  # noqa: E402
import numpy as np  # noqa: E402
import prompts  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

HERE = Path(__file__).parent
NEW_TOKENS = 64
PRIVATE = ("_name_or_path", "quantization_config")  # where the file lay on the maker's machine
VERSIONS = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"

SMOLLM2 = [
    ("sentence:1", 3),
    ("sentence:0", 5),
    ("sentence:2", 9),
    ("sentence:3", 15),
    ("sentence:4", 16),
    ("code:bisect", 17),
    ("austen:1:9000", 31),
    ("austen:2", 33),
    ("code:heapq", 50),
    ("austen:3", 64),
    ("austen:4:20000", 65),
    ("code:textwrap", 100),
    ("austen:0", 128),
    ("austen:5:4000", 200),
    ("code:colorsys", 256),
    ("austen:3:7000", 300),
    ("austen:1:30000", 400),
    ("austen:4", 512),
    ("code:queue", 700),
    ("austen:2:12000", 1000),
    ("austen:0:6000", 1500),
]
GEMMA3 = [
    ("sentence:0", 6),
    ("code:bisect", 100),
    ("austen:1", 511),
    ("austen:2", 513),
    ("austen:0", 700),
    ("code:heapq", 800),
    ("austen:4", 1000),
    ("austen:3:7000", 1024),
    ("austen:5", 1300),
]


def load(gguf: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def check_gemma3(config: Any) -> None:
    """The GGUF states only the window and the global base; the reader must have filled in the family's other values."""
    bases = {kind: values["rope_theta"] for kind, values in config.rope_parameters.items()}
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    found = (config.model_type, config.sliding_window, config.query_pre_attn_scalar, full, bases)
    expected = ("gemma3_text", 512, 256, [5, 11, 17], {"full_attention": 1e6, "sliding_attention": 1e4})
    if found != expected:
        raise ValueError(f"transformers read the Gemma 3 configuration as {found}, expected {expected}")


def check_norms(model: Any, gguf: Path, offset: float) -> None:
    """Norm weights against the file's own: Gemma's contain the +1 that transformers adds in the model."""
    from gguf import GGUFReader

    stored = {tensor.name: tensor.data for tensor in GGUFReader(gguf).tensors if tensor.name == "output_norm.weight"}
    loaded = model.model.norm.weight.detach().numpy() + offset
    np.testing.assert_allclose(loaded, stored["output_norm.weight"], rtol=1e-6)


@torch.inference_mode()
def continue_greedily(model: Any, ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Greedy tokens, top logits and top-two gaps, each [NEW_TOKENS]; end-of-sequence ids do not stop it."""
    cache = transformers.DynamicCache(config=model.config)
    tokens, tops, gaps = [], [], []
    following = torch.tensor([ids])
    for _ in range(NEW_TOKENS):
        logits = model(input_ids=following, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        best = logits.topk(2)
        tokens.append(int(best.indices[0]))
        tops.append(float(best.values[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        following = best.indices[None, :1]
    return np.array(tokens, np.int32), np.array(tops, np.float32), np.array(gaps, np.float32)


@torch.inference_mode()
def check_in_one_pass(model: Any, ids: list[int], tokens: np.ndarray, tops: np.ndarray, gaps: np.ndarray) -> float:
    """Largest change of a top logit when the same tokens go through one pass without a cache."""
    whole = torch.tensor([ids + tokens[:-1].tolist()])
    logits = model(input_ids=whole, use_cache=False, logits_to_keep=NEW_TOKENS).logits[0]
    sure = gaps >= 0.005
    np.testing.assert_array_equal(logits.argmax(-1).numpy()[sure], tokens[sure])
    chosen = logits[torch.arange(NEW_TOKENS), torch.from_numpy(tokens).long()].numpy()
    return float(abs(chosen - tops).max())


def build_continuations(name: str, gguf: Path, novels: list[str], wanted: list[tuple[str, int]], chat: bool) -> None:
    """Writes {name}.npz: prompts, greedy continuations and how sure each choice was."""
    model, tokenizer = load(gguf)
    if name.startswith("gemma3"):
        check_gemma3(model.config)
    check_norms(model, gguf, 1.0 if name.startswith("gemma3") else 0.0)
    built = prompts.build(wanted, novels, lambda text: tokenizer(text).input_ids)
    if chat:
        turn = [{"role": "user", "content": prompts.QUESTION}]
        built.append(("chat", tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]))
    rows = []
    for kind, ids in built:
        tokens, tops, gaps = continue_greedily(model, ids)
        drift = check_in_one_pass(model, ids, tokens, tops, gaps)
        text = tokenizer.decode(tokens)
        print(f"{kind} [{len(ids)}] min gap {gaps.min():.4f} one-pass drift {drift:.1e}: {text!r}", flush=True)
        rows.append((tokens, tops, gaps))
    origin = dict(
        gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        versions=VERSIONS,
        config={key: value for key, value in model.config.to_dict().items() if key not in PRIVATE},
    )
    np.savez_compressed(
        HERE / f"{name}.npz",
        kinds=np.array([kind for kind, _ in built]),
        prompt_lengths=np.array([len(ids) for _, ids in built], np.int32),
        prompt_tokens=np.concatenate([np.array(ids, np.int32) for _, ids in built]),
        tokens=np.stack([row[0] for row in rows]),
        top_logits=np.stack([row[1] for row in rows]),
        gaps=np.stack([row[2] for row in rows]),
        origin=np.array(json.dumps(origin, default=str)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["families", "smollm2", "gemma3"])
    parser.add_argument("--gguf", type=Path, help="the model's GGUF file")
    parser.add_argument("--austen", type=Path, help="Rdata.rdb of the Debian package r-cran-janeaustenr")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.what == "families":
        return families.build_families(HERE)
    if arguments.gguf is None or arguments.austen is None:
        parser.error(f"{arguments.what} needs --gguf and --austen")
    novels = prompts.read_novels(arguments.austen)
    if arguments.what == "smollm2":
        return build_continuations("smollm2-135m", arguments.gguf, novels, SMOLLM2, chat=True)
    return build_continuations("gemma3-270m", arguments.gguf, novels, GEMMA3, chat=False)


if __name__ == "__main__":
    main()
