"""Looking after workers while the user's loop waits: who has not come on for a while, and where it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple, final

from infeed.scheduler.messages import WorkerId
from infeed.workers.pool import WorkerPool
from infeed.workers.status import Doing, StatusBoard

_LOG: Final = logging.getLogger("infeed")
# Nobody is told of a wait that is shorter than this, or than so many times what a sample usually takes...
_WARN_S: Final = 10.0
_WARN_TIMES: Final = 30
# A spawned worker that imports torch on a busy machine takes more than 10 s to start.
_WARN_START_S: Final = 30.0
# ...and of the same wait again when it has become so many times as long.
_AGAIN_TIMES: Final = 2
_LOOK_S: Final = 1.0
_SOONEST_LOOK_S: Final = 0.01


class Limits(NamedTuple):
    """The user's options."""

    sample_timeout_s: float = 0.0  # 0: none
    warning_s: float | None = None  # None: by what samples usually take; 0: never


class Overdue(NamedTuple):
    """A worker that has been at one sample for longer than it may."""

    worker: WorkerId
    doing: Doing
    for_s: float
    stack: str | None


@final
class Watchdog:
    """Belongs to one engine; looks at its board."""

    def __init__(self, pool: WorkerPool, status_board: StatusBoard, workers: tuple[WorkerId, ...], limits: Limits) -> None:
        self._pool, self._status_board, self._workers = pool, status_board, workers
        self._limits = limits
        shortest = [_LOOK_S]
        shortest += [limit / 4 for limit in (limits.sample_timeout_s, limits.warning_s or 0.0) if limit]
        self.look_s = max(_SOONEST_LOOK_S, min(shortest))
        self._told: dict[WorkerId, tuple[int, float]] = {}  # since when it was at what it was told of, and how long that was

    def doing(self, worker: WorkerId) -> Doing:
        return self._status_board.doing(worker)

    def stack_of(self, worker: WorkerId) -> str | None:
        return self._pool.stack_of(worker, self._status_board.doing(worker).stack_fd)

    def look(self, usual_s: float, rows_of: Callable[[Doing], int], describe: Callable[[Doing], str]) -> list[Overdue]:
        """Warn of workers that do not come on, and say which have passed the limit.

        Args:
            usual_s: what a sample usually takes; 0 if nothing is known.
            rows_of: how many samples a worker may be at, where it does not say which.
            describe: what a worker is at, in words.
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
                if self._status_board.doing(worker)[:4] == doing[:4]:  # taking the stack takes a while: it may have come on
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
