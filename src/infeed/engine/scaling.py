"""What an engine sets by itself while it runs, by what it measures: how many workers there are, how much is in flight."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Literal, final

from infeed.autotune.tuner import Bound, Limits, Reading, Tuner, Work, better_kind
from infeed.engine.planning import Feed, StreamFeed
from infeed.engine.records import EngineSetup
from infeed.engine.slots import SlotAllocator
from infeed.errors import WorkerStartError
from infeed.formatting import format_count
from infeed.memory.limits import available_bytes
from infeed.metrics.collector import EngineMetrics
from infeed.metrics.statistics import LOOP, Point
from infeed.options import LoaderConfig, WorkerKind
from infeed.scheduler.messages import Event, WorkerAdded, WorkerId, WorkerReleased
from infeed.scheduler.scheduler import Scheduler

_LOG: Final = logging.getLogger("infeed")
# Of the memory that is free when the first worker starts, so much is left to others.
_RESERVE: Final = 0.1
# Threads may hold each other up by other things than the GIL: memory that they ask the kernel for, locks of a library. If a
# sample takes them so many times as long as it took processes, they were the wrong choice.
_WORSE: Final = 1.15
_LEAST_NS: Final = 200_000_000  # of work, to compare them by


@final
class WorkerChoice:
    """Belongs to one loader."""

    def __init__(self) -> None:
        self._tuner: Tuner | None = None
        self._given: tuple[float, int, bool, WorkerKind] | None = None
        self._kind: Literal["thread", "process"] = "process"
        self._has_been_thread = False
        self._process_ns = 0.0  # that a sample took processes; 0: not known
        self.is_open = True  # whether the kind may still change, if it is for infeed to choose

    def tuner(self, config: LoaderConfig, cores: float) -> Tuner | None:
        """Who decides how many there are. With other limits, or another kind of worker, it begins anew from where it was."""
        if not config.is_auto:
            return None
        given = (cores, config.most_workers, config.cpu_limit is not None, self.kind(config))
        if self._tuner is None or given != self._given:
            reserve_bytes, is_strict = int(_RESERVE * available_bytes()), config.cpu_limit is not None
            limits = Limits(cores, config.most_workers, reserve_bytes, is_strict, config.is_cpu_limited)
            self._tuner = Tuner(limits, None if self._tuner is None else self._tuner.count)
            self._given = given
        return self._tuner

    @property
    def count(self) -> int | None:
        """How many there should be, as far as is known; ``None`` where the user has said it, or nobody asked yet."""
        return None if self._tuner is None else self._tuner.count

    @property
    def is_settled(self) -> bool:
        """Not while it is being tried out how many there should be."""
        return self._tuner is None or self._tuner.is_settled

    @property
    def bound(self) -> Bound:
        """What allows no more workers, though more might bring something."""
        return "" if self._tuner is None else self._tuner.bound

    def kind(self, config: LoaderConfig) -> WorkerKind:
        """What workers are to be, as far as is known."""
        return self._kind if config.is_kind_auto else config.kind

    def reconsider(self, work: Work, cores: float) -> bool:
        """Take in an epoch; whether workers should be of another kind from the next on."""
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
        self._process_ns = work.sample_ns if work.busy_ns >= _LEAST_NS else 0.0
        return True

    def is_back(self, config: LoaderConfig) -> bool:
        """Whether workers are to be processes again, after threads."""
        return config.is_kind_auto and self._kind == "process" and self._has_been_thread

    def stay(self, kind: Literal["thread", "process"]) -> None:
        """It cannot be changed any more."""
        self._kind, self.is_open = kind, False

    def _regret(self, work: Work) -> bool:
        took_ns, before_ns = work.sample_ns, self._process_ns
        if not before_ns or work.busy_ns < _LEAST_NS or took_ns <= _WORSE * before_ns:
            return False
        self.stay("process")
        _LOG.info("processes after all: a sample took threads %.3g ms, and processes %.3g ms", took_ns / 1e6, before_ns / 1e6)
        return True


@final
class WorkerScaling:
    """Belongs to one engine. The scheduler knows who is there; this one makes it so."""

    def __init__(self, setup: EngineSetup, scheduler: Scheduler, handle: Callable[[Event], None]) -> None:
        self._setup, self._pool, self._scheduler = setup, setup.pool, scheduler
        self._handle = handle
        self._started: set[WorkerId] = set()
        self._starting: set[WorkerId] = set()  # not ready yet
        self._wanted_count = len(setup.first_workers)
        self._is_unsettled = False

    def begin(self) -> None:
        """Start those that there are at first; of a stream the first alone, until it is known whether others read too."""
        for worker in self._setup.first_workers[: None if self._setup.stream is None else 1]:
            self._start(worker)

    @property
    def awaits_init(self) -> bool:
        """Whether ``worker_init_fn`` may still raise in a worker."""
        return self._setup.has_init and bool(self._starting)

    def stop_awaiting(self) -> None:
        """Those that are starting take too long."""
        self._starting.clear()

    def note_started(self, worker: WorkerId) -> None:
        """It is ready."""
        self._starting.discard(worker)

    def aim(self, count: int) -> None:
        """Let there be so many, within what there may be. A stream keeps its workers: its batches are theirs."""
        if self._setup.stream is None and not self._setup.is_lazy:
            self._wanted_count = min(max(1, count), len(self._setup.workers))
            self._is_unsettled = True

    def settle(self) -> bool:
        """Come as near to what is wanted as can be: a number that somebody is still leaving is not free.

        Returns:
            Whether there may be others than before.
        """
        if not self._is_unsettled:
            return False
        self._is_unsettled = False
        hired = sorted(self._scheduler.active_workers)
        for worker in reversed(hired[self._wanted_count :]):
            self._handle(WorkerReleased(worker))
        missing = self._wanted_count - len(hired)
        if missing <= 0:
            return True
        taken = {*hired, *self._scheduler.leaving_workers}
        for worker in [worker for worker in self._setup.workers if worker not in taken][:missing]:
            try:
                self._start_while_waited(worker)
            except WorkerStartError as error:
                self._wanted_count = len(self._scheduler.active_workers)
                _LOG.warning(
                    "there are %d workers and no more, because another cannot be started: %s", self._wanted_count, error
                )
                return True
            self._handle(WorkerAdded(worker))
        return True

    def replace(self, worker: WorkerId, feed: Feed | None) -> None:
        """Start one again that died."""
        self._start_while_waited(worker)
        if isinstance(feed, StreamFeed):
            self.open_share(worker, feed)

    def stop(self, worker: WorkerId) -> None:
        """Let one end that was released and has nothing left to do."""
        self._pool.stop(worker)
        self._starting.discard(worker)
        self.note_gone()

    def note_gone(self) -> None:
        """Somebody is gone, and their number may be free."""
        self._is_unsettled = True  # not at once: the scheduler is in the middle of something

    def open_share(self, worker: WorkerId, feed: StreamFeed) -> None:
        if worker not in self._started:
            self._start(worker)
        self._pool.send(worker, feed.open_message(worker))

    def _start_while_waited(self, worker: WorkerId) -> None:
        """The loop waits meanwhile, in the middle of an epoch."""
        began_ns = time.perf_counter_ns()
        self._start(worker)
        self._setup.metrics.waited_for_workers(time.perf_counter_ns() - began_ns)

    def _start(self, worker: WorkerId) -> None:
        self._started.add(worker)
        self._starting.add(worker)
        self._pool.start(worker)


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
class AutoScaler:
    """Belongs to one engine."""

    def __init__(
        self,
        tuner: Tuner | None,
        metrics: EngineMetrics,
        scheduler: Scheduler,
        scaling: WorkerScaling,
        allocator: SlotAllocator,
        set_window: Callable[[int], None],
        memory_budget: int | None = None,
    ) -> None:
        """``memory_budget`` is what workers and batches may take together, if the user has set it."""
        self._tuner, self._metrics, self._scheduler = tuner, metrics, scheduler
        self._scaling, self._allocator, self._set_window = scaling, allocator, set_window
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
        point = self._metrics.latest
        if point is None or self._metrics.tick_count == self._seen:
            return
        self._seen = self._metrics.tick_count
        if self._tuner is not None:
            self._tune(self._tuner, point)
        before, self._before = self._before, point
        if before is not None:
            self._widen(before, point)

    def _tune(self, tuner: Tuner, point: Point) -> None:
        usages = [self._metrics.members.usage(worker) for worker in self._scheduler.active_workers]
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
            self._scaling.aim(change.worker_count)
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
        window = self._allocator.widen()
        if window is not None:
            _LOG.info("%d batches in flight instead of fewer: the loop waited while workers had nothing to do", window)
            self._set_window(window)
