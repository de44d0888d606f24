"""kvjax: a paged KV cache for JAX language models that is a value.

Names are looked up on first use, so `import kvjax` loads no model, no tokenizer and not even JAX.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvjax.attention import attend as attend
    from kvjax.attention import plan_step as plan_step
    from kvjax.cache import Cache as Cache
    from kvjax.cache import PooledCache as PooledCache
    from kvjax.cache import Status as Status
    from kvjax.cache import clear_status as clear_status
    from kvjax.cache import init_cache as init_cache
    from kvjax.errors import InputError as InputError
    from kvjax.formats import dequantize_pages as dequantize_pages
    from kvjax.formats import quantize_pages as quantize_pages
    from kvjax.generation import Generated as Generated
    from kvjax.generation import Generation as Generation
    from kvjax.generation import Streamed as Streamed
    from kvjax.generation import generate as generate
    from kvjax.generation import stream as stream
    from kvjax.implementations import explain as explain
    from kvjax.invariants import CacheError as CacheError
    from kvjax.invariants import check as check
    from kvjax.models.loading import LanguageModel as LanguageModel
    from kvjax.models.loading import load as load
    from kvjax.options import Options as Options
    from kvjax.rotary import Rotary as Rotary
    from kvjax.sequences import fork as fork
    from kvjax.sequences import release as release
    from kvjax.sequences import truncate as truncate
    from kvjax.sharing import drop as drop
    from kvjax.sharing import retain as retain
    from kvjax.sharing import share as share
    from kvjax.spec import CacheSpec as CacheSpec
    from kvjax.step import Report as Report
    from kvjax.step import Step as Step
    from kvjax.step import begin_step as begin_step
    from kvjax.step import end_step as end_step

_LAZY = {
    "attend": "kvjax.attention",
    "plan_step": "kvjax.attention",
    "Cache": "kvjax.cache",
    "PooledCache": "kvjax.cache",
    "Status": "kvjax.cache",
    "clear_status": "kvjax.cache",
    "init_cache": "kvjax.cache",
    "InputError": "kvjax.errors",
    "dequantize_pages": "kvjax.formats",
    "quantize_pages": "kvjax.formats",
    "Generated": "kvjax.generation",
    "Generation": "kvjax.generation",
    "Streamed": "kvjax.generation",
    "generate": "kvjax.generation",
    "stream": "kvjax.generation",
    "explain": "kvjax.implementations",
    "CacheError": "kvjax.invariants",
    "check": "kvjax.invariants",
    "LanguageModel": "kvjax.models.loading",
    "load": "kvjax.models.loading",
    "Options": "kvjax.options",
    "Rotary": "kvjax.rotary",
    "drop": "kvjax.sharing",
    "fork": "kvjax.sequences",
    "release": "kvjax.sequences",
    "retain": "kvjax.sharing",
    "share": "kvjax.sharing",
    "truncate": "kvjax.sequences",
    "CacheSpec": "kvjax.spec",
    "Report": "kvjax.step",
    "Step": "kvjax.step",
    "begin_step": "kvjax.step",
    "end_step": "kvjax.step",
}

__all__ = ["__version__", *_LAZY]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kvjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
