"""`kvjax stream`: a text, or a model's own, without end and in constant memory; stopped and resumed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.cli import arguments
from kvjax.cli.interrupts import noted_interrupt, stoppable
from kvjax.errors import InputError, shown, whole_number

POLICY = "streaming:window=508,sinks=4"
# Odd, so that steps end at every place of a page: what is held differs by one page between them.
CHUNK = 63
STOPPING = "\nstopping after the step that is running; once more ends at once, and saves nothing"


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code. Raises InputError for mistakes of the user's."""
    args = _parser().parse_args(argv)
    _refuse_contradictions(args)
    # Late, so that --help and a wrong flag cost no start of JAX.
    import kvjax
    from kvjax.sampling import sampling

    cache = arguments.cache_options(args)
    sampling(1, temperature=args.temperature)
    options = kvjax.Options(**cache, chunk_size=args.chunk, temperature=args.temperature, seed=args.seed)
    text = None if args.generate else _text(args)
    arguments.progress(f"loading {args.model} ({args.dtype})")
    model = kvjax.load(args.model, args.dtype, notify=arguments.progress)
    if args.compare:
        return _compare(args, model, text, options)
    return _Run(args, model, text, options).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvjax stream",
        description="Feed a long text through a model, or have it read what it writes, for ever and in constant memory "
        "(policy streaming). Tokens, tokens/s, pages held and the perplexity of the last 1024 tokens go to standard "
        "error. Ctrl-C ends it; with --state the same command goes on from there.",
        epilog=arguments.cache_note(),
    )
    arguments.add_model(parser)
    of = parser.add_argument_group("stream")
    of.add_argument("--text", metavar="FILE", help="a file of UTF-8 text (default: prose that is installed)")
    of.add_argument("--generate", action="store_true", help="write, after a prompt, and read that, in place of a text")
    of.add_argument("--prompt", metavar="TEXT", help="for --generate (default: Once upon a time)")
    of.add_argument("--temperature", type=float, default=0.8, help="for --generate; 0 is greedy (default: %(default)s)")
    of.add_argument("--seed", type=int, default=0, help="for --generate, of the random key (default: %(default)s)")
    of.add_argument("--tokens", type=int, metavar="N", help="stop after so many, those before a resumption included")
    of.add_argument("--chunk", type=int, default=CHUNK, metavar="N", help="tokens a step feeds (default: %(default)s)")
    of.add_argument("--start-position", type=int, metavar="N", help="position of a text's first token (default: 0)")
    of.add_argument(
        "--state", metavar="DIR",
        help="resume from this folder, where it holds a state, and save there: at the end, on Ctrl-C and now and then",
    )  # fmt: skip
    of.add_argument(
        "--save-every", type=float, default=60, metavar="SECONDS", help="with --state (default: %(default)s)"
    )
    of.add_argument(
        "--compare", action="store_true",
        help="compare its perplexity with attention that recomputes the window for every block of 64 tokens, and with "
        "a window without sinks, in stretches of 4096 tokens (default of --tokens: 20480)",
    )  # fmt: skip
    of.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_cache(parser)
    parser.set_defaults(policy=POLICY)
    return parser


def _refuse_contradictions(args: argparse.Namespace) -> None:
    without = {"--generate": args.generate, "--compare": args.compare}
    for name, value, others in (
        ("--text", args.text, ["--generate"]),
        ("--start-position", args.start_position, ["--generate", "--compare"]),
        ("--state", args.state, ["--compare"]),
        ("--generate", args.generate, ["--compare"]),
    ):
        for other in others:
            if value and without[other]:
                raise InputError(f"{name} and {other} exclude each other: choose one")
    if args.prompt is not None and not args.generate:
        raise InputError("--prompt is for --generate: add it, or give --text")
    if args.prompt == "":
        raise InputError("--prompt is empty: give the text that the model goes on from")
    if args.tokens is not None:
        whole_number("--tokens", args.tokens, 1)
    whole_number("--chunk", args.chunk, 1, 2**16)
    if not args.save_every >= 0:
        raise InputError(f"--save-every is {args.save_every}: give seconds, 0 or more")
    if args.state is not None:
        try:
            Path(args.state).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write --state {args.state}: {error}: give a folder") from None


