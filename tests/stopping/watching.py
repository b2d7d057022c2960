"""Starts ``program.py`` and checks what its end leaves behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import Journal, Script, start_python, wait_until

PROGRAM = Path(__file__).with_name("program.py")
# The usual duration is about a second; the rest is for a busy machine. Slow samples take a minute: waiting for one fails.
GONE_S = 10.0


@dataclass
class Ended:
    """How a program ended."""

    code: int
    out: str
    err: str
    exit_s: float  # From the cause to its own end.
    gone_s: float  # And to that of its last process.

    @property
    def tracebacks(self) -> int:
        return self.err.count("Traceback (most recent call last)")


class Program:
    """A running program in its own folder."""

    def __init__(self, folder: Path, kind: str, samples: str, ending: str) -> None:
        self.name = f"{kind}, {samples} samples, {ending}"
        self.folder = folder / self.name.replace(" ", "_")
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.is_over = False
        self.journal = Journal(self.folder / "journal")
        arguments = [str(PROGRAM), kind, samples, ending]
        self.script: Script = start_python(arguments, cwd=self.folder, env={"TMPDIR": str(self.temporary)})

    @property
    def pid(self) -> int:
        return self.script.pid

    def wait_line(self, line: str) -> None:
        self.script.wait_line(self.journal, line)

    def ended(self, cause: Callable[[], object] = lambda: None) -> Ended:
        """Triggers the end, and waits until the program and all its processes have ended; fails if anything else is left."""
        process, start = self.script.process, time.monotonic()
        try:
            cause()
            wait_until(lambda: process.poll() is not None, f"the end of the program ({self.name})", GONE_S)
            exit_s = time.monotonic() - start
            wait_until(lambda: not self.script.survivors(), f"the end of its processes ({self.name})", GONE_S)
            gone_s = time.monotonic() - start
        except BaseException as error:
            self.is_over = True
            error.add_note(self.script.kill_all())
            raise
        self.is_over = True
        out, err = process.communicate()
        assert os.listdir(self.temporary) == [], self.name
        return Ended(process.returncode, out, err, exit_s, gone_s)
