"""Carries out what the scheduler decides: the one place where plan, workers, memory and delivery meet.

Nothing here runs by itself. The user's thread drives it from ``next_batch``: it waits for workers in exactly one place, tells
the scheduler what they said, does what the scheduler asks, and returns when that was to deliver.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Any, Final, assert_never, final

from infeed.errors import LoaderClosedError, WorkerStartError
from infeed.exchange import Exchange
from infeed.feeds import Feed, PlannedBatch, StreamFeed
from infeed.observe.gauge import Flight
from infeed.observe.records import LOOP
from infeed.plan.cursor import Cursor
from infeed.records import EngineSetup, Record, Task
from infeed.reports import batch_error, start_error, workers_error
from infeed.rooms import Rooms
from infeed.scheduler.machine import Scheduler
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
    Reload,
    Send,
    SlotFreed,
    SlotId,
    SlotsAdded,
    StartWorker,
    StopWorker,
    TaskEmpty,
    TaskId,
    TaskMismatched,
    WindowChanged,
    WorkerId,
    WorkerReady,
)
from infeed.staffing import Staffing
from infeed.steering import Steering
from infeed.trail import Trail
from infeed.troubles import Troubles
from infeed.tuning.kinds import Work
from infeed.workers.crew import Death
from infeed.workers.failures import Failure
from infeed.workers.messages import (
    DropTask,
    Emptied,
    FromWorker,
    LoadFailed,
    Mismatched,
    PackedLoaded,
    RowsLoaded,
    Stack,
    Started,
    StartFailed,
    Unplaced,
)

# Batches are planned when this share of those in flight has been delivered. One at a time would cost a system call each; half
# would let workers run dry.
_REFILL_SHARE: Final = 4
_MSG_FORKED: Final = "this epoch was begun by the parent of this process, and is still its own; iterate the loader anew here"
_MSG_CLOSED: Final = "the loader was closed while it was iterated; iterate it again to load anew, or close it later"
_COOLING_LOOK_S: Final = 0.0005
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
        self._crew, self._arena = setup.crew, setup.arena
        self._delivery = setup.delivery
        self._gauge = setup.gauge
        self._gauge.flight = self._flight
        self._gauge.bytes_given = lambda: setup.delivery.given_bytes
        window = setup.windows(len(setup.first_workers))[0]
        self._scheduler = Scheduler(
            workers=setup.first_workers, window=window, in_order=setup.in_order, whole_batches=setup.whole_batches
        )
        self._records: dict[BatchId, Record] = {}
        self._tasks: dict[TaskId, Task] = {}
        self._refill = max(1, window // _REFILL_SHARE)
        self._batch_count = 0
        self._trail: Trail | None = None
        self._feed: Feed | None = None
        self._next_feed: Feed | None = None
        self._delivered: list[Any] = []
        self._error: BaseException | None = None
        self._rooms = Rooms(setup, self._scheduler)
        self._staffing = Staffing(setup, self._scheduler, self._tell)
        self._steering = Steering(
            setup.tuner, setup.gauge, self._scheduler, self._staffing, self._rooms, self._change_window, setup.memory_budget
        )
        self._troubles = Troubles(setup, self._records, self._tasks, self._tell)
        self._exchange = Exchange(
            setup, self._records, self._tasks, self._rooms, self._troubles,
            tell=self._tell, learn_size=self._learn_size, stream_loaded=self._stream_loaded,
        )  # fmt: skip
        self._next_look = 0.0  # when to look after workers, while waiting
        self._given_count = 0  # batches of this epoch that the user has had
        self._left_ns = 0  # when the user's loop was given a batch; 0 if it was not yet
        self._is_polled = False  # whoever asks prefetches by itself, and says when the loop has what it waited for
        self._is_closed = False
        self._is_down = False
        self._lock = threading.RLock()  # held by the thread that drives this engine
        self._driver = 0  # that thread, while it is in `next_batch`
        self.owner_pid = os.getpid()
        self._staffing.begin()

    @property
    def is_usable(self) -> bool:
        """Whether it can load in this process; a forked child cannot use its parent's workers."""
        return not self._is_closed and self.owner_pid == os.getpid()

    @property
    def is_between_epochs(self) -> bool:
        return self._feed is None

    def worker_pids(self) -> list[int]:
        """Process numbers of its workers, in their order."""
        return list(self._crew.pids().values())

    def given(self, asked_ns: int, left_ns: int) -> None:
        """Whoever polls has given the loop a batch, which it asked for and got at these times."""
        with self._lock:
            if not self._is_closed:
                self._gauge.given(asked_ns, left_ns)
                self._steering.consider()

    def changed_over(self, began_ns: int) -> None:
        """The loop has waited since then for an epoch to begin or to end, and for workers to start or to stop."""
        self._gauge.changed_over(began_ns, time.perf_counter_ns())

    def ended(self, asked_ns: int) -> None:
        """Whoever polls was asked for a batch at this time, and there are no more in this epoch."""
        self._gauge.end_epoch(self._left_ns, asked_ns)

    def work(self) -> Work:
        """What its workers have done and found so far."""
        sums = self._gauge.sums()
        queued_ns = sum(self._gauge.usage(worker).queued_ns for worker in sums)
        busy_ns = sum(one.load_ns + one.collate_ns + one.write_ns for one in sums.values())
        shares = [one.gil_share for one in sums.values() if one.gil_share is not None]
        return Work(
            self._gauge.kind,
            max(0, busy_ns - queued_ns),
            sum(one.sample_count for one in sums.values()),
            shares[0] if shares else None,
            any(one.is_drawing for one in sums.values()),
        )

    def staff(self, count: int) -> None:
        """Let there be so many workers, at least one and no more than there may be. What is loaded does not depend on it."""
        with self._lock:
            if not self._is_closed:
                self._staffing.aim(count)
                self._settle_staff()

    def _settle_staff(self) -> None:
        if self._staffing.settle():
            self._change_window(self._rooms.learn_staff(len(self._scheduler.hired_workers)))

    # --- the user's side

    def prime(self) -> None:
        """Let workers begin with the epoch before its first batch is asked for."""
        with self._lock:
            began_ns = time.perf_counter_ns()
            # Some at a time: workers load the first while the others are planned.
            while self._plan(self._refill):
                self._crew.flush()
            self.changed_over(began_ns)

    def _flight(self) -> Flight:
        arena = self._arena
        return Flight(len(self._records), arena.used_bytes(self._scheduler.free_slots), arena.total_bytes)

    def begin_epoch(self, trail: Trail, *, is_polled: bool = False) -> None:
        """Make the epoch of ``trail`` the one that ``next_batch`` gives, from where it starts."""
        start = trail.start
        self._trail = trail
        self._is_polled = is_polled
        self._gauge.begin_epoch(trail.epoch, start.step)
        self._steering.begin_epoch()
        self._given_count = start.step
        self._left_ns = 0  # what the user did between epochs says nothing about their loop
        prefetched, self._next_feed = self._next_feed, None
        if prefetched is not None and start == Cursor(prefetched.epoch):
            self._feed = prefetched
            return
        if prefetched is not None:
            self._abandon(prefetched.epoch)
        self._feed = self._setup.make_feed(start)

    def leave_epoch(self) -> None:
        """Forget what is left of the epoch; the next may begin."""
        feed, self._feed = self._feed, None
        self._gauge.end_epoch(self._left_ns)
        if feed is not None and not self._is_closed:
            self._abandon(feed.epoch)

    def _abandon(self, epoch: int) -> None:
        records = self._records
        wanted = {batch for batch, record in records.items() if record.plan.epoch != epoch}
        left = [task for task, entry in self._tasks.items() if entry.batch not in wanted]
        self._crew.recall(left)
        self._tell(EpochAbandoned(epoch))

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
                if self._is_closed:
                    self._tear_down()

    def _next_batch(self, waits: bool) -> Any:
        feed = self._feed
        if self.owner_pid != os.getpid():
            raise LoaderClosedError(_MSG_FORKED)
        if feed is None or self._is_closed:
            raise LoaderClosedError(_MSG_CLOSED)
        asked_ns = time.perf_counter_ns()
        deadline = asked_ns / 1e9 + self._setup.timeout_s if self._setup.timeout_s else None
        self._plan()
        if not self._delivered:  # it may be there, if it was asked for before and not waited for
            self._tell(BatchWanted(feed.epoch, asked_ns - self._left_ns if self._left_ns else 0))
        while self._error is not None or not self._delivered:
            if self._error is not None:  # it comes before what is delivered: a batch that was passed over had it
                error, self._error = self._error, None
                self._note_wait(asked_ns)
                raise error
            self._check_end(feed, asked_ns)
            if waits:
                self._wait(deadline)
            elif not self._look_around():
                return NOTHING
        if not self._setup.is_lazy:
            self._plan()
            self._crew.flush()
        left_ns = time.perf_counter_ns()
        if not self._is_polled:
            # As `Gauge.given`, which would be another call for every batch.
            gauge = self._gauge
            gauge.waited_ns += left_ns - asked_ns
            gauge.batch_count += 1
            if left_ns > gauge.next_ns:
                gauge.note(self._left_ns, asked_ns, left_ns)
                self._steering.consider()
        self._left_ns = left_ns
        return self._delivered.pop(0)

    def _note_wait(self, asked_ns: int) -> None:
        """The loop waited, and gets an exception for it."""
        if not self._is_polled and self._left_ns:
            self._left_ns = time.perf_counter_ns()
            self._gauge.waited_ns += self._left_ns - asked_ns

    def _check_end(self, feed: Feed, asked_ns: int) -> None:
        if not feed.is_exhausted or self._scheduler.remaining(feed.epoch):
            return
        if feed.error is not None:
            error, feed.error = feed.error, None  # told once; then the epoch is over
            raise error
        self._feed = None
        if not self._is_polled:
            self.ended(asked_ns)
        emptiness = None if self._given_count or self._trail is None else self._trail.ledger.emptiness()
        if emptiness is not None:
            raise emptiness
        raise EpochEnd

    def _wait(self, deadline: float | None) -> None:
        """The one place where the user's thread waits: for news, a death, the time-out, a look at the workers, or close."""
        if self._is_closed:
            raise LoaderClosedError(_MSG_CLOSED)
        now_ns = time.perf_counter_ns()
        now = now_ns / 1e9
        timeout_s = None if deadline is None else deadline - now
        if timeout_s is not None and timeout_s <= 0:
            raise self._troubles.timeout_error()
        watch = self._setup.watch
        if watch is not None:
            if now >= self._next_look:
                self._troubles.look(self._scheduler.grain_s / min(self._setup.grain_size, _LONG_GRAIN))
                self._next_look = time.perf_counter() + watch.look_s
            timeout_s = watch.look_s if timeout_s is None else min(timeout_s, watch.look_s)
        if self._delivery.is_cooling:
            timeout_s = _COOLING_LOOK_S  # a slot may become free at any moment, and nobody says so
        news = self._crew.receive(timeout_s)
        self._gauge.blocked_ns += time.perf_counter_ns() - now_ns
        for worker, message in news:
            self._hear(worker, message)
        self._plan()

    def _look_around(self) -> bool:
        """Hear what there is to hear without waiting; whether there was anything."""
        news = self._crew.receive(0)
        for worker, message in news:
            self._hear(worker, message)
        self._plan()
        return bool(news)

    def close(self) -> None:
        """Stop all workers and let go of all memory that the user does not look into. Idempotent.

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
        self._crew.wake()
        if self._driver == threading.get_ident():
            return
        with self._lock:
            self._tear_down()

    def _tear_down(self) -> None:
        if self._is_down:
            return
        self._is_down = True
        self._scheduler.handle(Closed())
        self._records.clear()
        self._setup.close()

    # --- planning

    def _plan(self, most: int | None = None) -> bool:
        """Free what the user let go of, and plan as many batches as there is room for; whether there may be more to plan."""
        for slot in self._delivery.ended_slots():
            self._tell(SlotFreed(slot))
        self._settle_staff()
        # Several at a time: their messages go out together.
        room = self._scheduler.room
        if room < self._refill:
            return False
        for _ in range(room if most is None else most):
            planned = self._take_planned()
            if planned is None:
                return False
            batch = BatchId(self._batch_count)
            self._batch_count += 1
            self._records[batch] = Record(planned)
            self._tell(BatchPlanned(batch, planned.epoch, planned.grain_count, planned.worker))
        return True

    def _take_planned(self) -> PlannedBatch | None:
        """The next batch of this epoch, or the first of the next while there is nothing else to do."""
        feed = self._feed
        if feed is None:
            return None
        planned = feed.take()
        if planned is None:
            if not (feed.is_exhausted and feed.error is None and self._setup.prefetches_epochs):
                return None
            if self._next_feed is None:
                self._next_feed = self._setup.make_feed(Cursor(feed.epoch + 1))
            return self._next_feed.take()
        if planned.worker is not None and isinstance(feed, StreamFeed) and feed.opening(planned.worker):
            self._staffing.open_share(planned.worker, feed)
        return planned

    # --- what workers say

    def _hear(self, worker: WorkerId, message: FromWorker | Death) -> None:
        match message:
            case RowsLoaded() | PackedLoaded():
                self._exchange.loaded(worker, message)
            case Started():
                self._gauge.started(worker, self._crew.pids().get(worker))
                self._tell(WorkerReady(worker))
            case Unplaced(task, nbytes, layout):
                self._exchange.unplaced(worker, task, nbytes, layout)
            case Mismatched(task):
                self._tasks.pop(task, None)
                self._tell(TaskMismatched(worker, task))
            case Emptied():
                self._on_empty(worker, message)
            case LoadFailed():
                self._on_failed(worker, message)
            case Stack():
                pass  # asked for, and too late
            case StartFailed(failure):
                # Nothing that this engine starts would fare better.
                self.close()
                self._error = start_error(worker, failure)
            case Death():
                self._gauge.ended(worker)
                self._troubles.died(worker, message)
                self._gauge.mark("death", worker, self._troubles.last_death)
                self._staffing.note_gone()
                if self._troubles.is_storm and not self._is_closed:
                    self._do(FailWorkers(worker))
            case _:
                assert_never(message)

    def _on_empty(self, worker: WorkerId, message: Emptied) -> None:
        entry = self._tasks.pop(message.task, None)
        record = None if entry is None else self._records.get(entry.batch)
        if self._setup.stream is not None:
            self._setup.stream.decide(shards_itself=message.shards_itself)
        if record is not None:
            self._stream_loaded(record, 0, None)
            if message.bad:
                if not self._troubles.left_out(worker, record, message.task, message.bad):
                    return
                assert record.mend is not None
                self._note_bad(record)
        self._tell(TaskEmpty(worker, message.task))

    def _on_failed(self, worker: WorkerId, message: LoadFailed) -> None:
        entry = self._tasks.get(message.task)
        record = None if entry is None else self._records.get(entry.batch)
        if record is not None and self._setup.stream is not None:
            record.row_count = message.row_count
            self._setup.stream.decide(shards_itself=False)
            self._stream_loaded(record, message.row_count, None)
        self._troubles.load_failed(worker, message)

    def _stream_loaded(self, record: Record, row_count: int, state: Any) -> None:
        if isinstance(self._feed, StreamFeed) and self._feed.epoch == record.plan.epoch:
            assert record.plan.worker is not None
            self._feed.loaded(record.plan.worker, row_count, record.plan.row_count, state)

    def _learn_size(self, nbytes: int) -> None:
        """Batches of this size are in flight: hold their number to what fits."""
        self._change_window(self._rooms.learn_size(nbytes))

    def _change_window(self, window: int | None) -> None:
        if window is not None:
            self._refill = max(1, window // _REFILL_SHARE)
            self._tell(WindowChanged(window))

    # --- what the scheduler asks

    def _tell(self, event: Event) -> None:
        for action in self._scheduler.handle(event):
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Send():
                self._exchange.send(action)
            case Deliver(batch, slot):
                self._deliver(batch, slot)
            case Place(worker, task, batch, slot):
                self._exchange.place(worker, task, self._records[batch], slot)
            case Drop(worker, task):
                self._tasks.pop(task, None)
                self._crew.send(worker, DropTask(task))
            case Grow():
                self._grow()
            case DeliverError(batch, task):
                record = self._records.pop(batch)
                self._error = batch_error(record, task, self._troubles.name)
                self._gauge.mark("failure", LOOP, f"{type(self._error).__name__}: {self._error}")
                self._note_failed(record)
            case Reload(batch):
                before = self._records[batch]
                plan = before.plan
                if before.mend is not None and plan.indices is not None:
                    plan = before.mend.apply(plan, self._setup.grain_size)
                self._records[batch] = Record(plan, before)
            case Pass(batch):
                record = self._records.pop(batch)
                if not self._note_bad(record) and self._trail is not None:
                    self._trail.delivered(record, 0)
            case Forget(batch):
                self._records.pop(batch, None)
            case StartWorker(worker):
                self._gauge.restarted(worker)
                self._staffing.replace(worker, self._feed)
            case StopWorker(worker):
                self._gauge.ended(worker)
                self._staffing.stop(worker)
                self._troubles.forget(worker)
            case FailWorkers():
                self.close()
                self._error = workers_error(self._troubles.last_death)
            case FailMemory():
                self._fail_memory()
            case _:
                assert_never(action)

    def _grow(self) -> None:
        slot = self._rooms.add_slot()
        self._tell(GrowthRefused() if slot is None else SlotsAdded((slot,)))

    def _fail_memory(self) -> None:
        ended = self._rooms.collect()
        for slot in ended:
            self._tell(SlotFreed(slot))
        if ended and self._feed is not None:
            self._tell(BatchWanted(self._feed.epoch))
            return
        self._error = self._rooms.error(self._scheduler.held_slots)

    def _deliver(self, batch: BatchId, slot: SlotId) -> None:
        record = self._records.pop(batch)
        if record.packed is None:
            assert record.layout is not None
            value = self._delivery.rows(slot, record.layout, record.row_count, record.beside)
        else:
            try:
                value = self._delivery.tree(slot, record.packed)
            except Exception as error:  # the user's objects are built again here, and may raise anything
                self._note_failed(record)
                place = f"position {record.plan.first_position} of epoch {record.plan.epoch}"
                failure = Failure.of(error, "receiving a batch (an object of it cannot be built again in this process)")
                self._error = failure.exception(place)
                return
        self._gauge.sample_count += record.row_count
        record.let_go()
        if self._setup.mender.is_active and self._note_bad(record):
            return
        if self._trail is not None:
            self._trail.delivered(record, 0 if self._feed is None else self._feed.share_count)
        self._given_count += 1
        self._delivered.append(value)

    def _note_bad(self, record: Record) -> bool:
        """Enter a batch into the ledger, with its bad samples; whether there are more of them than may be."""
        if self._trail is None:
            return False
        for sample in () if record.mend is None else record.mend.done:
            self._gauge.outcomes[sample.outcome] += 1
            self._gauge.mark("bad sample", LOOP, str(sample))
        error = self._trail.note_bad(record, self._setup.epoch_length)
        if error is not None:
            self._note_failed(record)
            self._error = error
        return error is not None

    def _note_failed(self, record: Record) -> None:
        record.let_go()
        if self._trail is not None:
            self._trail.failed(record)
