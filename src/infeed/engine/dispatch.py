"""Plan batches, send their tasks to workers and handle the results, including the expected batch layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, final

from infeed.collate.layout import Layout, LayoutPool
from infeed.engine.faults import Faults
from infeed.engine.output import BatchOutput
from infeed.engine.planning import Feed, PlannedBatch, StreamFeed
from infeed.engine.records import EngineSetup, Record, Task
from infeed.engine.scaling import WorkerScaling
from infeed.engine.slots import SlotAllocator
from infeed.plan.state import Cursor
from infeed.scheduler.messages import (
    BatchId,
    BatchPlanned,
    EpochAbandoned,
    Event,
    PlaceRefused,
    Send,
    SlotFreed,
    SlotId,
    TaskEmpty,
    TaskId,
    TaskLoaded,
    TaskMismatched,
    TaskUnplaced,
    WindowChanged,
    WorkerId,
)
from infeed.scheduler.scheduler import Scheduler
from infeed.workers.protocol import DropTask, Emptied, LoadFailed, LoadGrains, LoadNext, PackedLoaded, PlaceTask, RowsLoaded

# Plan batches when 1/4 of those in flight has been delivered. One at a time would cost a system call each; waiting for half
# would starve the workers.
_REFILL_SHARE: Final = 4
# During an epoch, prefetch at most this many batches of the next epoch per worker thread. More would take the GIL from the
# training loop; the rest is planned when the epoch ends.
_SPARING: Final = 2


@final
class BatchInput:
    """Plans the batches of one engine; ``records`` and ``tasks`` are shared with the engine."""

    def __init__(
        self,
        setup: EngineSetup,
        scheduler: Scheduler,
        records: dict[BatchId, Record],
        tasks: dict[TaskId, Task],
        allocator: SlotAllocator,
        scaling: WorkerScaling,
        handle: Callable[[Event], None],
    ) -> None:
        self._setup, self._scheduler, self._delivery = setup, scheduler, setup.delivery
        self._records, self._tasks = records, tasks
        self._allocator, self._scaling, self._handle = allocator, scaling, handle
        self._refill = max(1, allocator.window // _REFILL_SHARE)
        self._batch_count = 0
        self.feed: Feed | None = None  # of the epoch in progress; None between epochs
        self._returned: PlannedBatch | None = None  # taken from the feed, planned next
        self._next_feed: Feed | None = None
        self._next_count = 0  # batches taken from it
        self._is_sparing = setup.metrics.kind == "thread"
        self._binds_batches = setup.binds_batches

    # --- epochs

    def begin(self, start: Cursor, asked: Iterator[Any] | None = None) -> None:
        """Begin the epoch at ``start``. Its first batches may already be planned behind those of the previous epoch."""
        prefetched, self._next_feed, self._next_count = self._next_feed, None, 0
        self._returned = None
        self._is_sparing = self._setup.metrics.kind == "thread"
        if prefetched is not None and start == Cursor(prefetched.epoch):
            self.feed = prefetched
            return
        if prefetched is not None:
            self.abandon(prefetched.epoch)
        self.feed = self._setup.make_feed(start, asked)

    def abandon(self, epoch: int) -> None:
        """Drop all planned batches of an epoch."""
        records = self._records
        wanted = {batch for batch, record in records.items() if record.plan.epoch != epoch}
        left = [task for task, entry in self._tasks.items() if entry.batch not in wanted]
        self._setup.pool.recall(left)
        self._handle(EpochAbandoned(epoch))

    def end(self) -> None:
        """End the epoch and fill the window with batches of the next."""
        if not self._setup.is_lazy:
            self._is_sparing = False
            self.plan()
            self._setup.pool.flush()
        self.feed = None

    # --- planning

    def plan_some(self) -> bool:
        """Plan one refill of batches, which are sent together. Return whether more can be planned."""
        return self.plan(self._refill)

    def plan(self, most: int | None = None) -> bool:
        """Free the slots that user code released, then plan batches up to the window. Return whether more can be planned."""
        for slot in self._delivery.ended_slots():
            self._handle(SlotFreed(slot))
        self.settle_workers()
        # Plan several at a time, so that their messages are sent together.
        room = self._scheduler.room
        if room < self._refill:
            return False
        for _ in range(room if most is None else most):
            planned = self._take()
            if planned is None:
                return False
            batch = BatchId(self._batch_count)
            self._batch_count += 1
            self._records[batch] = Record(planned)
            worker = planned.worker
            if self._binds_batches:
                worker = WorkerId(planned.step % len(self._setup.workers))
            self._handle(BatchPlanned(batch, planned.epoch, planned.grain_count, worker, planned.indices is None))
        return True

    def _take(self) -> PlannedBatch | None:
        """Return the next batch of this epoch or, if it is exhausted, of the next epoch."""
        feed = self.feed
        if feed is None:
            return None
        planned, self._returned = self._returned or feed.take(), None
        if planned is None:
            if not (feed.is_exhausted and feed.error is None and self._setup.prefetches_epochs):
                return None
            if self._is_sparing and self._next_count >= _SPARING * len(self._scheduler.active_workers):
                return None
            if self._next_feed is None:
                self._next_feed = self._setup.make_feed(Cursor(feed.epoch + 1), None)
            self._next_count += 1
            return self._next_feed.take()
        if planned.worker is not None and isinstance(feed, StreamFeed) and feed.opening(planned.worker):
            self._scaling.open_share(planned.worker, feed)
        return planned

    def put_back(self, planned: PlannedBatch) -> None:
        """Plan this batch next: it was taken from the feed but could not be gathered."""
        self._returned = planned

    def delivered(self) -> None:
        """Note that a batch, or an exception in its place, was delivered."""
        if self.feed is not None:
            self.feed.delivered()

    def stream_loaded(self, record: Record, row_count: int, state: Any) -> None:
        """Pass the row count of an iterable dataset's batch to the feed; a short batch ends the share."""
        if isinstance(self.feed, StreamFeed) and self.feed.epoch == record.plan.epoch:
            assert record.plan.worker is not None
            self.feed.loaded(record.plan.worker, row_count, record.plan.row_count, state)

    # --- window and worker count

    def settle_workers(self) -> None:
        """Start or release workers to reach the target count, and adapt the window to it."""
        if self._scaling.settle():
            self.change_window(self._allocator.learn_worker_count(len(self._scheduler.active_workers)))

    def learn_size(self, nbytes: int) -> None:
        """Adapt the window to a batch of ``nbytes``."""
        self.change_window(self._allocator.learn_size(nbytes))

    def change_window(self, window: int | None) -> None:
        """Set the number of batches in flight; ``None`` keeps it."""
        if window is not None:
            self._refill = max(1, window // _REFILL_SHARE)
            self._handle(WindowChanged(window))


@final
class Dispatcher:
    """Sends tasks to the workers of one engine and handles their results; ``records`` and ``tasks`` are shared with it."""

    def __init__(
        self,
        setup: EngineSetup,
        records: dict[BatchId, Record],
        tasks: dict[TaskId, Task],
        allocator: SlotAllocator,
        faults: Faults,
        batch_input: BatchInput,
        output: BatchOutput,
        handle: Callable[[Event], None],
    ) -> None:
        self._setup, self._pool = setup, setup.pool
        self._records, self._tasks = records, tasks
        self._allocator, self._faults = allocator, faults
        self._input, self._output, self._handle = batch_input, output, handle
        self._layout: Layout | None = None  # expected for the next batch
        self._layouts = LayoutPool()

    # --- to workers

    def send(self, action: Send) -> None:
        record = self._records[action.batch]
        plan = record.plan
        layout = record.layout or self._layout
        block = None
        if action.slot is not None:
            needed = layout.offsets(plan.row_count)[1] if layout is not None else 0
            block = self._allocator.block(action.slot, needed)
        if plan.indices is None:
            self._tasks[action.task] = Task(action.worker, action.batch, 0, plan.row_count, layout)
            self._pool.send(
                action.worker, LoadNext(action.task, plan.epoch, plan.first_position, plan.row_count, block, layout)
            )
            return
        if block is not None and record.layout is None and not action.is_whole:
            record.layout = layout
        grain_size = self._setup.grain_size
        first_row = action.first_grain * grain_size
        indices = plan.indices
        if not action.is_whole:
            indices = indices[first_row : first_row + action.grain_count * grain_size]
        rows = None if plan.rows is None else plan.rows[first_row : first_row + len(indices)]
        self._tasks[action.task] = Task(action.worker, action.batch, first_row, len(indices), layout)
        self._pool.send(
            action.worker,
            LoadGrains(
                action.task, plan.epoch, plan.first_position, plan.row_count, first_row, block, layout,
                action.is_whole, indices, record.deaths is not None, rows,
            ),
        )  # fmt: skip

    def place(self, worker: WorkerId, task: TaskId, record: Record, slot: SlotId) -> None:
        block = self._allocator.block(slot, record.needed_bytes)
        if block is None:
            self._handle(PlaceRefused(worker, task))
        else:
            self._pool.send(worker, PlaceTask(task, block, record.layout))

    def drop(self, worker: WorkerId, task: TaskId) -> None:
        """Drop a task and ignore its result."""
        self._tasks.pop(task, None)
        self._pool.send(worker, DropTask(task))

    # --- from workers

    def loaded(self, worker: WorkerId, message: RowsLoaded | PackedLoaded) -> None:
        entry = self._tasks.pop(message.task, None)
        record = None if entry is None else self._records.get(entry.batch)
        if entry is not None and record is not None:
            record.row_count += message.row_count
            record.parts.append((worker, entry.first_row, message.row_count, message.elapsed_ns))
            if isinstance(message, PackedLoaded):
                record.packed = message.packed
                self._input.learn_size(record.needed_bytes)
            else:
                layout = message.layout
                if layout is None:
                    layout = entry.layout
                elif layout is not entry.layout:
                    layout = self._layout = self._layouts.interned(layout)
                record.layout = layout
                record.beside[entry.first_row] = message.beside
            if self._setup.stream is not None:
                self._setup.stream.decide(shards_itself=message.shards_itself)
                record.stream_state = message.stream_state
                self._input.stream_loaded(record, message.row_count, message.stream_state)
                if message.bad and not self._faults.left_out(worker, record, message.task, message.bad):
                    return
        self._handle(TaskLoaded(worker, message.task, message.elapsed_ns))

    def unplaced(self, worker: WorkerId, task: TaskId, nbytes: int, layout: Layout | None) -> None:
        entry = self._tasks.get(task)
        record = None if entry is None else self._records.get(entry.batch)
        if entry is not None and record is not None:
            record.needed_bytes = nbytes
            self._input.learn_size(nbytes)
            if layout is not None:
                layout = self._layouts.interned(layout)
                if self._layout is None:
                    self._layout = layout
                if record.layout is None:
                    record.layout = layout
                elif record.layout is not layout:
                    # Another part of this batch has a different layout.
                    del self._tasks[task]
                    self._pool.send(worker, DropTask(task))
                    self._handle(TaskMismatched(worker, task))
                    return
                self._tasks[task] = entry._replace(layout=layout)
        self._handle(TaskUnplaced(worker, task))

    def mismatched(self, worker: WorkerId, task: TaskId) -> None:
        """Handle a task whose samples differ in layout."""
        self._tasks.pop(task, None)
        self._handle(TaskMismatched(worker, task))

    def emptied(self, worker: WorkerId, message: Emptied) -> None:
        """Handle a task without rows: the iterable dataset has ended, or its remaining elements were bad."""
        entry = self._tasks.pop(message.task, None)
        record = None if entry is None else self._records.get(entry.batch)
        if self._setup.stream is not None:
            self._setup.stream.decide(shards_itself=message.shards_itself)
        if record is not None:
            self._input.stream_loaded(record, 0, message.stream_state)
            if message.bad:
                if not self._faults.left_out(worker, record, message.task, message.bad):
                    return
                assert record.bad_rows is not None
                self._output.note_bad(record)
        self._handle(TaskEmpty(worker, message.task))

    def failed(self, worker: WorkerId, message: LoadFailed) -> None:
        """Handle a failed task.

        In an iterable dataset, all positions of the batch are used up: the next element belongs to the next batch.
        """
        entry = self._tasks.get(message.task)
        record = None if entry is None else self._records.get(entry.batch)
        if record is not None and self._setup.stream is not None:
            record.row_count = record.plan.row_count
            self._setup.stream.decide(shards_itself=message.shards_itself)
            self._input.stream_loaded(record, record.plan.row_count, None)
        self._faults.load_failed(worker, message)
