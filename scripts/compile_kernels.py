"""Compile the kernels for a device that is not there: the same as the installed `kvjax compile-kernels`."""

import sys

from kvjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compile-kernels", *sys.argv[1:]]))
