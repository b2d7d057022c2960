"""The engine: drives workers from the training loop's thread and returns batches.

The engine has no thread. The training loop's thread drives it in ``next_batch``: it plans batches, waits for workers in exactly
one place (``_listen``), passes what happens to the scheduler as events (``_handle``), executes the actions that the scheduler
returns, and returns on a delivery. The engine owns the batches in flight: their records, their tasks, and those that are ready.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, assert_never, final

from infeed.collate.layout import Layout, LayoutPool
from infeed.delivery.host import HostDelivery
from infeed.engine.faults import Faults, not_sent, start_error, workers_error
from infeed.engine.planning import Feed, PlannedBatch, StreamFeed, StreamShares
from infeed.engine.progress import Progress, Record, SentTask
from infeed.engine.scaling import AutoScaler, WorkerScaling
from infeed.engine.slots import SlotAllocator
from infeed.engine.watchdog import Watchdog
from infeed.errors import LoaderClosedError, WorkerStartError
from infeed.memory.arena import Arena, Block
from infeed.memory.segments import SegmentStore
from infeed.metrics.collector import EngineMetrics, Flight
from infeed.metrics.statistics import LOOP
from infeed.plan.state import Cursor
from infeed.scheduler.messages import (
    Action,
    BatchId,
    BatchPlanned,
    BatchWanted,
    Closed,
    Deliver,
    DeliverError,
    Drop,
    EpochAbandoned,
    Event,
    FailMemory,
    FailWorkers,
    Forget,
    Grow,
    GrowthRefused,
    Pass,
    Place,
    PlaceRefused,
    Reload,
    Send,
    SlotFreed,
    SlotId,
    SlotsAdded,
    StartWorker,
    StopWorker,
    TaskEmpty,
    TaskFailed,
    TaskId,
    TaskLoaded,
    TaskMismatched,
    TaskUnplaced,
    WindowChanged,
    WorkerId,
    WorkerReady,
    WorkersLost,
)
from infeed.scheduler.scheduler import Scheduler
from infeed.workers.exceptions import Failure, kept, text_of
from infeed.workers.launcher import Process
from infeed.workers.pool import Death, News, WorkerPool
from infeed.workers.protocol import (
    DropTask,
    Emptied,
    FromWorker,
    Idle,
    LoadFailed,
    LoadGrains,
    LoadNext,
    Mismatched,
    PackedLoaded,
    PlaceTask,
    RowsLoaded,
    Stack,
    Started,
    StartFailed,
    StreamNote,
    Unplaced,
)
from infeed.workers.status import StatusBoard

_LOG: Final = logging.getLogger("infeed")
_MSG_FORKED: Final = "this epoch began in the parent process; iterate the loader again in this process"
_MSG_CLOSED: Final = "the loader was closed during iteration; iterate it again, or close it later"
_COOLING_LOOK_S: Final = 0.0005
# A training loop that finds its batches ready need not read worker messages. But workers would starve: their queued tasks may
# last only 2 ms. So the engine reads messages once per millisecond, at the cost of a system call.
POLL_NS: Final = 1_000_000
# How long the first epoch waits for a worker that unpickles the dataset.
_START_S: Final = 30.0
# How long an exhausted epoch waits for workers that are still in worker_init_fn.
_INIT_S: Final = 5.0
# Upper limit of the grain size in per-sample times: a batch that is collated as a whole has no finite grain size.
_LONG_GRAIN: Final = 1 << 20
# Plan batches when 1/4 of those in flight has been delivered. One at a time would cost a system call each; waiting for half
# would starve the workers.
_REFILL_SHARE: Final = 4
# During an epoch, prefetch at most this many batches of the next epoch per worker thread. More would take the GIL from the
# training loop; the rest is planned when the epoch ends.
_SPARING: Final = 2

NOTHING: Final = object()


class EpochEnd(Exception):
    """The epoch has no more batches. Internal."""


class Gather(Protocol):
    """Copies rows of in-memory arrays into a block and returns the duration in ns."""

    def __call__(self, epoch: int, position: int, indices: Any, block: Block, row_count: int) -> int: ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The parts and settings of an engine."""

    scheduler: Scheduler
    pool: WorkerPool
    store: SegmentStore
    arena: Arena
    delivery: HostDelivery
    status_board: StatusBoard
    metrics: EngineMetrics
    allocator: SlotAllocator
    scaling: WorkerScaling
    autoscaler: AutoScaler
    faults: Faults
    watchdog: Watchdog
    workers: tuple[WorkerId, ...]  # all workers that may exist
    first_workers: tuple[WorkerId, ...]  # workers started at first
    is_lazy: bool  # in the main process: a batch is planned only when it is wanted
    binds_batches: bool  # the step of a batch, not availability, determines its worker
    grain_size: int
    timeout_s: float
    stream: StreamShares | None
    make_feed: Callable[[Cursor, Iterator[Any] | None], Feed]  # from a cursor and, if given, the sampler's iterator
    prefetches_epochs: bool
    gather: Gather | None  # None: tasks load the samples
    table_layout: Layout | None  # of the gathered rows
    handles_bad_samples: bool


