"""Measure the kernels on a GPU: the same as the installed `kvjax benchmark-kernels`."""

import sys

from kvjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["benchmark-kernels", *sys.argv[1:]]))
