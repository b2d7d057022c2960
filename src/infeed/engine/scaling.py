"""Scaling at run time: the kind and number of workers and the number of batches in flight, from measurements."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Final, NamedTuple, final

from infeed.autotune.capacity import ParallelKind, WorkerKind
from infeed.autotune.tuner import Bound, Reading, Tuner, Work, WorkerLimits, better_kind
from infeed.errors import WorkerStartError
from infeed.formatting import format_count
from infeed.memory.limits import available_bytes
from infeed.metrics.collector import EngineMetrics
from infeed.metrics.statistics import LOOP, Point
from infeed.options import Options
from infeed.scheduler.messages import WorkerAdded, WorkerId, WorkerReleased
from infeed.scheduler.scheduler import Scheduler
from infeed.workers.pool import WorkerPool

_LOG: Final = logging.getLogger("infeed")
# Share of the memory that is free when the first worker starts, reserved for other processes.
_RESERVE: Final = 0.1
# Threads may contend for more than the GIL: memory allocation in the kernel, locks of a library. If a sample takes threads this
# many times as long as processes, switch back to processes.
WORSE: Final = 1.15
LEAST_NS: Final = 200_000_000  # minimum work for a comparison


@final
class WorkerTuning:
    """Chooses the kind and number of workers of one loader."""

    def __init__(self) -> None:
        self._tuner: Tuner | None = None
        self._given: tuple[float, int, bool, WorkerKind] | None = None
        self._kind: ParallelKind = "process"
        self._has_been_thread = False
        self._process_ns = 0.0  # time per sample in processes; 0: unknown
        self.is_open = True  # whether infeed may still change the kind, if it chooses it

    def tuner(self, config: Options, cores: float) -> Tuner | None:
        """Return the tuner of the worker count. It restarts from its latest count if the limits or the worker kind change."""
        if not config.is_auto:
            return None
        given = (cores, config.most_workers, config.cpu_limit is not None, self.kind(config))
        if self._tuner is None or given != self._given:
            reserve_bytes, is_strict = int(_RESERVE * available_bytes()), config.cpu_limit is not None
            limits = WorkerLimits(cores, config.most_workers, reserve_bytes, is_strict, config.is_cpu_limited)
            self._tuner = Tuner(limits, None if self._tuner is None else self._tuner.count)
            self._given = given
        return self._tuner

    @property
    def count(self) -> int | None:
        """Best known number of workers; ``None`` if the user set it, or before the first tuner exists."""
        return None if self._tuner is None else self._tuner.count

    @property
    def is_settled(self) -> bool:
        """Whether the tuner has stopped trying other worker counts."""
        return self._tuner is None or self._tuner.is_settled

    @property
    def bound(self) -> Bound:
        """The limit that prevents more workers, although more might help."""
        return "" if self._tuner is None else self._tuner.bound

    def kind(self, config: Options) -> WorkerKind:
        """Return the best known kind of worker."""
        return self._kind if config.is_kind_auto else config.kind

    def reconsider(self, work: Work, cores: float) -> bool:
        """Evaluate an epoch; return whether the next should use another kind of worker."""
        if not self.is_open or work.kind != self._kind or not work.sample_count:
            return False
        if work.kind == "thread":
            return self._regret(work)
        if work.gil_share is None and not work.is_drawing:
            return False
        diagnosis = better_kind(work.gil_share or 0.0, is_drawing=work.is_drawing, cores=cores)
        _LOG.info("%s", diagnosis.why)
        if diagnosis.kind == "process":
            self.is_open = False
            return False
        self._kind, self._has_been_thread = "thread", True
        self._process_ns = work.sample_ns if work.busy_ns >= LEAST_NS else 0.0
        return True

    def is_back(self, config: Options) -> bool:
        """Whether workers switch back from threads to processes."""
        return config.is_kind_auto and self._kind == "process" and self._has_been_thread

    def stay(self, kind: ParallelKind) -> None:
        """Fix the kind of worker for the rest of the run."""
        self._kind, self.is_open = kind, False

    def _regret(self, work: Work) -> bool:
        took_ns, before_ns = work.sample_ns, self._process_ns
        if not before_ns or work.busy_ns < LEAST_NS or took_ns <= WORSE * before_ns:
            return False
        self.stay("process")
        _LOG.info(
            "switching back to processes: a sample takes %.3g ms in threads and %.3g ms in processes",
            took_ns / 1e6,
            before_ns / 1e6,
        )
        return True


@final
class WorkerScaling:
    """Starts and stops the workers of one engine, up to a target count."""

    def __init__(
        self,
        pool: WorkerPool,
        metrics: EngineMetrics,
        workers: tuple[WorkerId, ...],
        first_count: int,
        *,
        has_init: bool,
        is_fixed: bool,
    ) -> None:
        """Create a scaling with ``first_count`` of the possible ``workers``.

        Args:
            has_init: Workers call ``worker_init_fn``.
            is_fixed: The number of workers never changes: an iterable dataset, or loading in the main process.
        """
        self._pool, self._metrics, self._workers = pool, metrics, workers
        self._has_init, self._is_fixed = has_init, is_fixed
        self._started: set[WorkerId] = set()
        self._starting: set[WorkerId] = set()  # not yet ready
        self._wanted_count = first_count
        self.is_unsettled = False  # `settle` may have something to do

    @property
    def awaits_init(self) -> bool:
        """Whether ``worker_init_fn`` may still raise in a worker."""
        return self._has_init and bool(self._starting)

    @property
    def awaits_first(self) -> bool:
        """Whether workers are starting and none has become ready yet."""
        return bool(self._starting) and self._starting == self._started

    def stop_awaiting(self) -> None:
        """Stop waiting for workers that take too long to start."""
        self._starting.clear()

    def ready(self, worker: WorkerId) -> None:
        """Note that a worker is ready."""
        self._starting.discard(worker)

    def aim(self, count: int) -> None:
        """Set the target count, within the limits."""
        if not self._is_fixed:
            self._wanted_count = min(max(1, count), len(self._workers))
            self.is_unsettled = True

    def settle(self, active: Iterable[WorkerId], leaving: Iterable[WorkerId]) -> list[WorkerReleased | WorkerAdded]:
        """Start workers, or choose workers to release, to reach the target count; return the events for the scheduler.

        Args:
            active: Workers that were not released.
            leaving: Workers that were released but still have tasks; their numbers are not free.
        """
        self.is_unsettled = False
        current = sorted(active)
        events: list[WorkerReleased | WorkerAdded] = [
            WorkerReleased(worker) for worker in reversed(current[self._wanted_count :])
        ]
        taken = {*current, *leaving}
        for worker in [worker for worker in self._workers if worker not in taken][: max(0, self._wanted_count - len(current))]:
            try:
                self.start_while_waited(worker)
            except WorkerStartError as error:
                self._wanted_count = len(current) + len(events)
                _LOG.warning("staying at %s: %s", format_count(self._wanted_count, "worker"), error)
                break
            events.append(WorkerAdded(worker))
        return events

    def stop(self, worker: WorkerId) -> None:
        """Stop a released worker that has no tasks left."""
        self._pool.stop(worker)
        self._starting.discard(worker)
        self.note_gone()

    def note_gone(self) -> None:
        """Note that a worker has exited, so that its number may be free."""
        self.is_unsettled = True

    def start_once(self, worker: WorkerId) -> None:
        """Start a worker unless it was started before."""
        if worker not in self._started:
            self.start(worker)

    def start_while_waited(self, worker: WorkerId) -> None:
        """Start a worker and count the time as a wait for workers: the training loop is blocked meanwhile."""
        began_ns = time.perf_counter_ns()
        self.start(worker)
        self._metrics.waited_for_workers(time.perf_counter_ns() - began_ns)

    def start(self, worker: WorkerId) -> None:
        """Start a worker, or restart it after its death."""
        self._started.add(worker)
        self._starting.add(worker)
        self._pool.start(worker)


# If the training loop waits more than 10% of the time while workers idle more than 30%, in 3 checks in a row, the window is the
# bottleneck: one slow sample blocks delivery, and all other batches in flight are loaded.
_WAITS: Final = 0.1
_IDLES: Final = 0.3
_LOOKS: Final = 3
_BOUNDS: Final = {
    "memory_limit": "memory_limit allows no more",
    "memory": "free memory allows no more",
    "cores": "cpu_limit allows no more",
}


class Adjustment(NamedTuple):
    """The changes that the metrics suggest."""

    worker_count: int | None = None  # None: keep it
    is_narrow: bool = False  # more batches in flight might help


_NO_ADJUSTMENT: Final = Adjustment()


@final
class AutoScaler:
    """Decides from the metrics of one engine whether its worker count and its window should change."""

    def __init__(
        self, tuner: Tuner | None, metrics: EngineMetrics, scheduler: Scheduler, memory_budget: int | None = None
    ) -> None:
        """Create a scaler; ``memory_budget`` limits workers and batches together, if the user set it."""
        self._tuner, self._metrics, self._scheduler = tuner, metrics, scheduler
        self._memory_budget = memory_budget
        self._seen = 0
        self._before: Point | None = None
        self._held_up = 0  # checks in a row
        if tuner is not None:
            tuner.begin()

    def begin_epoch(self) -> None:
        """Exclude the time between epochs from the window check. The tuner uses the training loop's time, which stops then."""
        self._before = None

    def consider(self) -> Adjustment:
        """Evaluate the metrics if there are new ones since the last call."""
        point = self._metrics.latest
        if point is None or self._metrics.tick_count == self._seen:
            return _NO_ADJUSTMENT
        self._seen = self._metrics.tick_count
        worker_count = None if self._tuner is None else self._tune(self._tuner, point)
        before, self._before = self._before, point
        return Adjustment(worker_count, is_narrow=before is not None and self._is_narrow(before, point))

    def _tune(self, tuner: Tuner, point: Point) -> int | None:
        """Return another number of workers, if it is better."""
        usages = [self._metrics.workers.usage(worker) for worker in self._scheduler.active_workers]
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
                # A worker that waits for a CPU core is CPU-bound.
                cpu_ns=point.cpu_ns + point.queued_ns,
                worker_count=len(self._scheduler.active_workers),
                ready_count=point.worker_count,
                worker_bytes=max((one.private_bytes for one in usages), default=0),
                free_bytes=free_bytes,
                is_budget=is_budget,
            )
        )
        if change is not None:
            _LOG.info("%s", change.why)
            self._metrics.mark("workers", LOOP, change.why)
            return change.worker_count
        if tuner.bound not in ("", bound):
            _LOG.info("staying at %s: %s", format_count(tuner.count, "worker"), _BOUNDS[tuner.bound])
        return None

    def _free_bytes(self, tuner: Tuner, point: Point, taken_bytes: int) -> tuple[int, bool]:
        """Return the memory for more workers, and whether the user's budget is the limit rather than the machine.

        The tuner keeps a reserve of the machine's memory for other processes; the budget needs none, so it is added back.
        """
        free = available_bytes()
        if self._memory_budget is None:
            return free, False
        left = self._memory_budget - taken_bytes - point.slot_bytes + tuner.reserve_bytes
        return min(free, left), left < free

    def _is_narrow(self, before: Point, now: Point) -> bool:
        """Whether the window is the bottleneck in several checks in a row."""
        loop_ns = now.waited_ns - before.waited_ns + now.away_ns - before.away_ns
        waits = now.waited_ns - before.waited_ns > _WAITS * loop_ns
        could_ns = now.worker_count * (now.at_ns - before.at_ns)
        idles = now.busy_ns - before.busy_ns < (1 - _IDLES) * could_ns
        # A slow sample in progress looks idle: its time is counted only when it is done.
        self._held_up = self._held_up + 1 if waits and idles and now.worker_count == before.worker_count > 1 else 0
        if self._held_up < _LOOKS:
            return False
        self._held_up = 0
        return True
