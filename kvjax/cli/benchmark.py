"""`kvjax benchmark`: measure speed and memory on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from kvjax.cli import arguments


def main(argv: Sequence[str]) -> int:
    """Run `kvjax benchmark`; returns the exit code. Raises InputError for values out of range."""
    args = _parser().parse_args(argv)
    # Late, so that --help and a wrong flag cost no start of JAX.
    from kvjax.benchmarks import decode, formats, policies
    from kvjax.models.loading import load

    common: dict[str, Any] = dict(
        dtype=args.dtype, batches=tuple(dict.fromkeys(args.batch)), new_tokens=args.new_tokens, repeats=args.repeats
    )
    if args.benchmark == "policies":
        chosen: dict[str, Any] = dict() if args.policies is None else dict(policies=tuple(args.policies))
        of_policies = policies.Settings(**common, **chosen, context=args.context)
        model = load(args.model, args.dtype, notify=arguments.progress)
        report = policies.run(model.decoder, of_policies, arguments.progress)
        print(json.dumps(report, indent=2) if args.json else _table(report))
        return 0
    common |= dict(model=args.model, peers=args.peers)
    if args.benchmark == "formats":
        given: dict[str, Any] = {} if args.formats is None else dict(formats=tuple(args.formats))
        settings = formats.Settings(**common, **given, context=args.context)
        model = load(args.model, args.dtype, notify=arguments.progress)
        report = formats.run(model.decoder, settings, arguments.progress)
    else:
        settings = decode.Settings(**common, contexts=tuple(dict.fromkeys(args.context)))
        model = load(args.model, args.dtype, notify=arguments.progress)
        report = decode.run(model.decoder, settings, arguments.progress)
    print(json.dumps(report, indent=2) if args.json else _table(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvjax benchmark", description=__doc__, epilog=arguments.cache_note())
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    decode = commands.add_parser(
        "decode",
        help="time per token: paged against contiguous, larger pools and tables, other engines",
        description="Time per token of the paged cache against a contiguous one in the same loop, with larger pools "
        "and page tables, and (--peers) against other engines; engines take turns, and ratios are medians of those of "
        "neighbours. ms_per_token is the time between two tokens of a sequence, tokens_per_s counts all sequences, "
        "spread is (max - min) / median.",
        epilog=arguments.cache_note(),
    )
    _add_flags(decode)
    decode.add_argument(
        "--context", type=int, nargs="+", default=[128, 1024], metavar="N",
        help="tokens of a sequence at the end of a measurement (default: 128 1024)",
    )  # fmt: skip
    _add_formats(commands)
    _add_policies(commands)
    return parser


def _add_formats(commands) -> None:
    formats = commands.add_parser(
        "formats",
        help="time of a decode step with pages in each format",
        description="Time of a decode step with pages in each format, over that of float32 pages, and (--peers) "
        "against the 4-bit QuantizedCache of transformers (hqq), of which a prompt is measured too and takes a minute "
        "or two; formats take turns, and ratios are medians of those of neighbours. ms_per_token is the time of a "
        "step, spread is (max - min) / median.",
        epilog=arguments.cache_note(),
    )
    _add_flags(formats)
    formats.add_argument(
        "--formats", nargs="+", metavar="FORMAT",
        help="page formats (default: float32 bfloat16 int8 fp8_e4m3 int4_hadamard int4; float32 is always measured)",
    )  # fmt: skip
    formats.add_argument(
        "--context", type=int, default=1024, metavar="N",
        help="tokens of a sequence at the end of a measurement (default: %(default)s)",
    )  # fmt: skip


def _add_policies(commands) -> None:
    policies = commands.add_parser(
        "policies",
        help="time of a decode step with a cache that a policy keeps full",
        description="Time of a decode step with a cache that holds as many tokens as the context under each policy, "
        "over that of one that keeps all; policies take turns, and ratios are medians of those of neighbours.",
        epilog=arguments.cache_note(),
    )
    _add_flags(policies, peers=False)
    policies.add_argument(
        "--policies", nargs="+", metavar="NAME[:key=value,...]",
        help="as --policy of kvjax generate; a budget or window that is not named is the context",
    )  # fmt: skip
    policies.add_argument(
        "--context", type=int, default=1024, metavar="N", help="tokens that a sequence holds (default: %(default)s)"
    )


def _add_flags(parser: argparse.ArgumentParser, *, peers: bool = True) -> None:
    """Add what the benchmarks have in common."""
    arguments.add_model(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], metavar="N", help="sequences (default: 1 8)")
    parser.add_argument(
        "--new-tokens", type=int, default=32, metavar="N", help="decode steps of a measurement (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="measurements of each engine (default: %(default)s)"
    )
    if peers:
        parser.add_argument("--peers", action="store_true", help="compare with the engines `make peers` has set up")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _table(report: dict[str, Any]) -> str:
    """The report for readers."""
    machine, is_ratio = report["machine"], all("ratio" in row for row in report["rows"])
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load'][0]} before; jax {machine['jax']} on "
        f"{machine['platform']}",
        "",
        f"{'engine':<44}{'batch':>6}{'context':>9}{'ms/token':>10}{'tokens/s':>10}{'spread':>8}"
        + (f"{'ratio':>8}" if is_ratio else ""),
    ]
    lines += [
        f"{row['engine']:<44}{row['batch']:>6}{row['context']:>9}{row['ms_per_token']:>10.2f}"
        f"{row['tokens_per_s']:>10.1f}{row['spread']:>8.0%}" + (f"{row['ratio']:>8.2f}" if is_ratio else "")
        for row in report["rows"]
    ]
    lines.append("")
    lines += [
        f"{name:<44}{'not measured' if value is None else format(value, '.3f')}"
        for name, value in report["summary"].items()
    ]
    lines += ["", *(f"{name}: {json.dumps(facts)[1:-1]}" for name, facts in report["peers"].items())]
    return "\n".join(lines)
