"""Batches between plan and delivery, progress of an epoch (the cursor to resume from), and lineage for ``explain``."""

from __future__ import annotations

import reprlib
from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias, final

from infeed.collate.layout import Layout
from infeed.collate.packing import Handed, Packed
from infeed.engine.bad_samples import BadRows, ErrorBudget
from infeed.engine.planning import PlannedBatch
from infeed.errors import SampleError
from infeed.formatting import format_count
from infeed.plan.batches import BatchPlan
from infeed.plan.order import plain_indices
from infeed.plan.seeds import derive
from infeed.plan.state import Cursor, ShareCursor, StreamCursor
from infeed.scheduler.messages import BatchId, TaskId, WorkerId
from infeed.workers.exceptions import Failure

# Worker, first row, number of rows, duration in ns. A plain tuple for speed: one is created per task.
Part: TypeAlias = tuple[WorkerId, int, int, int]


class Loss(NamedTuple):
    """The death of a worker that had a task of the batch."""

    text: str
    sample: tuple[Any, int | None] | None  # index and position of the sample it was loading, if reported


_NOTHING: Final[dict[int, list[list[Any]]]] = {}


@final
class Record:
    """A batch between plan and delivery. One is created per batch, so rarely used fields are created on demand."""

    __slots__ = (
        "bad_rows",
        "beside",
        "deaths",
        "doom",
        "failures",
        "is_forgotten",
        "layout",
        "needed_bytes",
        "packed",
        "parts",
        "plan",
        "row_count",
        "stream_state",
    )  # fmt: skip

    def __init__(self, plan: PlannedBatch, before: Record | None = None) -> None:
        """Create a record; ``before`` is the earlier record of the same batch if it is reloaded."""
        self.plan = plan
        self.layout: Layout | None = None
        self.row_count = 0
        self.needed_bytes = 0
        self.packed: Packed | Handed | None = None
        self.parts: list[Part] = []
        self.stream_state: Any = None
        self.beside: dict[int, list[list[Any]]] = {}  # by first row of the task
        self.failures: dict[TaskId, tuple[WorkerId, Failure]] | None = None
        self.deaths: list[Loss] | None = None if before is None else before.deaths
        self.bad_rows: BadRows | None = None if before is None else before.bad_rows
        self.doom: BaseException | None = None  # raised in its place, if it cannot be loaded
        self.is_forgotten = False

    def add_rows(
        self, worker: WorkerId, first_row: int, row_count: int, elapsed_ns: int, layout: Layout, beside: list[list[Any]]
    ) -> None:
        """Note rows that a worker has written into the slot."""
        self.parts.append((worker, first_row, row_count, elapsed_ns))
        self.row_count += row_count
        self.layout = layout
        self.beside[first_row] = beside

    def add_packed(self, worker: WorkerId, row_count: int, elapsed_ns: int, packed: Packed | Handed) -> None:
        """Note that a worker has packed the batch into the slot."""
        self.parts.append((worker, 0, row_count, elapsed_ns))
        self.row_count += row_count
        self.packed = packed

    def need(self, nbytes: int) -> None:
        """Set the size of the batch, which a worker holds because its slot is too small."""
        self.needed_bytes = nbytes

    def agree(self, layout: Layout) -> bool:
        """Set the layout, unless a part of the batch has one; return whether it is this one."""
        if self.layout is None:
            self.layout = layout
        return self.layout is layout

    def keep_state(self, state: Any) -> None:
        """Set the state of the iterable dataset after this batch."""
        self.stream_state = state

    def take_state(self) -> Any:
        """Return that state and release it: it may be large, and only the latest is needed."""
        state, self.stream_state = self.stream_state, None
        return state

    def use_up(self) -> None:
        """Note that a batch of an iterable dataset has failed: the next element belongs to the next batch."""
        self.row_count = self.plan.row_count

    def begin_bad_rows(self) -> BadRows:
        """Return the bad rows, so that more can be added."""
        if self.bad_rows is None:
            self.bad_rows = BadRows(self.plan.indices)
        return self.bad_rows

    def add_failure(self, task: TaskId, worker: WorkerId, failure: Failure) -> None:
        self.failures = {**(self.failures or {}), task: (worker, failure)}

    def add_death(self, loss: Loss) -> None:
        self.deaths = [*(self.deaths or ()), loss]

    def give_up(self, error: BaseException | None) -> None:
        """Set the error to raise in place of the batch; ``None`` if it can still be loaded."""
        self.doom = error

    def forget(self) -> None:
        """Note that the batch is not delivered: its epoch was abandoned, or the dataset ended before it."""
        self.is_forgotten = True

    def sample(self, row: int | None) -> tuple[Any, int | None]:
        """Return index and position of a row: for an iterable dataset, the element number; without a row, all indices."""
        plan = self.plan
        if plan.indices is None:
            return (f"element {row}", row) if row is not None else (None, None)
        indices = plain_indices(plan.indices)
        if row is None or row >= len(indices):
            return indices, None
        first_row = row if self.bad_rows is None else self.bad_rows.first_row(row)
        return indices[row], plan.first_position + first_row

    def release(self) -> None:
        """Release the content of the batch; the rest of the record serves ``explain``.

        Release its exceptions too: their tracebacks reference the iteration, which would then never be freed.
        """
        self.failures = None
        self.doom = None
        self.beside = _NOTHING
        self.packed = None
        self.layout = None


