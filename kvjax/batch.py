"""A batch of prompts on its way through the compiled steps: its options, its cache, and chunked prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax import sizes
from kvjax.cache import init_cache
from kvjax.decoding import Chosen, Finish, State, decode_scan, decode_while, prefill_step
from kvjax.errors import InputError
from kvjax.sampling import Sampling, sampling
from kvjax.spec import CacheSpec, bucket, pages_for

Prompts = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to generate.

    Attributes:
        max_new_tokens: most tokens to generate, one number for all prompts or one each.
        temperature, top_k, top_p, min_p, repetition_penalty: one number for all prompts or one each, see
            `kvjax.sampling.Sampling`; greedy by default.
        seed: of the random key.
        stop_ids: token ids that end a sequence; they are the last token of its result.
        logprobs: None for none, or how many of the likeliest tokens to report beside the chosen one.
        format, page_size, num_pages: of the cache; as many pages as the prompts may need by default.
        chunk_size: most prompt tokens a step.
    """

    max_new_tokens: int | Sequence[int] = 128
    temperature: float | Sequence[float] = 0.0
    top_k: int | Sequence[int] = 0
    top_p: float | Sequence[float] = 1.0
    min_p: float | Sequence[float] = 0.0
    repetition_penalty: float | Sequence[float] = 1.0
    seed: int = 0
    stop_ids: Sequence[int] = ()
    logprobs: int | None = None
    format: str = "float32"
    page_size: int = 16
    num_pages: int | None = None
    chunk_size: int = 512

    def sampling(self, num_seqs: int) -> Sampling:
        """Return the sampling of a batch. Raises InputError for values out of range."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return sampling(num_seqs, **{name: getattr(self, name) for name in names})


class Batch:
    """A batch on its way: the split model, the donated state, and what has been chosen."""

    def __init__(self, model: nnx.Module, prompts: Prompts, options: Options):
        self.prompts, self.options = prompts, options
        self.limits = _limits(prompts, options)
        self.spec = cache_spec(model, [len(prompt) for prompt in prompts], self.limits, options)
        self.graph, self.weights = nnx.split(model)
        self.num_logprobs = -1 if options.logprobs is None else options.logprobs
        self.state = self._initial_state(model)

    def _initial_state(self, model) -> State:
        count, vocab = len(self.prompts), model.config.vocab_size
        how = self.options.sampling(count)
        penalised = bool((np.asarray(how.repetition_penalty) != 1).any())
        zeros = lambda: jnp.zeros(count, jnp.int32)  # noqa: E731 - every leaf needs a buffer of its own to donate
        return State(
            cache=init_cache(self.spec),
            finish=zeros(),
            token=zeros(),
            generated=zeros(),
            limit=jnp.array(self.limits, jnp.int32),
            stop_ids=jnp.array(list(self.options.stop_ids) or [-1], jnp.int32),
            sampling=how,
            key=jax.random.key(self.options.seed),
            seen=jnp.zeros((count, vocab), bool) if penalised else None,
            peak_pages=jnp.int32(0),
        )

    def prefill(self, progress: Callable[[int, int], None] | None = None) -> Iterator[Chosen]:
        """Feed all prompts in chunks, yielding the first tokens chosen with each chunk."""
        done, total = 0, sum(map(len, self.prompts))
        pending = [(sequence, 0) for sequence in range(len(self.prompts))]
        size = self.spec.max_query_length
        while pending:
            chunk, pending = next_chunk(pending, self.prompts, size)
            chosen, ok = self._feed(chunk, give_up=len(chunk) == 1)
            if not ok and len(chunk) > 1:
                # Together they do not fit: one by one, so that as many as possible are served.
                for part in chunk:
                    chosen, ok = self._feed([part], give_up=True)
                    yield chosen
            else:
                yield chosen
            ended = np.asarray(self.state.finish) != Finish.RUNNING
            pending = [part for part in pending if not ended[part[0]]]
            done += sum(end - begin for _, begin, end in chunk)
            if progress:
                progress(done, total)

    def _feed(self, chunk: list[tuple[int, int, int]], *, give_up: bool) -> tuple[Chosen, bool]:
        count = len(self.prompts)
        lengths, last = np.zeros(count, np.int32), np.zeros(count, bool)
        tokens: list[int] = []
        for sequence, begin, end in chunk:
            tokens += self.prompts[sequence][begin:end]
            lengths[sequence], last[sequence] = end - begin, end == len(self.prompts[sequence])
        padded = np.zeros(min(max(16, 1 << (len(tokens) - 1).bit_length()), self.spec.max_query_length), np.int32)
        padded[: len(tokens)] = tokens
        arrays = (jnp.asarray(padded), jnp.asarray(lengths), jnp.asarray(last), jnp.asarray(give_up))
        self.state, chosen, ok = prefill_step(
            self.graph, self.weights, self.state, *arrays, num_logprobs=self.num_logprobs
        )
        return chosen, bool(ok)

    def decode(self, out: Chosen, most: int) -> Chosen:
        """Run the decode loop for at most `most` steps; `out` is donated."""
        self.state, out = decode_while(
            self.graph, self.weights, self.state, out, jnp.int32(most), num_logprobs=self.num_logprobs
        )
        return out

    def scan(self, steps: int) -> Chosen:
        """Run `steps` decode steps and return what they chose."""
        self.state, chosen = decode_scan(
            self.graph, self.weights, self.state, steps=steps, num_logprobs=self.num_logprobs
        )
        return chosen

    @property
    def running(self) -> bool:
        return bool((np.asarray(self.state.finish) == Finish.RUNNING).any())


def _limits(prompts: Prompts, options: Options) -> list[int]:
    if not prompts:
        raise InputError("no prompt was given: give at least one")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(f"prompt {number} is empty: give at least one token")
    most = options.max_new_tokens
    limits = [most] * len(prompts) if isinstance(most, int) else list(most)
    if len(limits) != len(prompts):
        raise InputError(f"max_new_tokens has {len(limits)} values for {len(prompts)} prompts: give one, or one each")
    if min(limits) < 1:
        raise InputError(f"max_new_tokens {min(limits)} is too small: it must be at least 1")
    if options.logprobs is not None and options.logprobs < 0:
        raise InputError(f"logprobs {options.logprobs} is negative: give 0 or more")
    if options.chunk_size < 1:
        raise InputError(f"chunk_size {options.chunk_size} is too small: it must be at least 1")
    return limits


def cache_spec(model, prompt_lengths: Sequence[int], limits: Sequence[int], options: Options) -> CacheSpec:
    """Return the cache that a batch needs, its sizes rounded up so that similar batches share a compiled program.

    Args:
        model: a module with a `config` (see `kvjax.models.config.DecoderConfig`).
        prompt_lengths, limits: tokens of each prompt and most tokens to generate for it.
        options: page size, pages and format.

    Raises: InputError if the cache is too small for the longest prompt.
    """
    config = model.config
    longest = max(prompt_lengths)
    chunk = min(options.chunk_size, max(16, 1 << (longest - 1).bit_length()))
    shape: dict[str, Any] = dict(
        num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        max_seqs=len(prompt_lengths), max_query_length=chunk, page_size=options.page_size, format=options.format,
        windows=config.windows,
    )  # fmt: skip
    small = CacheSpec(**shape, num_pages=2**30, pages_per_seq=2**20)
    # The last token generated is never fed.
    tokens = [length + limit - 1 for length, limit in zip(prompt_lengths, limits, strict=True)]
    pages_per_seq = max(bucket(pages_for(max(tokens), small.page_size)), *small.window_rings, 1)
    needed = [sizes.most_pages(small, count) for count in tokens]
    num_pages = options.num_pages if options.num_pages is not None else bucket(sum(needed)) + 1
    spec = CacheSpec(**shape, num_pages=num_pages, pages_per_seq=pages_per_seq)
    if (least := sizes.most_pages(spec, longest)) > num_pages - 1:
        raise InputError(
            f"a prompt of {longest} tokens is longer than the cache: it needs {least} pages and there are "
            f"{num_pages - 1}; raise num_pages to at least {least + 1} or shorten the prompt"
        )
    return spec


def next_chunk(pending, prompts: Prompts, size: int):
    """Pack prompt tokens, in order, into one chunk: (sequence, begin, end) parts, and what is left."""
    chunk, room = [], size
    while pending and room:
        sequence, begin = pending[0]
        end = min(len(prompts[sequence]), begin + room)
        chunk.append((sequence, begin, end))
        room -= end - begin
        pending = pending[1:] if end == len(prompts[sequence]) else [(sequence, end), *pending[1:]]
    return chunk, pending
