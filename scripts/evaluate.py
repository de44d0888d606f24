"""Measure what options of the cache cost in quality: the same as the installed `kvjax evaluate`."""

import sys

from kvjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
