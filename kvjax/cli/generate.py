"""`kvjax generate`: text from a model, for one prompt or many."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from kvjax.cli import arguments
from kvjax.errors import InputError


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="kvjax generate",
        description="Generate text from a language model over a paged KV cache.",
        epilog="Without --prompt and --prompts-file the prompt is read from standard input. " + arguments.cache_note(),
    )
    arguments.add_model(parser)
    text = parser.add_argument_group("prompts")
    text.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    text.add_argument("--prompts-file", type=Path, help='JSON lines: {"prompt": str, "max_new_tokens"?: int}')
    text.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    arguments.add_sampling(parser)
    arguments.add_cache(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--stream", action="store_true", help="print tokens as they are chosen")
    output.add_argument("--json", action="store_true", help="print one JSON object, or a list for several prompts")
    return parser


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how much to generate for it."""

    prompt: str
    max_new_tokens: int


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code. Raises InputError for mistakes of the user's."""
    args = parser().parse_args(argv)
    if args.stream and args.json:
        raise InputError("--stream and --json exclude each other: choose one")
    requests = read_requests(args)
    sampling = arguments.sampling_options(args, len(requests))

    import kvjax

    arguments.progress(f"loading {args.model} ({args.dtype})")
    model = kvjax.load(args.model, args.dtype, notify=arguments.progress)
    prompts = [_tokens(model.tokenizer, request.prompt, args.chat) for request in requests]
    options = kvjax.Options(
        max_new_tokens=[request.max_new_tokens for request in requests],
        **sampling,
        seed=args.seed,
        stop_ids=model.tokenizer.eos_ids,
        logprobs=args.logprobs,
        **arguments.cache_options(args),
    )
    run = _stream if args.stream else _generate
    return run(args, model, requests, prompts, options)


def read_requests(args: argparse.Namespace) -> list[Request]:
    """Return the prompts of the flags, of the file, or of standard input."""
    if args.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens {args.max_new_tokens} is too small: it must be at least 1")
    requests = [Request(prompt, args.max_new_tokens) for prompt in args.prompt]
    if args.prompts_file:
        requests += _read_file(args.prompts_file, args.max_new_tokens)
    if not args.prompt and not args.prompts_file:
        requests = [Request(sys.stdin.read().rstrip("\n"), args.max_new_tokens)]
    if not requests:
        raise InputError(f"{args.prompts_file} holds no prompt: give at least one line")
    for number, request in enumerate(requests):
        if not request.prompt:
            raise InputError(f"prompt {number + 1} is empty: give some text")
    return requests


def _read_file(path: Path, default: int) -> list[Request]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read --prompts-file {path}: {error}") from None
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f'{where} is no JSON ({error}): write {{"prompt": "…"}}') from None
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise InputError(f'{where} has no text under "prompt": write {{"prompt": "…"}}')
        if unknown := set(entry) - {"prompt", "max_new_tokens"}:
            raise InputError(f"{where} has the unknown key {sorted(unknown)[0]!r}: use prompt and max_new_tokens")
        most = entry.get("max_new_tokens", default)
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise InputError(f"{where}: max_new_tokens {most!r} must be a whole number from 1 on")
        requests.append(Request(entry["prompt"], most))
    return requests


