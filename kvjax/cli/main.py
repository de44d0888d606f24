"""The `kvjax` command: options of its own, and dispatch to one module a subcommand."""

import argparse
import importlib
import sys
from collections.abc import Sequence

import kvjax
from kvjax.errors import InputError
from kvjax.paths import cache_dir, enable_compilation_cache

# Subcommand -> what --help says. `kvjax x` runs `kvjax.cli.x.main(argv) -> exit code`.
COMMANDS = {
    "generate": "generate text from prompts",
    "benchmark": "measure speed and memory on this machine",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `kvjax` command.

    Args:
        argv: the arguments after the program's name; those of the process when None.

    Returns:
        The exit code: 0, 2 after a mistake of the user's (one line on stderr), 130 after an interrupt.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in COMMANDS:
            enable_compilation_cache()
            return importlib.import_module(f"kvjax.cli.{arguments[0]}").main(arguments[1:])
        return _own_options(arguments)
    except InputError as error:
        print(f"kvjax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _own_options(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="kvjax",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="A paged KV cache for JAX language models.\n\ncommands (kvjax COMMAND --help says more):\n"
        + "\n".join(f"  {name:<12}{text}" for name, text in COMMANDS.items()),
        epilog="Weights, compiled programs and downloads are kept in the folder KVJAX_CACHE, "
        f"now\n{cache_dir()}".replace("%", "%%"),
    )
    parser.add_argument("--version", action="store_true", help="print the versions of kvjax and jax, and the backend")
    # Reached only by a name that COMMANDS lacks: argparse then names the choices and exits with 2.
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help="one of the commands above")
    if parser.parse_args(arguments).version:
        print(_version())
    else:
        parser.print_help()
    return 0


def _version() -> str:
    import jax

    devices = jax.devices()
    return (
        f"kvjax {kvjax.__version__}, jax {jax.__version__}, "
        f"backend {jax.default_backend()} ({len(devices)} x {devices[0].device_kind})"
    )
