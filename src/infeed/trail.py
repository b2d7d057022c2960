"""What an epoch has given its user so far: where it stands, and what its latest batches were made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Final, NamedTuple, final

from infeed.errors import SampleError
from infeed.feeds import PlannedBatch
from infeed.ledger import Ledger
from infeed.plan.cursor import Cursor, ShareCursor, StreamCursor
from infeed.records import Part, Record

# Batches of which is kept how they came about: more than anyone looks back.
_KEPT: Final = 256


class Past(NamedTuple):
    """A batch that was delivered or that failed: what was planned, who loaded it, how often it was tried."""

    plan: PlannedBatch
    parts: list[Part]
    attempts: int
    row_count: int


@final
class Trail:
    """Belongs to one iteration of a loader; the engine notes every batch in it, when it gives it away."""

    def __init__(self, start: Cursor, ledger: Ledger | None = None, stream: StreamCursor | None = None) -> None:
        """``stream`` is what the shares of a stream begin with by themselves, where ``start`` does not say it."""
        self.start = start
        self.ledger = ledger or Ledger()
        self.ledger.begin_epoch(start.epoch, start.bad_count)
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
        bad = [] if record.mend is None else sorted(record.mend.done, key=attrgetter("position"))
        self.ledger.note(bad, record.row_count)
        return self.ledger.excess(epoch_length())

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
        failed = None if self._failed is None else self._failed.mend
        bad_count = self.ledger.bad_count - (0 if failed is None else len(failed.done))
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
