"""Stream a text, or a model's own, through a cache of constant size: the same as the installed `kvjax stream`."""

import sys

from kvjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["stream", *sys.argv[1:]]))
