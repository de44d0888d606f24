"""What a generation is asked for: its prompts and options, and their check at the border."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from kvjax.errors import InputError, shown, whole_number
from kvjax.policy import Policy, checked_policy
from kvjax.sampling import Sampling, sampling

Prompts = Sequence[Sequence[int] | np.ndarray | jax.Array] | np.ndarray | jax.Array
# Positions are int32, and a prompt comes before what is generated.
MOST_NEW_TOKENS = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to generate.

    Attributes:
        max_new_tokens: most tokens to generate, one number for all prompts or one each.
        temperature, top_k, top_p, min_p, repetition_penalty: one number for all prompts or one each, see
            `kvjax.sampling.Sampling`; greedy by default.
        seed: of the random key, 32 bits.
        stop_ids: token ids that end a sequence; they are the last token of its result. None takes those that end a
            text or a turn of a `LanguageModel`, and none for a module of your own.
        logprobs: None for none, or how many of the likeliest tokens to report beside the chosen one.
        format, skip_layers, page_size, num_pages: of the cache (see `CacheSpec`); by default the page size that suits
            the format, and as many pages as the prompts may need.
        policy: what the cache keeps, from `kvjax.policies` or of your own; everything by default.
        chunk_size: most prompt tokens a step; more where a policy must see the end of a prompt at once.
    """

    max_new_tokens: int | Sequence[int] | np.ndarray = 128
    temperature: float | Sequence[float] | np.ndarray = 0.0
    top_k: int | Sequence[int] | np.ndarray = 0
    top_p: float | Sequence[float] | np.ndarray = 1.0
    min_p: float | Sequence[float] | np.ndarray = 0.0
    repetition_penalty: float | Sequence[float] | np.ndarray = 1.0
    seed: int = 0
    stop_ids: Sequence[int] | np.ndarray | None = None
    logprobs: int | None = None
    format: str = "float32"
    skip_layers: Sequence[int] = ()
    page_size: int | None = None
    num_pages: int | None = None
    policy: Policy = Policy()
    chunk_size: int = 512

    def __post_init__(self):
        checked_policy(self.policy)

    def sampling(self, num_seqs: int) -> Sampling:
        """Return the sampling of a batch. Raises InputError for values out of range."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return sampling(num_seqs, **{name: getattr(self, name) for name in names})


def checked(prompts: object, options: Options, vocab_size: int) -> tuple[list[list[int]], list[int], Options]:
    """Return the prompts as lists, the most new tokens of each, and the options as plain integers.

    Raises: InputError for prompts that are no token ids of the vocabulary, and for options out of range.
    """
    token_ids = [_token_ids(f"prompt {i}", prompt, vocab_size) for i, prompt in enumerate(_items("prompts", prompts))]
    if not token_ids:
        raise InputError("no prompt was given: give at least one")
    for number, prompt in enumerate(token_ids):
        if not prompt:
            raise InputError(f"prompt {number} is empty: give at least one token")
    given = options.max_new_tokens
    several = isinstance(given, list | tuple) or np.ndim(given) > 0
    limits = _items("max_new_tokens", given) if several else [given] * len(token_ids)
    if len(limits) != len(token_ids):
        raise InputError(f"max_new_tokens has {len(limits)} values for {len(token_ids)} prompts: give one, or one each")
    limits = [whole_number("max_new_tokens", limit, 1, MOST_NEW_TOKENS) for limit in limits]
    whole: dict[str, int] = dict(
        seed=whole_number("seed", options.seed, 0, 2**32 - 1),
        chunk_size=whole_number("chunk_size", options.chunk_size, 1),
    )
    if options.page_size is not None:
        whole["page_size"] = whole_number("page_size", options.page_size, 1)
    if options.logprobs is not None:
        whole["logprobs"] = whole_number("logprobs", options.logprobs, 0, vocab_size)
    if options.num_pages is not None:
        whole["num_pages"] = whole_number("num_pages", options.num_pages, 1)
    stop_ids = _token_ids("stop_ids", () if options.stop_ids is None else options.stop_ids, vocab_size)
    return token_ids, limits, dataclasses.replace(options, stop_ids=stop_ids, **whole)


def _token_ids(name: str, given: object, vocab_size: int) -> list[int]:
    return [
        whole_number(f"token {i} of {name}", token, 0, vocab_size - 1) for i, token in enumerate(_items(name, given))
    ]


def _items(name: str, given: object) -> list:
    """The items of a list, tuple or array; those of arrays as Python's own numbers."""
    if isinstance(given, list | tuple):
        return list(given)
    if isinstance(given, np.ndarray | jax.Array) and given.ndim:
        return np.asarray(given).tolist()
    raise InputError(
        f"{name} is {shown(given)}: give a list or an array of whole numbers, for each prompt a list of its token ids"
    )
