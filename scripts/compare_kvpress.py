"""Compare eviction policies with those of kvpress that have the same rule; `make kvpress` sets kvpress up."""

import sys

from kvjax.benchmarks.kvpress_report import main

if __name__ == "__main__":
    sys.exit(main())
