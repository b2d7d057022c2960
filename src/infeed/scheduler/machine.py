"""Who loads what, what is delivered when, what is done again: the scheduler.

Pure: events in, actions out, no clock. The engine tells it what happened, one event at a time, and does what it asks, in order.

Invariants, checked by ``validate`` (in ``invariants``), which the tests call after every event:

    I1  a grain of an undelivered batch is waiting, or in exactly one task, or loaded
    I2  a task is held by exactly one live worker
    I3  a slot is free, or filled by one batch, or leased to the user; it is given away again only when no task that may still
        write into it is left
    I4  batches of one epoch are delivered once each, in the order they were planned (``in_order``)
    I5  no batch is planned while ``window`` batches are not delivered, and none begun while as many older ones are not
    I6  only a worker that is ready and stays is given tasks; one that was released has some left, or it is let go of

Each floor of it is one idea: ``books`` (what is where), ``serving`` (who gets what), ``shortage`` (no memory), and here what
follows from each event.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, final, get_args

from infeed.scheduler.messages import (
    Action,
    BatchId,
    BatchPlanned,
    BatchSpoiled,
    BatchWanted,
    Closed,
    EpochAbandoned,
    Event,
    FailWorkers,
    Forget,
    Grow,
    GrowthRefused,
    PlaceRefused,
    SlotFreed,
    SlotId,
    SlotsAdded,
    StartWorker,
    TaskEmpty,
    TaskFailed,
    TaskLoaded,
    TaskMismatched,
    TaskUnplaced,
    WindowChanged,
    WorkerAdded,
    WorkerDied,
    WorkerId,
    WorkerReady,
    WorkerReleased,
    WorkersLost,
)
from infeed.scheduler.records import Batch, SlotState, Worker
from infeed.scheduler.shortage import Shortage

# The method for each event: _on_batch_planned for BatchPlanned.
_HANDLERS: Final = {event: "_on" + re.sub("([A-Z])", r"_\1", event.__name__).lower() for event in get_args(Event)}


@final
class Scheduler(Shortage):
    """The state machine. ``handle`` is its only way in; the properties are for the engine's and the tests' eyes."""

    def __init__(self, *, workers: tuple[WorkerId, ...], window: int, in_order: bool, whole_batches: bool) -> None:
        super().__init__(workers=workers, window=window, in_order=in_order, whole_batches=whole_batches)
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            event: getattr(self, name) for event, name in _HANDLERS.items()
        }

    def handle(self, event: Event) -> list[Action]:
        """Take in one event and say what is to be done, in this order."""
        if self._is_closed:
            return []
        self._handlers[type(event)](event)
        if self._unplaced and not self._slots.is_growth_refused:
            self._place()
        if self._wanted is not None and self._is_urgent:
            if self._is_lost and self.has_undelivered(self._wanted):
                self._is_closed = True
                return [*self._actions, FailWorkers()]
            if self._is_stuck:
                self._unstick()
        actions, self._actions = self._actions, []
        if self._slots.asks_for_growth:
            # Last: it is answered at once, and what follows from the answer must not come before what was decided without it.
            self._slots.asks_for_growth = False
            actions.append(Grow())
        return actions

    @property
    def room(self) -> int:
        """How many more batches may be planned now."""
        return self._window - len(self._batches)

    @property
    def is_lost(self) -> bool:
        """Whether no more workers are started: they died too often, or could not be started."""
        return self._is_lost

    @property
    def has_work(self) -> bool:
        """Whether a task is with a worker, so that waiting for one makes sense."""
        return bool(self._tasks)

    @property
    def free_slots(self) -> tuple[SlotId, ...]:
        """Slots that nobody uses."""
        return tuple(self._slots.free)

    def lease_free_slot(self) -> SlotId | None:
        """Lease a slot for a batch that the engine fills itself, without tasks; ``None`` if no slot is free."""
        if not self._slots.free:
            return None
        self._wanted = None  # this is the batch that the training loop waits for
        slot = self._slots.take()
        self._slots.lease(slot)
        return slot

    @property
    def held_slots(self) -> int:
        """Slots that the user looks into."""
        return self._slots.held_count

    @property
    def grain_s(self) -> float:
        """What a grain usually takes, in seconds; 0 while nothing is known."""
        return self._pace.grain_s

    def worker_tasks(self, worker: WorkerId) -> list[tuple[BatchId, int, int]]:
        """(batch, first grain, grains) of what a worker has been given and not reported."""
        record = self._workers.get(worker)
        held = [] if record is None else [self._tasks[task] for task in sorted(record.tasks)]
        return [(task.batch.batch, task.first_grain, task.grain_count) for task in held]

    # --- the plan and the user's loop

    def _on_batch_planned(self, event: BatchPlanned) -> None:
        batch, epoch, grain_count, worker, is_share = event
        assert batch not in self._batches
        self._batches[batch] = Batch(batch, epoch, grain_count, worker, is_share)
        self._waiting.append(batch)
        self._assign()

    def _on_batch_wanted(self, event: BatchWanted) -> None:
        self._wanted, self._is_urgent = event.epoch, event.is_urgent
        if self._pace.learn_away(event.away_ns):
            self._find_room()
        self._has_asked_again = False
        if self._finished:
            self._deliver()
        if self._waiting:
            self._assign()

    def _on_epoch_abandoned(self, event: EpochAbandoned) -> None:
        if self._wanted == event.epoch:
            self._wanted = None
        for batch in [batch for batch in self._batches.values() if batch.epoch == event.epoch]:
            del self._batches[batch.batch]
            self._finished.pop(batch.batch, None)
            self._stop_waiting(batch)
            batch.is_abandoned = True
            self._draining.add(batch.batch)
            self._actions.append(Forget(batch.batch))
            self._drop_unplaced(batch)
            self._settle(batch)
        for worker, record in self._workers.items():
            if record.tasks:  # it may be stuck with something that nobody wants any more: until it tells, others come first
                self._roomy.pop(worker, None)
        self._assign()

    def _on_window_changed(self, event: WindowChanged) -> None:
        self._window = event.window
        self._assign()

    def _on_closed(self, _event: Closed) -> None:
        self._is_closed = True

    # --- workers

    def _on_worker_ready(self, event: WorkerReady) -> None:
        worker = self._workers.get(event.worker)
        if worker is None:
            return  # it was let go of before it was there
        worker.is_ready = True
        self._patience.start_well()
        self._roomy[event.worker] = self._idle[event.worker] = None
        self._assign()

    def _on_worker_added(self, event: WorkerAdded) -> None:
        assert event.worker not in self._workers, "it is there, or on its way out"
        self._workers[event.worker] = Worker()
        self._hired_count += 1
        self._patience.expect(self._hired_count)

    def _on_worker_released(self, event: WorkerReleased) -> None:
        assert self._hired_count > 1, "nobody would be left"
        self._hired_count -= 1
        assert not any(batch.worker == event.worker for batch in self._batches.values()), "nobody else has its share"
        worker = self._retire(event.worker)
        worker.is_leaving = True
        if not worker.tasks:
            self._let_go(event.worker)

    def _on_worker_died(self, event: WorkerDied) -> None:
        if event.worker not in self._workers:
            return  # it was let go of, and died before it ended
        worker = self._retire(event.worker)
        self._patience.lose(event.at_s, is_idle=not worker.tasks)
        culprit = worker.culprit(event.task, self._unplaced) if event.is_blamed else None
        for task_id in sorted(worker.tasks):
            task = self._tasks.pop(task_id)
            batch = task.batch
            batch.task_count -= 1
            batch.death_count += task_id == culprit
            if task.is_unplaced:
                self._unplaced.remove(task_id)
            if not (batch.is_abandoned or batch.is_failed or batch.must_regroup):
                self._wait_again(batch, task.first_grain, task.grain_count)
            if batch.is_failed:
                self._stop_waiting(batch)
            self._settle(batch)
        worker.tasks.clear()
        self._is_lost |= self._patience.is_lost
        if worker.is_leaving:
            del self._workers[event.worker]
        elif not self._is_lost:
            self._actions.append(StartWorker(event.worker))
        self._deliver()
        self._assign()

    def _on_workers_lost(self, _event: WorkersLost) -> None:
        self._is_lost = True

    # --- tasks

    def _on_task_loaded(self, event: TaskLoaded) -> None:
        task = self._finish(event.worker, event.task)
        if task is None:
            return
        self._patience.renew()
        self._pace.learn_task(event.elapsed_ns, task.grain_count)
        task.batch.loaded_count += task.grain_count
        self._settle(task.batch)
        if self._wanted is not None:
            self._deliver()
        if self._waiting:
            self._assign()

    def _on_task_empty(self, event: TaskEmpty) -> None:
        task = self._finish(event.worker, event.task)
        if task is None:
            return
        batch = task.batch
        if not batch.is_abandoned:
            del self._batches[batch.batch]
            self._actions.append(Forget(batch.batch))
            batch.is_abandoned = True
            self._draining.add(batch.batch)
        self._settle(batch)
        self._deliver()
        self._assign()

    def _on_task_unplaced(self, event: TaskUnplaced) -> None:
        task = self._tasks.get(event.task)
        if task is None or task.worker != event.worker or task.is_unplaced:
            return
        task.is_unplaced = True
        self._unplaced.append(event.task)
        if task.batch.is_abandoned or task.batch.must_regroup or task.batch.is_failed:
            self._drop_unplaced(task.batch)
            self._settle(task.batch)
            self._deliver()
        self._place()
        self._assign()

    def _on_task_mismatched(self, event: TaskMismatched) -> None:
        # One worker must see all samples of the batch, to find a layout for all or to say which do not stack. What is uneven
        # once will be again: from here on batches go out whole.
        task = self._finish(event.worker, event.task)
        if task is None:
            return
        self._whole_batches = True
        batch = task.batch
        if not batch.is_abandoned and not batch.is_failed:
            batch.must_regroup = True
            self._stop_waiting(batch)
            self._drop_unplaced(batch)
        self._settle(batch)
        self._deliver()
        self._assign()

    def _on_task_failed(self, event: TaskFailed) -> None:
        task = self._finish(event.worker, event.task)
        if task is None:
            return
        self._patience.renew()
        batch = task.batch
        if not batch.is_abandoned and not batch.must_regroup:
            batch.fail(event.task, task.first_grain)
            self._stop_waiting(batch)
            self._drop_unplaced(batch)
        self._settle(batch)
        self._deliver()
        self._assign()

    def _on_batch_spoiled(self, event: BatchSpoiled) -> None:
        batch = self._batches.get(event.batch)
        if event.task is None:
            if event.worker in self._workers:
                self._retire(event.worker)
        else:
            task = self._finish(event.worker, event.task)
            if task is None:
                return
            self._patience.renew()
            batch = task.batch
        if batch is None:
            return
        if not batch.is_abandoned and not batch.is_failed:
            batch.spoil(event.grain_count)
            self._stop_waiting(batch)
            self._drop_unplaced(batch)
        # Also if it has failed already: this may have been its last task.
        self._settle(batch)
        self._deliver()
        self._assign()

    # --- slots

    def _on_slots_added(self, event: SlotsAdded) -> None:
        for slot in event.slots:
            self._slots.release(slot)
        self._place()
        self._assign()

    def _on_growth_refused(self, _event: GrowthRefused) -> None:
        self._slots.is_growth_refused = True

    def _on_place_refused(self, event: PlaceRefused) -> None:
        task = self._tasks.get(event.task)
        if task is None or task.worker != event.worker:
            return
        # The batch keeps its slot, which is only a number: other tasks of it may be on their way with it. Until the user lets
        # go of something, asking again would give the same answer.
        task.is_unplaced = True
        self._unplaced.append(event.task)
        self._slots.is_growth_refused = True

    def _on_slot_freed(self, event: SlotFreed) -> None:
        assert self._slots.states[event.slot] is SlotState.LEASED
        self._slots.release(event.slot)
        if self._unplaced:
            self._place()
        if self._waiting:
            self._assign()
