"""Clocks of the metrics, and the CPU time of the main process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter_ns, process_time_ns
from typing import Final, NamedTuple, final

from infeed.workers.process_tools import queued_ns


class Clock(NamedTuple):
    """The clocks that metrics read. Tests pass their own, so that times are exact."""

    now_ns: Callable[[], int] = perf_counter_ns
    cpu_ns: Callable[[], int] = process_time_ns  # of this process
    queued_ns: Callable[[], int] = queued_ns  # of this thread: ready to run, but without a CPU core


# Reading either clock is a system call, at which a thread may lose its CPU core: for 0.5 ms if there are too few cores.
# ProcessTime reads the clocks at the start and end of an epoch, unless the epoch or the pause before it is shorter than 20 ms.
# Then it reads them at most every 100 ms, and subtracts the share of the pauses between epochs from the result.
_SHORT_TIME_NS: Final = 20_000_000
_SELDOM_NS: Final = 100_000_000
# The time between two reads is at least 1000 times the duration of a read, but never has to exceed 1 s.
_READ_SHARE: Final = 1000
_LONGEST_NS: Final = 1_000_000_000


@final
class ProcessTime:
    """CPU and queued time of the main process during the epochs of one engine.

    Epochs begin and end in the training loop's thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.counted_ns = 0  # CPU time of the process
        self.queued_ns = 0  # time in which the training loop's thread was ready to run but had no CPU core
        self._cpu_from_ns = self._queued_from_ns = 0  # clock values at the last read
        self._read_ns = 0  # time of the last read; 0: never
        self._paused_ns = 0  # time between epochs since the last read
        self._least_ns = 0  # minimum time from the last read to the next
        self._begun_ns = 0  # when the latest epoch began
        self._ended_ns = 0  # when that epoch ended; 0: it is in progress
        self._is_exact = False  # that epoch was long, and was counted to its end
        self._thread = 0

    def begin(self) -> None:
        """Begin an epoch; read the clocks unless the pause before it was short."""
        now_ns, thread = self._clock.now_ns(), threading.get_ident()
        pause_ns, self._begun_ns, self._ended_ns = now_ns - self._ended_ns, now_ns, 0
        if self._read_ns and pause_ns < _SELDOM_NS and thread == self._thread:
            is_cheap = now_ns - self._read_ns >= self._least_ns
            if not (self._is_exact and pause_ns >= _SHORT_TIME_NS and is_cheap):
                self._paused_ns += pause_ns
                return
        self._thread, self._paused_ns = thread, 0
        self._cpu_from_ns, self._queued_from_ns = self._clock.cpu_ns(), self._clock.queued_ns()
        self._read_ns = self._clock.now_ns()

    def end(self) -> bool:
        """End the epoch. Return whether its time was counted; a short epoch is not, because another may follow at once."""
        is_long = self._clock.now_ns() - self._begun_ns >= _SHORT_TIME_NS
        is_counted = self._count(0 if is_long else _SELDOM_NS)
        self._is_exact = is_long and is_counted
        self._ended_ns = self._clock.now_ns()
        return is_counted

    def count(self) -> bool:
        """Count up to now, unless the last count is less than 100 ms old. Return whether it counted.

        The kernel keeps queued time per thread, so only a call from the training loop's thread counts it.
        """
        return self._count(_SELDOM_NS)

    def _count(self, least_ns: int) -> bool:
        began_ns = self._clock.now_ns()
        since_ns = began_ns - self._read_ns
        if not self._read_ns or self._ended_ns or since_ns < self._least_ns or since_ns - self._paused_ns < least_ns:
            return False
        before_ns, self._cpu_from_ns = self._cpu_from_ns, self._clock.cpu_ns()
        self.counted_ns += self._in_epochs(self._cpu_from_ns - before_ns, began_ns)
        if threading.get_ident() == self._thread:
            before_ns, self._queued_from_ns = self._queued_from_ns, self._clock.queued_ns()
            self.queued_ns += self._in_epochs(max(0, self._queued_from_ns - before_ns), began_ns)
        self._paused_ns, self._read_ns = 0, self._clock.now_ns()
        # A read may take long by chance, because other threads had the core, so cap the interval.
        self._least_ns = min(_LONGEST_NS, _READ_SHARE * (self._read_ns - began_ns))
        return True

    def _in_epochs(self, used_ns: int, now_ns: int) -> int:
        """Return the share of ``used_ns``, the time used since the last read, that belongs to epochs."""
        passed_ns = now_ns - self._read_ns
        return used_ns * (passed_ns - self._paused_ns) // passed_ns if 0 < self._paused_ns < passed_ns else used_ns

    @property
    def cpu_ns(self) -> int:
        """CPU time of the process; up to now if an epoch is in progress."""
        if not self._read_ns or self._ended_ns:
            return self.counted_ns
        return self.counted_ns + self._in_epochs(self._clock.cpu_ns() - self._cpu_from_ns, self._clock.now_ns())