def _text(args: argparse.Namespace) -> Any:
    """The text to read: the file, or the first prose that is there."""
    from kvjax.evaluation import texts

    found = texts.read_texts([args.text]) if args.text is not None else texts.default_texts(arguments.progress)
    return found[0]


def _compare(args: argparse.Namespace, model: Any, text: Any, options: Any) -> int:
    from kvjax.evaluation.policies import Stopped
    from kvjax.evaluation.recomputation import run

    with stoppable(Stopped) as pause:
        report = run(model, text, options, args.tokens, arguments.progress, pause)
    code = 0 if report["complete"] else 130
    if args.json:
        print(json.dumps(report, indent=2))
        return code
    print(f"{'tokens':>15}{'streaming':>11}{'recomputed':>12}{'ratio':>17}{'no sinks':>10}{'ratio':>8}")
    for row in report["rows"]:
        print(
            f"{row['begin']:>7} -{row['end']:>6}{row['ppl']:>11.3f}{row['ppl_recomputed']:>12.3f}{row['ratio']:>9.4f} "
            f"+-{row['ratio_error']:.4f}{row['ppl_window']:>10.2f}{row['ratio_window']:>8.2f}"
        )
    print(f"pages: {report['pages_after_fill']} after the fill, {report['pages_end']} at the end")
    return code


