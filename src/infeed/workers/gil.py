"""Measure, while a worker process loads samples, whether thread workers would be as fast.

They are if loading releases the GIL most of the time and does not draw from global generators, which threads would share.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from time import perf_counter_ns
from typing import Final, final

from infeed.workers.process_tools import queued_ns
from infeed.workers.recorder import Recorder
from infeed.workers.rng import DrawWatch

# Sampling interval. Long enough not to slow down user code.
_TICK_S: Final = 0.001
# Switch interval while sampling: how long the sampler waits before Python makes user code release the GIL. Well above timer
# error, and below Python's default of 5 ms, so that a few tenths of a second give enough ticks.
_SWITCH_S: Final = 0.002
# A tick that is later than _LATE_S had to wait for the GIL. If CPU wait times are unknown, _SURELY_LATE_S applies.
_LATE_S: Final = 0.00025
_SURELY_LATE_S: Final = 0.0014
# Sampling stops after this time if no further task ends it.
_MOST_S: Final = 2.0
# Fewer ticks are not significant.
_LEAST_TICKS: Final = 20


@final
class GilShare:
    """Samples, from ``start`` to ``stop``, how long user code in this process holds the GIL.

    For worker processes only, because it changes the switch interval in between.
    """

    def __init__(self, least_ticks: int = _LEAST_TICKS) -> None:
        self._least_ticks = least_ticks
        self._thread: threading.Thread | None = None
        self._is_stopped = threading.Event()
        self._interval_s = 0.0
        self.looked_s = 0.0  # duration of the last measurement
        self._ticks: list[tuple[bool, float]] = []  # whether the GIL was held, and the time to the next tick

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
        """Return the fraction of time, 0 to 1, that the GIL was held; ``None`` if the measurement was too short."""
        thread, self._thread = self._thread, None
        if thread is None:
            return None
        self._is_stopped.set()
        thread.join()
        sys.setswitchinterval(self._interval_s)
        if len(self._ticks) < self._least_ticks:
            return None
        self.looked_s = sum(seconds for _, seconds in self._ticks)
        held_s = sum(seconds for is_held, seconds in self._ticks if is_held)
        return held_s / self.looked_s if self.looked_s else None

    def _look(self, watched: int) -> None:
        clock, sleep, ticks = time.perf_counter, time.sleep, self._ticks
        own, others = _CpuWaits(threading.get_native_id()), _CpuWaits(watched)
        late_s = _LATE_S if own.are_known else _SURELY_LATE_S
        try:
            begin = clock() - others.seconds()  # on a clock that stops while user code waits for a CPU core
            until = clock() + _MOST_S
            while not self._is_stopped.is_set() and clock() < until:
                # Read the clock first, so that any CPU wait after this point is subtracted.
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
class _CpuWaits:
    """Time that a thread of this process was runnable but waited for a CPU core. Linux only; unknown elsewhere."""

    def __init__(self, native_id: int) -> None:
        self._fd = -1
        self.are_known = False
        if sys.platform == "linux":
            try:
                self._fd = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY)
                self.seconds()
                self.are_known = True
            except (OSError, ValueError, IndexError):  # a kernel without schedstat
                self.close()

    def seconds(self) -> float:
        if sys.platform == "linux" and self._fd >= 0:
            return int(os.pread(self._fd, 128, 0).split()[1]) / 1e9
        return 0.0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# Measure until _ENOUGH_NS of loading, or for _LONG_NS at most. Discard results from less than _LEAST_NS of loading.
_ENOUGH_NS: Final = 250_000_000
_LONG_NS: Final = 1_500_000_000
_LEAST_NS: Final = 50_000_000


@final
class KindProbe:
    """Measures GIL use and draws from global generators in one worker process."""

    def __init__(self, recorder: Recorder, *, looks_at_gil: bool) -> None:
        self._recorder = recorder
        self._gil = GilShare() if looks_at_gil else None
        self._draws = DrawWatch()
        self._began_ns = self._busy_ns = self._queued_ns = 0

    def begin(self) -> None:
        """Start the measurement with the first task."""
        if self._gil is not None and not self._began_ns:
            self._began_ns, self._busy_ns, self._queued_ns = perf_counter_ns(), 0, queued_ns()
            self._gil.start()

    def end(self, elapsed_ns: int) -> None:
        """Record a finished task, and report the GIL share when enough loading was measured."""
        if self._draws.look():
            self._recorder.note_draw()
        if self._gil is None:
            return
        self._busy_ns += elapsed_ns
        if self._busy_ns < _ENOUGH_NS and perf_counter_ns() - self._began_ns < _LONG_NS:
            return
        share = self._gil.stop()
        self._began_ns = 0
        if share is not None and self._busy_ns > _LEAST_NS:
            # An idle worker does not hold the GIL, so relate the held time to loading time only. Both clocks exclude CPU waits.
            loaded_ns = max(1, self._busy_ns - (queued_ns() - self._queued_ns))
            self._recorder.note_gil(min(1.0, share * max(1.0, self._gil.looked_s * 1e9 / loaded_ns)))
            self._gil = None
