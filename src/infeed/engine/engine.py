"""The engine: drives workers from the training loop's thread and returns batches.

The engine has no thread. The training loop's thread drives it in ``next_batch``: it waits for workers in exactly one place,
passes their messages to the scheduler as events, executes the resulting actions (``_do``), and returns on a delivery.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, assert_never, final

from infeed.autotune.tuner import Work
from infeed.engine.dispatch import BatchInput, Dispatcher
from infeed.engine.faults import Faults, start_error, workers_error
from infeed.engine.output import BatchOutput
from infeed.engine.planning import Feed
from infeed.engine.progress import Progress
from infeed.engine.records import EngineSetup, Gather, Record, Task
from infeed.engine.scaling import AutoScaler, WorkerScaling
from infeed.engine.slots import SlotAllocator
from infeed.errors import LoaderClosedError, WorkerStartError
from infeed.metrics.collector import Flight
from infeed.scheduler.messages import (
    Action,
    BatchId,
    BatchWanted,
    Closed,
    Deliver,
    DeliverError,
    Drop,
    Event,
    FailMemory,
    FailWorkers,
    Forget,
    Grow,
    GrowthRefused,
    Pass,
    Place,
    Reload,
    Send,
    SlotFreed,
    SlotsAdded,
    StartWorker,
    StopWorker,
    TaskId,
    WorkerId,
    WorkerReady,
    WorkersLost,
)
from infeed.scheduler.scheduler import Scheduler
from infeed.workers.launcher import Process
from infeed.workers.pool import Death, News
from infeed.workers.protocol import (
    Emptied,
    FromWorker,
    Idle,
    LoadFailed,
    Mismatched,
    PackedLoaded,
    RowsLoaded,
    Stack,
    Started,
    StartFailed,
    Unplaced,
)

_MSG_FORKED: Final = "this epoch was begun by the parent of this process, and is still its own; iterate the loader anew here"
_MSG_CLOSED: Final = "the loader was closed while it was iterated; iterate it again to load anew, or close it later"
_COOLING_LOOK_S: Final = 0.0005
# A training loop that finds its batches ready need not read worker messages. But workers would starve: their queued tasks may
# last only 2 ms. So the engine reads messages once per millisecond, at the cost of a system call.
_HEAR_NS: Final = 1_000_000
# How long an exhausted epoch waits for workers that are still in worker_init_fn.
_INIT_S: Final = 5.0
# Upper limit of the grain size in per-sample times: a batch that is collated as a whole has no finite grain size.
_LONG_GRAIN: Final = 1 << 20


NOTHING: Final = object()


class EpochEnd(Exception):
    """The epoch has no more batches. Internal."""


@final
class Engine:
    """Loads batches. Only one thread may use it at a time; another may call ``close``."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._pool, self._arena = setup.pool, setup.arena
        self._delivery = setup.delivery
        self._metrics = setup.metrics
        window = setup.windows(len(setup.first_workers))[0]
        self._scheduler = Scheduler(
            workers=setup.first_workers, window=window, in_order=setup.in_order, whole_batches=setup.whole_batches
        )
        self._events: deque[Event] = deque()  # not yet passed to the scheduler
        self._is_handling = False
        self._fatal: BaseException | None = None  # why no more workers can be started
        self._records: dict[BatchId, Record] = {}
        tasks: dict[TaskId, Task] = {}
        self._allocator = SlotAllocator(setup, self._scheduler)
        self._scaling = WorkerScaling(setup, self._scheduler, self._handle)
        self._faults = Faults(setup, self._records, tasks, self._handle)
        self._input = BatchInput(setup, self._scheduler, self._records, tasks, self._allocator, self._scaling, self._handle)
        self._output = BatchOutput(setup, self._faults.name)
        self._dispatcher = Dispatcher(
            setup, self._records, tasks, self._allocator, self._faults, self._input, self._output, self._handle
        )
        self._autoscaler = AutoScaler(
            setup.tuner, setup.metrics, self._scheduler, self._scaling, self._allocator, self._input.change_window,
            setup.memory_budget,
        )  # fmt: skip
        self._next_look = 0.0  # time of the next watchdog check
        self._left_ns = 0  # when `next_batch` last returned a batch; 0: none yet in this epoch
        self._heard_ns = 0  # when worker messages were last read
        self._is_polled = False  # device prefetch asks for batches, and reports itself what the training loop gets
        self._is_closed = False
        self._is_down = False
        self._lock = threading.RLock()  # held by the thread that drives the engine
        self._driver = 0  # ident of that thread while it is in `next_batch`
        self.owner_pid = os.getpid()
        # Last, when everything is set: another thread may ask for statistics at any time.
        self._metrics.connect(self._flight, lambda: setup.delivery.given_bytes)
        self._scaling.begin()

    @property
    def is_usable(self) -> bool:
        """Whether the engine can load in this process; a forked child cannot use its parent's workers."""
        return not self._is_closed and self.owner_pid == os.getpid()

    @property
    def is_between_epochs(self) -> bool:
        return self._input.feed is None

    def worker_pids(self) -> list[int]:
        """Return the PIDs of the worker processes, in worker order."""
        return [process.pid for process in self.worker_processes()]

    def worker_processes(self) -> list[Process]:
        """Return the workers that are processes, in worker order."""
        return list(self._pool.processes().values())

    def asked(self, asked_ns: int) -> None:
        """Note that the training loop asked for a batch. ``given``, ``ended`` or ``stop_waiting`` follows."""
        self._metrics.asked(asked_ns)

    def stop_waiting(self) -> None:
        """Note that the training loop gets an exception instead of a batch."""
        self._metrics.stop_waiting()

    def given(self, asked_ns: int, left_ns: int) -> None:
        """Note that device prefetch delivered a batch, with the times of request and delivery."""
        with self._lock:
            if not self._is_closed:
                self._metrics.delivered(asked_ns, left_ns)
                self._autoscaler.consider()

    def changed_over(self, began_ns: int) -> None:
        """Count the time since ``began_ns`` as epoch change: begin or end of an epoch, start or stop of workers."""
        self._metrics.changed_over(began_ns, time.perf_counter_ns())

    def ended(self, asked_ns: int) -> None:
        """Note that the training loop asked for a batch at this time, and the epoch has no more."""
        self._metrics.end_epoch(asked_ns)

    def work(self) -> Work:
        """Return what the workers have done and measured so far."""
        return self._metrics.work()

    # --- driven by the training loop's thread

    def prime(self) -> None:
        """Start loading the epoch before the training loop asks for its first batch.

        Raises:
            Exception: The user's sampler raised it.
        """
        with self._lock:
            began_ns = time.perf_counter_ns()
            assert self._input.feed is not None
            self._input.feed.prime()
            # Plan in steps: workers load the first batches while the engine plans the others.
            while self._input.plan_some():
                self._pool.flush()
            self.changed_over(began_ns)

    def _flight(self) -> Flight:
        arena = self._arena
        return Flight(len(self._records), arena.used_bytes(self._scheduler.free_slots), arena.total_bytes)

    def begin_epoch(self, progress: Progress, asked: Iterator[Any] | None = None, *, is_polled: bool = False) -> None:
        """Begin the epoch of ``progress`` at its start; ``next_batch`` returns its batches.

        Args:
            progress: Records the delivered batches.
            asked: The sampler's iterator for this iteration, if ``iter`` was already called on the sampler.
            is_polled: Whether device prefetch asks for the batches.
        """
        self._output.begin(progress)
        self._is_polled = is_polled
        self._metrics.begin_epoch(progress.epoch, progress.start.step)
        self._autoscaler.begin_epoch()
        self._left_ns = 0
        self._input.begin(progress.start, asked)

    def leave_epoch(self) -> None:
        """Abandon the rest of the epoch, so that the next can begin."""
        feed, self._input.feed = self._input.feed, None
        self._metrics.end_epoch()
        if feed is not None and not self._is_closed:
            self._input.abandon(feed.epoch)

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
                if self._metrics.is_waiting and not self._is_polled:
                    self.stop_waiting()
                if self._is_closed:
                    self._tear_down()

    def _next_batch(self, waits: bool) -> Any:
        batch_input, output = self._input, self._output
        feed = batch_input.feed
        if self.owner_pid != os.getpid():
            raise LoaderClosedError(_MSG_FORKED)
        if feed is None or self._is_closed:
            raise LoaderClosedError(_MSG_CLOSED)
        asked_ns = time.perf_counter_ns()
        if not self._is_polled:
            self.asked(asked_ns)
        deadline = asked_ns / 1e9 + self._setup.timeout_s if self._setup.timeout_s else None
        # An earlier call that did not wait may have left a batch or an error.
        if output.error is None and output.is_empty and not (self._setup.gather and self._gather(feed, self._setup.gather)):
            batch_input.plan()
            self._handle(BatchWanted(feed.epoch, asked_ns - self._left_ns if self._left_ns else 0, waits))
        while output.error is not None or output.is_empty:
            if output.error is not None:
                raise output.take_error()
            self._check_end(feed, asked_ns, waits)
            if output.error is not None:
                continue
            if waits:
                self._wait(deadline)
            elif not self._look_around():
                return NOTHING
        if not self._setup.is_lazy:
            if asked_ns - self._heard_ns > _HEAR_NS:
                news = self._pool.receive(0)
                self._heard_ns = time.perf_counter_ns()
                self._hear_all(news)
            batch_input.plan()
            self._pool.flush()
        left_ns = self._left_ns = time.perf_counter_ns()
        if not self._is_polled and self._metrics.delivered(asked_ns, left_ns):
            self._autoscaler.consider()
        return output.take()

    def _gather(self, feed: Feed, gather: Gather) -> bool:
        """Copy the next batch of in-memory arrays into a free slot, without a task or a worker.

        Returns:
            Whether it did. If not (no slot is free or large enough, or an index is invalid), tasks load the batch.
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
                    record.layout, record.row_count = layout, row_count
                    record.parts.append((self._setup.workers[0], 0, row_count, took_ns))
                    self._output.deliver(record, slot, 0)
                    self._input.delivered()
                    return True
            except IndexError:
                pass
            self._input.put_back(planned)
        self._handle(SlotFreed(slot))
        return False

    def _check_end(self, feed: Feed, asked_ns: int, waits: bool) -> None:
        if not (feed.is_exhausted or feed.error is not None) or self._scheduler.has_undelivered(feed.epoch):
            return
        if feed.error is not None:
            raise feed.take_error()
        if self._scaling.awaits_init:
            if waits:
                self._await_init()
            if not waits or self._output.error is not None:
                return
        # An engine that cannot start workers is useless for the next epoch.
        self._is_closed |= self._scheduler.is_lost
        self._output.end(feed.carried())
        self._input.end()
        if not self._is_polled:
            self.ended(asked_ns)
        emptiness = self._output.emptiness()
        if emptiness is not None:
            raise emptiness
        raise EpochEnd

    def _await_init(self) -> None:
        """Wait for starting workers after the last batch.

        Whether an error of ``worker_init_fn`` is raised must not depend on how fast workers start. The wait is limited, because
        a worker may hang there.
        """
        deadline_s = time.perf_counter() + _INIT_S
        while self._scaling.awaits_init and not self._scheduler.is_lost:
            left_s = deadline_s - time.perf_counter()
            if left_s <= 0:
                self._scaling.stop_awaiting()
                return
            self._listen(left_s)
        if self._scaling.awaits_init:
            self._fail_workers()

    def _wait(self, deadline: float | None) -> None:
        timeout_s = None if deadline is None else deadline - time.perf_counter()
        if timeout_s is not None and timeout_s <= 0:
            raise self._faults.timeout_error()
        self._listen(timeout_s)

    def _listen(self, timeout_s: float | None) -> None:
        """Wait for messages, a death, the timeout, a watchdog check or close. The training loop's thread waits nowhere else."""
        if self._is_closed:
            raise LoaderClosedError(_MSG_CLOSED)
        now_ns = time.perf_counter_ns()
        now = now_ns / 1e9
        watchdog = self._setup.watchdog
        if watchdog is not None:
            if now >= self._next_look:
                self._faults.look(self._scheduler.grain_s / min(self._setup.grain_size, _LONG_GRAIN))
                self._next_look = time.perf_counter() + watchdog.look_s
            timeout_s = watchdog.look_s if timeout_s is None else min(timeout_s, watchdog.look_s)
        if self._delivery.is_cooling:
            timeout_s = _COOLING_LOOK_S  # slots become free without notification, so poll
        idle_count = self._scheduler.idle_count
        news = self._pool.receive(0 if self._faults.is_storm else timeout_s)
        self._heard_ns = time.perf_counter_ns()
        self._metrics.blocked(self._heard_ns - now_ns, idle_count)
        self._take_in(news)

    def _look_around(self) -> bool:
        """Process pending messages without waiting. Return whether there were any."""
        news = self._pool.receive(0)
        self._heard_ns = time.perf_counter_ns()
        is_any = bool(news)
        self._take_in(news)
        return is_any

    def _take_in(self, news: list[News]) -> None:
        """Process messages, and empty the list.

        The callers' frames hold the list. From Python 3.12 on, the traceback of a user's exception, which may be in the list,
        holds those frames.
        """
        self._hear_all(news)
        news.clear()
        if self._faults.is_storm and not self._is_closed:
            self._fail_workers()
        # In the main process, plan nothing while a batch is undelivered: the sampler advances only when the training loop asks.
        if not self._setup.is_lazy or (self._output.is_empty and self._output.error is None):
            self._input.plan()

    def _hear_all(self, news: list[News]) -> None:
        try:
            for worker, message in news:
                self._hear(worker, message)
        except Exception:
            # The message is handled only in part and the others are lost, so the state is unreliable.
            self._is_closed = True
            raise

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
          4. Free memory last: a worker may write until it has exited.
        """
        if self._is_closed:
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
        self._setup.close(keeps_workers=keeps_workers)

    # --- events and actions

    def _handle(self, event: Event) -> None:
        """Pass an event to the scheduler and execute the actions it returns.

        An action may cause further events. They stay queued until the actions of this event are done, so the scheduler
        handles one event at a time and its actions run in order.
        """
        events = self._events
        if self._is_handling:
            events.append(event)
            return
        self._is_handling = True
        try:
            for action in self._scheduler.handle(event):
                self._do(action)
            while events:
                for action in self._scheduler.handle(events.popleft()):
                    self._do(action)
        finally:
            self._is_handling = False
            if events:
                events.clear()

    def _do(self, action: Action) -> None:
        match action:
            case Send():
                self._dispatcher.send(action)
            case Deliver(batch, slot):
                feed = self._input.feed
                self._output.deliver(self._records.pop(batch), slot, 0 if feed is None else feed.share_count)
                self._input.delivered()
            case Place(worker, task, batch, slot):
                self._dispatcher.place(worker, task, self._records[batch], slot)
            case Drop(worker, task):
                self._dispatcher.drop(worker, task)
            case Grow():
                self._grow()
            case DeliverError(batch, task):
                self._output.fail(self._records.pop(batch), task)
                self._input.delivered()
            case Reload(batch):
                self._reload(batch)
            case Pass(batch):
                self._output.pass_over(self._records.pop(batch))
                self._input.delivered()
            case Forget(batch):
                self._records.pop(batch, None)
            case StartWorker(worker):
                self._metrics.workers.restarted(worker)
                try:
                    self._scaling.replace(worker, self._input.feed)
                except WorkerStartError as error:
                    self._lose_workers(error.with_traceback(None))
            case StopWorker(worker):
                self._metrics.workers.ended(worker)
                self._scaling.stop(worker)
                self._faults.forget(worker)
            case FailWorkers():
                self._fail_workers()
            case FailMemory():
                self._fail_memory()
            case _:
                assert_never(action)

    def _grow(self) -> None:
        slot = self._allocator.add_slot()
        self._handle(GrowthRefused() if slot is None else SlotsAdded((slot,)))

    def _reload(self, batch: BatchId) -> None:
        before = self._records[batch]
        plan = before.plan
        if before.bad_rows is not None and plan.indices is not None:
            plan = before.bad_rows.apply(plan, self._setup.grain_size)
        self._records[batch] = Record(plan, before)

    def _lose_workers(self, error: BaseException) -> None:
        """Note that no more workers can be started. The engine raises ``error`` when no batch is ready any more."""
        self._fatal = self._fatal or error
        self._handle(WorkersLost())

    def _fail_workers(self) -> None:
        """Close the engine because workers keep dying or cannot be started."""
        self.close()
        error, self._fatal = self._fatal, None
        self._output.error = error or workers_error(self._faults.last_death)

    def _fail_memory(self) -> None:
        ended = self._allocator.collect()
        for slot in ended:
            self._handle(SlotFreed(slot))
        feed = self._input.feed
        if ended and feed is not None:
            self._handle(BatchWanted(feed.epoch))
            return
        self._output.error = self._allocator.error(self._scheduler.held_slots)

    # --- messages from workers

    def _hear(self, worker: WorkerId, message: FromWorker | Death) -> None:
        match message:
            case RowsLoaded() | PackedLoaded():
                self._dispatcher.loaded(worker, message)
            case Started():
                self._metrics.workers.started(worker, self._pool.pids().get(worker))
                self._scaling.note_started(worker)
                self._handle(WorkerReady(worker))
            case Unplaced(task, nbytes, layout):
                self._dispatcher.unplaced(worker, task, nbytes, layout)
            case Mismatched(task):
                self._dispatcher.mismatched(worker, task)
            case Emptied():
                self._dispatcher.emptied(worker, message)
            case LoadFailed():
                self._dispatcher.failed(worker, message)
            case Stack() | Idle():
                pass  # a stack reply that arrived after the timeout
            case StartFailed(failure):
                # Other workers of this engine would fail the same way. Stop it, so that its exit is not logged as a death.
                self._pool.stop(worker)
                self._metrics.workers.ended(worker)
                self._lose_workers(start_error(worker, failure))
            case Death():
                self._metrics.workers.ended(worker)
                self._faults.died(worker, message)
                self._metrics.mark("death", worker, self._faults.last_death)
                self._scaling.note_gone()
            case _:
                assert_never(message)
