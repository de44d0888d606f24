"""`kvjax.load`: a model ready to run, by name or path."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvjax.models import registry
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.tokenizer import Tokenizer
from kvjax.paths import enable_compilation_cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A decoder with its tokenizer."""

    name: str
    decoder: Decoder
    config: DecoderConfig
    tokenizer: Tokenizer


def load(name: str, dtype: str = "float32", *, notify: Callable[[str], None] | None = None) -> LanguageModel:
    """Load a model. Compiled programs are kept from here on, see `kvjax.paths.enable_compilation_cache`.

    Args:
        name: smollm2-135m, gemma3-270m, a GGUF file, a Hugging Face folder or a hub name; see `registry.find`.
        dtype: of weights and computation: float32, bfloat16 or float16.
        notify: is called with a line to show before work that takes long.

    Raises: InputError for a model that is unknown, damaged or not supported.

    Example: `model = kvjax.load("smollm2-135m"); kvjax.generate(model, [model.tokenizer.encode("Hello")])`
    """
    enable_compilation_cache()
    source = registry.find(name)
    config = registry.read_config(source)
    tokenizer = registry.read_tokenizer(source)
    decoder = Decoder(config, registry.load_weights(source, dtype, notify=notify))
    return LanguageModel(name=source.name, decoder=decoder, config=config, tokenizer=tokenizer)
