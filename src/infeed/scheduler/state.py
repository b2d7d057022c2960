"""Which slots there are, and who has them."""

from __future__ import annotations

import enum
from collections.abc import Container
from typing import Final, final

from infeed.scheduler.messages import BatchId, SlotId, TaskId, WorkerId

# A batch whose workers died this often is given up: it is the batch that kills them.
BATCH_DEATHS: Final = 3


class SlotState(enum.Enum):
    FREE = enum.auto()
    FILLING = enum.auto()  # belongs to an undelivered batch, or to an abandoned one whose tasks still run
    LEASED = enum.auto()  # delivered; the user looks into it


@final
class Batch:
    """A planned batch, until it is delivered or, if it was abandoned, until nothing writes into its slot any more."""

    __slots__ = (
        "batch", "death_count", "epoch", "failed", "failed_grain", "grain_count", "is_abandoned", "is_given_up",
        "is_share", "loaded_count", "must_regroup", "next_grain_count", "slot", "task_count", "waiting", "worker",
    )  # fmt: skip

    def __init__(self, batch: BatchId, epoch: int, grain_count: int, worker: WorkerId | None, is_share: bool) -> None:
        self.batch = batch
        self.epoch = epoch
        self.grain_count = grain_count
        self.worker = worker
        self.is_share = is_share
        self.waiting = [(0, grain_count)]  # (first grain, count), ascending: in no task yet
        self.slot: SlotId | None = None
        self.task_count = 0
        self.loaded_count = 0
        self.failed: TaskId | None = None  # the failed task with the lowest grain
        self.failed_grain = 0
        self.death_count = 0
        self.must_regroup = False
        self.next_grain_count = grain_count  # when it is begun again
        self.is_given_up = False
        self.is_abandoned = False

    @property
    def is_finished(self) -> bool:
        return not self.task_count and (self.loaded_count == self.grain_count or self.is_failed)

    @property
    def is_failed(self) -> bool:
        return self.failed is not None or self.is_given_up or self.death_count > BATCH_DEATHS

    def fail(self, task: TaskId, first_grain: int) -> None:
        # Grains are sent in ascending order, so when all tasks are in, the lowest failure is what a plain loop meets first.
        if self.failed is None or first_grain < self.failed_grain:
            self.failed, self.failed_grain = task, first_grain

    def spoil(self, grain_count: int | None) -> None:
        """It is to be loaded again with so many grains; ``None``: it is given up."""
        if grain_count is None:
            self.is_given_up = True
        else:
            self.must_regroup = True
            self.next_grain_count = grain_count
            self.death_count = 0

    def begin_again(self) -> None:
        """Forget what was loaded of it."""
        self.must_regroup = False
        self.loaded_count = 0
        self.failed = None
        self.grain_count = self.next_grain_count


@final
class Task:
    __slots__ = ("batch", "first_grain", "grain_count", "is_unplaced", "worker")

    def __init__(self, worker: WorkerId, batch: Batch, first_grain: int, grain_count: int) -> None:
        self.worker = worker
        self.batch = batch
        self.first_grain = first_grain
        self.grain_count = grain_count
        self.is_unplaced = False


@final
class Worker:
    __slots__ = ("is_leaving", "is_ready", "tasks")

    def __init__(self) -> None:
        self.is_ready = False
        self.is_leaving = False  # it was released, and has tasks left
        self.tasks: set[TaskId] = set()

    def culprit(self, said: TaskId | None, held: Container[TaskId]) -> TaskId | None:
        """The task that it died of; ``held`` are those that wait for a slot.

        Unless it said otherwise that is the first, or it had done that and not told yet. From the second death on there is no
        doubt, because then the task goes to a worker that is at nothing else.
        """
        return said if said in self.tasks else min(self.tasks, key=lambda task: (task in held, task), default=None)


@final
class Slots:
    """A slot is free, or filled by one batch, or leased to the user."""

    def __init__(self) -> None:
        self.states: dict[SlotId, SlotState] = {}
        self.free: list[SlotId] = []  # last in, first out: the memory that is still in the processor's cache
        self.is_growth_refused = False  # or not answered yet
        self.asks_for_growth = False

    @property
    def held_count(self) -> int:
        """Slots that the user looks into."""
        return sum(state is SlotState.LEASED for state in self.states.values())

    def release(self, slot: SlotId) -> None:
        """Let it be free: it is new, or whoever had it needs it no more."""
        self.states[slot] = SlotState.FREE
        self.free.append(slot)
        self.is_growth_refused = False

    def take(self) -> SlotId:
        slot = self.free.pop()
        self.states[slot] = SlotState.FILLING
        return slot

    def lease(self, slot: SlotId) -> None:
        self.states[slot] = SlotState.LEASED

    def ask_for_growth(self) -> None:
        if not self.is_growth_refused:
            self.asks_for_growth = True
            # Until it is answered nobody asks again.
            self.is_growth_refused = True
