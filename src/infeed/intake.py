"""Batches as they come in: planned while there is room for them, from the epoch in progress and from the next behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, final

from infeed.feeds import Feed, PlannedBatch, StreamFeed
from infeed.plan.cursor import Cursor
from infeed.records import EngineSetup, Record, Task
from infeed.rooms import Rooms
from infeed.scheduler.machine import Scheduler
from infeed.scheduler.messages import BatchId, BatchPlanned, EpochAbandoned, Event, SlotFreed, TaskId, WindowChanged, WorkerId
from infeed.staffing import Staffing

# Batches are planned when this share of those in flight has been delivered. One at a time would cost a system call each; half
# would let workers run dry.
_REFILL_SHARE: Final = 4
# While an epoch lasts, threads get so many batches of the next, each: enough to go on with. They would take the GIL from the
# loop, which has more use for it; when it is over they get the rest.
_SPARING: Final = 2


@final
class Intake:
    """Belongs to one engine, and works on its books."""

    def __init__(
        self,
        setup: EngineSetup,
        scheduler: Scheduler,
        records: dict[BatchId, Record],
        tasks: dict[TaskId, Task],
        rooms: Rooms,
        staffing: Staffing,
        tell: Callable[[Event], None],
    ) -> None:
        self._setup, self._scheduler, self._delivery = setup, scheduler, setup.delivery
        self._records, self._tasks = records, tasks
        self._rooms, self._staffing, self._tell = rooms, staffing, tell
        self._refill = max(1, rooms.window // _REFILL_SHARE)
        self._batch_count = 0
        self.feed: Feed | None = None  # of the epoch in progress; whoever finds its end takes it away
        self._returned: PlannedBatch | None = None  # taken from the feed, and to be planned next
        self._next_feed: Feed | None = None
        self._next_count = 0  # batches that were taken from it
        self._is_sparing = setup.gauge.kind == "thread"
        self._binds_batches = setup.binds_batches

    # --- epochs

    def begin(self, start: Cursor, asked: Iterator[Any] | None = None) -> None:
        """Take the batches of an epoch from here on; some may have been planned already, behind those of the one before."""
        prefetched, self._next_feed, self._next_count = self._next_feed, None, 0
        self._returned = None
        self._is_sparing = self._setup.gauge.kind == "thread"
        if prefetched is not None and start == Cursor(prefetched.epoch):
            self.feed = prefetched
            return
        if prefetched is not None:
            self.abandon(prefetched.epoch)
        self.feed = self._setup.make_feed(start, asked)

    def abandon(self, epoch: int) -> None:
        """What was planned of an epoch is not wanted any more."""
        records = self._records
        wanted = {batch for batch, record in records.items() if record.plan.epoch != epoch}
        left = [task for task, entry in self._tasks.items() if entry.batch not in wanted]
        self._setup.crew.recall(left)
        self._tell(EpochAbandoned(epoch))

    def end(self) -> None:
        """The epoch is over: all that may be in flight is planned of the next."""
        if not self._setup.is_lazy:
            self._is_sparing = False
            self.plan()
            self._setup.crew.flush()
        self.feed = None

    # --- planning

    def plan_some(self) -> bool:
        """Plan as many batches as are sent out together; whether there may be more to plan."""
        return self.plan(self._refill)

    def plan(self, most: int | None = None) -> bool:
        """Free what the user let go of, and plan as many batches as there is room for; whether there may be more to plan."""
        for slot in self._delivery.ended_slots():
            self._tell(SlotFreed(slot))
        self.settle_staff()
        # Several at a time: their messages go out together.
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
            self._tell(BatchPlanned(batch, planned.epoch, planned.grain_count, worker, planned.indices is None))
        return True

    def _take(self) -> PlannedBatch | None:
        """The next batch of this epoch, or the first of the next while there is nothing else to do."""
        feed = self.feed
        if feed is None:
            return None
        planned, self._returned = self._returned or feed.take(), None
        if planned is None:
            if not (feed.is_exhausted and feed.error is None and self._setup.prefetches_epochs):
                return None
            if self._is_sparing and self._next_count >= _SPARING * len(self._scheduler.hired_workers):
                return None
            if self._next_feed is None:
                self._next_feed = self._setup.make_feed(Cursor(feed.epoch + 1), None)
            self._next_count += 1
            return self._next_feed.take()
        if planned.worker is not None and isinstance(feed, StreamFeed) and feed.opening(planned.worker):
            self._staffing.open_share(planned.worker, feed)
        return planned

    def put_back(self, planned: PlannedBatch) -> None:
        """Plan this batch next: it was taken from the feed and could not be gathered."""
        self._returned = planned

    def delivered(self) -> None:
        """A batch, or an exception in its place, is delivered."""
        if self.feed is not None:
            self.feed.delivered()

    def stream_loaded(self, record: Record, row_count: int, state: Any) -> None:
        """So much came of a batch of a stream, which says whether there is more to ask for."""
        if isinstance(self.feed, StreamFeed) and self.feed.epoch == record.plan.epoch:
            assert record.plan.worker is not None
            self.feed.loaded(record.plan.worker, row_count, record.plan.row_count, state)

    # --- how many at a time

    def settle_staff(self) -> None:
        """Let there be as many workers as are wanted, and in flight what keeps them busy."""
        if self._staffing.settle():
            self.change_window(self._rooms.learn_staff(len(self._scheduler.hired_workers)))

    def learn_size(self, nbytes: int) -> None:
        """Batches of this size are in flight: hold their number to what fits."""
        self.change_window(self._rooms.learn_size(nbytes))

    def change_window(self, window: int | None) -> None:
        """Let so many batches be in flight, or as many as before."""
        if window is not None:
            self._refill = max(1, window // _REFILL_SHARE)
            self._tell(WindowChanged(window))
