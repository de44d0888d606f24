"""`kvjax compile-kernels`: compile the kernels for a device that is not there, and check what the compiler made."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence

from kvjax.cli import arguments
from kvjax.errors import InputError

_COLUMNS = ("registers", "spills", "smem_bytes", "stages", "hgmma", "tma_loads", "floor_us")


def main(argv: Sequence[str]) -> int:
    """Run `kvjax compile-kernels`.

    Returns: the exit code: 0, or 1 if a kernel breaks a limit.

    Raises: InputError where the compilers are missing or fail.
    """
    args = _parser().parse_args(argv)
    from kvjax.benchmarks.deviceless import python_with_compilers

    # In a process of its own: a missing library aborts it.
    command = [python_with_compilers(), "-m", "kvjax.benchmarks.compile_kernels"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None and worker.stderr is not None
        rows = []
        for line in worker.stdout:
            rows.append(json.loads(line))
            arguments.progress(f"{len(rows)}: {rows[-1]['kernel']}, {rows[-1]['shape']}")
        said = worker.stderr.read()
    if worker.returncode:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
        raise InputError(f"compiling for {args.target} failed after {len(rows)} kernels: {last}")
    print(json.dumps(dict(rows=rows), indent=2) if args.json else _table(rows))
    return 1 if any(row["faults"] for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvjax compile-kernels",
        description="Compile the attention kernels at production shapes, for a device that need not be there, and "
        "check registers, spills, shared memory and instructions. floor_us is the time to move the bytes at the "
        "device's bandwidth. The exit code is 1 if a kernel breaks a limit.",
        epilog="Needs the compilers that `make kernel-checks` installs.",
    )
    parser.add_argument("--target", choices=["h200"], default="h200", help="the device (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def _table(rows: list[dict]) -> str:
    widths = [max(len(name), 8) + 2 for name in _COLUMNS]
    head = "".join(f"{name:>{width}}" for name, width in zip(_COLUMNS, widths, strict=True))
    lines = [f"{'kernel':<9}{head}  shape"]
    for row in rows:
        cells = "".join(f"{row[name]:>{width}}" for name, width in zip(_COLUMNS, widths, strict=True))
        lines.append(f"{row['kernel']:<9}{cells}  {row['shape']}")
        lines += [f"  {fault}" for fault in row["faults"]]
    return "\n".join(lines)
