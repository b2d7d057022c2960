"""What the user's own process used while epochs were in progress: processor time, and the loop's wait for a core."""

from __future__ import annotations

import threading
from time import perf_counter_ns, process_time_ns
from typing import Final, final

from infeed.workers.insides import queued_ns

# Both clocks are system calls, which take a third of a millisecond where there are fewer cores than work. So who iterates a
# small dataset again and again does not pay for each epoch: pauses that are shorter than this count as the loop's...
_SHORT_NS: Final = 20_000_000
# ...and the clocks are read no more often than so many times what that takes.
_READ_SHARE: Final = 1000


@final
class OwnTime:
    """Belongs to the gauge of one engine. Epochs begin and end in the loop's thread."""

    def __init__(self) -> None:
        self.counted_ns = 0  # of processor time
        self.queued_ns = 0  # of the loop's thread: ready to run, and no core to run on
        self._cpu_from_ns = self._queued_from_ns = 0  # how far they were when they were last read
        self._read_ns = 0  # when that was; 0: never
        self._least_ns = _SHORT_NS  # from there to the next time, at least
        self._ended_ns = 0  # when the last epoch ended; 0: one is in progress
        self._thread = 0

    def begin(self) -> None:
        """An epoch begins."""
        now_ns, thread = perf_counter_ns(), threading.get_ident()
        goes_on = self._read_ns and now_ns - self._ended_ns < _SHORT_NS and thread == self._thread
        self._ended_ns = 0
        if not goes_on:
            self._thread, self._read_ns = thread, now_ns
            self._cpu_from_ns, self._queued_from_ns = process_time_ns(), queued_ns()

    def end(self) -> bool:
        """The epoch is over. Whether that was counted: not if it was short, because another may follow at once."""
        is_counted = self.count()
        self._ended_ns = perf_counter_ns()
        return is_counted

    def count(self) -> bool:
        """Count up to now, unless that was done a moment ago.

        Each thread has its own wait for a core, so that can be had in the loop's alone.
        """
        began_ns = perf_counter_ns()
        if not self._read_ns or self._ended_ns or began_ns - self._read_ns < self._least_ns:
            return False
        before_ns, self._cpu_from_ns = self._cpu_from_ns, process_time_ns()
        self.counted_ns += self._cpu_from_ns - before_ns
        if threading.get_ident() == self._thread:
            before_ns, self._queued_from_ns = self._queued_from_ns, queued_ns()
            self.queued_ns += max(0, self._queued_from_ns - before_ns)
        self._read_ns = perf_counter_ns()
        self._least_ns = max(_SHORT_NS, _READ_SHARE * (self._read_ns - began_ns))
        return True

    @property
    def cpu_ns(self) -> int:
        """Up to now, while an epoch is in progress."""
        return self.counted_ns + (process_time_ns() - self._cpu_from_ns if self._read_ns and not self._ended_ns else 0)
