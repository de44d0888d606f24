"""A stream beside attention that recomputes its window for every block of tokens, on the same text."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int32

from kvjax.decoding import jit
from kvjax.errors import InputError
from kvjax.evaluation.policies import Stopped
from kvjax.evaluation.texts import Text
from kvjax.kernels import dense_attention
from kvjax.models.loading import LanguageModel
from kvjax.options import Options
from kvjax.policies import SlidingWindow, Streaming
from kvjax.rotary import apply
from kvjax.streaming import Piece, TextStream
from kvjax.tally import Tally

STRETCH, BLOCK, BLOCKS = 4096, 64, 16
TOKENS = 5 * STRETCH


def run(
    model: LanguageModel,
    text: Text,
    options: Options,
    tokens: int | None,
    notify: Callable[[str], None],
    pause: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Feed a text to a streaming cache, and to a plain window as large, and score blocks of it anew.

    In every stretch of `STRETCH` tokens `BLOCKS` blocks of `BLOCK` tokens, evenly spread, are scored by a forward pass
    without a cache over as many tokens as the streaming cache keeps and the block: what sliding-window attention with
    recomputation would say, in strides. The caches' scores of the same tokens are compared with these.

    Args:
        model, text: of any length; all but the last tokens that fill no stretch are used.
        options: of the cache, its policy `Streaming`.
        tokens: to read; None for `TOKENS`.
        notify: is called with an estimate of the time, and with progress.
        pause: is called between compiled calls; raises `policies.Stopped` to have the stretches compared so far.

    Returns: what `--compare --json` prints; see docs/streaming.md.

    Raises: InputError for another policy, and for fewer tokens than a stretch.
    """
    policy = options.policy
    if not isinstance(policy, Streaming):
        raise InputError(f"policy {policy.name} is not compared with recomputation: give streaming:window=…,sinks=…")
    kept = policy.sinks + policy.window
    tokens = TOKENS if tokens is None else tokens
    if tokens < STRETCH or kept + BLOCK > STRETCH:
        raise InputError(f"{tokens} tokens and a window of {kept}: give at least {STRETCH}, and a smaller window")
    began, read = time.perf_counter(), np.array(model.tokenizer.encode(text.text), np.int32)
    plain = dataclasses.replace(options, policy=SlidingWindow(window=kept))
    ours, window = (TextStream(model, read, of, limit=tokens) for of in (options, plain))
    blocks = [_starts(begin, kept) for begin in range(0, tokens - STRETCH + 1, STRETCH)]
    notify(f"about {_minutes(model, read, kept, ours, window, sum(map(len, blocks))):.0f} minutes")
    streamed, windowed, rows = _Scored(ours, pause), _Scored(window, pause), []
    with contextlib.suppress(Stopped):
        for number, starts in enumerate(blocks):
            end = (number + 1) * STRETCH if starts is not blocks[-1] else tokens
            scores = streamed.until(end), windowed.until(end)
            rows.append(_row(number * STRETCH, starts, _anew(model, read, kept, starts, pause), *scores))
            notify(_line(rows[-1]))
    if len(rows) < len(blocks):
        notify(f"stopped with {len(rows)} of {len(blocks)} stretches")
    figures = dict(model=model.name, text=text.name, source=text.source, sinks=policy.sinks, window=policy.window)
    figures |= streamed.tally.figures() | dict(tokens_per_s=streamed.speed, rows=rows)
    return figures | dict(complete=len(rows) == len(blocks), seconds=time.perf_counter() - began)


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['end']} tokens: perplexity {row['ppl']:.2f} streaming, {row['ppl_recomputed']:.2f} recomputed, "
        f"{row['ppl_window']:.2f} window"
    )


def _starts(begin: int, kept: int) -> list[int]:
    """First tokens of the blocks of a stretch; as many as are kept come before them."""
    return np.linspace(max(begin, kept), begin + STRETCH - BLOCK, BLOCKS).astype(int).tolist()


