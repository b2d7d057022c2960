"""``python -m infeed``: the same as the ``infeed`` command."""

import sys

from infeed.cli import main

# Guarded because torch's own spawned workers, which the demo compares with, import this module again.
if __name__ == "__main__":
    sys.exit(main())
