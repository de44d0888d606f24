"""Tiny checkpoints of every kind: random canonical weights, and writers of Hugging Face folders and GGUF files."""

import json

import numpy as np
import pytest

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 32, 4, 2, 8, 64, 2
ALPHABET = 256  # the byte tokens of GPT-2's tokenizer
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
VOCAB = len(TOKENS) + ALPHABET + len(MERGES)

CONFIG = dict(
    model_type="llama",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INTERMEDIATE,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    hidden_act="silu",
    max_position_embeddings=128,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)
HF_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
HF_GEMMA_NAMES = HF_NAMES | {
    "post_attn_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}
GGUF_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


@pytest.fixture
def random_weights():
    """`random_weights(biases=…, qk_norm=…, post_norms=…, tied=…)`: canonical weights of the tiny configuration."""

    def make(*, biases=False, qk_norm=False, post_norms=False, tied=True):
        random = np.random.default_rng(0)

        def draw(*shape):
            return random.standard_normal(shape).astype(np.float32)

        def layer():
            q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
            tensors = dict(attn_norm=draw(HIDDEN), mlp_norm=draw(HIDDEN))
            tensors |= dict(q=draw(q, HIDDEN), k=draw(kv, HIDDEN), v=draw(kv, HIDDEN), o=draw(HIDDEN, q))
            tensors |= dict(gate=draw(INTERMEDIATE, HIDDEN), up=draw(INTERMEDIATE, HIDDEN))
            tensors |= dict(down=draw(HIDDEN, INTERMEDIATE))
            tensors |= dict(q_bias=draw(q), k_bias=draw(kv), v_bias=draw(kv)) if biases else {}
            tensors |= dict(q_norm=draw(HEAD_DIM), k_norm=draw(HEAD_DIM)) if qk_norm else {}
            return tensors | (dict(post_attn_norm=draw(HIDDEN), post_mlp_norm=draw(HIDDEN)) if post_norms else {})

        weights = dict(embed=draw(VOCAB, HIDDEN), final_norm=draw(HIDDEN), layers=[layer() for _ in range(LAYERS)])
        return weights if tied else weights | dict(lm_head=draw(VOCAB, HIDDEN))

    return make


@pytest.fixture
def hf_tensors():
    """`hf_tensors(weights, gemma=…)`: canonical weights under the names and conventions of Hugging Face files."""

    def rename(weights, *, gemma=False):
        names = HF_GEMMA_NAMES if gemma else HF_NAMES
        tensors = {"model.embed_tokens.weight": weights["embed"], "model.norm.weight": weights["final_norm"]}
        if "lm_head" in weights:
            tensors["lm_head.weight"] = weights["lm_head"]
        for index, layer in enumerate(weights["layers"]):
            tensors |= {f"model.layers.{index}.{names[key]}": value for key, value in layer.items()}
        return {name: value - 1 if gemma and "norm" in name else value for name, value in tensors.items()}

    return rename


@pytest.fixture
def write_folder(tmp_path):
    """`write_folder(tensors, config=…, shards=…)`: a Hugging Face folder with these tensors."""
    from safetensors.numpy import save_file

    def write(tensors, config=CONFIG, *, shards=1):
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder
        weight_map = {}
        for shard in range(shards):
            name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = dict(list(tensors.items())[shard::shards])
            save_file(part, folder / name)
            weight_map |= dict.fromkeys(part, name)
        (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=weight_map)))
        return folder

    return write


def interleaved_rows(matrix, heads):
    """Rows of a half-split matrix as llama.cpp stores them: component i beside component i + half."""
    half = HEAD_DIM // 2
    order = [head * HEAD_DIM + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return matrix[order]


@pytest.fixture
def write_gguf(tmp_path):
    """`write_gguf(weights, quantised=…, fields=…, drop=…)`: a GGUF llama file with a byte-level tokenizer.

    `quantised` names the type of a layer's matrices, `drop` tensors to leave out, `fields` metadata to change.
    """
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    def write(weights, *, arch="llama", quantised="F32", fields=None, drop=(), extra=None):
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, arch)
        sizes = dict(block_count=LAYERS, context_length=128, embedding_length=HIDDEN, feed_forward_length=INTERMEDIATE)
        sizes |= {"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS}
        values: dict = {f"{arch}.{key}": value for key, value in sizes.items()}
        values[f"{arch}.attention.layer_norm_rms_epsilon"] = 1e-5
        values |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
        merged = [merge.replace(" ", "") for merge in MERGES]
        values["tokenizer.ggml.tokens"] = [*TOKENS, *sorted(ByteLevel.alphabet()), *merged]
        values["tokenizer.ggml.token_type"] = [3] * len(TOKENS) + [1] * (VOCAB - len(TOKENS))
        values["tokenizer.ggml.merges"] = MERGES
        values |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
        for key, value in (values | (fields or {})).items():
            if value is not None:
                add_field(writer, key, value)
        tensors = {"token_embd.weight": weights["embed"], "output_norm.weight": weights["final_norm"]} | (extra or {})
        for index, layer in enumerate(weights["layers"]):
            for key, value in layer.items():
                heads = dict(q=HEADS, k=KV_HEADS).get(key) if arch == "llama" else None
                tensors[f"blk.{index}.{GGUF_NAMES[key]}"] = interleaved_rows(value, heads) if heads else value
        for name, value in tensors.items():
            kind = gguf.GGMLQuantizationType[quantised if name.startswith("blk") and value.ndim == 2 else "F32"]
            if name not in drop:
                writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def add_field(writer, key, value):
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds.get(type(value), writer.add_array)(key, value)

    return write
