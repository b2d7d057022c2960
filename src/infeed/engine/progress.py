"""Where a batch came from: what ``DataLoader.explain`` returns."""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, NamedTuple, final

from infeed.engine.bad_samples import ErrorBudget
from infeed.engine.planning import PlannedBatch
from infeed.engine.records import Part, Record
from infeed.errors import SampleError
from infeed.plan.batches import BatchPlan
from infeed.plan.order import plain_indices
from infeed.plan.seeds import derive
from infeed.plan.state import Cursor, ShareCursor, StreamCursor

# Batches of which is kept how they came about: more than anyone looks back.
_KEPT: Final = 256


class Past(NamedTuple):
    """A batch that was delivered or that failed: what was planned, who loaded it, how often it was tried."""

    plan: PlannedBatch
    parts: list[Part]
    attempts: int
    row_count: int


@final
class Progress:
    """Belongs to one iteration of a loader; the engine notes every batch in it, when it gives it away."""

    def __init__(self, start: Cursor, error_budget: ErrorBudget | None = None, stream: StreamCursor | None = None) -> None:
        """``stream`` is what the shares of a stream begin with by themselves, where ``start`` does not say it."""
        self.start = start
        self.error_budget = error_budget or ErrorBudget()
        self.error_budget.begin_epoch(start.epoch, start.bad_count)
        self._step = start.step
        self._position = start.position
        # Later steps that came before this one, with the position each ended at. Of those that came in an earlier run it is not
        # known: they are passed when what follows them comes.
        self._ahead: dict[int, int | None] = dict.fromkeys(start.ahead)
        self._failed: Record | None = None
        self._recent: deque[Record] = deque(maxlen=_KEPT)
        self.is_over = False
        self.carried: StreamCursor | None = None  # what the epoch's end hands on to the next epoch
        self._shown: Cursor | None = None
        stream = start.stream or stream
        self.share_count = 0 if stream is None else len(stream.shares)
        self._turn = 0 if stream is None else stream.turn
        self._shares: dict[int, ShareCursor] = {} if stream is None else dict(enumerate(stream.shares))

    @property
    def epoch(self) -> int:
        return self.start.epoch

    def delivered(self, record: Record, share_count: int) -> None:
        """The user is given this batch, which is of one of so many shares of a stream, or of none."""
        if self._failed is not None:
            # They went on behind a batch that failed, so it is behind them too.
            self._pass(self._failed)
            self._failed = None
        self.share_count = share_count
        self._recent.append(record)
        plan = record.plan
        if plan.step == self._step and plan.worker is None and not self._ahead:  # the usual case, and it is asked every time
            self._step, self._position = plan.step + 1, plan.stop
        else:
            self._pass(record)

    def failed(self, record: Record) -> None:
        """The user is given an exception for this batch. If the run ends with it, the batch is still to come."""
        if self._failed is not None:
            self._pass(self._failed)
        self._failed = record
        self._recent.append(record)

    def note_bad(self, record: Record, epoch_length: Callable[[], int | None]) -> SampleError | None:
        """Enter a batch into the ledger, with its bad samples; what to raise if there are more of them than may be."""
        # Workers have told of them in any order.
        bad = [] if record.bad_rows is None else sorted(record.bad_rows.done, key=attrgetter("position"))
        self.error_budget.note(bad, record.row_count)
        return self.error_budget.excess(epoch_length())

    def show(self, cursor: Cursor) -> None:
        """The loop has come as far as this; what was noted beyond is still on its way to the device."""
        self._shown = cursor

    def end(self) -> None:
        """The epoch is over: where it stands is the beginning of the next."""
        self.is_over = True

    def cursor(self) -> Cursor:
        if self.is_over:
            return Cursor(self.epoch + 1, stream=self.carried)
        return self.reached() if self._shown is None else self._shown

    def reached(self) -> Cursor:
        """Behind the latest batch that the engine gave away."""
        ahead = tuple(sorted(self._ahead))
        # What was bad about a batch that is still to come will be found again.
        failed = None if self._failed is None else self._failed.bad_rows
        bad_count = self.error_budget.bad_count - (0 if failed is None else len(failed.done))
        return Cursor(self.epoch, self._step, self._position, ahead, self._stream(), max(0, bad_count))

    def find(self, step: int) -> Past | None:
        """The latest of what is remembered of a step."""
        # A copy, made in one go: another thread may ask while the training loop takes batches.
        recent = tuple(self._recent)
        record = next((record for record in reversed(recent) if record.plan.step == step), None)
        if record is None:
            return None
        return Past(record.plan, record.parts, 1 + len(record.deaths or ()), record.row_count)

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
        self._shares[worker] = ShareCursor(before.rows + record.row_count, is_ended, record.stream_state)
        record.stream_state = None  # it may be large, and only the latest is ever asked for
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
    """What one worker did for a batch."""

    worker: int
    first_row: int
    row_count: int
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a batch comes from.

    Attributes:
        epoch, step: which batch it is; ``step`` counts the batches of this loader in its epoch, from 0.
        first_position: where its first sample stands in the epoch's order, which all ranks share.
        indices: what was, or will be, asked of the dataset; ``None`` for a stream.
        seeds: one for each ``grain_size`` samples, in order: what ``random``, ``numpy.random`` and torch are seeded with.
        grain_size: samples that share a seed.
        attempts: how often it was tried; 0 if it was not loaded yet, or too long ago to be remembered.
        loadings: who loaded which rows of it, and how long that took. Empty if ``attempts`` is 0.
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
        what = "elements of a stream" if self.indices is None else f"indices {reprlib.repr(self.indices)}"
        lines = [
            f"batch {self.step} of epoch {self.epoch}, from position {self.first_position}: {what}",
            f"  seeds of {self.grain_size} samples each: {reprlib.repr(self.seeds)}",
        ]
        if not self.attempts:
            lines.append("  not loaded yet, or too long ago to be remembered")
        for loading in self.loadings:
            last = loading.first_row + loading.row_count - 1
            lines.append(f"  rows {loading.first_row} to {last} by worker {loading.worker} in {loading.seconds * 1e3:.3f} ms")
        if self.attempts > 1:
            lines.append(f"  it took {self.attempts} attempts: workers died")
        return "\n".join(lines)


def lineage_of(
    epoch: int, step: int, plan: BatchPlan | None, past: Past | None, *, seed: int, grain_size: int, rank: int
) -> Lineage:
    """Of a batch that is planned, remembered, or both."""
    if past is not None:
        indices, first, count = past.plan.indices, past.plan.first_position, past.row_count or past.plan.row_count
    else:
        assert plan is not None
        indices, first, count = plan.indices, plan.first_position, len(plan.indices)
    grain_size = max(1, min(grain_size, count))  # nothing may be left of it
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
