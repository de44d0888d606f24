"""Generate text from prompts: the same as the installed `kvjax generate`."""

import sys

from kvjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
