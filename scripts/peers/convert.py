"""Writes the model that the peers read; called by setup.sh in the environment that each step needs.

python convert.py checkpoint SmolLM2.gguf FOLDER    GGUF -> float32 safetensors folder (transformers)
python convert.py openvino CHECKPOINT FOLDER        that folder -> OpenVINO IR, float32 (optimum-intel)
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def checkpoint(gguf: Path, folder: Path) -> None:
    """The dequantised weights and the tokenizer of a GGUF file, as transformers reads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # Of no use after dequantisation, and a later transformers would look for the GGUF file.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def openvino(source: Path, folder: Path) -> None:
    """The same weights as OpenVINO IR, uncompressed, with the tokenizer the pipeline wants to find."""
    import openvino as ov
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    model = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, load_in_8bit=False)
    model.save_pretrained(folder)
    # From tokenizer.json alone: the class that a newer transformers names in tokenizer_config.json may be unknown.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(source / "tokenizer.json")), eos_token="<|im_end|>"
    )
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    ov.save_model(encoder, folder / "openvino_tokenizer.xml")
    ov.save_model(decoder, folder / "openvino_detokenizer.xml")


if __name__ == "__main__":
    {"checkpoint": checkpoint, "openvino": openvino}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
