"""What the user's loop is to be given: batches, or what is raised in their place; all of it noted in the epoch's trail."""

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
    """Belongs to one engine, which gives away what lies here."""

    def __init__(self, setup: EngineSetup, name: Callable[[WorkerId], str]) -> None:
        """``name`` is what people call a worker."""
        self._setup, self._delivery, self._metrics = setup, setup.delivery, setup.metrics
        self._name = name
        self._batches: list[tuple[Any, Record, int]] = []
        self.error: BaseException | None = None  # it comes before the batches: one that was passed over had it
        self._progress: Progress | None = None
        self._count = 0  # batches of this epoch, from its beginning

    def begin(self, progress: Progress) -> None:
        """Note what follows in this trail."""
        self._progress = progress
        self._count = progress.start.step
        self._batches.clear()
        self.error = None

    @property
    def is_empty(self) -> bool:
        """Whether no batch lies here."""
        return not self._batches

    def take(self) -> Any:
        """The batch that lies here. To be called last: from here on it counts as given."""
        value, record, share_count = self._batches.pop(0)
        self._count += 1
        if self._progress is not None:
            self._progress.delivered(record, share_count)
        return value

    def end(self, carried: StreamCursor | None) -> None:
        """All batches of the epoch have been delivered; its stream hands this on to the next."""
        if self._progress is not None:
            self._progress.carried = carried

    def take_error(self) -> BaseException:
        """What is to be raised. No local of who raises it: the traceback has their frame, and would keep the loader alive."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def deliver(self, record: Record, slot: SlotId, share_count: int) -> None:
        """Make a batch of what is in the slot; it is of one of so many shares of a stream, or of none."""
        if record.packed is None:
            assert record.layout is not None
            value = self._delivery.rows(slot, record.layout, record.row_count, record.beside)
        else:
            try:
                value = self._delivery.tree(slot, record.packed)
            except Exception as error:  # the user's objects are built again here, and may raise anything
                self._note_failed(record)
                place = f"position {record.plan.first_position} of epoch {record.plan.epoch}"
                failure = Failure.of(kept(error), "receiving a batch (an object of it cannot be built again in this process)")
                self.error = failure.exception(place)
                return
        self._metrics.sample_count += record.row_count
        record.let_go()
        if self._setup.bad_sample_handler.is_active and self.note_bad(record):
            return
        self._batches.append((value, record, share_count))

    def fail(self, record: Record, task: TaskId | None) -> None:
        """Raise what went wrong with a batch, in its turn."""
        self.error = batch_error(record, task, self._name)
        self._metrics.mark("failure", LOOP, f"{type(self.error).__name__}: {text_of(self.error)}")
        self._note_failed(record)

    def pass_over(self, record: Record) -> None:
        """Nothing is left of a batch, and the next one follows."""
        if not self.note_bad(record) and self._progress is not None:
            self._progress.delivered(record, 0)

    def note_bad(self, record: Record) -> bool:
        """Enter a batch into the ledger, with its bad samples; whether there are more of them than may be."""
        if self._progress is None:
            return False
        for sample in () if record.bad_rows is None else record.bad_rows.done:
            self._metrics.outcomes[sample.outcome] += 1
            self._metrics.mark("bad sample", LOOP, str(sample))
        error = self._progress.note_bad(record, self._setup.epoch_length)
        if error is not None:
            self._note_failed(record)
            self.error = error
        return error is not None

    def emptiness(self) -> SampleError | None:
        """What to raise at the end of an epoch that gave nothing, if it had anything to give."""
        return None if self._count or self._progress is None else self._progress.error_budget.emptiness()

    def _note_failed(self, record: Record) -> None:
        record.let_go()
        if self._progress is not None:
            self._progress.failed(record)