def _minutes(model, read, kept: int, ours: TextStream, window: TextStream, blocks: int) -> float:
    """Compile all programs, and estimate the time of the run. The streams are as new afterwards."""
    took = []
    for stream in (ours, window):
        state = jax.tree.map(jnp.copy, stream.state)
        stream.step()
        took.append(_seconds(stream.step) * -(-stream.limit // stream.spec.max_query_length))
        stream.resume(state, 0)
    _recomputed(model, read, kept, kept)
    return (sum(took) + blocks * _seconds(lambda: _recomputed(model, read, kept, kept))) / 60


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


class _Scored:
    """A stream, its figures, and what it has said of its tokens."""

    def __init__(self, stream: TextStream, pause: Callable[[], None]):
        self.stream, self.tally, self._pause = stream, Tally(stream.spec), pause
        self._seconds, self._scores = 0.0, []

    @property
    def speed(self) -> float | None:
        """Tokens/s."""
        return self.stream.position / self._seconds if self._seconds else None

    def until(self, position: int) -> np.ndarray:
        """Feed as many tokens, and return -log p of all after the first so far."""
        while self.stream.position < position and (piece := self._timed()) is not None:
            self.tally.add(piece, self.stream.pages)
            self._scores.append(piece.nll)
            self._pause()
        return np.concatenate(self._scores).astype(np.float64)

    def _timed(self) -> Piece | None:
        began = time.perf_counter()
        piece = self.stream.step()
        self._seconds += time.perf_counter() - began
        return piece


def _anew(model: LanguageModel, read: np.ndarray, kept: int, starts: list[int], pause) -> np.ndarray:
    """-log p of blocks, [blocks, tokens], each recomputed."""
    found = []
    for at in starts:
        found.append(_recomputed(model, read, kept, at))
        pause()
    return np.stack(found)


def _row(begin: int, starts: list[int], anew: np.ndarray, streamed: np.ndarray, windowed: np.ndarray) -> dict[str, Any]:
    """What is said of a stretch; `anew` is -log p of its blocks, [blocks, tokens]."""
    # The first score is of the second token.
    ours, window = (np.stack([of[at - 1 : at - 1 + BLOCK] for at in starts]) for of in (streamed, windowed))
    of_blocks = (ours - anew).mean(1)
    ratio = float(np.exp(of_blocks.mean()))
    return dict(
        begin=begin,
        end=begin + STRETCH,
        scored=anew.size,
        ppl=float(np.exp(ours.mean())),
        ppl_recomputed=float(np.exp(anew.mean())),
        ppl_window=float(np.exp(window.mean())),
        ratio=ratio,
        ratio_error=ratio * float(of_blocks.std(ddof=1)) / len(starts) ** 0.5,
        ratio_window=float(np.exp((window - anew).mean())),
        ppl_all=float(np.exp(streamed[max(begin - 1, 0) : begin + STRETCH - 1].mean())),
    )


def _recomputed(model: LanguageModel, read: np.ndarray, kept: int, start: int) -> np.ndarray:
    """-log p of the block that begins at token `start`, from a forward pass over it and the `kept` tokens before."""
    tokens, tokenizer = read[start - kept : start + BLOCK].copy(), model.tokenizer
    if tokenizer.add_bos:
        tokens[0] = tokenizer.bos_id
    return np.asarray(last_scores(*nnx.split(model.decoder), jnp.asarray(tokens), count=BLOCK), np.float64)


@functools.partial(jit, static_argnames=("graph", "count"))
def last_scores(graph: Any, weights: Any, tokens: Int32[Array, " tokens"], *, count: int) -> Float32[Array, " count"]:
    """Return -log p of the last `count` tokens of a sequence, by a decoder (split) without a cache."""
    model = nnx.merge(graph, weights)
    config, position = model.config, jnp.arange(tokens.shape[0], dtype=jnp.int32)
    windows = jnp.array([2**31 - 1 if window is None else window for window in config.windows], jnp.int32)

    def attention(state, layer, q, k, v, *_):
        q, k = (apply(model.rotary, x, position, layer) for x in (q, k))
        return dense_attention.attend(
            q, k, v, window=windows[layer], scale=config.attention_scale, soft_cap=config.attention_soft_cap
        ), state  # fmt: skip

    logits = jax.nn.log_softmax(model.logits(model.hidden(tokens, attention, ())[0][-count - 1 : -1]))
    return -jnp.take_along_axis(logits, tokens[-count:, None], axis=1)[:, 0]