class SentTask(NamedTuple):
    """Rows of a batch that a worker loads."""

    worker: WorkerId
    batch: BatchId
    record: Record
    first_row: int
    row_count: int
    layout: Layout | None

    @property
    def indices(self) -> list[Any]:
        """The indices of the rows; empty for an iterable dataset and for a batch that nobody waits for."""
        indices = self.record.plan.indices
        if indices is None or self.record.is_forgotten:
            return []
        return plain_indices(indices)[self.first_row : self.first_row + self.row_count]


# Latest batches whose records are kept for ``explain`` and ``replay``.
_KEPT: Final = 256


class PastBatch(NamedTuple):
    """A delivered or failed batch: its plan, the workers that loaded it, the number of attempts."""

    plan: PlannedBatch
    parts: list[Part]
    attempts: int
    row_count: int


@final
class Progress:
    """Delivered batches of one iteration; the engine records each batch when it delivers it."""

    def __init__(self, start: Cursor, error_budget: ErrorBudget | None = None, stream: StreamCursor | None = None) -> None:
        """Start at ``start``; ``stream`` has the initial states of an iterable dataset's shares if ``start`` has none."""
        self.start = start
        self.error_budget = error_budget or ErrorBudget()
        self.error_budget.begin_epoch(start.epoch, start.bad_count)
        self._step = start.step
        self._position = start.position
        # Later steps that were delivered before this one, with the end position of each. For steps of an earlier run the
        # position is unknown: they are passed when the batch after them is delivered.
        self._ahead: dict[int, int | None] = dict.fromkeys(start.ahead)
        self._failed: Record | None = None
        self._recent: deque[Record] = deque(maxlen=_KEPT)
        self.is_over = False
        self._carried: StreamCursor | None = None
        self._shown: Cursor | None = None
        stream = start.stream or stream
        self.share_count = 0 if stream is None else len(stream.shares)
        self._turn = 0 if stream is None else stream.turn
        self._shares: dict[int, ShareCursor] = {} if stream is None else dict(enumerate(stream.shares))

    @property
    def epoch(self) -> int:
        return self.start.epoch

    def delivered(self, record: Record, share_count: int) -> None:
        """Note a delivered batch. ``share_count`` is the number of shares of an iterable dataset, or 0."""
        if self._failed is not None:
            # The training loop continued after a failed batch, so that batch is passed too.
            self._pass(self._failed)
            self._failed = None
        self.share_count = share_count
        self._recent.append(record)
        plan = record.plan
        if plan.step == self._step and plan.worker is None and not self._ahead:  # fast path: batches in order
            self._step, self._position = plan.step + 1, plan.stop
        else:
            self._pass(record)

    def failed(self, record: Record) -> None:
        """Note a batch that raised. If the run ends here, a resumed run loads the batch again."""
        if self._failed is not None:
            self._pass(self._failed)
        self._failed = record
        self._recent.append(record)

    def note_bad(self, record: Record) -> SampleError | None:
        """Count the bad samples of a batch; return the error to raise if they exceed the budget."""
        # Workers report bad samples in any order.
        bad = [] if record.bad_rows is None else sorted(record.bad_rows.done, key=attrgetter("position"))
        self.error_budget.note(bad, record.row_count)
        return self.error_budget.excess()

    def show(self, cursor: Cursor) -> None:
        """Set the cursor that the training loop has reached; later batches are still in transfer to the device."""
        self._shown = cursor

    def carry(self, stream: StreamCursor | None) -> None:
        """Set the state of an iterable dataset that the next epoch begins with."""
        self._carried = stream

    @property
    def carried(self) -> StreamCursor | None:
        """The state that the next epoch begins with; ``None`` if this one is not over."""
        return self._carried if self.is_over else None

    def end(self) -> None:
        """End the epoch; the cursor is now the start of the next."""
        self.is_over = True

    def cursor(self) -> Cursor:
        if self.is_over:
            return Cursor(self.epoch + 1, stream=self._carried)
        return self.reached() if self._shown is None else self._shown

    def reached(self) -> Cursor:
        """Return the cursor after the latest batch that the engine delivered."""
        ahead = tuple(sorted(self._ahead))
        # Bad samples of a batch that will be loaded again are counted then.
        failed = None if self._failed is None else self._failed.bad_rows
        bad_count = self.error_budget.bad_count - (0 if failed is None else len(failed.done))
        return Cursor(self.epoch, self._step, self._position, ahead, self._stream(), max(0, bad_count))

    def find(self, step: int) -> PastBatch | None:
        """Return the latest record of a step, if it is still kept."""
        # Copy atomically: another thread may call this while the training loop takes batches.
        recent = tuple(self._recent)
        record = next((record for record in reversed(recent) if record.plan.step == step), None)
        if record is None:
            return None
        return PastBatch(record.plan, record.parts, 1 + len(record.deaths or ()), record.row_count)

    def _pass(self, record: Record) -> None:
        plan = record.plan
        if plan.worker is not None:
            self._pass_share(plan.worker, record)
            return
        step = self._step
        while step in self._ahead:
            step += 1
        if step != plan.step:
            self._ahead[plan.step] = plan.stop
            return
        for passed in range(self._step, step):
            del self._ahead[passed]
        self._step, self._position = step + 1, plan.stop
        while (stop := self._ahead.get(self._step)) is not None:
            del self._ahead[self._step]
            self._step, self._position = self._step + 1, stop

    def _pass_share(self, worker: int, record: Record) -> None:
        before = self._shares.get(worker) or ShareCursor()
        is_ended = record.row_count < record.plan.row_count
        self._shares[worker] = ShareCursor(before.rows + record.row_count, is_ended, record.take_state())
        self._step = record.plan.step + 1
        self._position += record.row_count
        self._turn = worker + 1

    def _stream(self) -> StreamCursor | None:
        if not self._shares:
            return None
        return StreamCursor(self._turn, tuple(self._shares.get(number) or ShareCursor() for number in range(self.share_count)))


