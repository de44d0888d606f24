"""Train the small model of the tests and write it as a Hugging Face folder."""

import sys

from kvjax.evaluation.train_small import main

if __name__ == "__main__":
    sys.exit(main())
