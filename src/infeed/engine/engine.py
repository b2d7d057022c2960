"""The user's side of loading: epochs, the next batch, waiting for it, close.

Nothing here runs by itself. The user's thread drives it from ``next_batch``: it waits for workers in exactly one place, has the
scheduler told what they said and what that asks for done (``_do``), and returns when that was to deliver.
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
from infeed.metrics.collector import Flight, busy_ns
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
# A loop that finds its batches ready need not hear workers. But they have need of it: what they are sent ahead may last for two
# milliseconds only. So they are heard once in this time, at the price of a system call.
_HEAR_NS: Final = 1_000_000
# How long an epoch that has no more batches waits for workers that are in worker_init_fn.
_INIT_S: Final = 5.0
# A grain of a batch that is collated as a whole has no length of its own.
_LONG_GRAIN: Final = 1 << 20


NOTHING: Final = object()


class EpochEnd(Exception):
    """There are no more batches in this epoch. Internal."""


@final
class Engine:
    """Loads batches. Used by one thread at a time; ``close`` may come from another."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._pool, self._arena = setup.pool, setup.arena
        self._delivery = setup.delivery
        self._metrics = setup.metrics
        window = setup.windows(len(setup.first_workers))[0]
        self._scheduler = Scheduler(
            workers=setup.first_workers, window=window, in_order=setup.in_order, whole_batches=setup.whole_batches
        )
        self._events: deque[Event] = deque()  # not passed to the scheduler yet
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
        self._next_look = 0.0  # when to look after workers, while waiting
        self._left_ns = 0  # when the user's loop was given a batch; 0 if it was not yet
        self._heard_ns = 0  # when workers were last heard
        self._is_polled = False  # whoever asks prefetches by itself, and says when the loop has what it waited for
        self._is_closed = False
        self._is_down = False
        self._lock = threading.RLock()  # held by the thread that drives this engine
        self._driver = 0  # that thread, while it is in `next_batch`
        self.owner_pid = os.getpid()
        # Not before all is there: another thread may ask for statistics at any time.
        self._metrics.flight = self._flight
        self._metrics.bytes_given = lambda: setup.delivery.given_bytes
        self._scaling.begin()

    @property
    def is_usable(self) -> bool:
        """Whether it can load in this process; a forked child cannot use its parent's workers."""
        return not self._is_closed and self.owner_pid == os.getpid()

    @property
    def is_between_epochs(self) -> bool:
        return self._input.feed is None

    def worker_pids(self) -> list[int]:
        """Process numbers of its workers, in their order."""
        return [process.pid for process in self.worker_processes()]

    def worker_processes(self) -> list[Process]:
        """Its workers, as far as they are processes, in their order."""
        return list(self._pool.processes().values())

    def asked(self, asked_ns: int) -> None:
        """The loop has asked for a batch. Then it is ``given``, or there is none (``ended``), or it waits no more."""
        self._metrics.asked_ns, self._metrics.asked_blocked = asked_ns, self._metrics.blocked_ns

    def stop_waiting(self) -> None:
        """The loop gets no batch, but an exception."""
        if self._metrics.asked_ns:
            self._metrics.stop_waiting()
            if self._left_ns and not self._is_polled:
                self._left_ns = time.perf_counter_ns()

    def given(self, asked_ns: int, left_ns: int) -> None:
        """Whoever polls has given the loop a batch, which it asked for and got at these times."""
        with self._lock:
            if not self._is_closed:
                self._metrics.given(asked_ns, left_ns)
                self._autoscaler.consider()

    def changed_over(self, began_ns: int) -> None:
        """The loop has waited since then for an epoch to begin or to end, and for workers to start or to stop."""
        self._metrics.changed_over(began_ns, time.perf_counter_ns())

    def ended(self, asked_ns: int) -> None:
        """Whoever polls was asked for a batch at this time, and there are no more in this epoch."""
        self._metrics.end_epoch(self._left_ns, asked_ns)

    def work(self) -> Work:
        """What its workers have done and found so far."""
        sums = self._metrics.members.sums()
        queued_ns = sum(self._metrics.members.usage(worker).queued_ns for worker in sums)
        worked_ns = sum(map(busy_ns, sums.values()))
        shares = [one.gil_share for one in sums.values() if one.gil_share is not None]
        return Work(
            self._metrics.kind,
            max(0, worked_ns - queued_ns),
            sum(one.sample_count for one in sums.values()),
            shares[0] if shares else None,
            any(one.is_drawing for one in sums.values()),
        )

    # --- the user's side

    def prime(self) -> None:
        """Let workers begin with the epoch before its first batch is asked for.

        Raises:
            Exception: what the user's sampler raised.
        """
        with self._lock:
            began_ns = time.perf_counter_ns()
            assert self._input.feed is not None
            self._input.feed.prime()
            # Some at a time: workers load the first while the others are planned.
            while self._input.plan_some():
                self._pool.flush()
            self.changed_over(began_ns)

    def _flight(self) -> Flight:
        arena = self._arena
        return Flight(len(self._records), arena.used_bytes(self._scheduler.free_slots), arena.total_bytes)

    def begin_epoch(self, progress: Progress, asked: Iterator[Any] | None = None, *, is_polled: bool = False) -> None:
        """Make the epoch of ``trail`` the one that ``next_batch`` gives, from where it starts.

        Args:
            asked: the iterator of the sampler that belongs to this iteration, where ``iter`` was called on it already.
        """
        self._output.begin(progress)
        self._is_polled = is_polled
        self._metrics.begin_epoch(progress.epoch, progress.start.step)
        self._autoscaler.begin_epoch()
        self._left_ns = 0  # what the user did between epochs says nothing about their loop
        self._input.begin(progress.start, asked)

    def leave_epoch(self) -> None:
        """Forget what is left of the epoch; the next may begin."""
        feed, self._input.feed = self._input.feed, None
        self._metrics.end_epoch(self._left_ns)
        if feed is not None and not self._is_closed:
            self._input.abandon(feed.epoch)

    def next_batch(self, *, waits: bool = True) -> Any:
        """The next batch; ``NOTHING`` if it is not to be waited for and not there yet.

        Raises:
            EpochEnd: there is none.
        """
        with self._lock:
            self._driver = threading.get_ident()
            try:
                return self._next_batch(waits)
            except (EpochEnd, Exception) as error:
                # Whoever asked again would wait for a worker that nobody starts.
                self._is_closed |= isinstance(error, WorkerStartError)
                raise
            except BaseException:
                # Interrupted anywhere, perhaps between an action and its record: what is left of it cannot be relied on.
                self._is_closed = True
                with suppress(KeyboardInterrupt):  # once more, while it is closed: one is on its way to the user already
                    self._tear_down()
                raise
            finally:
                self._driver = 0
                if self._metrics.asked_ns and not self._is_polled:
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
        # Either may be there, if it was asked for before and not waited for.
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
        left_ns = time.perf_counter_ns()
        if not self._is_polled:
            # As `Gauge.given`, which would be another call for every batch.
            metrics = self._metrics
            metrics.waited_ns, metrics.asked_ns = metrics.waited_ns + left_ns - asked_ns, 0
            metrics.batch_count += 1
            if left_ns > metrics.next_ns:
                metrics.note(self._left_ns, asked_ns, left_ns)
                self._autoscaler.consider()
        self._left_ns = left_ns
        return output.take()

    def _gather(self, feed: Feed, gather: Gather) -> bool:
        """Copy the next batch of in-memory arrays into a free slot. Needs no task and no worker.

        Whether it did. If not (no slot is free or large enough, an index is wrong), the batch goes the way of all others.
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
        # An engine that can start no more workers is of no use to the next epoch.
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
        """All batches are delivered. Whether ``worker_init_fn`` has raised must not depend on how fast workers start, so those
        that are still starting are waited for; not for long, because one may hang there."""
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
        """The one place where the user's thread waits: for news, a death, the time-out, a look at the workers, or close."""
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
            timeout_s = _COOLING_LOOK_S  # a slot may become free at any moment, and nobody says so
        worker_count, idle_count = self._metrics.members.count, self._scheduler.idle_count
        news = self._pool.receive(0 if self._faults.is_storm else timeout_s)
        self._heard_ns = time.perf_counter_ns()
        took_ns = self._heard_ns - now_ns
        if worker_count:
            metrics = self._metrics
            metrics.blocked_ns += took_ns
            metrics.manned_ns += worker_count * took_ns
            metrics.idled_ns += idle_count * took_ns
        else:
            self._metrics.waited_for_workers(took_ns)
        self._take_in(news)

    def _look_around(self) -> bool:
        """Hear what there is to hear without waiting; whether there was anything."""
        news = self._pool.receive(0)
        self._heard_ns = time.perf_counter_ns()
        self._take_in(news)
        return bool(news)

    def _take_in(self, news: list[News]) -> None:
        self._hear_all(news)
        if self._faults.is_storm and not self._is_closed:
            self._fail_workers()
        # Without workers nothing is planned while a batch waits to be delivered: the sampler is asked when the loop asks.
        if not self._setup.is_lazy or (self._output.is_empty and self._output.error is None):
            self._input.plan()

    def _hear_all(self, news: list[News]) -> None:
        try:
            for worker, message in news:
                self._hear(worker, message)
        except Exception:
            # What is to be done about it is done in part only, and the rest is lost: its books cannot be relied on.
            self._is_closed = True
            raise

    def close(self, *, keeps_workers: bool = False) -> None:
        """Stop all workers and let go of all memory that the user does not look into. Idempotent.

        Args:
            keeps_workers: Whether worker processes that are slow to start may wait for another loader.

        NOTE [close order]
          1. mark closed and wake whoever waits in `next_batch`; wait until they are out, because a descriptor that is closed
             under a thread that polls it may be another file's by the time it looks. If that is this very thread (a signal
             handler of the user's closes the loader) it cannot be waited for: then `next_batch` does the rest on its way out
          2. the scheduler hears of it and asks for nothing more
          3. workers are told by the end of their pipes; those in user code are killed after a moment
          4. memory last: a worker may write until it is gone
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

        Executing an action may raise further events. They wait in the queue until the actions of this one are done, so the
        scheduler sees one event at a time and its actions are executed in order.
        """
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                for action in self._scheduler.handle(self._events.popleft()):
                    self._do(action)
        finally:
            self._is_handling = False
            self._events.clear()

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
                self._metrics.members.restarted(worker)
                try:
                    self._scaling.replace(worker, self._input.feed)
                except WorkerStartError as error:
                    self._lose_workers(error.with_traceback(None))
            case StopWorker(worker):
                self._metrics.members.ended(worker)
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
        """No more workers can be started, for this reason. It is raised when no batch is ready any more."""
        self._fatal = self._fatal or error
        self._handle(WorkersLost())

    def _fail_workers(self) -> None:
        """Workers die, one after another, or cannot be started: end it."""
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

    # --- what workers say

    def _hear(self, worker: WorkerId, message: FromWorker | Death) -> None:
        match message:
            case RowsLoaded() | PackedLoaded():
                self._dispatcher.loaded(worker, message)
            case Started():
                self._metrics.members.started(worker, self._pool.pids().get(worker))
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
                pass  # a stack that arrived after the timeout
            case StartFailed(failure):
                # Nothing that this engine starts would fare better. Its end is no death to be logged.
                self._pool.stop(worker)
                self._metrics.members.ended(worker)
                self._lose_workers(start_error(worker, failure))
            case Death():
                self._metrics.members.ended(worker)
                self._faults.died(worker, message)
                self._metrics.mark("death", worker, self._faults.last_death)
                self._scaling.note_gone()
            case _:
                assert_never(message)
