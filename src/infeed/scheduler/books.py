"""The scheduler's books: which batch, task, worker and slot is where, and the moves that keep them in step."""

from __future__ import annotations

from bisect import insort
from collections import deque

from infeed.scheduler.invariants import check
from infeed.scheduler.messages import Action, BatchId, Drop, Reload, StopWorker, TaskId, WorkerId
from infeed.scheduler.pace import Pace
from infeed.scheduler.patience import Patience
from infeed.scheduler.records import Batch, Task, Worker
from infeed.scheduler.slots import Slots


class Books:
    """What the scheduler knows. The rules above read it; these methods are the only moves that touch several books at once."""

    def __init__(self, *, workers: tuple[WorkerId, ...], window: int, in_order: bool, whole_batches: bool) -> None:
        self._workers = {worker: Worker() for worker in workers}
        self._hired_count = len(workers)  # those that stay
        self._window = window
        self._in_order = in_order
        self._whole_batches = whole_batches
        self._batches: dict[BatchId, Batch] = {}  # planned, not delivered; in planned order
        self._draining: set[BatchId] = set()  # abandoned, but tasks may still write
        self._waiting: list[BatchId] = []  # ascending: batches with grains in no task
        self._finished: dict[BatchId, None] = {}  # loaded or failed, undelivered; in order of finishing
        self._tasks: dict[TaskId, Task] = {}
        self._roomy: dict[WorkerId, None] = {}  # ready workers that may take a task, least recently served first
        self._idle: dict[WorkerId, None] = {}  # those of them that have none: nothing they get waits behind a slow sample
        self._slots = Slots()
        self._unplaced: deque[TaskId] = deque()  # tasks that wait for a slot
        self._slotless: set[BatchId] = set()  # begun without a slot, because there was none yet
        self._next_task = 0
        self._pace = Pace()
        self._wanted: int | None = None
        self._is_urgent = True  # somebody waits for it
        self._has_asked_again = False
        self._is_closed = False
        self._is_lost = False  # no more workers are started; what is ready is delivered first
        self._patience = Patience(len(workers))
        self._actions: list[Action] = []

    def _finish(self, worker: WorkerId, task_id: TaskId) -> Task | None:
        """Take a task off the books; ``None`` if it is not on them: the late word of a worker that was declared dead."""
        task = self._tasks.get(task_id)
        if task is None or task.worker != worker:
            return None
        del self._tasks[task_id]
        task.batch.task_count -= 1
        if task.is_unplaced and task_id in self._unplaced:
            self._unplaced.remove(task_id)
        record = self._workers[worker]
        record.tasks.discard(task_id)
        if record.is_ready:
            if not record.tasks:
                self._idle.setdefault(worker)
                self._roomy.setdefault(worker)
            elif self._has_room(record, task.grain_count):
                self._roomy.setdefault(worker)
        elif record.is_leaving and not record.tasks:
            self._let_go(worker)
        return task

    def _has_room(self, worker: Worker, grain_count: int) -> bool:
        """Whether it may be sent more, of which it has tasks of so many grains."""
        is_plenty = len(self._waiting) > self._hired_count and not self._whole_batches
        return self._pace.has_room(len(worker.tasks), grain_count, is_plenty=is_plenty)

    def _retire(self, worker: WorkerId) -> Worker:
        """Send it no more."""
        self._roomy.pop(worker, None)
        self._idle.pop(worker, None)
        record = self._workers[worker]
        record.is_ready = False
        return record

    def _let_go(self, worker: WorkerId) -> None:
        """A worker that was released has nothing left to do."""
        del self._workers[worker]
        self._actions.append(StopWorker(worker))

    def _settle(self, batch: Batch) -> None:
        """Move a batch on when its last task is in."""
        if batch.task_count:
            return
        if batch.slot is None:
            self._slotless.discard(batch.batch)
        if batch.is_abandoned:
            if batch.batch in self._draining:
                self._draining.discard(batch.batch)
                if batch.slot is not None:
                    self._slots.release(batch.slot)
        elif batch.must_regroup and not batch.is_failed:
            self._begin_again(batch)
        elif batch.is_finished and batch.batch not in self._finished:
            self._finished[batch.batch] = None

    def _wait_again(self, batch: Batch, first_grain: int, grain_count: int) -> None:
        insort(batch.waiting, (first_grain, grain_count))
        if batch.batch not in self._waiting:
            insort(self._waiting, batch.batch)

    def _stop_waiting(self, batch: Batch) -> None:
        batch.waiting.clear()
        if batch.batch in self._waiting:
            self._waiting.remove(batch.batch)

    def _drop_unplaced(self, batch: Batch) -> None:
        for task_id in [task_id for task_id in self._unplaced if self._tasks[task_id].batch is batch]:
            worker = self._tasks[task_id].worker
            self._actions.append(Drop(worker, task_id))  # first: if it is on its way out, it is stopped next
            self._finish(worker, task_id)

    def _begin_again(self, batch: Batch) -> None:
        batch.begin_again()
        self._stop_waiting(batch)
        self._actions.append(Reload(batch.batch))
        if batch.grain_count:
            self._wait_again(batch, 0, batch.grain_count)
            return
        if batch.slot is not None:  # nothing is left of it; it is passed over in its turn
            self._slots.release(batch.slot)
            batch.slot = None
        self._finished[batch.batch] = None

    def has_undelivered(self, epoch: int) -> bool:
        """Whether planned batches of an epoch are not delivered."""
        return any(batch.epoch == epoch for batch in self._batches.values())

    @property
    def idle_count(self) -> int:
        """How many workers have nothing to load: no task, or samples that wait for a slot."""
        return len(self._idle) + len(self._unplaced)

    @property
    def hired_workers(self) -> tuple[WorkerId, ...]:
        """Those that are there to stay, ready or being started."""
        return tuple(worker for worker, record in self._workers.items() if not record.is_leaving)

    @property
    def leaving_workers(self) -> tuple[WorkerId, ...]:
        """Those that were released and still have something to do."""
        return tuple(worker for worker, record in self._workers.items() if record.is_leaving)

    def validate(self) -> None:
        """Check the invariants; for tests."""
        check(self._batches, self._tasks, self._workers, self._slots.states, self._slots.free, (*self._roomy, *self._idle))
