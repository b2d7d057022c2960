"""Finding out, while a worker loads samples, whether threads would do as well.

They would if loading leaves the GIL for most of the time, and if it draws from no generator that threads would share.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Final, final

from infeed.workers.gilshare import GilShare
from infeed.workers.insides import queued_ns
from infeed.workers.seeding import DrawWatch
from infeed.workers.silence import Silence
from infeed.workers.tape import Tape

# So much loading is looked at for the GIL, within so long.
_ENOUGH_NS: Final = 250_000_000
_LONG_NS: Final = 1_500_000_000
_LEAST_NS: Final = 50_000_000


@final
class Probe:
    """Belongs to one worker that is a process."""

    def __init__(self, tape: Tape | Silence, *, looks_at_gil: bool) -> None:
        self._tape = tape
        self._gil = GilShare() if looks_at_gil else None
        self._draws = DrawWatch()
        self._began_ns = self._busy_ns = self._queued_ns = 0

    def begin(self) -> None:
        """A task begins."""
        if self._gil is not None and not self._began_ns:
            self._began_ns, self._busy_ns, self._queued_ns = perf_counter_ns(), 0, queued_ns()
            self._gil.start()

    def end(self, elapsed_ns: int) -> None:
        """It has been done."""
        if self._draws.look():
            self._tape.note_draw()
        if self._gil is None:
            return
        self._busy_ns += elapsed_ns
        if self._busy_ns < _ENOUGH_NS and perf_counter_ns() - self._began_ns < _LONG_NS:
            return
        share = self._gil.stop()
        self._began_ns = 0
        if share is not None and self._busy_ns > _LEAST_NS:
            # While the worker had nothing to do, nobody held it; and neither clock runs while it waits for a core.
            loaded_ns = max(1, self._busy_ns - (queued_ns() - self._queued_ns))
            self._tape.note_gil(min(1.0, share * max(1.0, self._gil.looked_s * 1e9 / loaded_ns)))
            self._gil = None
