"""What the scheduler asks for, when it is told what happened: everything that it decides is carried out from here."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never, final

from infeed.errors import WorkerStartError
from infeed.exchange import Exchange
from infeed.handout import Handout
from infeed.intake import Intake
from infeed.records import EngineSetup, Record, Task
from infeed.reports import workers_error
from infeed.rooms import Rooms
from infeed.scheduler.machine import Scheduler
from infeed.scheduler.messages import (
    Action,
    BatchId,
    BatchWanted,
    Deliver,
    DeliverError,
    Drop,
    Event,
    FailMemory,
    FailWorkers,
    Forget,
    Grow,
    GrowthRefused,
    Pass,
    Place,
    Reload,
    Send,
    SlotFreed,
    SlotsAdded,
    StartWorker,
    StopWorker,
    TaskId,
    WorkersLost,
)
from infeed.staffing import Staffing
from infeed.troubles import Troubles


@final
class Orders:
    """Belongs to one engine: its books, and for everything that may be asked who does it."""

    def __init__(self, setup: EngineSetup, scheduler: Scheduler, close: Callable[[], None]) -> None:
        """``close`` is the engine's own, for when nothing can be loaded any more."""
        self._setup, self._gauge, self._scheduler, self._close = setup, setup.gauge, scheduler, close
        self._fatal: BaseException | None = None  # why no more workers can be started
        self.records: dict[BatchId, Record] = {}
        tasks: dict[TaskId, Task] = {}
        self.rooms = Rooms(setup, scheduler)
        self.staffing = Staffing(setup, scheduler, self.tell)
        self.troubles = Troubles(setup, self.records, tasks, self.tell)
        self.intake = Intake(setup, scheduler, self.records, tasks, self.rooms, self.staffing, self.tell)
        self.handout = Handout(setup, self.troubles.name)
        self.exchange = Exchange(setup, self.records, tasks, self.rooms, self.troubles, self.intake, self.handout, self.tell)

    def tell(self, event: Event) -> None:
        """Let the scheduler know of something, and do what it asks then."""
        for action in self._scheduler.handle(event):
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Send():
                self.exchange.send(action)
            case Deliver(batch, slot):
                feed = self.intake.feed
                self.handout.deliver(self.records.pop(batch), slot, 0 if feed is None else feed.share_count)
                self.intake.delivered()
            case Place(worker, task, batch, slot):
                self.exchange.place(worker, task, self.records[batch], slot)
            case Drop(worker, task):
                self.exchange.drop(worker, task)
            case Grow():
                self._grow()
            case DeliverError(batch, task):
                self.handout.fail(self.records.pop(batch), task)
                self.intake.delivered()
            case Reload(batch):
                self._reload(batch)
            case Pass(batch):
                self.handout.pass_over(self.records.pop(batch))
                self.intake.delivered()
            case Forget(batch):
                self.records.pop(batch, None)
            case StartWorker(worker):
                self._gauge.members.restarted(worker)
                try:
                    self.staffing.replace(worker, self.intake.feed)
                except WorkerStartError as error:
                    self.lose_workers(error.with_traceback(None))
            case StopWorker(worker):
                self._gauge.members.ended(worker)
                self.staffing.stop(worker)
                self.troubles.forget(worker)
            case FailWorkers():
                self.fail_workers()
            case FailMemory():
                self._fail_memory()
            case _:
                assert_never(action)

    def _grow(self) -> None:
        slot = self.rooms.add_slot()
        self.tell(GrowthRefused() if slot is None else SlotsAdded((slot,)))

    def _reload(self, batch: BatchId) -> None:
        before = self.records[batch]
        plan = before.plan
        if before.mend is not None and plan.indices is not None:
            plan = before.mend.apply(plan, self._setup.grain_size)
        self.records[batch] = Record(plan, before)

    def lose_workers(self, error: BaseException) -> None:
        """No more workers can be started, for this reason. It is raised when no batch is ready any more."""
        self._fatal = self._fatal or error
        self.tell(WorkersLost())

    def fail_workers(self) -> None:
        """Workers die, one after another, or cannot be started: end it."""
        self._close()
        error, self._fatal = self._fatal, None
        self.handout.error = error or workers_error(self.troubles.last_death)

    def _fail_memory(self) -> None:
        ended = self.rooms.collect()
        for slot in ended:
            self.tell(SlotFreed(slot))
        feed = self.intake.feed
        if ended and feed is not None:
            self.tell(BatchWanted(feed.epoch))
            return
        self.handout.error = self.rooms.error(self._scheduler.held_slots)
