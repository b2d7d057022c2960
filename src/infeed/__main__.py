"""Run the ``infeed`` command with ``python -m infeed``."""

import sys

from infeed.cli import main

# The guard is needed because the demo compares with torch, whose spawned workers import this module again.
if __name__ == "__main__":
    sys.exit(main())