class _Run:
    """A stream on its way, its figures, and where it is saved."""

    def __init__(self, args: argparse.Namespace, model: Any, text: Any, options: Any):
        import numpy as np

        from kvjax import snapshots
        from kvjax.streaming import OwnStream, TextStream
        from kvjax.tally import Tally

        self.args, self.written = args, model.tokenizer.decode_stream()
        if args.generate:
            prompt = args.prompt or "Once upon a time"
            self.stream = OwnStream(model, np.array(model.tokenizer.encode(prompt)), options, limit=args.tokens)
            source = dict(stream="--generate", prompt=f"{shown(prompt)} ({_digest(prompt.encode())})")
            source |= dict(temperature=str(args.temperature), seed=str(args.seed))
        else:
            tokens = np.array(model.tokenizer.encode(text.text), np.int32)
            start = whole_number("--start-position", args.start_position or 0, 0)
            self.stream = TextStream(model, tokens, options, limit=args.tokens, start_position=start)
            named = f"{Path(text.name).name} ({len(tokens)} tokens, {_digest(tokens.tobytes())})"
            source = dict(stream="a text", text=named, start_position=str(start))
        self.tally = Tally(self.stream.spec)
        self.kind: Mapping[str, str] = source | _kind(args, model, self.stream.spec)
        self.shown, self.saved, self.steps, self.seconds, self.timed = 0.0, 0, 0, 0.0, 0
        if args.state is None:
            return
        if (found := snapshots.load(args.state, self.stream.state, self.kind)) is not None:
            state, notes = found
            self.stream.resume(state, notes["position"])
            self.tally.restore(notes["tally"])
            self.saved = self.tally.tokens
            arguments.progress(f"goes on after {self.saved} tokens, from {args.state}")
            if args.tokens is not None and args.tokens <= self.saved:
                arguments.progress(f"--tokens {args.tokens} asks for no more: it counts those before")

    def run(self) -> int:
        """Stream until the end or an interrupt; returns the exit code."""
        arguments.progress("compiling (about half a minute where sizes or options are new)")
        saved_at = time.perf_counter()
        # A job in the background of a shell ignores interrupts, and should go on doing so.
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with contextlib.nullcontext(threading.Event()) if is_ignored else noted_interrupt(STOPPING) as interrupted:
            while not interrupted.is_set() and self._step():
                if self.args.state is not None and time.perf_counter() - saved_at > self.args.save_every:
                    self._save()
                    saved_at = time.perf_counter()
            self._show(last=True)
            figures = self.tally.figures() | dict(tokens_per_s=self.speed)
            print(json.dumps(figures) if self.args.json else self._summary(), flush=True)
            # Last: a full disk must not take the figures along.
            if self.args.state is not None:
                self._save()
        if interrupted.is_set():
            kept = f"saved in {self.args.state}" if self.args.state else "not saved (--state DIR would)"
            arguments.progress(f"interrupted, {kept}")
        return 130 if interrupted.is_set() else 0

    def _step(self) -> bool:
        began = time.perf_counter()
        piece = self.stream.step()
        if piece is None:
            return False
        self.tally.add(piece, self.stream.pages)
        self.steps += 1
        if self.steps > 2:  # those before were compiled
            self.seconds, self.timed = self.seconds + time.perf_counter() - began, self.timed + len(piece.tokens)
        if self.args.generate and not self.args.json:
            print("".join(map(self.written.push, piece.tokens.tolist())), end="", flush=True)
        self._show(last=False)
        return True

    @property
    def speed(self) -> float | None:
        """Tokens/s of this run, without what was compiled."""
        return self.timed / self.seconds if self.seconds else None

    def _save(self) -> None:
        from kvjax import snapshots

        if self.tally.tokens == self.saved:
            return
        notes = dict(position=self.stream.position, tally=self.tally.saved())
        snapshots.save(self.args.state, self.stream.state, self.kind, notes)
        self.saved = self.tally.tokens

    def _show(self, *, last: bool) -> None:
        """Show the live line: over and over on a terminal, else now and then."""
        live = sys.stderr.isatty() and (self.args.json or not self.args.generate)
        now = time.perf_counter()
        if not last and now - self.shown < (0.2 if live else 10):
            return
        self.shown, figures = now, self.tally.figures()
        perplexity = "-" if figures["perplexity_last"] is None else f"{figures['perplexity_last']:.2f}"
        line = (
            f"{figures['tokens']} tokens, {self.speed or 0:.1f} tokens/s, {figures['pages_end']} pages, perplexity "
            f"{perplexity} of the last 1024 tokens"
        )
        before = "\r" if live else "\n" if self.args.generate and not self.args.json else ""
        print(before + line, end="" if live and not last else "\n", file=sys.stderr, flush=True)

    def _summary(self) -> str:
        of = self.tally.figures()
        first, end = (
            "-" if of[name] is None else f"{of[name]:.3f}" for name in ("perplexity_first", "perplexity_last")
        )
        filled = "not full" if of["pages_after_fill"] is None else f"{of['pages_after_fill']} after the fill"
        return (
            f"{of['tokens']} tokens; pages: {filled}, {of['pages_end']} at the end; perplexity: {first} of the first "
            f"1024 tokens, {end} of the last"
        )


def _kind(args: argparse.Namespace, model: Any, spec: Any) -> dict[str, str]:
    """What a state belongs to."""
    policy = spec.policy
    values = ",".join(f"{field.name}={getattr(policy, field.name)}" for field in dataclasses.fields(policy))
    return dict(
        model=f"{model.name} ({_fingerprint(model)})",
        dtype=args.dtype,
        policy=f"{policy.name}:{values}",
        format=" ".join([spec.format, *(f"but in layer {layer}" for layer in spec.skip_layers)]),
        page_size=str(spec.page_size),
        chunk=str(spec.max_query_length),
        room=f"for {spec.pages_per_seq * spec.page_size} tokens in {spec.num_pages} pages",
    )


def _fingerprint(model: Any) -> str:
    """Tells models apart: of the configuration and some numbers of every array of weights."""
    import jax
    import numpy as np
    from flax import nnx

    leaves = jax.tree.leaves(nnx.state(model.decoder))
    some = (np.asarray(leaf.reshape(-1)[:: max(leaf.size // 1024, 1)]) for leaf in leaves)
    return _digest(repr(model.config).encode() + b"".join(of.tobytes() for of in some))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