def _tokens(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if not chat:
        return tokenizer.encode(prompt)
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    # The template writes the beginning-of-sequence token itself where the model wants one.
    return tokenizer.encode(text, add_bos=False)


def _generate(args, model, requests: list[Request], prompts, options) -> int:
    import kvjax

    stops = StopTexts(model.tokenizer, args.stop)
    result = kvjax.generate(
        model.decoder, prompts, options, progress=arguments.prefill_progress(), stop=stops.found if args.stop else None
    )
    texts = [stops.text(sequence.token_ids) for sequence in result.sequences]
    if args.json:
        entries = [_entry(model, result, number, text) for number, text in enumerate(texts)]
        print(json.dumps(entries[0] if len(entries) == 1 else entries, ensure_ascii=False))
        return 0
    for request, text, sequence in zip(requests, texts, result.sequences, strict=True):
        print(f"{request.prompt}{text}" if not args.chat else text)
        print(f"  [{sequence.finish_reason}, {len(sequence.token_ids)} tokens]\n")
    cache = result.cache_facts()
    print(
        f"{result.decode_tokens_per_s:.1f} tokens/s, first token after {result.ttft_s:.2f} s; "
        f"{cache['pages_used_peak']} of {cache['pages_total']} pages of {cache['page_size']} tokens used, "
        f"{cache['bytes_used_peak'] / 1e6:.1f} of {cache['bytes_total'] / 1e6:.1f} MB"
    )
    return 0


def _entry(model, result, number: int, text: str) -> dict[str, Any]:
    sequence = result.sequences[number]
    entry: dict[str, Any] = dict(
        text=text,
        token_ids=sequence.token_ids,
        prompt_tokens=sequence.prompt_tokens,
        generated_tokens=len(sequence.token_ids),
        finish_reason=sequence.finish_reason,
        ttft_s=result.ttft_s,
        decode_tokens_per_s=result.decode_tokens_per_s,
        cache=result.cache_facts(),
    )
    if sequence.logprobs is not None:
        decode = model.tokenizer.decode
        entry["logprobs"] = [
            dict(
                token_id=token,
                token=decode([token], skip_special=False),
                logprob=own.logprob,
                top=[dict(token_id=i, token=decode([i], skip_special=False), logprob=p) for i, p in own.top.items()],
            )
            for token, own in zip(sequence.token_ids, sequence.logprobs, strict=True)
        ]
    return entry


class StopTexts:
    """Finds texts that end a generation, and cuts them off."""

    def __init__(self, tokenizer: Any, stops: list[str]):
        self._tokenizer, self._stops = tokenizer, stops

    def found(self, sequence: int, token_ids: list[int]) -> bool:
        """Return whether the text of a sequence holds a stop text."""
        text = self._tokenizer.decode(token_ids)
        return any(stop in text for stop in self._stops)

    def text(self, token_ids: list[int]) -> str:
        """Return the text of tokens up to the first stop text."""
        text = self._tokenizer.decode(token_ids)
        ends = [text.find(stop) for stop in self._stops if stop in text]
        return text[: min(ends)] if ends else text


def _stream(args, model, requests: list[Request], prompts, options) -> int:
    import kvjax

    began, count = time.perf_counter(), 0
    printers = [_Printer(model.tokenizer, args.stop) for _ in requests]
    several = len(requests) > 1
    if not several and not args.chat:
        print(requests[0].prompt, end="", flush=True)
    for events in kvjax.stream(model.decoder, prompts, options, progress=arguments.prefill_progress()):
        for event in events:
            text = printers[event.sequence].push(event.token_ids, last=event.finish_reason is not None)
            count += len(event.token_ids)
            if text:
                print(f"[{event.sequence + 1}] {text!r}" if several else text, end="\n" if several else "", flush=True)
        if all(printer.ended for printer in printers):
            break
    seconds = time.perf_counter() - began
    print(f"\n{count} tokens in {seconds:.1f} s", file=sys.stderr)
    return 0


class _Printer:
    """Text of a stream of tokens, held back while it may be the beginning of a stop text."""

    def __init__(self, tokenizer: Any, stops: list[str]):
        self._stream, self._stops = tokenizer.decode_stream(), stops
        self._held = ""
        self.ended = False

    def push(self, token_ids: list[int], *, last: bool) -> str:
        """Return the text that can be shown now."""
        if self.ended:
            return ""
        self._held += "".join(self._stream.push(token) for token in token_ids) + (self._stream.finish() if last else "")
        ends = [self._held.find(stop) for stop in self._stops if stop in self._held]
        if ends or last:
            self.ended = True
            return self._held[: min(ends)] if ends else self._held
        keep = max((n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown
