"""Detects workers that hang while the training loop waits: logs their stacks, and kills those over ``sample_timeout``."""

from __future__ import annotations

import logging
import reprlib
import time
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias, final

from infeed.engine.progress import SentTask
from infeed.errors import LoadTimeoutError
from infeed.plan.order import plain_indices
from infeed.scheduler.messages import TaskId, WorkerId
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

Tasks: TypeAlias = Mapping[TaskId, SentTask]  # sent, not yet answered


class HangLimits(NamedTuple):
    """The watchdog options of the user."""

    sample_timeout_s: float = 0.0  # 0: none
    warning_s: float | None = None  # None: depends on the usual time of a sample; 0: never


class Overdue(NamedTuple):
    """A worker that was killed because it exceeded ``sample_timeout`` on one sample."""

    worker: WorkerId
    doing: Doing
    for_s: float
    stack: str | None


@final
class Watchdog:
    """Checks the status board of one engine."""

    def __init__(self, pool: WorkerPool, status_board: StatusBoard, workers: tuple[WorkerId, ...], limits: HangLimits) -> None:
        self._pool, self._status_board, self._workers = pool, status_board, workers
        self._limits = limits
        shortest = [_LOOK_S]
        shortest += [limit / 4 for limit in (limits.sample_timeout_s, limits.warning_s or 0.0) if limit]
        self.look_s = max(_SOONEST_LOOK_S, min(shortest))
        # Start of the task in the latest warning, and its duration then.
        self._warned: dict[WorkerId, tuple[int, float]] = {}
        self._killed: dict[WorkerId, Overdue] = {}  # whose death was not handled yet

    def forget(self, worker: WorkerId) -> Overdue | None:
        """Forget a worker that died or was stopped; another may get its number. Return why it was killed, if it was."""
        return self._killed.pop(worker, None)

    def look(self, usual_s: float, tasks: Tasks) -> None:
        """Warn of workers that make no progress, and kill those over ``sample_timeout``.

        Args:
            usual_s: Usual time of a sample; 0 if unknown.
        """
        now_ns = time.perf_counter_ns()
        pids = self._pool.pids()
        for worker in self._workers:
            doing = self._status_board.doing(worker)
            if not doing.since_ns:
                continue
            for_s = (now_ns - doing.since_ns) / 1e9
            # If the exact sample is unknown, it may be any number of those in the batch.
            task = None if doing.task is None or doing.exact_row is not None else tasks.get(doing.task)
            rows = 1 if task is None else max(1, task.record.plan.row_count)
            limit_s = self._limits.sample_timeout_s * rows
            if limit_s and for_s > limit_s and doing.task is not None:
                if worker in self._killed:
                    continue
                stack = self._pool.stack_of(worker, doing.stack_fd, kills=True)
                # Race: a worker that is asked for its stack may have moved on meanwhile; with a stack file, it is dead.
                if doing.stack_fd > 0 or self._status_board.doing(worker)[:4] == doing[:4]:
                    self._killed[worker] = Overdue(worker, doing, for_s, stack)
                    self._pool.kill(worker)
            elif self._must_warn(worker, doing, for_s, usual_s * rows):
                stack = self._stack_of(worker)
                where = self._pool.place_of(worker) if worker not in pids else f" (pid {pids[worker]})"
                usual = f" (usual: {usual_s:.2g} s)" if usual_s and doing.task is not None else ""
                _LOG.warning(
                    "worker %d%s has been %s for %.1f s%s; %s",
                    worker, where, _description(doing, tasks), for_s, usual,
                    f"its stack:\n{stack}" if stack else "its stack is not available",
                )  # fmt: skip

    def timeout_error(self, timeout_s: float, tasks: Tasks) -> LoadTimeoutError:
        """Return the error for ``timeout``: the busy workers, oldest task first, and the stack of the first."""
        doing = {worker: self._status_board.doing(worker) for worker in self._workers}
        at = {worker: one for worker, one in doing.items() if one.since_ns}
        oldest = sorted(at, key=lambda worker: (at[worker].task is None, at[worker].task))
        now_ns = time.perf_counter_ns()
        busy = [
            f"worker {worker}{self._pool.place_of(worker)} has been {_description(at[worker], tasks)} for "
            f"{(now_ns - at[worker].since_ns) / 1e9:.1f} s"
            for worker in oldest
        ]
        # These workers have tasks but are idle: they are stopped, or the machine is too busy to run them.
        idle = sorted({task.worker for task in tasks.values()} - at.keys())
        busy += [f"worker {worker}{self._pool.place_of(worker)} has not started its task" for worker in idle]
        busy += filter(None, [self._pool.missing()])
        stack = self._stack_of(oldest[0]) if oldest else None
        listed = "; ".join(busy) or "no worker has a task"
        where = "" if stack is None else f"\n  stack of the first:\n{stack}"
        return LoadTimeoutError(
            f"timeout={timeout_s:g} s exceeded without a batch; raise timeout, or make loading faster\n  {listed}{where}"
        )

    def _stack_of(self, worker: WorkerId) -> str | None:
        return self._pool.stack_of(worker, self._status_board.doing(worker).stack_fd)

    def _must_warn(self, worker: WorkerId, doing: Doing, for_s: float, usual_s: float) -> bool:
        warning_s = self._limits.warning_s
        default_s = _WARN_START_S if doing.task is None else max(_WARN_S, _WARN_TIMES * usual_s)
        least_s = default_s if warning_s is None else warning_s
        since_ns, warned_s = self._warned.get(worker, (0, 0.0))
        if not least_s or for_s < least_s or (since_ns == doing.since_ns and for_s < _AGAIN_TIMES * warned_s):
            return False
        self._warned[worker] = (doing.since_ns, for_s)
        return True


def _description(doing: Doing, tasks: Tasks) -> str:
    """Describe the activity of a worker, in words that follow "has been"."""
    if doing.task is None:
        return "starting (building the dataset, or in worker_init_fn)"
    task = tasks.get(doing.task)
    if task is None or task.record.is_forgotten:
        return "loading a batch of an abandoned epoch"
    plan = task.record.plan
    if doing.exact_row is not None:
        index, position = task.record.sample(doing.row)
        return f"loading index={index!r} (position {position} of epoch {plan.epoch})"
    if doing.row >= 0 and plan.indices is not None:
        among = plain_indices(plan.indices)[doing.row : doing.row + doing.row_count]
        first = plan.first_position + doing.row
        return f"loading one of index={reprlib.repr(among)} (position {first} of epoch {plan.epoch} and following)"
    return f"loading samples from position {plan.first_position + task.first_row} of epoch {plan.epoch} on"
