"""`scripts/compare_kvpress.py`: the comparison with kvpress on SmolLM2-135M, as tables or JSON, and its limits."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.benchmarks.kvpress_peer import environment
from kvjax.errors import InputError

LOGITS_LIMIT = 1e-4
# A perplexity counts as worse from this ratio and this many standard errors of the paired difference on.
WORSE, SIGNIFICANT = 1.001, 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison.

    Args:
        argv: the arguments after the program's name; those of the process when None.

    Returns: the exit code: 0, 1 if a limit is missed, 2 if something is missing (one line on stderr).
    """
    args = _parser().parse_args(argv)
    try:
        report = _measured(args)
    except InputError as error:
        print(f"compare_kvpress: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    report["missed"] = missed(report)
    print(json.dumps(report, indent=2) if args.json else table(report))
    return 1 if report["missed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare eviction policies with those of kvpress that have the same rule, on SmolLM2-135M in "
        "float32: the tokens that both keep of the same prompts, the logits behind them, the tokens kept in decode, "
        "and perplexity at no more bytes than kvpress holds. `make kvpress` sets kvpress up. The exit code is 1 if a "
        "limit is missed.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="one document, a shorter prompt and one ratio")
    parser.add_argument("--documents", type=int, metavar="N", help="texts (default: 3, or 1 with --quick)")
    parser.add_argument(
        "--ratios", type=float, nargs="+", metavar="R", help="shares that are dropped (default: 0.5 0.75, or 0.5)"
    )
    parser.add_argument("--page-size", type=int, metavar="N", help="tokens of a page of kvjax (default: 8)")
    return parser


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    _, folder = environment()
    # Late, so that --help costs no start of JAX.
    from kvjax.benchmarks import kvpress
    from kvjax.evaluation.texts import default_texts, excerpts
    from kvjax.models import registry
    from kvjax.models.decoder import Decoder
    from kvjax.paths import enable_compilation_cache

    enable_compilation_cache()
    given: dict[str, Any] = dict(kvpress.QUICK) if args.quick else {}
    given |= {} if args.documents is None else dict(documents=args.documents)
    given |= {} if args.ratios is None else dict(ratios=tuple(dict.fromkeys(args.ratios)))
    given |= {} if args.page_size is None else dict(page_size=args.page_size)
    settings = kvpress.Settings(**given)
    source = registry.find(str(folder))
    length = settings.prompt + settings.continuation
    prose = next(text for text in default_texts(_progress) if text.kind == "prose")
    documents = excerpts(prose, registry.read_tokenizer(source), settings.documents, length)
    # A scan over the layers: dozens of caches are compiled for, and each runs for seconds.
    decoder = Decoder(registry.read_config(source), registry.load_weights(source, notify=_progress), scan=True)
    tokens = [of.tokens.tolist() for of in documents]
    report = kvpress.Comparison(decoder, Path(folder), tokens, settings, _progress).run()
    return report | dict(text=prose.source, quick=args.quick)


def missed(report: dict[str, Any]) -> list[str]:
    """Return a line for each limit that a report misses."""
    lines = []
    for level in ("sets", "decode"):
        for row in report[level]:
            name = f"{level}: {row['rule']} at ratio {row['ratio']}"
            if not row["is_tied"]:
                lines.append(f"{name}: kept sets differ in tokens {row['margin']:.1e} from the threshold")
            if row["logits"] is not None and row["logits"] > LOGITS_LIMIT:
                lines.append(f"{name}: logits are {row['logits']:.1e} apart, more than {LOGITS_LIMIT:.0e}")
    for row in report["quality"]:
        name = f"quality: {row['rule']} at ratio {row['ratio']}, {row['how']}"
        if row["bytes"][-1] > row["bytes_kvpress"][-1]:
            lines.append(f"{name}: {row['bytes'][-1]} bytes, more than {row['bytes_kvpress'][-1]}")
        if row["ratio_of_perplexities"] > WORSE and row["standard_errors"] > SIGNIFICANT:
            lines.append(f"{name}: perplexity is {row['ratio_of_perplexities']:.4f} of kvpress's")
    return lines


def table(report: dict[str, Any]) -> str:
    """The report for readers."""
    settings, machine = report["settings"], report["machine"]
    lines = [
        f"{report['engine']}; jax {machine['jax']} on {machine['cpu']}",
        f"{settings['documents']} documents of {settings['prompt']} + {settings['continuation']} tokens, float32, "
        f"pages of {settings['page_size']} tokens",
        f"without a press: perplexity {report['perplexity_without_press']:.3f}, logits "
        f"{report['logits_without_press']:.1e} apart",
    ]
    for level, what in (("sets", "after the prompt"), ("decode", "after each token of the continuation")):
        lines += ["", f"{'kept tokens ' + what:<58}{'ratio':>6}{'kept':>6}{'sets':>8}{'equal':>8}{'margin':>10}"]
        lines[-1] += f"{'logits':>10}"
        for row in report[level]:
            logits = "-" if row["logits"] is None else f"{row['logits']:.1e}"
            name = f"{row['press']} = {row['policy']}"
            lines.append(f"{name:<58}{row['ratio']:>6}{row['kept']:>6}{row['sets']:>8}{row['equal']:>8}")
            lines[-1] += f"{row['margin']:>10.1e}{logits:>10}"
    lines += ["", f"{'perplexity at no more bytes than kvpress':<58}{'ratio':>6}{'ours':>9}{'kvpress':>9}{'s.e.':>7}"]
    lines[-1] += f"{'MB':>15}{'MB kvpress':>15}"
    for row in report["quality"]:
        name = f"{row['policy']}, {row['how']}"
        mb = ["-".join(f"{of / 1e6:.2f}" for of in row[key]) for key in ("bytes", "bytes_kvpress")]
        lines.append(f"{name:<58}{row['ratio']:>6}{row['perplexity']:>9.3f}{row['perplexity_kvpress']:>9.3f}")
        lines[-1] += f"{row['standard_errors']:>7.1f}{mb[0]:>15}{mb[1]:>15}"
    return "\n".join([*lines, "", *(f"missed: {line}" for line in report["missed"])])