@final
class Engine:
    """Loads batches. Only one thread may use it at a time; another may call ``close``."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._scheduler, self._pool, self._arena = setup.scheduler, setup.pool, setup.arena
        self._delivery, self.metrics = setup.delivery, setup.metrics
        self._allocator, self.scaling, self._autoscaler = setup.allocator, setup.scaling, setup.autoscaler
        self._faults, self._watchdog = setup.faults, setup.watchdog
        self._events: deque[Event] = deque()  # not yet passed to the scheduler
        self._is_handling = False
        # Batches in flight.
        self._records: dict[BatchId, Record] = {}
        self._tasks: dict[TaskId, SentTask] = {}
        self._ready: list[tuple[Any, Record]] = []  # for the training loop
        self._error: BaseException | None = None  # raised before those: a skipped batch before them caused it
        self._batch_count = 0
        self._refill = max(1, self._allocator.window // _REFILL_SHARE)
        self._layout: Layout | None = None  # expected for the next batch
        self._layouts = LayoutPool()
        # The epoch in progress; None between epochs.
        self._feed: Feed | None = None
        self._progress = Progress(Cursor())
        self._delivered_count = 0  # since the beginning of the epoch, including those before it was resumed
        self._next_feed: Feed | None = None
        self._next_count = 0  # batches taken from it
        self._is_sparing = False
        self._is_polled = False  # device prefetch asks for batches, and reports itself what the training loop gets
        self._left_ns = 0  # when the training loop got its latest batch; 0: none yet
        self._polled_ns = 0  # when worker messages were last read
        self._next_look = 0.0  # time of the next watchdog check
        self._fatal: BaseException | None = None  # why no more workers can be started
        self._is_closed = False
        self._is_down = False
        self._lock = threading.RLock()  # held by the thread that drives the engine
        self._driver = 0  # ident of that thread while it is in `next_batch`
        self.owner_pid = os.getpid()
        # Last, when everything is set: another thread may ask for statistics at any time.
        self.metrics.connect(self._flight, lambda: setup.delivery.delivered_bytes)
        # For an iterable dataset start only one worker, until it is known whether others read too.
        for worker in setup.first_workers[: None if setup.stream is None else 1]:
            self.scaling.start(worker)

    @property
    def is_usable(self) -> bool:
        """Whether the engine can load in this process; a forked child cannot use its parent's workers."""
        return not self._is_closed and self.owner_pid == os.getpid()

    @property
    def is_between_epochs(self) -> bool:
        return self._feed is None

    @property
    def can_close_here(self) -> bool:
        """Whether this thread may close the engine; if not, a finalizer needs another thread."""
        return self._pool.can_close_here

    def worker_processes(self) -> list[Process]:
        """Return the workers that are processes, in worker order."""
        return list(self._pool.processes().values())

    def _flight(self) -> Flight:
        arena = self._arena
        used_bytes = arena.used_bytes(self._scheduler.free_slots)
        return Flight(len(self._records), used_bytes, arena.total_bytes)

    def count_delivery(self, asked_ns: int, left_ns: int) -> None:
        """Note that device prefetch delivered a batch, with the times of request and delivery."""
        with self._lock:
            if not self._is_closed:
                self._count_batch(asked_ns, left_ns)

    # --- epochs

    def begin_epoch(self, progress: Progress, asked: Iterator[Any] | None = None, *, is_polled: bool = False) -> None:
        """Begin the epoch of ``progress`` at its start; ``next_batch`` returns its batches.

        Args:
            progress: Records the delivered batches.
            asked: The sampler's iterator for this iteration, if ``iter`` was already called on the sampler.
            is_polled: Whether device prefetch asks for the batches.
        """
        start = progress.start
        self._progress, self._delivered_count = progress, start.step
        self._ready.clear()
        self._error = None
        self._is_polled = is_polled
        self.metrics.begin_epoch(progress.epoch, start.step)
        self._autoscaler.begin_epoch()
        self._left_ns = 0  # time between epochs is not time of the training loop
        self._is_sparing = self.metrics.kind == "thread"
        # The first batches may already be planned behind those of the previous epoch.
        prefetched, self._next_feed, self._next_count = self._next_feed, None, 0
        if prefetched is not None and start == Cursor(prefetched.epoch):
            self._feed = prefetched
            return
        if prefetched is not None:
            self._abandon(prefetched.epoch)
        self._feed = self._setup.make_feed(start, asked)

    def await_start(self) -> None:
        """Wait until one worker has the dataset, before the sampler is asked. The wait is limited: unpickling may hang.

        Raises:
            WorkerStartError: The dataset cannot be unpickled in a worker.
        """
        with self._lock:
            self._driver = threading.get_ident()
            try:
                self._await_start()
            except BaseException:
                self._is_closed = True  # as in next_batch
                raise
            finally:
                self._driver = 0
                if self._is_closed:
                    self._tear_down()

    def _await_start(self) -> None:
        began_ns = time.perf_counter_ns()
        deadline_s = began_ns / 1e9 + _START_S
        while self.scaling.awaits_first and not (self._scheduler.is_lost or self._faults.is_storm or self._is_closed):
            left_s = deadline_s - time.perf_counter()
            if left_s <= 0:
                break
            self._handle_messages(self._pool.receive(left_s))
        self.metrics.changed_over(began_ns, time.perf_counter_ns())
        if isinstance(self._fatal, WorkerStartError) and self._fatal.unpicklable is not None:
            self._error, self._fatal = self._fatal, None
            raise self._take_error()
        if self._is_closed:
            raise LoaderClosedError(_MSG_CLOSED)

    def prime(self) -> None:
        """Start loading the epoch before the training loop asks for its first batch.

        Raises:
            Exception: The user's sampler raised it.
        """
        with self._lock:
            began_ns = time.perf_counter_ns()
            assert self._feed is not None
            self._feed.prime()
            try:
                # Plan in steps: workers load the first batches while the engine plans the others.
                while self._plan(self._refill):
                    self._pool.flush()
            finally:
                if self._is_closed:
                    self._tear_down()
            self.metrics.changed_over(began_ns, time.perf_counter_ns())

    def leave_epoch(self) -> None:
        """Abandon the rest of the epoch, so that the next can begin."""
        feed, self._feed = self._feed, None
        self.metrics.end_epoch()
        if feed is not None and not self._is_closed:
            self._abandon(feed.epoch)

    def _abandon(self, epoch: int) -> None:
        """Drop all planned batches of an epoch."""
        self._pool.recall(
            [task for task, entry in self._tasks.items() if entry.record.is_forgotten or entry.record.plan.epoch == epoch]
        )
        self._handle(EpochAbandoned(epoch))

    # --- the next batch

    def next_batch(self, *, waits: bool = True) -> Any:
        """Return the next batch, or ``NOTHING`` if it is not ready and ``waits`` is false.

        Raises:
            EpochEnd: The epoch has no more batches.
        """
        with self._lock:
            self._driver = threading.get_ident()
            try:
                return self._next_batch(waits)
            except (EpochEnd, Exception) as error:
                # Another call would wait for a worker that is never started.
                self._is_closed |= isinstance(error, WorkerStartError)
                raise
            except BaseException:
                # The interrupt may have come between an action and its record, so the state is unreliable.
                self._is_closed = True
                with suppress(KeyboardInterrupt):  # a second Ctrl+C during close: the first is already being raised
                    self._tear_down()
                raise
            finally:
                self._driver = 0
                if self.metrics.is_waiting and not self._is_polled:
                    self.metrics.stop_waiting()
                if self._is_closed:
                    self._tear_down()

    def _next_batch(self, waits: bool) -> Any:
        feed, setup = self._feed, self._setup
        if self.owner_pid != os.getpid():
            raise LoaderClosedError(_MSG_FORKED)
        if feed is None or self._is_closed:
            raise LoaderClosedError(_MSG_CLOSED)
        asked_ns = time.perf_counter_ns()
        if not self._is_polled:
            self.metrics.asked(asked_ns)
        deadline_s = asked_ns / 1e9 + setup.timeout_s if setup.timeout_s else None
        # An earlier call that did not wait may have left a batch or an error.
        if not self._ready and self._error is None and not (setup.gather and self._gather(feed, setup.gather)):
            self._plan()
            self._handle(BatchWanted(feed.epoch, asked_ns - self._left_ns if self._left_ns else 0, waits))
        while not self._ready or self._error is not None:
            if self._error is not None:
                raise self._take_error()
            is_over = (feed.is_exhausted or feed.error is not None) and not self._scheduler.has_undelivered(feed.epoch)
            if is_over and (waits or not self.scaling.awaits_init):
                self._end_epoch(feed, asked_ns)
            elif not self._listen(deadline_s, waits=waits) and not waits:
                return NOTHING
        if not setup.is_lazy:
            if asked_ns - self._polled_ns > POLL_NS:
                self._handle_messages(self._pool.receive(0))
            self._plan()
            self._pool.flush()
        left_ns = time.perf_counter_ns()
        if not self._is_polled:
            self._count_batch(asked_ns, left_ns)
        self._left_ns = left_ns
        # Last: from here on, the batch counts as delivered. No local variable may reference it: an exception of user code can
        # keep this frame alive, and with it the batch's slot.
        self._delivered_count += 1
        self._progress.delivered(self._ready[0][1], feed.share_count)
        return self._ready.pop(0)[0]

    def _count_batch(self, asked_ns: int, left_ns: int) -> None:
        """Record that the training loop got a batch, and adapt to what was measured, if anything was."""
        if self.metrics.delivered(asked_ns, left_ns):
            adjustment = self._autoscaler.consider()
            if adjustment.worker_count is not None:
                self.scaling.aim(adjustment.worker_count)
            before = self._allocator.window
            if adjustment.is_narrow and (window := self._allocator.widen()) is not None:
                _LOG.info("%d batches in flight, not %d: the training loop waited while workers were idle", window, before)
                self._change_window(window)

    def _take_error(self) -> BaseException:
        """Return the error to raise. Never keep it in a local variable: its traceback would keep the frame and loader alive."""
        error, self._error = self._error, None
        assert error is not None
        return error

    def _gather(self, feed: Feed, gather: Gather) -> bool:
        """Copy the next batch of in-memory arrays into a free slot, without a task or a worker.

        Returns:
            Whether it did. If not (no slot is free or large enough, or an index is invalid), tasks load the batch.
            Their errors name the sample.
        """
        for ended in self._delivery.ended_slots():
            self._handle(SlotFreed(ended))
        slot, layout = self._scheduler.lease_free_slot(), self._setup.table_layout
        assert layout is not None
        if slot is None:
            return False
        planned = feed.take()
        if planned is not None:
            block, row_count = self._arena.block(slot), planned.row_count
            try:
                if block.size >= layout.offsets(row_count)[1]:
                    took_ns = gather(planned.epoch, planned.first_position, planned.indices, block, row_count)
                    record = Record(planned)
                    record.add_rows(self._setup.workers[0], 0, row_count, took_ns, layout, [])
                    self._deliver(record, slot)
                    return True
            except Exception:
                _LOG.debug("rows cannot be gathered; tasks load them", exc_info=True)
        self._handle(SlotFreed(slot))
        if planned is not None:
            self._add(planned)
        return False

    def _end_epoch(self, feed: Feed, asked_ns: int) -> None:
        """End the epoch after its last batch, or raise the sampler's error. Returns only if ``worker_init_fn`` failed."""
        if feed.error is not None:
            raise feed.take_error()
        if self.scaling.awaits_init:
            self._await_init()
            if self._error is not None:
                return
        # An engine that cannot start workers is useless for the next epoch.
        self._is_closed |= self._scheduler.is_lost
        self._progress.carry(feed.carried())
        if not self._setup.is_lazy:
            self._is_sparing = False
            self._plan()
            self._pool.flush()
        self._feed = None
        if not self._is_polled:
            self.metrics.end_epoch(asked_ns)
        empty = None if self._delivered_count else self._progress.error_budget.emptiness()
        if empty is not None:
            raise empty
        raise EpochEnd

    def _await_init(self) -> None:
        """Wait for starting workers after the last batch.

        Whether an error of ``worker_init_fn`` is raised must not depend on how fast workers start. The wait is limited, because
        a worker may hang there.
        """
        deadline_s = time.perf_counter() + _INIT_S
        while self.scaling.awaits_init and not self._scheduler.is_lost:
            if time.perf_counter() >= deadline_s:
                self.scaling.stop_awaiting()
                return
            self._listen(deadline_s, raises=False)
        if self.scaling.awaits_init:
            self._fail_workers()

    # --- waiting and workers' messages

    def _listen(self, deadline_s: float | None, *, waits: bool = True, raises: bool = True) -> bool:
        """Wait for messages, a death, a watchdog check or close; then process the messages and plan batches.

        The training loop's thread waits nowhere else. With ``waits=False``, process only the messages that are there.

        Returns:
            Whether there were messages.

        Raises:
            LoadTimeoutError: ``deadline_s`` has passed, unless ``raises`` is false.
        """
        if self._is_closed:
            raise LoaderClosedError(_MSG_CLOSED)
        if waits:
            began_ns = time.perf_counter_ns()
            timeout_s = self._wait_limit(began_ns / 1e9, deadline_s, raises=raises)
            idle_count = self._scheduler.idle_count
            news = self._pool.receive(timeout_s)
            self.metrics.blocked(time.perf_counter_ns() - began_ns, idle_count)
        else:
            news = self._pool.receive(0)
        is_any = bool(news)
        self._handle_messages(news)
        if self._faults.is_storm and not self._is_closed:
            self._fail_workers()
        # In the main process, plan nothing while a batch is undelivered: the sampler advances only when the training loop asks.
        if not self._setup.is_lazy or (not self._ready and self._error is None):
            self._plan()
        return is_any

    def _wait_limit(self, now_s: float, deadline_s: float | None, *, raises: bool) -> float | None:
        """Return how long to wait for messages, after a watchdog check if one is due."""
        timeout_s = None if deadline_s is None else deadline_s - now_s
        watchdog = self._watchdog
        if raises and timeout_s is not None and timeout_s <= 0:
            raise watchdog.timeout_error(self._setup.timeout_s, self._tasks)
        if now_s >= self._next_look:
            watchdog.look(self._scheduler.grain_s / min(self._setup.grain_size, _LONG_GRAIN), self._tasks)
            self._next_look = time.perf_counter() + watchdog.look_s
        timeout_s = watchdog.look_s if timeout_s is None else min(timeout_s, watchdog.look_s)
        if self._delivery.is_cooling:
            timeout_s = _COOLING_LOOK_S  # slots become free without notification, so poll
        return 0 if self._faults.is_storm else timeout_s

    def _handle_messages(self, news: list[News]) -> None:
        """Process messages from workers, in order, and empty the list.

        The callers' frames hold the list. From Python 3.12 on, the traceback of a user's exception, which may be in the list,
        holds those frames.
        """
        self._polled_ns = time.perf_counter_ns()
        try:
            for worker, message in news:
                if type(message) is RowsLoaded:  # most messages, without another call
                    self._loaded(worker, message)
                else:
                    self._handle_message(worker, message)
        except Exception:
            # The message is handled only in part and the others are lost, so the state is unreliable.
            self._is_closed = True
            raise
        news.clear()

    def _handle_message(self, worker: WorkerId, message: FromWorker | Death) -> None:
        match message:
            case RowsLoaded() | PackedLoaded():
                self._loaded(worker, message)
            case Started():
                self.metrics.workers.started(worker, self._pool.pids().get(worker))
                self.scaling.ready(worker)
                self._handle(WorkerReady(worker))
            case Unplaced(task, nbytes, layout):
                self._unplaced(worker, task, nbytes, layout)
            case Mismatched(task):
                self._tasks.pop(task, None)
                self._handle(TaskMismatched(worker, task))
            case Emptied():
                self._emptied(worker, message)
            case LoadFailed():
                self._load_failed(worker, message)
            case StartFailed(failure):
                # Other workers of this engine would fail the same way. Stop it, so that its exit is not logged as a death.
                self._pool.stop(worker)
                self.metrics.workers.ended(worker)
                self._lose_workers(start_error(worker, failure))
            case Death():
                self.metrics.workers.ended(worker)
                held = {task: entry for task, entry in self._tasks.items() if entry.worker == worker}
                for task in held:
                    del self._tasks[task]
                events = self._faults.died(worker, message, held)
                self.metrics.mark("death", worker, self._faults.last_death)
                for event in events:
                    self._handle(event)
                self.scaling.note_gone()
            case Stack() | Idle():
                pass  # a stack reply that arrived after the timeout
            case _:
                assert_never(message)

    def _loaded(self, worker: WorkerId, message: RowsLoaded | PackedLoaded) -> None:
        entry = self._tasks.pop(message.task, None)
        if entry is not None and not entry.record.is_forgotten:
            record = entry.record
            if isinstance(message, PackedLoaded):
                record.add_packed(worker, message.row_count, message.elapsed_ns, message.packed)
                self._change_window(self._allocator.learn_size(record.needed_bytes))
            else:
                layout = message.layout
                if layout is None:
                    layout = entry.layout
                elif layout is not entry.layout:
                    layout = self._layout = self._layouts.interned(layout)
                assert layout is not None
                record.add_rows(worker, entry.first_row, message.row_count, message.elapsed_ns, layout, message.beside)
            if message.stream is not None:
                record.keep_state(message.stream.state)
                if self._handle_stream(worker, message.task, record, message.row_count, message.stream):
                    return
        self._handle(TaskLoaded(worker, message.task, message.elapsed_ns))

    def _unplaced(self, worker: WorkerId, task: TaskId, nbytes: int, layout: Layout | None) -> None:
        entry = self._tasks.get(task)
        if entry is not None and not entry.record.is_forgotten:
            record = entry.record
            record.need(nbytes)
            self._change_window(self._allocator.learn_size(nbytes))
            if layout is not None:
                layout = self._layouts.interned(layout)
                if self._layout is None:
                    self._layout = layout
                if not record.agree(layout):
                    # Another part of this batch has a different layout.
                    del self._tasks[task]
                    self._pool.send(worker, DropTask(task))
                    self._handle(TaskMismatched(worker, task))
                    return
                self._tasks[task] = entry._replace(layout=layout)
        self._handle(TaskUnplaced(worker, task))

    def _emptied(self, worker: WorkerId, message: Emptied) -> None:
        """Handle a task without rows: the iterable dataset has ended, or its remaining elements were bad."""
        entry = self._tasks.pop(message.task, None)
        if entry is not None and not entry.record.is_forgotten:
            if self._handle_stream(worker, message.task, entry.record, 0, message.stream):
                return
            if message.stream.bad:
                self._note_bad(entry.record)
        self._handle(TaskEmpty(worker, message.task))

    def _load_failed(self, worker: WorkerId, message: LoadFailed) -> None:
        entry = self._tasks.pop(message.task, None)
        if entry is None or entry.record.is_forgotten:
            self._handle(TaskFailed(worker, message.task))
            return
        if self._setup.stream is not None:
            entry.record.use_up()
            note = message.stream or StreamNote(shards_itself=False)
            self._handle_stream(worker, message.task, entry.record, entry.record.row_count, note)
        self._handle(self._faults.failed(worker, entry, message))

    def _handle_stream(self, worker: WorkerId, task: TaskId, record: Record, row_count: int, note: StreamNote) -> bool:
        """Note what a worker reports about its share of an iterable dataset; return whether the batch has failed.

        A batch with fewer rows than planned ends the share.
        """
        assert self._setup.stream is not None
        self._setup.stream.decide(shards_itself=note.shards_itself)
        if isinstance(self._feed, StreamFeed) and self._feed.epoch == record.plan.epoch:
            assert record.plan.worker is not None
            self._feed.loaded(record.plan.worker, row_count, record.plan.row_count, note.state)
        event = self._faults.left_out(worker, record, task, note.bad) if note.bad else None
        if event is not None:
            self._handle(event)
        return event is not None

    # --- planning

    def _plan(self, most: int | None = None) -> bool:
        """Free the slots that user code released, then plan batches up to the window, or up to ``most``.

        Returns:
            Whether more can be planned.
        """
        for slot in self._delivery.ended_slots():
            self._handle(SlotFreed(slot))
        if self.scaling.is_unsettled:
            self._settle_workers()
        # Plan several at a time, so that their messages are sent together.
        room, feed = self._scheduler.room, self._feed
        if room < self._refill or feed is None:
            return False
        for _ in range(room if most is None else most):
            planned = feed.take() or self._take_next_epoch(feed)
            if planned is None:
                return False
            self._add(planned)
        return True

    def _take_next_epoch(self, feed: Feed) -> PlannedBatch | None:
        """Return a batch of the next epoch, if this one is exhausted and the next may be prefetched."""
        if not (feed.is_exhausted and feed.error is None and self._setup.prefetches_epochs):
            return None
        if self._is_sparing and self._next_count >= _SPARING * len(self._scheduler.active_workers):
            return None
        if self._next_feed is None:
            self._next_feed = self._setup.make_feed(Cursor(feed.epoch + 1), None)
        self._next_count += 1
        return self._next_feed.take()

    def _add(self, planned: PlannedBatch) -> None:
        batch = BatchId(self._batch_count)
        self._batch_count += 1
        self._records[batch] = Record(planned)
        worker = planned.worker
        if worker is not None:
            feed = self._feed
            if isinstance(feed, StreamFeed) and feed.opening(worker):
                self._open_share(worker, feed)
        elif self._setup.binds_batches:
            worker = WorkerId(planned.step % len(self._setup.workers))
        self._handle(BatchPlanned(batch, planned.epoch, planned.grain_count, worker, planned.indices is None))

    def _open_share(self, worker: WorkerId, feed: StreamFeed) -> None:
        self.scaling.start_once(worker)
        self._pool.send(worker, feed.open_message(worker))

    def _settle_workers(self) -> None:
        """Start or release workers to reach the target count, and adapt the window to it."""
        for event in self.scaling.settle(self._scheduler.active_workers, self._scheduler.leaving_workers):
            self._handle(event)
        self._change_window(self._allocator.learn_worker_count(len(self._scheduler.active_workers)))

    def _change_window(self, window: int | None) -> None:
        """Set the number of batches in flight; ``None`` keeps it."""
        if window is not None:
            self._refill = max(1, window // _REFILL_SHARE)
            self._handle(WindowChanged(window))

    # --- events and actions

    def _handle(self, event: Event) -> None:
        """Pass an event to the scheduler and execute the actions it returns.

        An action may cause further events. They stay queued until the actions of this event are done, so the scheduler
        handles one event at a time and its actions run in order.
        """
        events = self._events
        events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while events:
                for action in self._scheduler.handle(events.popleft()):
                    if type(action) is Send:  # these two for every batch, without another call
                        self._send(action)
                    elif type(action) is Deliver:
                        self._deliver(self._records.pop(action.batch), action.slot)
                    else:
                        self._do(action)
        except BaseException:
            # The other actions and events are lost, so the scheduler waits for answers that never come.
            self._is_closed = True
            raise
        finally:
            self._is_handling = False
            events.clear()

    def _do(self, action: Action) -> None:
        match action:
            case Send():
                self._send(action)
            case Deliver(batch, slot):
                self._deliver(self._records.pop(batch), slot)
            case Place(worker, task, batch, slot):
                self._place(worker, task, self._records[batch], slot)
            case Drop(worker, task):
                self._tasks.pop(task, None)
                self._pool.send(worker, DropTask(task))
            case Grow():
                added = self._allocator.add_slot()
                self._handle(GrowthRefused() if added is None else SlotsAdded((added,)))
            case DeliverError(batch, task):
                self._fail(self._records.pop(batch), task)
                self._note_passed()
            case Reload(batch):
                before = self._records[batch]
                plan = before.plan
                if before.bad_rows is not None and plan.indices is not None:
                    plan = before.bad_rows.apply(plan, self._setup.grain_size)
                self._records[batch] = Record(plan, before)
            case Pass(batch):
                record = self._records.pop(batch)
                if not self._note_bad(record):
                    self._progress.delivered(record, 0)
                self._note_passed()
            case Forget(batch):
                self._records.pop(batch).forget()
            case StartWorker(worker):
                self._restart(worker)
            case StopWorker(worker):
                self.metrics.workers.ended(worker)
                self.scaling.stop(worker)
                self._watchdog.forget(worker)
            case FailWorkers():
                self._fail_workers()
            case FailMemory():
                self._fail_memory()
            case _:
                assert_never(action)

    def _send(self, action: Send) -> None:
        worker, task, batch, first_grain, grain_count, slot, is_whole = action
        record = self._records[batch]
        plan = record.plan
        layout = record.layout or self._layout
        block = None
        if slot is not None:
            needed = 0 if layout is None else layout.offsets(plan.row_count)[1]
            block = self._arena.block(slot)
            if block.size < needed:
                block = self._allocator.enlarge(slot, needed, self._scheduler.free_slots)
        indices, rows, first_row = plan.indices, plan.rows, 0
        if indices is None:
            self._tasks[task] = SentTask(worker, batch, record, 0, plan.row_count, layout)
            self._pool.send(worker, LoadNext(task, plan.epoch, plan.first_position, plan.row_count, block, layout))
            return
        if not is_whole:
            if block is not None and layout is not None:
                record.agree(layout)
            grain_size = self._setup.grain_size
            first_row = first_grain * grain_size
            indices = indices[first_row : first_row + grain_count * grain_size]
            rows = None if rows is None else rows[first_row : first_row + len(indices)]
        self._tasks[task] = SentTask(worker, batch, record, first_row, len(indices), layout)
        message = LoadGrains(
            task, plan.epoch, plan.first_position, plan.row_count, first_row, block, layout,
            is_whole, indices, record.deaths is not None, rows,
        )  # fmt: skip
        try:
            self._pool.send(worker, message)
        except Exception as error:  # an index of a user class that cannot be pickled
            self._load_failed(worker, not_sent(task, self._tasks[task], error, reports_bad=self._setup.handles_bad_samples))

    def _place(self, worker: WorkerId, task: TaskId, record: Record, slot: SlotId) -> None:
        block: Block | None = self._arena.block(slot)
        if block is None or block.size < record.needed_bytes:
            block = self._allocator.enlarge(slot, record.needed_bytes, self._scheduler.free_slots)
        if block is None:
            self._handle(PlaceRefused(worker, task))
        else:
            self._pool.send(worker, PlaceTask(task, block, record.layout))

    def _restart(self, worker: WorkerId) -> None:
        """Start a worker in place of one that died."""
        self.metrics.workers.restarted(worker)
        try:
            self.scaling.start_while_waited(worker)
            if isinstance(self._feed, StreamFeed):
                self._open_share(worker, self._feed)
        except WorkerStartError as error:
            self._lose_workers(error.with_traceback(None))

    def _lose_workers(self, error: BaseException) -> None:
        """Note that no more workers can be started. The engine raises ``error`` when no batch is ready any more."""
        self._fatal = self._fatal or error
        self._handle(WorkersLost())

    def _fail_workers(self) -> None:
        """Close the engine because workers keep dying or cannot be started."""
        self.close()
        error, self._fatal = self._fatal, None
        self._error = error or workers_error(self._faults.last_death)

    def _fail_memory(self) -> None:
        ended = self._allocator.collect()
        for slot in ended:
            self._handle(SlotFreed(slot))
        if ended and self._feed is not None:
            self._handle(BatchWanted(self._feed.epoch))
            return
        self._error = self._allocator.error(self._scheduler.held_slots)

    # --- finished batches

    def _deliver(self, record: Record, slot: SlotId) -> None:
        """Make the batch in the slot the next one for the training loop."""
        self._note_passed()
        if record.packed is None:
            assert record.layout is not None
            value = self._delivery.rows(slot, record.layout, record.row_count, record.beside)
        else:
            try:
                value = self._delivery.tree(slot, record.packed)
            except Exception as error:  # unpickling the user's objects may raise anything
                self._note_failed(record)
                place = f"position {record.plan.first_position} of epoch {record.plan.epoch}"
                failure = Failure.of(kept(error), "receiving a batch (an object in it cannot be unpickled in the main process)")
                self._error = failure.exception(place)
                return
        self.metrics.add_samples(record.row_count)
        record.release()
        if not (self._setup.handles_bad_samples and self._note_bad(record)):
            self._ready.append((value, record))

    def _fail(self, record: Record, task: TaskId | None) -> None:
        """Set the error of a failed batch when the batch is due."""
        self._error = self._faults.batch_error(record, task)
        self.metrics.mark("failure", LOOP, f"{type(self._error).__name__}: {text_of(self._error)}")
        self._note_failed(record)

    def _note_passed(self) -> None:
        """Note that a batch, or an exception in its place, is ready: the sampler may be read further."""
        if self._feed is not None:
            self._feed.delivered()

    def _note_bad(self, record: Record) -> bool:
        """Count the bad samples of a batch; return whether they exceed the error budget."""
        for sample in () if record.bad_rows is None else record.bad_rows.done:
            self.metrics.add_outcome(sample.outcome, str(sample))
        error = self._progress.note_bad(record)
        if error is not None:
            self._note_failed(record)
            self._error = error
        return error is not None

    def _note_failed(self, record: Record) -> None:
        record.release()
        self._progress.failed(record)

    # --- close

    def close(self, *, keeps_workers: bool = False) -> None:
        """Stop all workers and release all memory that user code does not reference. Idempotent.

        Args:
            keeps_workers: Whether worker processes that are slow to start may stay alive for another loader.

        NOTE [close order]
          1. Mark the engine closed, wake the thread in `next_batch` and wait until it has left. A descriptor that is closed
             while a thread polls it may already belong to another file. If this thread itself is in `next_batch` (the user's
             signal handler closes the loader), `next_batch` does the remaining steps on its way out.
          2. Pass `Closed` to the scheduler, which then requests no more actions.
          3. Close the pipes of the workers, which ends them; kill those in user code after a moment.
          4. Free memory last: a worker may write until it has exited or unmapped the memory.
        """
        if self._is_down:
            return
        self._is_closed = True
        self._pool.wake()
        if self._driver == threading.get_ident():
            return
        with self._lock:
            self._tear_down(keeps_workers=keeps_workers)

    def _tear_down(self, *, keeps_workers: bool = False) -> None:
        if self._is_down:
            return
        self._is_down = True
        self._scheduler.handle(Closed())
        self._records.clear()
        self._tasks.clear()
        setup = self._setup
        try:
            setup.pool.close(keeps_workers=keeps_workers)
            setup.metrics.close()
            setup.status_board.close()
        finally:  # Ctrl+C may end the wait for workers, which are then killed
            setup.delivery.close()
            setup.arena.close()
            setup.store.close()
