"""What an engine sets by itself while it runs, by what it measures: how many workers there are, how much is in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, final

from infeed.memory.budget import available_bytes
from infeed.observe.gauge import Gauge
from infeed.observe.records import LOOP, Point
from infeed.rooms import Rooms
from infeed.scheduler.machine import Scheduler
from infeed.staffing import Staffing
from infeed.tuning.readings import Reading
from infeed.tuning.tuner import Tuner
from infeed.units import format_count

_LOG: Final = logging.getLogger("infeed")
# A loop that waits for more than this while workers idle for more than that, so many looks in a row, is held up by the window:
# behind one slow sample everything that may be in flight is loaded.
_WAITS: Final = 0.1
_IDLES: Final = 0.3
_LOOKS: Final = 3
_BOUNDS: Final = {
    "memory_limit": "memory_limit allows no more",
    "memory": "there is memory for no more",
    "cores": "cpu_limit allows no more",
}


@final
class Steering:
    """Belongs to one engine."""

    def __init__(
        self,
        tuner: Tuner | None,
        gauge: Gauge,
        scheduler: Scheduler,
        staffing: Staffing,
        rooms: Rooms,
        set_window: Callable[[int], None],
        memory_budget: int | None = None,
    ) -> None:
        """``memory_budget`` is what workers and batches may take together, if the user has set it."""
        self._tuner, self._gauge, self._scheduler = tuner, gauge, scheduler
        self._staffing, self._rooms, self._set_window = staffing, rooms, set_window
        self._memory_budget = memory_budget
        self._seen = 0
        self._before: Point | None = None
        self._held_up = 0  # looks in a row
        if tuner is not None:
            tuner.begin()

    def begin_epoch(self) -> None:
        """What was between epochs says nothing about the window. The tuner goes by the loop's time, which stands still then."""
        self._before = None

    def consider(self) -> None:
        """Look at what the gauge has found since the last time, if anything."""
        point = self._gauge.latest
        if point is None or self._gauge.tick_count == self._seen:
            return
        self._seen = self._gauge.tick_count
        if self._tuner is not None:
            self._tune(self._tuner, point)
        before, self._before = self._before, point
        if before is not None:
            self._widen(before, point)

    def _tune(self, tuner: Tuner, point: Point) -> None:
        usages = [self._gauge.members.usage(worker) for worker in self._scheduler.hired_workers]
        free_bytes, is_budget = self._free_bytes(tuner, point, sum(one.private_bytes for one in usages))
        bound = tuner.bound
        change = tuner.consider(
            Reading(
                at_ns=point.waited_ns + point.away_ns,
                batch_count=point.batch_count,
                sample_count=point.sample_count,
                waited_ns=point.waited_ns,
                away_ns=point.away_ns,
                busy_ns=point.busy_ns,
                # Who waits for a core would compute.
                cpu_ns=point.cpu_ns + point.queued_ns,
                worker_count=len(self._scheduler.hired_workers),
                ready_count=point.worker_count,
                worker_bytes=max((one.private_bytes for one in usages), default=0),
                free_bytes=free_bytes,
                is_budget=is_budget,
            )
        )
        if change is not None:
            _LOG.info("%s", change.why)
            self._gauge.mark("workers", LOOP, change.why)
            self._staffing.aim(change.worker_count)
        elif tuner.bound not in ("", bound):
            _LOG.info("no more than %s: %s", format_count(tuner.count, "worker"), _BOUNDS[tuner.bound])

    def _free_bytes(self, tuner: Tuner, point: Point, taken_bytes: int) -> tuple[int, bool]:
        """Memory for more workers: of the machine, some of which is left to others, or of the user's budget, which is ours.

        And whether it is the budget that says so.
        """
        free = available_bytes()
        if self._memory_budget is None:
            return free, False
        left = self._memory_budget - taken_bytes - point.room_bytes + tuner.reserve_bytes
        return min(free, left), left < free

    def _widen(self, before: Point, now: Point) -> None:
        loop_ns = now.waited_ns - before.waited_ns + now.away_ns - before.away_ns
        waits = now.waited_ns - before.waited_ns > _WAITS * loop_ns
        could_ns = now.worker_count * (now.at_ns - before.at_ns)
        idles = now.busy_ns - before.busy_ns < (1 - _IDLES) * could_ns
        # The latest sample may have been begun long ago: what it takes is counted when it is done.
        self._held_up = self._held_up + 1 if waits and idles and now.worker_count == before.worker_count > 1 else 0
        if self._held_up < _LOOKS:
            return
        self._held_up = 0
        window = self._rooms.widen()
        if window is not None:
            _LOG.info("%d batches in flight instead of fewer: the loop waited while workers had nothing to do", window)
            self._set_window(window)
