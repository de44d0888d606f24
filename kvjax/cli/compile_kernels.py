"""`kvjax compile-kernels`: compile the kernels for a device that is not there, and check what the compiler made."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvjax.cli import arguments
from kvjax.errors import InputError, whole_number

_COLUMNS = dict(
    h200=("registers", "spills", "smem_bytes", "stages", "hgmma", "tma_loads", "floor_us"),
    tpu=("vmem_bytes", "smem_bytes", "stages", "pool_copies", "temp_bytes", "floor_us"),
    loop=("devices", "format", "policy", "pool_bytes", "alias_bytes", "temp_bytes", "pool_copies", "kernels"),
)
# Of kvjax.benchmarks; those of one kind run side by side.
_MODULES = dict(h200=("compile_kernels", "compile_mass", "compile_write"), tpu=("compile_tpu",), loop=("compile_loop",))


def main(argv: Sequence[str]) -> int:
    """Run `kvjax compile-kernels`.

    Returns: the exit code: 0, or 1 if a kernel or a program breaks a limit.

    Raises: InputError where the compilers are missing or fail, and for a number of shapes below 1.
    """
    args = _parser().parse_args(argv)
    kind = "loop" if args.loop else "h200" if args.target == "h200" else "tpu"
    options = ["--target", args.target]
    if args.shapes is not None:
        options += ["--shapes", str(whole_number("--shapes", args.shapes, 1))]
    modules = _MODULES[kind]
    with ThreadPoolExecutor(len(modules)) as pool:
        compiled = list(pool.map(lambda module: _compiled(module, options, args.target), modules))
    rows = [row for of_module in compiled for row in of_module]
    print(json.dumps(dict(rows=rows), indent=2) if args.json else _table(rows, _COLUMNS[kind]))
    return 1 if any(row["faults"] for row in rows) else 0


def _compiled(module: str, options: list[str], target: str) -> list[dict[str, Any]]:
    """Run a module of kvjax.benchmarks in the environment of the compilers and return the rows that it prints."""
    from kvjax.benchmarks.deviceless import python_with_compilers

    # In a process of its own: a missing library aborts it. What it says may be more than a pipe holds.
    command = [python_with_compilers(), "-m", f"kvjax.benchmarks.{module}", *options]
    # A second process would not get libtpu, though it needs no TPU.
    environment = os.environ | dict(ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    rows = []
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment) as worker,
    ):
        assert worker.stdout is not None
        for line in worker.stdout:
            rows.append(json.loads(line))
            arguments.progress(f"{len(rows)}: {_name(rows[-1])}")
        if worker.wait():
            said.seek(0)
            last = next((line for line in reversed(said.read().splitlines()) if line.strip()), "it said nothing")
            raise InputError(f"{module} for {target} failed after {len(rows)} rows: {last}")
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvjax compile-kernels",
        description="Compile the attention kernels at production shapes, or (--loop) generation with a decoder of "
        "Llama-3.1-8B's shape, for devices that need not be there, and check registers, spills, shared memory and "
        "instructions, or that the pool of pages is updated in place. floor_us is the time to move the bytes at the "
        "device's bandwidth; bytes of a program are those of one device. The exit code is 1 if a limit is broken.",
        epilog="Needs the compilers that `make kernel-checks` installs.",
    )
    parser.add_argument(
        "--target", choices=["h200", "v5e", "v6e"], default="h200", help="the device (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--loop", action="store_true", help="prefill, the loop of generate and the steps of stream (h200: also for 8)"
    )
    which.add_argument("--shapes", type=int, metavar="N", help="N of the shapes, of all kinds (default: all)")
    return parser


def _name(row: dict[str, Any]) -> str:
    if "kernel" in row:
        return f"{row['kernel']}, {row['shape']}"
    return f"{row['program']}, devices: {row['devices']}, {row['format']} pages, policy {row['policy']}"


def _table(rows: list[dict[str, Any]], columns: Sequence[str]) -> str:
    widths = [max(len(name), *(len(str(row.get(name, ""))) for row in rows)) + 2 for name in columns]
    names = [row["kernel"] if "kernel" in row else row["program"] for row in rows]
    label = max(map(len, names))
    head = "".join(f"{name:>{width}}" for name, width in zip(columns, widths, strict=True))
    lines = [f"{'':<{label}}{head}"]
    for name, row in zip(names, rows, strict=True):
        cells = "".join(f"{row.get(column, '')!s:>{width}}" for column, width in zip(columns, widths, strict=True))
        lines.append(f"{name:<{label}}{cells}  {row.get('shape', '')}".rstrip())
        lines += [f"  {fault}" for fault in row["faults"]]
    return "\n".join(lines)
