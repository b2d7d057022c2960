"""Batches, or exceptions in their place, that are ready for the training loop; recorded in the epoch's progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from infeed.engine.faults import batch_error
from infeed.engine.progress import Progress
from infeed.engine.records import EngineSetup, Record
from infeed.errors import SampleError
from infeed.metrics.statistics import LOOP
from infeed.plan.state import StreamCursor
from infeed.scheduler.messages import SlotId, TaskId, WorkerId
from infeed.workers.exceptions import Failure, kept, text_of


@final
class BatchOutput:
    """Holds the ready batches and the pending error of one engine."""

    def __init__(self, setup: EngineSetup, name: Callable[[WorkerId], str]) -> None:
        """Create an output; ``name`` returns the display name of a worker."""
        self._setup, self._delivery, self._metrics = setup, setup.delivery, setup.metrics
        self._name = name
        self._batches: list[tuple[Any, Record, int]] = []
        self.error: BaseException | None = None  # raised before the batches: a skipped batch before them caused it
        self._progress: Progress | None = None
        self._count = 0  # batches since the beginning of the epoch

    def begin(self, progress: Progress) -> None:
        """Record all further deliveries in ``progress``."""
        self._progress = progress
        self._count = progress.start.step
        self._batches.clear()
        self.error = None

    @property
    def is_empty(self) -> bool:
        """Whether no batch is ready."""
        return not self._batches

    def take(self) -> Any:
        """Return the ready batch. Call this last: the batch then counts as delivered."""
        value, record, share_count = self._batches.pop(0)
        self._count += 1
        if self._progress is not None:
            self._progress.delivered(record, share_count)
        return value

    def end(self, carried: StreamCursor | None) -> None:
        """End the epoch; ``carried`` is the state that an iterable dataset passes to the next."""
        if self._progress is not None:
            self._progress.carried = carried

    def take_error(self) -> BaseException:
        """Return the error to raise. Never keep it in a local variable: its traceback would keep the frame and loader alive."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def deliver(self, record: Record, slot: SlotId, share_count: int) -> None:
        """Make a batch from the slot. ``share_count`` is the number of shares of an iterable dataset, or 0."""
        if record.packed is None:
            assert record.layout is not None
            value = self._delivery.rows(slot, record.layout, record.row_count, record.beside)
        else:
            try:
                value = self._delivery.tree(slot, record.packed)
            except Exception as error:  # unpickling the user's objects may raise anything
                self._note_failed(record)
                place = f"position {record.plan.first_position} of epoch {record.plan.epoch}"
                failure = Failure.of(kept(error), "receiving a batch (an object of it cannot be built again in this process)")
                self.error = failure.exception(place)
                return
        self._metrics.add_samples(record.row_count)
        record.let_go()
        if self._setup.bad_sample_handler.is_active and self.note_bad(record):
            return
        self._batches.append((value, record, share_count))

    def fail(self, record: Record, task: TaskId | None) -> None:
        """Set the error of a failed batch when the batch is due."""
        self.error = batch_error(record, task, self._name)
        self._metrics.mark("failure", LOOP, f"{type(self.error).__name__}: {text_of(self.error)}")
        self._note_failed(record)

    def pass_over(self, record: Record) -> None:
        """Skip a batch whose samples were all bad."""
        if not self.note_bad(record) and self._progress is not None:
            self._progress.delivered(record, 0)

    def note_bad(self, record: Record) -> bool:
        """Count the bad samples of a batch; return whether they exceed the error budget."""
        if self._progress is None:
            return False
        for sample in () if record.bad_rows is None else record.bad_rows.done:
            self._metrics.add_outcome(sample.outcome, str(sample))
        error = self._progress.note_bad(record, self._setup.epoch_length)
        if error is not None:
            self._note_failed(record)
            self.error = error
        return error is not None

    def emptiness(self) -> SampleError | None:
        """Return the error for an epoch that yielded nothing because of bad samples, if it did."""
        return None if self._count or self._progress is None else self._progress.error_budget.emptiness()

    def _note_failed(self, record: Record) -> None:
        record.let_go()
        if self._progress is not None:
            self._progress.failed(record)
