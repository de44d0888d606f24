"""A batch of prompts on its way through the compiled steps: its cache, chunked prefill, and memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax import sizes
from kvjax.cache import init_cache
from kvjax.decoding import Chosen, Finish, State, decode_scan, decode_while, prefill_step
from kvjax.errors import InputError, shown
from kvjax.formats import best_page_size
from kvjax.models.loading import LanguageModel
from kvjax.options import Options, Prompts, checked
from kvjax.policy import Policy
from kvjax.spec import CacheSpec, bucket, pages_for


class Batch:
    """A batch on its way: the split model and the donated state.

    `collects` says whether all that is chosen will be kept, which takes memory too.
    """

    def __init__(self, model: nnx.Module | LanguageModel, prompts: Prompts, options: Options, *, collects: bool = True):
        module, eos_ids = parts_of(model)
        vocab: int = module.config.vocab_size  # pyright: ignore[reportAttributeAccessIssue]
        self.prompts, self.limits, self.options = checked(prompts, options, vocab)
        self.stop_ids = list(eos_ids if options.stop_ids is None else self.options.stop_ids or ())
        self.spec = cache_spec(module, [len(prompt) for prompt in self.prompts], self.limits, self.options)
        self.graph, self.weights = nnx.split(module)
        self.num_logprobs = -1 if self.options.logprobs is None else self.options.logprobs
        self._collects = collects
        if (memory := _memory()) is not None and self._bytes > memory:
            raise self._too_large(f"there are {memory / 1e9:.1f} GB of memory")
        kinds = token_kinds(model, vocab, self.spec.policy)
        with self.within_memory():
            self.state = self._initial_state(vocab, kinds)

    @property
    def _bytes(self) -> int:
        """Bytes of the cache and, where that is collected, of what is chosen."""
        places = bucket(max(self.limits)) if self._collects else 0
        return sizes.cache_bytes(self.spec) + len(self.limits) * places * (8 + 8 * (self.num_logprobs + 1))

    def _too_large(self, reason: str) -> InputError:
        return InputError(
            f"the cache and the results would take {self._bytes} bytes ({self._bytes / 1e9:.1f} GB) and {reason}: "
            f"lower max_new_tokens, num_pages or page_size, or give fewer or shorter prompts"
        )

    @contextlib.contextmanager
    def within_memory(self) -> Iterator[None]:
        """Raise InputError where jax finds no memory."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise self._too_large("the memory ran out") from None

    def _initial_state(self, vocab: int, kinds: jax.Array | None) -> State:
        count = len(self.prompts)
        how = self.options.sampling(count)
        penalised = bool((np.asarray(how.repetition_penalty) != 1).any())
        zeros = lambda: jnp.zeros(count, jnp.int32)  # noqa: E731 - every leaf needs a buffer of its own to donate
        return State(
            cache=init_cache(self.spec),
            finish=zeros(),
            token=zeros(),
            generated=zeros(),
            limit=jnp.array(self.limits, jnp.int32),
            stop_ids=jnp.array(self.stop_ids or [-1], jnp.int32),
            sampling=how,
            key=jax.random.key(self.options.seed),
            seen=jnp.zeros((count, vocab), bool) if penalised else None,
            peak_pages=jnp.zeros(len(self.spec.pools), jnp.int32),
            kinds=kinds,
        )

    def prefill(self, progress: Callable[[int, int], None] | None = None) -> Iterator[Chosen]:
        """Feed all prompts in chunks, yielding the first tokens chosen with each chunk."""
        done, total = 0, sum(map(len, self.prompts))
        pending = [(sequence, 0) for sequence in range(len(self.prompts))]
        size = self.spec.max_query_length
        while pending:
            chunk, pending = next_chunk(pending, self.prompts, size, self.spec.policy.last_chunk)
            chosen, ok = self._feed(chunk, give_up=len(chunk) == 1)
            done += sum(end - begin for _, begin, end in chunk)
            if progress:
                progress(done, total)
            if not ok and len(chunk) > 1:
                # Together they do not fit: one by one, so that as many as possible are served.
                for part in chunk:
                    yield self._feed([part], give_up=True)[0]
            else:
                yield chosen
            ended = np.asarray(self.state.finish) != Finish.RUNNING
            pending = [part for part in pending if not ended[part[0]]]

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


