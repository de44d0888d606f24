"""`kvjax generate`: text from a model, for one prompt or many."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from kvjax.cli import arguments
from kvjax.cli.prompts import Request, add_prompts, read_requests, refuse_half_characters
from kvjax.cli.text import StoppedText
from kvjax.errors import InputError


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="kvjax generate",
        description="Generate text from a language model over a paged KV cache.",
        epilog="Without --prompt and --prompts-file the prompt is read from standard input. " + arguments.cache_note(),
    )
    arguments.add_model(parser)
    add_prompts(parser)
    arguments.add_sampling(parser)
    arguments.add_cache(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--stream", action="store_true", help="print tokens as they are chosen")
    output.add_argument("--json", action="store_true", help="print one JSON object, or a list for several prompts")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code. Raises InputError for mistakes of the user's."""
    args = parser().parse_args(argv)
    _refuse_contradictions(args)
    requests = read_requests(args)
    sampling = arguments.sampling_options(args, len(requests))

    import kvjax

    cache_options = arguments.cache_options(args)
    arguments.progress(f"loading {args.model} ({args.dtype})")
    model = kvjax.load(args.model, args.dtype, notify=arguments.progress)
    prompts = [_tokens(model.tokenizer, request.prompt, args.chat) for request in requests]
    options = kvjax.Options(
        max_new_tokens=[request.max_new_tokens for request in requests],
        **sampling,
        seed=args.seed,
        logprobs=args.logprobs,
        **cache_options,
    )
    _warn_beyond_training(model, prompts, requests)
    arguments.progress("compiling (about half a minute where sizes or options are new), then generating")
    run = _stream if args.stream else _generate
    return run(args, model, requests, prompts, options)


def _refuse_contradictions(args: argparse.Namespace) -> None:
    if args.stream and args.json:
        raise InputError("--stream and --json exclude each other: choose one")
    if args.logprobs is not None and not args.json:
        raise InputError("--logprobs are printed as JSON only: add --json")
    for stop in args.stop:
        if not stop:
            raise InputError("--stop is empty: give the text that ends the generation")
        refuse_half_characters("--stop", stop)


def _tokens(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if not chat:
        return tokenizer.encode(prompt)
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    # The template writes the beginning-of-sequence token itself where the model wants one.
    return tokenizer.encode(text, add_bos=False)


def _warn_beyond_training(model: Any, prompts: list[list[int]], requests: list[Request]) -> None:
    tokens, number = max((len(p) + r.max_new_tokens, i) for i, (p, r) in enumerate(zip(prompts, requests, strict=True)))
    if tokens > model.config.max_position:
        arguments.progress(
            f"warning: prompt {number + 1} and its new tokens come to {tokens} tokens, and {model.name} was trained on "
            f"{model.config.max_position}: text beyond them may make no sense"
        )


def _generate(args, model, requests: list[Request], prompts, options) -> int:
    import kvjax

    texts = [StoppedText(model.tokenizer, args.stop) for _ in requests]

    def stop(sequence: int, token_ids: list[int]) -> int | None:
        text = texts[sequence]
        text.push(token_ids[text.count :], last=False)
        return text.count if text.stopped else None

    progress = arguments.prefill_progress()
    result = kvjax.generate(model, prompts, options, progress=progress, stop=stop if args.stop else None)
    for text, sequence in zip(texts, result.sequences, strict=True):
        text.push(sequence.token_ids[text.count :], last=True)
    if args.json:
        entries = [_entry(model, result, number, text.text) for number, text in enumerate(texts)]
        plain = (getattr(sys.stdout, "encoding", None) or "").lower() not in ("utf-8", "utf8")
        print(json.dumps(entries[0] if len(entries) == 1 else entries, ensure_ascii=plain))
        return 0
    for request, text, sequence in zip(requests, texts, result.sequences, strict=True):
        print(text.text if args.chat else f"{request.prompt}{text.text}")
        print(f"  {_ending(sequence.finish_reason, len(sequence.token_ids))}\n")
    cache = result.cache_facts()
    print(
        f"{result.decode_tokens_per_s:.1f} tokens/s, first token after {result.ttft_s:.2f} s; "
        f"{cache['pages_used_peak']} of {cache['pages_total']} pages of {cache['page_size']} tokens used, "
        f"{cache['bytes_used_peak'] / 1e6:.1f} of {cache['bytes_total'] / 1e6:.1f} MB"
    )
    return 0


def _ending(reason: str | None, count: int) -> str:
    hint = ": raise --num-pages" if reason == "out_of_pages" else ""
    return f"[{reason}, {count} tokens{hint}]"


def _entry(model, result, number: int, text: str) -> dict[str, Any]:
    sequence = result.sequences[number]
    entry: dict[str, Any] = dict(
        text=text,
        token_ids=sequence.token_ids,
        prompt_tokens=sequence.prompt_tokens,
        generated_tokens=len(sequence.token_ids),
        finish_reason=sequence.finish_reason,
        ttft_s=result.ttft_s,
        compile_s=result.compile_s,
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


def _stream(args, model, requests: list[Request], prompts, options) -> int:
    import kvjax

    began = time.perf_counter()
    texts = [StoppedText(model.tokenizer, args.stop) for _ in requests]
    reasons: list[str | None] = [None] * len(requests)
    several = len(requests) > 1
    # The prompt is shown with the first of the text: lines of progress come before, on the same terminal.
    before = "" if several or args.chat else requests[0].prompt
    for events in kvjax.stream(model, prompts, options, progress=arguments.prefill_progress()):
        for event in events:
            text = texts[event.sequence]
            piece = before + text.push(event.token_ids, last=event.finish_reason is not None)
            before = ""
            if piece:
                line = f"[{event.sequence + 1}] {piece!r}"
                print(line if several else piece, end="\n" if several else "", flush=True)
            if reasons[event.sequence] is None:
                reasons[event.sequence] = "stop" if text.stopped else event.finish_reason
        if None not in reasons:
            break
    if not several:
        print(flush=True)
    for number, (reason, text) in enumerate(zip(reasons, texts, strict=True), 1):
        arguments.progress((f"[{number}] " if several else "") + _ending(reason, text.count))
    arguments.progress(f"{sum(text.count for text in texts)} tokens in {time.perf_counter() - began:.1f} s")
    return 0
