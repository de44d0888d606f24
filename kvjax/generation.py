"""Generating text: `generate` runs a batch of prompts to its end, `stream` yields tokens as they are chosen."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax import sizes
from kvjax.batch import Batch
from kvjax.decoding import Chosen, Finish
from kvjax.errors import whole_number
from kvjax.models.loading import LanguageModel
from kvjax.options import Options, Prompts
from kvjax.spec import CacheSpec, bucket

Stop = Callable[[int, list[int]], int | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of one generated token: its own, and those of the likeliest tokens by id."""

    logprob: float
    top: dict[int, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """What became of one prompt; `finish_reason` is stop, length or out_of_pages."""

    prompt_tokens: int
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """A finished batch: one `Generated` for every prompt, times in seconds, and the cache's memory.

    `pages_used` are the most pages of each pool used at once. `compile_s` is what compiling or loading the decode loop
    took; the prefill's is in `ttft_s` and `prefill_s`.
    """

    sequences: list[Generated]
    ttft_s: float
    prefill_s: float
    decode_s: float
    compile_s: float
    pages_used: tuple[int, ...]
    spec: CacheSpec

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens of all sequences per second of decoding, the first of each (from the prefill) left out."""
        tokens = sum(max(len(sequence.token_ids) - 1, 0) for sequence in self.sequences)
        return tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def pages_used_peak(self) -> int:
        """Most pages used at once, of all pools."""
        return sum(self.pages_used)

    def cache_facts(self) -> dict[str, int]:
        """Sizes of the cache: page_size, pages_total, pages_used_peak, bytes_total, bytes_used_peak."""
        return dict(
            page_size=self.spec.page_size,
            pages_total=self.spec.num_pages - len(self.spec.pools),
            pages_used_peak=self.pages_used_peak,
            bytes_total=sizes.cache_bytes(self.spec),
            bytes_used_peak=sum(
                used * sizes.page_bytes(pool.spec) for used, pool in zip(self.pages_used, self.spec.pools, strict=True)
            ),
        )


def generate(
    model: nnx.Module | LanguageModel,
    prompts: Prompts,
    options: Options | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
    stop: Stop | None = None,
) -> Generation:
    """Generate for a batch of prompts: chunked prefill, then one jitted while loop over decode steps.

    Args:
        model: what `kvjax.load` returns, or a module called as `model(cache, step, tokens) -> (logits [seqs, vocab],
            cache)` with a `config`.
        prompts: token ids, of any lengths: lists, tuples or arrays of integers.
        options: see `Options`.
        progress: is called with prompt tokens fed and in all, after every chunk.
        stop: is called every 16 steps with a sequence's number and tokens. A number ends the sequence with reason stop
            and keeps so many of its tokens; None lets it go on (stop texts).

    Returns: everything generated, whatever the reason for the end, with times and memory.

    Raises: InputError for prompts that are no token ids, options out of range, a cache too small for a prompt or too
        large for the memory.
    """
    run = Batch(model, prompts, options or Options())
    with run.within_memory():
        return _generate(run, progress, stop)


def _generate(run: Batch, progress: Callable[[int, int], None] | None, stop: Stop | None) -> Generation:
    began = time.perf_counter()
    first, ttft = _first_tokens(run, progress)
    prefilled = time.perf_counter()
    places = bucket(max(run.limits))
    out = jax.tree.map(lambda x: jnp.zeros((places, *x.shape), x.dtype).at[0].set(x), first)
    out = run.decode(out, 0)
    compiled = time.perf_counter()
    if stop is None:
        out = run.decode(out, places)
    while stop is not None:
        _end_stopped(run, out, stop)
        if not run.running:
            break
        out = run.decode(out, 16)
    out = jax.device_get(out)
    decoded = time.perf_counter()
    return Generation(
        sequences=_results(run, out),
        ttft_s=ttft,
        prefill_s=prefilled - began,
        decode_s=decoded - compiled,
        compile_s=compiled - prefilled,
        pages_used=tuple(run.state.peak_pages.tolist()),
        spec=run.spec,
    )


def _first_tokens(run: Batch, progress: Callable[[int, int], None] | None) -> tuple[Chosen, float]:
    """Prefill; returns the first token of every sequence, and the seconds until the first of them was there."""
    began = time.perf_counter()
    ttft, first = 0.0, None
    for chosen in run.prefill(progress):
        first = chosen if first is None else _either(first, chosen)
        if not ttft and bool(chosen.valid.any()):
            ttft = time.perf_counter() - began
    assert first is not None, "a batch has a prompt, and a prompt a token"
    return first, ttft


def _either(a: Chosen, b: Chosen) -> Chosen:
    """Join what two chunks chose: a sequence chooses its first token with one of them."""
    pick = lambda x, y: jnp.where(b.valid.reshape(-1, *(1,) * (x.ndim - 1)), y, x)  # noqa: E731
    return jax.tree.map(pick, a, b)


def _end_stopped(run: Batch, out: Chosen, stop: Stop) -> None:
    finish, counts = np.array(run.state.finish), np.array(run.state.generated)
    tokens = np.asarray(out.token)
    for sequence, count in enumerate(counts.tolist()):
        keep = stop(sequence, tokens[:count, sequence].tolist())
        if keep is not None:
            finish[sequence], counts[sequence] = Finish.STOP, keep
    run.state = dataclasses.replace(run.state, finish=jnp.asarray(finish), generated=jnp.asarray(counts))


def _results(run: Batch, out: Chosen) -> list[Generated]:
    finish, counts = np.asarray(run.state.finish), np.asarray(run.state.generated)
    results = []
    for sequence, prompt in enumerate(run.prompts):
        count = int(counts[sequence])
        results.append(
            Generated(
                prompt_tokens=len(prompt),
                token_ids=np.asarray(out.token)[:count, sequence].tolist(),
                finish_reason=Finish(int(finish[sequence])).name.lower(),
                logprobs=_logprobs(out, sequence, count),
            )
        )
    return results


def _logprobs(out: Chosen, sequence: int, count: int) -> list[TokenLogprobs] | None:
    if out.logprob is None or out.top_ids is None or out.top_logprobs is None:
        return None
    own, ids, top = (np.asarray(a)[:count, sequence].tolist() for a in (out.logprob, out.top_ids, out.top_logprobs))
    pairs = zip(own, ids, top, strict=True)
    return [TokenLogprobs(logprob=a, top=dict(zip(i, t, strict=True))) for a, i, t in pairs]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streamed:
    """What one sequence has got since the last time; `finish_reason` is None while it goes on."""

    sequence: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None


def stream(
    model: nnx.Module | LanguageModel,
    prompts: Prompts,
    options: Options | None = None,
    *,
    steps: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[list[Streamed]]:
    """Yield tokens as they are chosen: after each prefill chunk, then after every `steps` decode steps (one scan).

    The state is donated from scan to scan. Where the policy bounds what a sequence holds (`streaming`), memory does
    not depend on `max_new_tokens`. Closing the iterator ends the generation. Mistakes are found by the call.

    Args:
        model, prompts, options, progress: as for `generate`.
        steps: decode steps between two yields.

    Yields: one `Streamed` for every sequence that got tokens or ended.

    Raises: as `generate`.
    """
    run = Batch(model, prompts, options or Options(), collects=False)
    return _stream(run, whole_number("steps", steps, 1), progress)


def _stream(run: Batch, steps: int, progress: Callable[[int, int], None] | None) -> Iterator[list[Streamed]]:
    finished = np.zeros(len(run.prompts), bool)
    with run.within_memory():
        for chosen in run.prefill(progress):
            yield _streamed(run, jax.tree.map(lambda x: x[None], chosen), finished)
        while run.running:
            yield _streamed(run, run.scan(steps), finished)


def _streamed(run: Batch, chosen: Chosen, finished: np.ndarray) -> list[Streamed]:
    """Sort what some steps chose, [steps, seqs], by sequence; marks those that ended in `finished`."""
    chosen = jax.device_get(chosen)
    finish, events = np.asarray(run.state.finish), []
    for sequence in range(finish.size):
        rows = chosen.valid[:, sequence]
        ended = finish[sequence] != Finish.RUNNING and not finished[sequence]
        if not rows.any() and not ended:
            continue
        finished[sequence] |= ended
        kept = jax.tree.map(lambda x, rows=rows: x[rows], chosen)
        count = int(rows.sum())
        events.append(
            Streamed(
                sequence=sequence,
                token_ids=kept.token[:, sequence].tolist(),
                finish_reason=Finish(int(finish[sequence])).name.lower() if ended else None,
                logprobs=_logprobs(kept, sequence, count),
            )
        )
    return events
