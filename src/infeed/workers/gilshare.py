"""How much of the time user code holds the GIL: whether threads would do as well as processes.

A thread that wakes every millisecond needs the GIL to go on. If nobody has it, it is on time. If user code has it, the thread
waits until that lets go of it, or, if it does not by itself, until it has asked for a switch interval. So a tick that is late
was one at which the GIL was held, and how long it took to the next is how much of the time it stands for.

On a busy machine a thread is late also because it waits for a processor, and user code that waits for one has handed over the
GIL. Linux counts that for each thread, and it is taken off. Elsewhere a tick has to be late by most of a switch interval.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Final, final

# How often it looks. Seldom enough that user code does not notice.
_TICK_S: Final = 0.001
# How long it asks for the GIL before user code has to hand it over, while this looks: well above what a clock is off by, and
# below Python's own 5 ms, so that there are ticks enough in a few tenths of a second.
_SWITCH_S: Final = 0.002
# A tick that is late by more had to wait for the GIL; without a word of how long it waited for a processor, by more than that.
_LATE_S: Final = 0.00025
_SURELY_LATE_S: Final = 0.0014
# Fewer ticks say nothing.
_LEAST_TICKS: Final = 20


@final
class GilShare:
    """Looks from ``start`` to ``stop``, for as long as user code runs in this process.

    For processes that are ours: it changes the switch interval in between.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._is_stopped = threading.Event()
        self._interval_s = 0.0
        self._ticks: list[tuple[bool, float]] = []  # whether the GIL was held, and how long it was to the next

    def start(self) -> None:
        assert self._thread is None, "it looks already"
        self._is_stopped.clear()
        self._ticks = []
        self._interval_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        watched = threading.get_native_id()
        self._thread = threading.Thread(target=self._look, args=(watched,), name="infeed:gil", daemon=True)
        self._thread.start()

    def stop(self) -> float | None:
        """The share of the time, from 0 to 1, that the GIL was held; ``None`` if that cannot be told from so short a look."""
        thread, self._thread = self._thread, None
        if thread is None:
            return None
        self._is_stopped.set()
        thread.join()
        sys.setswitchinterval(self._interval_s)
        if len(self._ticks) < _LEAST_TICKS:
            return None
        seen_s = sum(seconds for _, seconds in self._ticks)
        return sum(seconds for is_held, seconds in self._ticks if is_held) / seen_s if seen_s else None

    def _look(self, watched: int) -> None:
        clock, sleep, ticks = time.perf_counter, time.sleep, self._ticks
        own, others = _ProcessorWaits(threading.get_native_id()), _ProcessorWaits(watched)
        late_s = _LATE_S if own.are_known else _SURELY_LATE_S
        try:
            begin = clock() - others.seconds()  # on a clock that stands while user code waits for a processor
            while not self._is_stopped.is_set():
                # The clock first: whatever waits for a processor after it has been read is taken off.
                due = clock() + _TICK_S - own.seconds()
                sleep(_TICK_S)
                late = clock() - own.seconds() - due
                end = clock() - others.seconds()
                ticks.append((late > late_s, max(0.0, end - begin)))
                begin = end
        finally:
            own.close()
            others.close()


@final
class _ProcessorWaits:
    """How long a thread of this process was ready to run and had no processor. Linux; elsewhere it is not known."""

    def __init__(self, native_id: int) -> None:
        self._fd = -1
        self.are_known = False
        if sys.platform == "linux":
            try:
                self._fd = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY)
                self.seconds()
                self.are_known = True
            except (OSError, ValueError, IndexError):  # a kernel that does not count
                self.close()

    def seconds(self) -> float:
        if sys.platform == "linux" and self._fd >= 0:
            return int(os.pread(self._fd, 128, 0).split()[1]) / 1e9
        return 0.0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
