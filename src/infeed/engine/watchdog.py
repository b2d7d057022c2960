"""Detects workers that hang while the training loop waits, and reports their stacks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple, final

from infeed.scheduler.messages import WorkerId
from infeed.workers.pool import WorkerPool
from infeed.workers.status import Doing, StatusBoard

_LOG: Final = logging.getLogger("infeed")
# Warn if a worker is stuck for 10 s and for 30 times the usual time of a sample.
_WARN_S: Final = 10.0
_WARN_TIMES: Final = 30
# A spawned worker that imports torch on a busy machine needs more than 10 s to start.
_WARN_START_S: Final = 30.0
# Warn again when the same wait has become twice as long.
_AGAIN_TIMES: Final = 2
_LOOK_S: Final = 1.0
_SOONEST_LOOK_S: Final = 0.01


class Limits(NamedTuple):
    """The watchdog options of the user."""

    sample_timeout_s: float = 0.0  # 0: none
    warning_s: float | None = None  # None: depends on the usual time of a sample; 0: never


class Overdue(NamedTuple):
    """A worker that has exceeded ``sample_timeout`` on one sample."""

    worker: WorkerId
    doing: Doing
    for_s: float
    stack: str | None


@final
class Watchdog:
    """Checks the status board of one engine."""

    def __init__(self, pool: WorkerPool, status_board: StatusBoard, workers: tuple[WorkerId, ...], limits: Limits) -> None:
        self._pool, self._status_board, self._workers = pool, status_board, workers
        self._limits = limits
        shortest = [_LOOK_S]
        shortest += [limit / 4 for limit in (limits.sample_timeout_s, limits.warning_s or 0.0) if limit]
        self.look_s = max(_SOONEST_LOOK_S, min(shortest))
        self._told: dict[WorkerId, tuple[int, float]] = {}  # start of the task in the latest warning, and its duration then

    def doing(self, worker: WorkerId) -> Doing:
        return self._status_board.doing(worker)

    def stack_of(self, worker: WorkerId) -> str | None:
        return self._pool.stack_of(worker, self._status_board.doing(worker).stack_fd)

    def look(self, usual_s: float, rows_of: Callable[[Doing], int], describe: Callable[[Doing], str]) -> list[Overdue]:
        """Warn of workers that make no progress, and return those over ``sample_timeout``.

        Args:
            usual_s: Usual time of a sample; 0 if unknown.
            rows_of: Returns the number of samples a worker may be loading, if it does not report the exact one.
            describe: Describes the activity of a worker.
        """
        overdue = []
        now_ns = time.perf_counter_ns()
        pids = self._pool.pids()
        for worker in self._workers:
            doing = self._status_board.doing(worker)
            if not doing.since_ns:
                continue
            for_s = (now_ns - doing.since_ns) / 1e9
            rows = 1 if doing.exact_row is not None or doing.task is None else max(1, rows_of(doing))
            limit_s = self._limits.sample_timeout_s * rows
            if limit_s and for_s > limit_s and doing.task is not None:
                stack = self.stack_of(worker)
                if self._status_board.doing(worker)[:4] == doing[:4]:  # race: it may have moved on while its stack was taken
                    overdue.append(Overdue(worker, doing, for_s, stack))
            elif self._is_worth_telling(worker, doing, for_s, usual_s * rows):
                stack = self.stack_of(worker)
                where = "" if worker not in pids else f" (pid {pids[worker]})"
                usual = f", where {usual_s:.2g} s is usual" if usual_s and doing.task is not None else ""
                _LOG.warning(
                    "worker %d%s has been %s for %.1f s%s; %s",
                    worker, where, describe(doing), for_s, usual,
                    f"it is here:\n{stack}" if stack else "its stack cannot be had",
                )  # fmt: skip
        return overdue

    def _is_worth_telling(self, worker: WorkerId, doing: Doing, for_s: float, usual_s: float) -> bool:
        warning_s = self._limits.warning_s
        default_s = _WARN_START_S if doing.task is None else max(_WARN_S, _WARN_TIMES * usual_s)
        least_s = default_s if warning_s is None else warning_s
        since_ns, told_s = self._told.get(worker, (0, 0.0))
        if not least_s or for_s < least_s or (since_ns == doing.since_ns and for_s < _AGAIN_TIMES * told_s):
            return False
        self._told[worker] = (doing.since_ns, for_s)
        return True
