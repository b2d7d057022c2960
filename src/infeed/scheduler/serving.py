"""Who loads what, and what is delivered: the scheduler's rules, while there is memory enough."""

from __future__ import annotations

from infeed.scheduler.books import Books
from infeed.scheduler.messages import Deliver, DeliverError, Pass, Place, Send, TaskId, WorkerId
from infeed.scheduler.records import Batch, Task


class Serving(Books):
    """Slots to batches, grains to workers, batches to the user: each the oldest first."""

    def _take_slot(self, batch: Batch) -> bool:
        """Give the batch a slot; if there is none, ask for one and say no.

        Older batches come first, even if they are not ready to be placed yet: the user's loop waits for them, and it may hold
        what would be freed for them otherwise. So as many slots are left for them.
        """
        older = {other for other in self._slotless if other < batch.batch}
        if self._waiting and self._waiting[0] < batch.batch:  # shares of a stream whose workers are not there
            older |= {other for other in self._waiting if other < batch.batch and self._batches[other].slot is None}
        if len(self._slots.free) <= len(older):
            self._slots.ask_for_growth()
            return False
        batch.slot = self._slots.take()
        self._slotless.discard(batch.batch)
        return True

    def _place(self, *, only_oldest: bool = False) -> None:
        waiting = sorted(self._unplaced, key=lambda task_id: self._tasks[task_id].batch.batch)
        for task_id in waiting:
            task = self._tasks[task_id]
            if only_oldest and task.batch is not self._tasks[waiting[0]].batch:
                return
            if task.batch.slot is None and not self._take_slot(task.batch):
                return
            self._place_task(task_id)

    def _place_task(self, task_id: TaskId) -> None:
        task = self._tasks[task_id]
        self._unplaced.remove(task_id)
        task.is_unplaced = False
        assert task.batch.slot is not None
        self._actions.append(Place(task.worker, task_id, task.batch.batch, task.batch.slot))

    def _deliver(self) -> None:
        if self._wanted is None or not self._finished:
            return
        batch = self._next_finished(self._wanted)
        while batch is not None and not batch.grain_count and not batch.is_failed:
            del self._batches[batch.batch]
            del self._finished[batch.batch]
            self._actions.append(Pass(batch.batch))
            batch = self._next_finished(self._wanted)
        if batch is None:
            return
        self._wanted = None
        del self._batches[batch.batch]
        del self._finished[batch.batch]
        if not self._pace.knows_loop:
            self._pace.expect_away()
            self._find_room()
        if batch.is_failed:
            if batch.slot is not None:
                self._slots.release(batch.slot)
            self._actions.append(DeliverError(batch.batch, batch.failed))
            return
        assert batch.slot is not None
        self._slots.lease(batch.slot)
        self._patience.renew()
        self._actions.append(Deliver(batch.batch, batch.slot))

    def _find_room(self) -> None:
        """Workers may be sent more ahead than before."""
        for worker, record in self._workers.items():
            if record.is_ready and self._has_room(record, 1):
                self._roomy.setdefault(worker)

    def _next_finished(self, epoch: int) -> Batch | None:
        if self._in_order:
            for batch in self._batches.values():
                if batch.epoch == epoch:
                    return batch if batch.batch in self._finished else None
            return None
        for batch_id in self._finished:
            if self._batches[batch_id].epoch == epoch:
                return self._batches[batch_id]
        return None

    def _assign(self, *, only_oldest: bool = False) -> None:
        """Give waiting grains to workers with room, oldest batch first.

        ``only_oldest`` when nothing moves: what workers have then only waits for a slot, and they are at nothing.
        """
        if not self._waiting:
            return
        for batch_id in tuple(self._waiting[:1] if only_oldest else self._waiting):
            batch = self._batches[batch_id]
            # More than the window are planned only when it has become smaller: then the oldest go on.
            if len(self._batches) > self._window and sum(other < batch_id for other in self._batches) >= self._window:
                return
            while batch.waiting:
                if batch.worker is not None:
                    # This worker and no other, one task after another, in order.
                    if batch.worker not in self._roomy:
                        break
                    worker = batch.worker
                elif self._roomy:
                    worker = next(iter(self._idle or self._roomy))
                else:
                    return
                if batch.death_count and self._workers[worker].tasks and not only_oldest:
                    return  # nothing else goes out until one has nothing else to do
                if batch.slot is None and self._slots.states:
                    if not self._take_slot(batch):
                        return
                    for task_id in [held for held in self._unplaced if self._tasks[held].batch is batch]:
                        self._place_task(task_id)  # parts that were sent when there was no slot yet
                self._send(batch, worker)
            if not batch.waiting:
                self._waiting.remove(batch_id)

    def _send(self, batch: Batch, worker: WorkerId) -> None:
        first, available = batch.waiting[0]
        if self._whole_batches:
            usual = batch.grain_count
        else:
            ahead = batch.batch - next(iter(self._batches))
            usual = self._pace.task_grains(batch.grain_count, self._hired_count, ahead=ahead, waiting=len(self._waiting))
        count = min(available, usual)
        if count == available:
            batch.waiting.pop(0)
        else:
            batch.waiting[0] = (first + count, available - count)
        task_id = TaskId(self._next_task)
        self._next_task += 1
        self._tasks[task_id] = Task(worker, batch, first, count)
        batch.task_count += 1
        if batch.slot is None:
            self._slotless.add(batch.batch)
        record = self._workers[worker]
        record.tasks.add(task_id)
        del self._roomy[worker]
        self._idle.pop(worker, None)
        if self._has_room(record, count) and not batch.death_count:
            self._roomy[worker] = None
        is_whole = count == batch.grain_count
        self._actions.append(Send(worker, task_id, batch.batch, first, count, batch.slot, is_whole))
