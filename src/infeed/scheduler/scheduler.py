"""The scheduler: assigns grains to workers and slots to batches, orders delivery, and retries after failures.

It is a pure state machine: events in, actions out, no clock. The engine reports one event at a time and executes the returned
actions in order.

Invariants, checked by ``validate`` (see ``invariants``), which the tests call after every event:

    I1  each grain of an undelivered batch is waiting, in exactly one task, or loaded
    I2  each task belongs to exactly one live worker
    I3  each slot is free, filled by one batch, or leased to user code; it is reused only when no task can still write into it
    I4  each batch of an epoch is delivered once, in planned order (``in_order``)
    I5  no batch is planned while ``window`` batches are undelivered, or started while ``window`` older ones are undelivered
    I6  only ready workers that were not released get tasks; a released worker has tasks left, or it is removed
"""

from __future__ import annotations

import re
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Any, Final, final, get_args

from infeed.scheduler.invariants import check
from infeed.scheduler.messages import (
    Action,
    BatchHasBadSamples,
    BatchId,
    BatchPlanned,
    BatchWanted,
    Closed,
    Deliver,
    DeliverError,
    Drop,
    EpochAbandoned,
    Event,
    FailMemory,
    FailWorkers,
    Forget,
    Grow,
    GrowthRefused,
    Pass,
    Place,
    PlaceRefused,
    Reload,
    Send,
    SlotFreed,
    SlotId,
    SlotsAdded,
    StartWorker,
    StopWorker,
    TaskEmpty,
    TaskFailed,
    TaskId,
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
from infeed.scheduler.pacing import REMOTE_TASKS, DeathLimit, Pacing
from infeed.scheduler.records import Batch, Slots, SlotState, Task, Worker

# Handler method of each event: _on_batch_planned for BatchPlanned.
_HANDLERS: Final = {event: "_on" + re.sub("([A-Z])", r"_\1", event.__name__).lower() for event in get_args(Event)}


@final
class Scheduler:
    """The state machine. ``handle`` and ``lease_free_slot`` change the state; the properties serve the engine and the tests."""

    def __init__(
        self,
        *,
        workers: tuple[WorkerId, ...],
        window: int,
        in_order: bool,
        whole_batches: bool,
        remote_workers: frozenset[WorkerId] = frozenset(),
    ) -> None:
        """Create a scheduler; ``remote_workers`` answer late, so each of them always gets a task behind the current one."""
        self._remote_workers = remote_workers
        self._workers = {worker: self._new_worker(worker) for worker in workers}
        self._active_count = len(workers)  # workers that were not released
        self._window = window
        self._in_order = in_order
        self._whole_batches = whole_batches
        self._batches: dict[BatchId, Batch] = {}  # planned, undelivered; in planned order
        self._draining: set[BatchId] = set()  # abandoned, but tasks may still write
        self._waiting: list[BatchId] = []  # ascending: batches with unassigned grains
        self._finished: dict[BatchId, None] = {}  # loaded or failed, undelivered; in order of completion
        self._tasks: dict[TaskId, Task] = {}
        self._roomy: dict[WorkerId, None] = {}  # ready workers that may take a task, least recently used first
        self._idle: dict[WorkerId, None] = {}  # those without a task: new work does not queue behind a slow sample
        self._slots = Slots()
        self._unplaced: deque[TaskId] = deque()  # tasks whose samples wait for a slot
        self._slotless: set[BatchId] = set()  # started without a slot, because none existed yet
        self._next_task = 0
        self._pacing = Pacing()
        self._wanted: int | None = None
        self._is_urgent = True  # the training loop waits for it
        self._has_asked_again = False
        self._is_closed = False
        self._is_lost = False  # no more workers are started; ready batches are delivered first
        self._death_limit = DeathLimit(len(workers))
        self._actions: list[Action] = []
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            event: getattr(self, name) for event, name in _HANDLERS.items()
        }

    def handle(self, event: Event) -> list[Action]:
        """Process one event and return the actions to execute, in order."""
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
            # Grow comes last: the engine replies at once, and actions that follow from the reply must not precede earlier
            # decisions.
            self._slots.asks_for_growth = False
            actions.append(Grow())
        return actions

    @property
    def room(self) -> int:
        """Number of batches that may be planned now."""
        return self._window - len(self._batches)

    @property
    def is_lost(self) -> bool:
        """Whether no more workers are started, because they died too often or could not be started."""
        return self._is_lost

    @property
    def free_slots(self) -> tuple[SlotId, ...]:
        """Unused slots."""
        return tuple(self._slots.free)

    def lease_free_slot(self) -> SlotId | None:
        """Lease a slot for a batch that the engine fills itself; return ``None`` if no slot is free.

        Changes the state without an event: such a batch is not planned and has no tasks, and the engine needs the slot at once.
        """
        if not self._slots.free:
            return None
        self._wanted = None  # the training loop waits for this batch
        slot = self._slots.take()
        self._slots.lease(slot)
        return slot

    @property
    def held_slots(self) -> int:
        """Number of slots that user code still references."""
        return self._slots.held_count

    @property
    def grain_s(self) -> float:
        """Usual time per grain in seconds; 0 until measured."""
        return self._pacing.grain_s

    def has_undelivered(self, epoch: int) -> bool:
        """Whether the epoch has planned batches that are undelivered."""
        return any(batch.epoch == epoch for batch in self._batches.values())

    @property
    def idle_count(self) -> int:
        """Number of workers that load nothing: they have no task, or hold samples that wait for a slot."""
        return len(self._idle) + len(self._unplaced)

    @property
    def active_workers(self) -> tuple[WorkerId, ...]:
        """Workers that were not released, ready or starting."""
        return tuple(worker for worker, record in self._workers.items() if not record.is_leaving)

    @property
    def leaving_workers(self) -> tuple[WorkerId, ...]:
        """Released workers that still have tasks."""
        return tuple(worker for worker, record in self._workers.items() if record.is_leaving)

    def validate(self) -> None:
        """Check the invariants; for tests."""
        check(self._batches, self._tasks, self._workers, self._slots.states, self._slots.free, (*self._roomy, *self._idle))

    # --- the plan and the training loop

    def _on_batch_planned(self, event: BatchPlanned) -> None:
        batch, epoch, grain_count, worker, is_share = event
        assert batch not in self._batches
        self._batches[batch] = Batch(batch, epoch, grain_count, worker, is_share)
        self._waiting.append(batch)
        self._assign()

    def _on_batch_wanted(self, event: BatchWanted) -> None:
        self._wanted, self._is_urgent = event.epoch, event.is_urgent
        if self._pacing.learn_away(event.away_ns):
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
            if record.tasks:  # its task may hang, and the batch is no longer needed: prefer other workers until it reports
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
            return  # released before it became ready
        worker.is_ready = True
        self._death_limit.start_well()
        self._roomy[event.worker] = self._idle[event.worker] = None
        self._assign()

    def _on_worker_added(self, event: WorkerAdded) -> None:
        assert event.worker not in self._workers, "it is there, or on its way out"
        self._workers[event.worker] = self._new_worker(event.worker)
        self._active_count += 1
        self._death_limit.expect(self._active_count)

    def _on_worker_released(self, event: WorkerReleased) -> None:
        assert self._active_count > 1, "the last worker cannot be released"
        self._active_count -= 1
        assert not any(batch.worker == event.worker for batch in self._batches.values()), "no other worker has its share"
        worker = self._retire(event.worker)
        worker.is_leaving = True
        if not worker.tasks:
            self._let_go(event.worker)

    def _on_worker_died(self, event: WorkerDied) -> None:
        if event.worker not in self._workers:
            return  # released, and died before it stopped
        worker = self._retire(event.worker)
        self._death_limit.lose(event.at_s, is_idle=not worker.tasks)
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
        self._is_lost |= self._death_limit.is_lost
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
        self._death_limit.renew()
        self._pacing.learn_task(event.elapsed_ns, task.grain_count)
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
        self._advance(batch)

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
        # One worker must see all samples of the batch to find a common layout, or to name the samples that do not stack. Later
        # batches are likely to differ too, so send whole batches from now on.
        task = self._finish(event.worker, event.task)
        if task is None:
            return
        self._whole_batches = True
        batch = task.batch
        if not batch.is_abandoned and not batch.is_failed:
            batch.must_regroup = True
            self._stop_waiting(batch)
            self._drop_unplaced(batch)
        self._advance(batch)

    def _on_task_failed(self, event: TaskFailed) -> None:
        task = self._finish(event.worker, event.task)
        if task is None:
            return
        self._death_limit.renew()
        batch = task.batch
        if not batch.is_abandoned and not batch.must_regroup:
            batch.fail(event.task, task.first_grain)
            self._stop_waiting(batch)
            self._drop_unplaced(batch)
        self._advance(batch)

    def _on_batch_has_bad_samples(self, event: BatchHasBadSamples) -> None:
        batch = self._batches.get(event.batch)
        if event.task is None:
            if event.worker in self._workers:
                self._retire(event.worker)
        else:
            task = self._finish(event.worker, event.task)
            if task is None:
                return
            self._death_limit.renew()
            batch = task.batch
        if batch is None:
            return
        if not batch.is_abandoned and not batch.is_failed:
            batch.plan_again(event.grain_count)
            self._stop_waiting(batch)
            self._drop_unplaced(batch)
        # Also needed if the batch has failed already: this may have been its last task.
        self._advance(batch)

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
        # The batch keeps its slot, which is only a number: its other tasks may already use it. A retry fails until user code
        # releases a batch.
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

    # --- assigning grains and slots, delivering

    def _take_slot(self, batch: Batch) -> bool:
        """Take a free slot for the batch; if none is available, request one and return False.

        Reserve one slot for each older batch without a slot, even if it is not ready to be placed. The training loop waits for
        those first, and may hold the slots that would otherwise become free for them.
        """
        older = {other for other in self._slotless if other < batch.batch}
        if self._waiting and self._waiting[0] < batch.batch:  # batches of an iterable dataset whose workers are not ready
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
        if not self._pacing.knows_loop:
            self._pacing.expect_away()
            self._find_room()
        if batch.is_failed:
            if batch.slot is not None:
                self._slots.release(batch.slot)
            self._actions.append(DeliverError(batch.batch, batch.failed))
            return
        assert batch.slot is not None
        self._slots.lease(batch.slot)
        self._death_limit.renew()
        self._actions.append(Deliver(batch.batch, batch.slot))

    def _find_room(self) -> None:
        """Mark workers that may take a task under the increased queue limit."""
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
        """Assign waiting grains to workers that may take a task, oldest batch first.

        ``only_oldest`` is for a stalled scheduler: tasks then only wait for a slot, and workers load nothing.
        """
        if not self._waiting:
            return
        if self._unplaced and not only_oldest and not self._slots.is_growth_refused:
            self._place()  # loaded samples get a free slot before a new task asks for another
        for batch_id in tuple(self._waiting[:1] if only_oldest else self._waiting):
            batch = self._batches[batch_id]
            # Exceeding the window is possible only after it shrank: then only the oldest batches continue.
            if len(self._batches) > self._window and sum(other < batch_id for other in self._batches) >= self._window:
                return
            while batch.waiting:
                if batch.worker is not None:
                    # Only this worker may load the batch, one task at a time and in order.
                    if batch.worker not in self._roomy:
                        break
                    worker = batch.worker
                elif self._roomy:
                    worker = next(iter(self._idle or self._roomy))
                else:
                    return
                if batch.death_count and self._workers[worker].tasks and not only_oldest:
                    return  # after a death, wait for a worker without tasks and assign nothing else before
                if batch.slot is None and self._slots.states:
                    if not self._take_slot(batch):
                        return
                    for task_id in [held for held in self._unplaced if self._tasks[held].batch is batch]:
                        self._place_task(task_id)  # tasks that were sent before a slot existed
                self._send(batch, worker)
            if not batch.waiting:
                self._waiting.remove(batch_id)

    def _send(self, batch: Batch, worker: WorkerId) -> None:
        first, available = batch.waiting[0]
        if self._whole_batches:
            usual = batch.grain_count
        else:
            ahead = batch.batch - next(iter(self._batches))
            usual = self._pacing.task_grains(batch.grain_count, self._active_count, ahead=ahead, waiting=len(self._waiting))
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

    # --- no memory for the batch that the training loop waits for

    @property
    def _is_stuck(self) -> bool:
        """Whether the training loop waits and no pending event can unblock it."""
        if len(self._tasks) != len(self._unplaced) or self._is_moving or self._wanted is None:
            return False
        if not self.has_undelivered(self._wanted) or self._next_finished(self._wanted) is not None:
            return False
        # A worker that is starting will take the waiting grains; its WorkerReady event triggers this check again.
        bound = [batch.worker for batch in self._batches.values() if batch.worker is not None and batch.waiting]
        awaited = bound or (
            self.active_workers if not any(batch.worker is not None for batch in self._batches.values()) else ()
        )
        return all(self._workers[worker].is_ready for worker in awaited)

    @property
    def _is_moving(self) -> bool:
        return self._slots.asks_for_growth or any(isinstance(action, Send | Place) for action in self._actions)

    def _unstick(self) -> None:
        """Get memory for the batch that the training loop waits for: retry growth, evict younger batches, or fail."""
        for worker, record in self._workers.items():
            if record.is_ready:  # and idle: every remaining task waits for a slot
                self._roomy.setdefault(worker)
        if not self._has_asked_again:
            self._has_asked_again = True
            self._slots.is_growth_refused = False
            self._serve_oldest()
            self._slots.is_growth_refused = True
        else:
            self._send_oldest()  # the oldest batch may have a slot but have lost a worker that is not replaced
        for batch in reversed(tuple(self._batches.values())):
            if self._is_moving:
                return
            if self._evict(batch):
                self._serve_oldest()
        if not self._is_moving:
            self._wanted = None
            self._actions.append(FailMemory())

    def _serve_oldest(self) -> None:
        # Serve only the oldest batch: any other would take the memory just freed, and be evicted in turn.
        self._place(only_oldest=True)
        self._send_oldest()

    def _send_oldest(self) -> None:
        if self._waiting and self._waiting[0] == next(iter(self._batches)):
            self._assign(only_oldest=True)

    def _evict(self, batch: Batch) -> bool:
        """Take the batch's slot away and reload the batch later; return False if it has no slot or is the oldest.

        Batches of an iterable dataset cannot be reloaded, so they are never evicted.
        """
        if batch.is_share or batch.slot is None or batch.task_count or batch.batch == next(iter(self._batches)):
            return False
        self._slots.release(batch.slot)
        self._slots.is_growth_refused = True
        batch.slot = None
        if not batch.is_failed:
            self._finished.pop(batch.batch, None)
            self._begin_again(batch)
        return True

    # --- changes to several tables at once

    def _finish(self, worker: WorkerId, task_id: TaskId) -> Task | None:
        """Remove a task; return ``None`` for an unknown one, such as a late report of a worker that was declared dead."""
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
        """Whether the worker may take another task; its current tasks have ``grain_count`` grains each."""
        is_plenty = len(self._waiting) > self._active_count and not self._whole_batches
        task_count = len(worker.tasks)
        return task_count < worker.least_tasks or self._pacing.has_room(task_count, grain_count, is_plenty=is_plenty)

    def _new_worker(self, worker: WorkerId) -> Worker:
        return Worker(REMOTE_TASKS if worker in self._remote_workers else 0)

    def _retire(self, worker: WorkerId) -> Worker:
        """Stop sending tasks to the worker."""
        self._roomy.pop(worker, None)
        self._idle.pop(worker, None)
        record = self._workers[worker]
        record.is_ready = False
        return record

    def _let_go(self, worker: WorkerId) -> None:
        """Remove a released worker that has no tasks left."""
        del self._workers[worker]
        self._actions.append(StopWorker(worker))

    def _advance(self, batch: Batch) -> None:
        """Settle a batch, then deliver and assign what has become possible."""
        self._settle(batch)
        self._deliver()
        self._assign()

    def _settle(self, batch: Batch) -> None:
        """Advance a batch after its last task was reported."""
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
            self._actions.append(Drop(worker, task_id))  # before _finish, which stops the worker if it was released
            self._finish(worker, task_id)

    def _begin_again(self, batch: Batch) -> None:
        batch.begin_again()
        self._stop_waiting(batch)
        self._actions.append(Reload(batch.batch))
        if batch.grain_count:
            self._wait_again(batch, 0, batch.grain_count)
            return
        if batch.slot is not None:  # no samples left: Pass skips it in its turn
            self._slots.release(batch.slot)
            batch.slot = None
        self._finished[batch.batch] = None
