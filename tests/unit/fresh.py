"""New interpreters, for effects that are visible only in one: imports, and generators that a process shares."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import infeed

SOURCE = Path(infeed.__file__).resolve().parent


def run_fresh(code: str) -> str:
    """Returns the output of a new interpreter; fails with its error if it does not exit with 0."""
    paths = [str(SOURCE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