def parts_of(model: object) -> tuple[nnx.Module, Sequence[int]]:
    """Return the module to run, and the ids that end its text."""
    if isinstance(model, LanguageModel):
        return model.decoder, model.tokenizer.eos_ids
    if isinstance(model, nnx.Module) and hasattr(model, "config"):
        return model, ()
    raise InputError(
        f"model is {shown(model)}: give what kvjax.load returns, its decoder, or a flax.nnx.Module with a config"
    )


def token_kinds(model: object, vocab: int, policy: Policy) -> jax.Array | None:
    """Return what a policy wants to know of tokens, int8 [vocab]; None if nothing, or the model has no tokenizer."""
    if not policy.wants_kinds or not isinstance(model, LanguageModel):
        return None
    # A vocabulary may be padded with tokens that no text has.
    kinds = model.tokenizer.kinds[:vocab]
    return jnp.array(np.pad(kinds, (0, vocab - kinds.size)))


def _memory() -> int | None:
    """Return the bytes of memory that the default device has, or None where nothing says so."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    known = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):  # a container's limit, where there is one
        known.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(known, default=None)


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
    policy, whole = options.policy, max(16, 1 << (longest - 1).bit_length())
    chunk = max(min(options.chunk_size, whole), min(policy.last_chunk, whole))
    shape: dict[str, Any] = dict(
        num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        max_seqs=len(prompt_lengths), max_query_length=chunk, windows=config.windows, format=options.format,
        page_size=options.page_size or best_page_size(options.format), skip_layers=options.skip_layers,
        policy=policy, groups=config.num_kv_heads if policy.by_head else 1,
    )  # fmt: skip
    small = CacheSpec(**shape, num_pages=2**30, pages_per_seq=2**20)
    # The last token generated is never fed.
    pairs = zip(prompt_lengths, limits, strict=True)
    tokens = [policy.most_slots(length, limit - 1, chunk, small.page_size) for length, limit in pairs]
    longest_row = 1 if all(small.layer_windows) else bucket(pages_for(max(tokens), small.page_size))
    pages_per_seq = max(longest_row, *small.window_rings, 1)
    pages: dict[str, Any] = dict(num_pages=options.num_pages or 0)
    if options.num_pages is None:
        of_pools = [bucket(sum(sizes.most_pages(pool.spec, n) for n in tokens)) + 1 for pool in small.pools]
        pages = dict(num_pages=sum(of_pools)) | (dict(skip_pages=of_pools[1]) if len(of_pools) > 1 else dict())
    spec = CacheSpec(**shape, **pages, pages_per_seq=pages_per_seq)
    for pool in spec.pools:
        slots = policy.most_slots(longest, 0, chunk, spec.page_size)
        if (least := sizes.most_pages(pool.spec, slots)) > pool.spec.num_pages - 1:
            raise InputError(
                f"a prompt of {longest} tokens is longer than the cache: it needs {least} pages and there are "
                f"{pool.spec.num_pages - 1}; raise num_pages to at least "
                f"{spec.num_pages - pool.spec.num_pages + least + 1} or shorten the prompt"
            )
    return spec


def next_chunk(pending, prompts: Sequence[Sequence[int]], size: int, last: int = 0):
    """Pack prompt tokens, in order, into one chunk: (sequence, begin, end) parts, and what is left.

    `last` tokens of a prompt, or all it has, are not parted; `size` is no less.
    """
    chunk, room = [], size
    while pending and room:
        sequence, begin = pending[0]
        length = len(prompts[sequence])
        end = min(length, begin + room)
        if 0 < length - end < (together := min(last, length)):
            end = length - together
        if end == begin:
            break
        chunk.append((sequence, begin, end))
        room -= end - begin
        pending = pending[1:] if end == length else [(sequence, end), *pending[1:]]
    return chunk, pending
