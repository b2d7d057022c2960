"""Threads at work in a program's processes, besides the first of each: whose they are, and how many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, final

from infeed.doctor.evidence import ProcessSeen, Run
from infeed.doctor.threads import PYTHON, find_owners

# A thread counts as one that works from this part of the first thread's time on.
_WORKING: Final = 0.05
_WORKING_S: Final = 0.05
# Processes that are looked at together. They are stopped for it, and the workers of a loader are alike.
_AT_ONCE: Final = 2


@final
class Pools:
    """What is known of them in one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._owners: dict[int, dict[int, str]] = {}  # libraries of threads, by process
        self._looks: Counter[int] = Counter()  # by process

    def look(self, processes: Sequence[Any]) -> None:
        """Look at some of these (of psutil's kind), each in its turn."""
        import psutil

        for process in sorted(processes, key=lambda one: self._looks[one.pid])[:_AT_ONCE]:
            self._looks[process.pid] += 1
            with suppress(psutil.Error, OSError):
                self._look_at(process)

    def _look_at(self, process: Any) -> None:
        times = {one.id: one.user_time + one.system_time for one in process.threads()}
        least_s = max(_WORKING * times.pop(process.pid, 0.0), _WORKING_S)
        working = {tid for tid, spent_s in times.items() if spent_s > least_s}
        owners = self._owners.setdefault(process.pid, {})
        if working - owners.keys():
            owners |= find_owners(process.pid, halts=True)
        seen = self._run.processes.setdefault(process.pid, ProcessSeen(process.pid))
        for owner, count in Counter(owners[tid] for tid in working & owners.keys() if owners[tid] != PYTHON).items():
            seen.pools[owner] = max(seen.pools.get(owner, 0), count)
