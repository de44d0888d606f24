"""Page formats by name, and pages outside a cache: quantised and back."""

from __future__ import annotations

from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32

from kvjax.arguments import floats
from kvjax.errors import InputError, shown
from kvjax.kernels.formats import FORMATS, Format, Stored, decode, encode, rotate

_ALIASES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "fp8": "fp8_e4m3", "fp8_per_token_head": "fp8_e4m3", "int8_per_token_head": "int8",
    "int4_per_token_head": "int4_hadamard",
}  # fmt: skip
# Names that stand for one format of keys and another of values, the best of those measured (docs/formats.md).
_PAIRS = {"int4": ("int4_per_channel", "int4_hadamard")}
_OF_BOTH = tuple(name for name, form in FORMATS.items() if not form.is_per_channel)
_FORMATS_OF = {
    "format": (*_OF_BOTH, *_PAIRS), "key_format": (*FORMATS, *_PAIRS), "value_format": (*_OF_BOTH, *_PAIRS),
    "skip_format": (*_OF_BOTH, *_PAIRS),
}  # fmt: skip


def canonical_format(name: str, of: str = "format", argument: str | None = None) -> str:
    """Return the page format that `name` or its alias (vLLM's names) stands for.

    Args:
        name: a format, or an alias.
        of: what it is the format of: "format" (keys and values), "key_format", "value_format" or "skip_format".
        argument: what the caller calls it, `of` by default.

    Raises: InputError for a name that is no such format.
    """
    format_name = _ALIASES.get(name, name) if isinstance(name, str) else None
    if format_name not in _FORMATS_OF[of]:
        raise InputError(
            f"{argument or of} {shown(name)} is not a page format: choose one of {', '.join(_FORMATS_OF[of])}"
        )
    return format_name


def forms_of(name: str) -> tuple[Format, Format]:
    """Return how a format, by its canonical name, stores keys, and values."""
    keys, values = _PAIRS.get(name, (name, name))
    return FORMATS[keys], FORMATS[values]


def best_page_size(name: str) -> int:
    """Return the page size that suits a format: larger where the channels of a page share their scales.

    Raises: InputError for a name that is no format.
    """
    return 64 if forms_of(canonical_format(name))[0].is_per_channel else 16


def quantize_pages(pages: Float[ArrayLike, "pages heads page_size head_dim"], format: str) -> Stored:
    """Store pages in a format, as a cache with that format does: for tiers, and to experiment.

    Args:
        pages: keys or values of full pages.
        format: a page format or alias. "int4" names two, of keys and of values: name one.

    Returns: codes, and scales (and minima) of every vector or channel. Codes have the dtype and width that the format
        says, two values in a byte in 4-bit ones.

    Raises: InputError for pages of another shape or kind, an odd head_dim, or a name that is no format.
    """
    name = canonical_format(format, "key_format", "format")
    if name in _PAIRS:
        keys, values = _PAIRS[name]
        raise InputError(f"format {name!r} stands for {keys!r} of keys and {values!r} of values: name one of them")
    array = floats("pages", pages, ("pages", "heads", "page_size", "head_dim"))
    if array.shape[-1] % 2:
        raise InputError(f"head_dim {array.shape[-1]} is odd: packed formats need an even size")
    if not array.size:
        raise InputError(f"pages is of shape {list(array.shape)}: there is nothing to store")
    codes, scales = encode(array, FORMATS[name])
    return Stored(codes, scales, FORMATS[name])


def dequantize_pages(stored: Stored) -> Float32[Array, "pages heads page_size head_dim"]:
    """Return what stored pages stand for, in the basis they came in: a rotation is undone.

    Raises: InputError for what is no stored pages, or lacks the scales of its format.
    """
    if not isinstance(stored, Stored):
        raise InputError(f"stored is a {type(stored).__name__}: give what quantize_pages returned")
    vectors = (*stored.codes.shape[:2], stored.codes.shape[3] * stored.form.per_code)
    wanted = [vectors if stored.form.is_per_channel else stored.codes.shape[:3]] * stored.form.num_scales
    if [scale.shape for scale in stored.scales] != wanted:
        raise InputError(
            f"stored has scales of shapes {[list(of.shape) for of in stored.scales]}: {stored.form.name} with these "
            f"codes has {[list(of) for of in wanted]}"
        )
    values = decode(stored.codes, stored.scales, stored.form).astype("float32")
    return rotate(values) if stored.form.is_rotated else values
