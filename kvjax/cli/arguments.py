"""Flags that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvjax.paths import cache_dir

if TYPE_CHECKING:
    from kvjax.evaluation.texts import Text
    from kvjax.models.loading import LanguageModel

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def cache_note() -> str:
    """Say where kvjax keeps its files, for --help."""
    return f"Weights and compiled programs are kept under KVJAX_CACHE, now {cache_dir()}".replace("%", "%%")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add --model and --dtype."""
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        help="smollm2-135m, gemma3-270m, a .gguf file, a Hugging Face folder or a hub name (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        help="of weights and computation: float32, bfloat16 or float16",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags of sampling and of the end of a generation."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", type=int, default=128, help="most tokens to generate (default: %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all")
    group.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this probability")
    group.add_argument("--min-p", type=float, default=0.0, help="keep tokens at least this share as likely as the best")
    group.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 avoids tokens that occurred")
    group.add_argument("--stop", action="append", default=[], help="a text that ends the generation; may be repeated")
    group.add_argument("--seed", type=int, default=0, help="of the random key (default: %(default)s)")
    group.add_argument(
        "--logprobs", type=int, metavar="N", help="report log-probabilities, those of the N likeliest too"
    )


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the cache."""
    group = parser.add_argument_group("cache")
    group.add_argument(
        "--kv-format",
        "--kv-cache-dtype",
        default="auto",
        help="format of the pages: float32, bfloat16, float16, fp8_e4m3, fp8_e5m2, int8, int4, int4_hadamard; auto "
        "follows --dtype (default: %(default)s)",
    )
    group.add_argument(
        "--skip-layers", type=int, nargs="+", default=(), metavar="LAYER",
        help="layers whose pages stay bfloat16; negative numbers count from the last",
    )  # fmt: skip
    group.add_argument(
        "--policy", default="full", metavar="NAME[:key=value,...]",
        help="what the cache keeps: full, sliding_window, streaming, h2o, tova, snapkv, knorm, paged_eviction, "
        "entropy, fastgen, quest, random; for example streaming:window=508,sinks=4 or h2o:budget=256 "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--page-size", type=int, help="tokens of a page (default: 64 for int4, else 16)")
    group.add_argument("--num-pages", type=int, help="pages of the pool, page 0 included; default: what is needed")


def add_evaluation(parser: argparse.ArgumentParser, quick: dict[str, Any], picture: str) -> None:
    """Add --seed, --quick (which stands for the settings `quick`), --json and --plot (which draws `picture`)."""
    plain = lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else value  # noqa: E731
    said = ", ".join(f"{name.replace('_', '-')} {plain(value)}" for name, value in quick.items())
    parser.add_argument("--seed", type=int, metavar="N", help="of the passkeys (default: 0)")
    parser.add_argument("--quick", action="store_true", help=f"in minutes: {said}")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--plot", metavar="FILE", help=f"draw {picture} (needs the extra `plots`)")


def given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the flags of those names that were given."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def evaluated(args: argparse.Namespace) -> tuple[LanguageModel, list[Text]]:
    """Return the model and the texts that the flags of an evaluation name."""
    from kvjax.evaluation import formats, texts

    read = texts.read_texts(args.text) if args.text else texts.default_texts(progress)
    progress(f"loading {args.model} (float32)")
    return formats.load(args.model, progress), read


def sampling_options(args: argparse.Namespace, count: int) -> dict[str, Any]:
    """Return the fields of `Options` that the flags of sampling set. Raises InputError for values out of range."""
    from kvjax.sampling import sampling

    options = {name: getattr(args, name) for name in SAMPLING}
    sampling(count, **options)
    return options


def cache_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `Options` that the flags of the cache set.

    Raises: InputError for a format, a policy or a page size that no cache has.
    """
    from kvjax.formats import canonical_format
    from kvjax.policies import parse_policy
    from kvjax.spec import check_page_size

    form = args.dtype if args.kv_format == "auto" else canonical_format(args.kv_format, argument="--kv-format")
    if args.page_size is not None:
        check_page_size(args.page_size)
    return dict(
        format=form, skip_layers=args.skip_layers, policy=parse_policy(args.policy), page_size=args.page_size,
        num_pages=args.num_pages,
    )  # fmt: skip


def progress(line: str) -> None:
    """Show a line of progress, on standard error."""
    print(line, file=sys.stderr, flush=True)


def prefill_progress() -> Callable[[int, int], None]:
    """Return a callback that shows prompt tokens fed, for prompts that take more than a second."""
    began = time.perf_counter()

    def show(done: int, total: int) -> None:
        if time.perf_counter() - began > 1 or total > 2048:
            progress(f"prompt: {done} of {total} tokens after {time.perf_counter() - began:.1f} s")

    return show
