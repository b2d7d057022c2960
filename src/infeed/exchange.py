"""What goes out to workers and comes back: tasks, and the layout that batches are expected to have."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from infeed.batch.layout import Layout, LayoutPool
from infeed.handout import Handout
from infeed.intake import Intake
from infeed.records import EngineSetup, Record, Task
from infeed.rooms import Rooms
from infeed.scheduler.messages import (
    BatchId,
    Event,
    PlaceRefused,
    Send,
    SlotId,
    TaskEmpty,
    TaskId,
    TaskLoaded,
    TaskMismatched,
    TaskUnplaced,
    WorkerId,
)
from infeed.troubles import Troubles
from infeed.workers.messages import (
    DropTask,
    Emptied,
    LoadFailed,
    LoadGrains,
    LoadNext,
    PackedLoaded,
    PlaceTask,
    RowsLoaded,
)


@final
class Exchange:
    """Belongs to one engine, and works on its books."""

    def __init__(
        self,
        setup: EngineSetup,
        records: dict[BatchId, Record],
        tasks: dict[TaskId, Task],
        rooms: Rooms,
        troubles: Troubles,
        intake: Intake,
        handout: Handout,
        tell: Callable[[Event], None],
    ) -> None:
        self._setup, self._crew = setup, setup.crew
        self._records, self._tasks = records, tasks
        self._rooms, self._troubles = rooms, troubles
        self._intake, self._handout, self._tell = intake, handout, tell
        self._layout: Layout | None = None  # what the next batch is expected to look like
        self._layouts = LayoutPool()

    # --- what goes out

    def send(self, action: Send) -> None:
        record = self._records[action.batch]
        plan = record.plan
        layout = record.layout or self._layout
        block = None
        if action.slot is not None:
            needed = layout.offsets(plan.row_count)[1] if layout is not None else 0
            block = self._rooms.block(action.slot, needed)
        if plan.indices is None:
            self._tasks[action.task] = Task(action.worker, action.batch, 0, plan.row_count, layout)
            self._crew.send(
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
        self._crew.send(
            action.worker,
            LoadGrains(
                action.task, plan.epoch, plan.first_position, plan.row_count, first_row, block, layout,
                action.is_whole, indices, record.deaths is not None, rows,
            ),
        )  # fmt: skip

    def place(self, worker: WorkerId, task: TaskId, record: Record, slot: SlotId) -> None:
        block = self._rooms.block(slot, record.needed_bytes)
        if block is None:
            self._tell(PlaceRefused(worker, task))
        else:
            self._crew.send(worker, PlaceTask(task, block, record.layout))

    def drop(self, worker: WorkerId, task: TaskId) -> None:
        """Whatever it comes to, nobody wants it."""
        self._tasks.pop(task, None)
        self._crew.send(worker, DropTask(task))

    # --- what comes back

    def loaded(self, worker: WorkerId, message: RowsLoaded | PackedLoaded) -> None:
        entry = self._tasks.pop(message.task, None)
        record = None if entry is None else self._records.get(entry.batch)
        if entry is not None and record is not None:
            record.row_count += message.row_count
            record.parts.append((worker, entry.first_row, message.row_count, message.elapsed_ns))
            if isinstance(message, PackedLoaded):
                record.packed = message.packed
                self._intake.learn_size(record.needed_bytes)
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
                self._intake.stream_loaded(record, message.row_count, message.stream_state)
                if message.bad and not self._troubles.left_out(worker, record, message.task, message.bad):
                    return
        self._tell(TaskLoaded(worker, message.task, message.elapsed_ns))

    def unplaced(self, worker: WorkerId, task: TaskId, nbytes: int, layout: Layout | None) -> None:
        entry = self._tasks.get(task)
        record = None if entry is None else self._records.get(entry.batch)
        if entry is not None and record is not None:
            record.needed_bytes = nbytes
            self._intake.learn_size(nbytes)
            if layout is not None:
                layout = self._layouts.interned(layout)
                if self._layout is None:
                    self._layout = layout
                if record.layout is None:
                    record.layout = layout
                elif record.layout is not layout:
                    # Another part of this batch came out differently.
                    del self._tasks[task]
                    self._crew.send(worker, DropTask(task))
                    self._tell(TaskMismatched(worker, task))
                    return
                self._tasks[task] = entry._replace(layout=layout)
        self._tell(TaskUnplaced(worker, task))

    def mismatched(self, worker: WorkerId, task: TaskId) -> None:
        """Its samples differ in layout."""
        self._tasks.pop(task, None)
        self._tell(TaskMismatched(worker, task))

    def emptied(self, worker: WorkerId, message: Emptied) -> None:
        """The stream had ended, or what was left of it was bad."""
        entry = self._tasks.pop(message.task, None)
        record = None if entry is None else self._records.get(entry.batch)
        if self._setup.stream is not None:
            self._setup.stream.decide(shards_itself=message.shards_itself)
        if record is not None:
            self._intake.stream_loaded(record, 0, message.stream_state)
            if message.bad:
                if not self._troubles.left_out(worker, record, message.task, message.bad):
                    return
                assert record.mend is not None
                self._handout.note_bad(record)
        self._tell(TaskEmpty(worker, message.task))

    def failed(self, worker: WorkerId, message: LoadFailed) -> None:
        """Of a stream, all positions of the batch are used up: what it reads next belongs to the next batch."""
        entry = self._tasks.get(message.task)
        record = None if entry is None else self._records.get(entry.batch)
        if record is not None and self._setup.stream is not None:
            record.row_count = record.plan.row_count
            self._setup.stream.decide(shards_itself=message.shards_itself)
            self._intake.stream_loaded(record, record.plan.row_count, None)
        self._troubles.load_failed(worker, message)
