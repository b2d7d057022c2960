"""What the user's own process used while epochs were in progress: processor time, and the loop's wait for a core."""

from __future__ import annotations

import threading
from time import perf_counter_ns, process_time_ns
from typing import Final, final

from infeed.workers.insides import queued_ns

# Both clocks are system calls, at which a thread may lose its core: half a millisecond where there are fewer cores than work.
# They are read where an epoch begins and where it ends, unless it or the pause before it was shorter than this. Then they are
# read this seldom, pauses between epochs are measured with them and leave their share of what was measured...
_SHORT_NS: Final = 20_000_000
_SELDOM_NS: Final = 100_000_000
# ...and never more often than so many times what reading takes.
_READ_SHARE: Final = 1000
_LONGEST_NS: Final = 1_000_000_000


@final
class OwnTime:
    """Belongs to the gauge of one engine. Epochs begin and end in the loop's thread."""

    def __init__(self) -> None:
        self.counted_ns = 0  # of processor time
        self.queued_ns = 0  # of the loop's thread: ready to run, and no core to run on
        self._cpu_from_ns = self._queued_from_ns = 0  # how far they were when they were last read
        self._read_ns = 0  # when that was; 0: never
        self._paused_ns = 0  # since then, between epochs
        self._least_ns = 0  # from there to the next time, at least
        self._begun_ns = 0  # when the latest epoch began
        self._ended_ns = 0  # when it ended; 0: it is in progress
        self._is_exact = False  # it was long, and counted to its end
        self._thread = 0

    def begin(self) -> None:
        """An epoch begins."""
        now_ns, thread = perf_counter_ns(), threading.get_ident()
        pause_ns, self._begun_ns, self._ended_ns = now_ns - self._ended_ns, now_ns, 0
        if self._read_ns and pause_ns < _SELDOM_NS and thread == self._thread:
            is_cheap = now_ns - self._read_ns >= self._least_ns
            if not (self._is_exact and pause_ns >= _SHORT_NS and is_cheap):
                self._paused_ns += pause_ns
                return
        self._thread, self._paused_ns = thread, 0
        self._cpu_from_ns, self._queued_from_ns = process_time_ns(), queued_ns()
        self._read_ns = perf_counter_ns()

    def end(self) -> bool:
        """The epoch is over. Whether that was counted: not if it was short, because another may follow at once."""
        is_long = perf_counter_ns() - self._begun_ns >= _SHORT_NS
        is_counted = self._count(0 if is_long else _SELDOM_NS)
        self._is_exact = is_long and is_counted
        self._ended_ns = perf_counter_ns()
        return is_counted

    def count(self) -> bool:
        """Count up to now, unless that was done a moment ago.

        Each thread has its own wait for a core, so that can be had in the loop's alone.
        """
        return self._count(_SELDOM_NS)

    def _count(self, least_ns: int) -> bool:
        began_ns = perf_counter_ns()
        since_ns = began_ns - self._read_ns
        if not self._read_ns or self._ended_ns or since_ns < self._least_ns or since_ns - self._paused_ns < least_ns:
            return False
        before_ns, self._cpu_from_ns = self._cpu_from_ns, process_time_ns()
        self.counted_ns += self._in_epochs(self._cpu_from_ns - before_ns, began_ns)
        if threading.get_ident() == self._thread:
            before_ns, self._queued_from_ns = self._queued_from_ns, queued_ns()
            self.queued_ns += self._in_epochs(max(0, self._queued_from_ns - before_ns), began_ns)
        self._paused_ns, self._read_ns = 0, perf_counter_ns()
        # It may have taken long by chance, because others had the core: that is not held against it for ever.
        self._least_ns = min(_LONGEST_NS, _READ_SHARE * (self._read_ns - began_ns))
        return True

    def _in_epochs(self, used_ns: int, now_ns: int) -> int:
        """Of what was used since the clocks were read, the share of epochs."""
        passed_ns = now_ns - self._read_ns
        return used_ns * (passed_ns - self._paused_ns) // passed_ns if 0 < self._paused_ns < passed_ns else used_ns

    @property
    def cpu_ns(self) -> int:
        """Up to now, while an epoch is in progress."""
        if not self._read_ns or self._ended_ns:
            return self.counted_ns
        return self.counted_ns + self._in_epochs(process_time_ns() - self._cpu_from_ns, perf_counter_ns())