@final
@dataclass(frozen=True, slots=True)
class Loading:
    """The rows of a batch that one worker loaded, and the time it took."""

    worker: int
    first_row: int
    row_count: int
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a batch comes from.

    Attributes:
        epoch: Epoch of the batch.
        step: Number of the batch in its epoch, for this loader, from 0.
        first_position: Position of its first sample in the epoch's order, which all ranks share.
        indices: Dataset indices of the batch; ``None`` for an iterable dataset.
        seeds: One seed per ``grain_size`` samples, in order, for ``random``, ``numpy.random`` and torch.
        grain_size: Number of samples that share a seed.
        attempts: Number of attempts to load it; 0 if it is not loaded yet, or its record is no longer kept.
        loadings: The workers that loaded it, with rows and durations. Empty if ``attempts`` is 0.

    Examples:
        >>> import infeed
        >>> lineage = infeed.DataLoader(range(6), batch_size=2).explain(1)
        >>> lineage.epoch, lineage.step, lineage.indices
        (0, 1, [2, 3])
    """

    __module__ = "infeed"

    epoch: int
    step: int
    first_position: int
    indices: list[Any] | None
    seeds: list[int]
    grain_size: int
    attempts: int
    loadings: tuple[Loading, ...]

    def __str__(self) -> str:
        what = "elements of an iterable dataset" if self.indices is None else f"indices {reprlib.repr(self.indices)}"
        lines = [
            f"batch {self.step} of epoch {self.epoch}, from position {self.first_position}: {what}",
            f"  one seed per {format_count(self.grain_size, 'sample')}: {reprlib.repr(self.seeds)}",
        ]
        if not self.attempts:
            lines.append("  not loaded yet, or no longer stored")
        for loading in self.loadings:
            last = loading.first_row + loading.row_count - 1
            lines.append(f"  rows {loading.first_row} to {last} by worker {loading.worker} in {loading.seconds * 1e3:.3f} ms")
        if self.attempts > 1:
            lines.append(f"  {self.attempts} attempts, because workers died")
        return "\n".join(lines)


def lineage_of(
    epoch: int, step: int, plan: BatchPlan | None, past: PastBatch | None, *, seed: int, grain_size: int, rank: int
) -> Lineage:
    """Return the lineage of a batch from its plan or its record; the record takes precedence."""
    if past is not None:
        indices, first, count = past.plan.indices, past.plan.first_position, past.row_count or past.plan.row_count
    else:
        assert plan is not None
        indices, first, count = plan.indices, plan.first_position, len(plan.indices)
    grain_size = max(1, min(grain_size, count))  # the batch may be empty
    starts = range(first, first + count, grain_size)
    if indices is None:
        assert past is not None
        share = (past.plan.worker or 0) + (rank << 32)
        seeds = [derive(seed, epoch, derive(start, share)) for start in starts]
    else:
        seeds = [derive(seed, epoch, start) for start in starts]
    parts = () if past is None else past.parts
    return Lineage(
        epoch=epoch,
        step=step,
        first_position=first,
        indices=None if indices is None else plain_indices(indices),
        seeds=seeds,
        grain_size=grain_size,
        attempts=0 if past is None else past.attempts,
        loadings=tuple(Loading(worker, first_row, row_count, ns / 1e9) for worker, first_row, row_count, ns in parts),
    )
