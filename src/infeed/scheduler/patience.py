"""How many deaths are borne before it is the surroundings that are broken, and not a batch that is bad."""

from __future__ import annotations

from typing import Final, final

from infeed.scheduler.records import BATCH_DEATHS

# Batches in a row, besides one for each worker, that may kill all their workers before it is given up.
_BAD_BATCHES: Final = 3
# Deaths of idle workers count for this long.
_IDLE_S: Final = 60.0


@final
class Patience:
    """Counts deaths between which nothing was done. A batch that is delivered counts as something done: while the training
    loop is served, no death is a reason to give up."""

    def __init__(self, worker_count: int) -> None:
        self._worker_count = worker_count
        self._in_a_row = 0
        self._idle_times: list[float] = []  # deaths without a task, since a worker last started well

    def expect(self, worker_count: int) -> None:
        """There are so many now. The most that there ever were may die: those that left may have been among the dead."""
        self._worker_count = max(self._worker_count, worker_count)

    def renew(self) -> None:
        """A worker has done something: it is not hopeless."""
        self._in_a_row = 0
        if self._idle_times:
            self._idle_times = []

    def start_well(self) -> None:
        """A worker is ready: whatever ended idle workers before, it does not keep them from starting."""
        self._idle_times = []

    def lose(self, at_s: float, *, is_idle: bool) -> None:
        """A worker died at this time; ``is_idle``: without a task."""
        if is_idle:
            self._idle_times = [*(time_s for time_s in self._idle_times if at_s - time_s < _IDLE_S), at_s]
        else:
            self._in_a_row += 1

    @property
    def is_lost(self) -> bool:
        """Workers that die without a task, each in turn, are a broken environment and not a bad batch; so are several batches
        in a row of which nothing could be loaded."""
        most_idle = self._worker_count + BATCH_DEATHS
        most = (self._worker_count + _BAD_BATCHES) * (BATCH_DEATHS + 1)
        return len(self._idle_times) > most_idle or self._in_a_row > most
