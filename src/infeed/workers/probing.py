"""Finding out, while a worker loads its first samples, whether threads would do as well.

They would if loading leaves the GIL for most of the time, and if it draws from no generator that threads would share.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Final, final

from infeed.workers.gilshare import GilShare
from infeed.workers.seeding import DrawWatch
from infeed.workers.tape import Silence, Tape

# So much loading is looked at.
_ENOUGH_NS: Final = 250_000_000


@final
class Probe:
    """Belongs to one worker that is a process."""

    def __init__(self, tape: Tape | Silence) -> None:
        self._tape = tape
        self._gil = GilShare()
        self._draws = DrawWatch()
        self._is_on = False
        self._began_ns = self._seen_ns = 0
        self.is_done = False

    def begin(self) -> None:
        """A task begins."""
        if not self._is_on:
            self._is_on = True
            self._began_ns = perf_counter_ns()
            self._draws.begin()
            self._gil.start()

    def end(self, elapsed_ns: int) -> None:
        """It has been done."""
        self._draws.look()
        self._seen_ns += elapsed_ns
        if self._seen_ns < _ENOUGH_NS:
            return
        share = self._gil.stop()
        passed_ns = perf_counter_ns() - self._began_ns
        if share is not None:
            self.is_done = True
            # While the worker had nothing to do, nobody held it.
            self._tape.note_gil(min(1.0, share * passed_ns / self._seen_ns), is_drawing=self._draws.has_drawn)
        self._is_on = False
        self._seen_ns = 0
