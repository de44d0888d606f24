"""Measure speed and memory: the same as the installed `kvjax benchmark`."""

import sys

from kvjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["benchmark", *sys.argv[1:]]))
