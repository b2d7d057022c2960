"""State of the scheduler: batches, tasks, workers and slots."""

from __future__ import annotations

import enum
from collections.abc import Container
from typing import Final, final

from infeed.scheduler.messages import BatchId, SlotId, TaskId, WorkerId

# A batch fails after more worker deaths than this: the batch itself must be the cause.
BATCH_DEATHS: Final = 3


class SlotState(enum.Enum):
    FREE = enum.auto()
    FILLING = enum.auto()  # used by an undelivered batch, or by an abandoned one whose tasks still run
    LEASED = enum.auto()  # delivered; user code references it


@final
class Batch:
    """A planned batch, until it is delivered or, if abandoned, until no task can write into its slot."""

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
        self.waiting = [(0, grain_count)]  # (first grain, count), ascending: not in a task yet
        self.slot: SlotId | None = None
        self.task_count = 0
        self.loaded_count = 0
        self.failed: TaskId | None = None  # the failed task with the lowest grain
        self.failed_grain = 0
        self.death_count = 0
        self.must_regroup = False
        self.next_grain_count = grain_count  # grain count after begin_again
        self.is_given_up = False
        self.is_abandoned = False

    @property
    def is_finished(self) -> bool:
        return not self.task_count and (self.loaded_count == self.grain_count or self.is_failed)

    @property
    def is_failed(self) -> bool:
        return self.failed is not None or self.is_given_up or self.death_count > BATCH_DEATHS

    def fail(self, task: TaskId, first_grain: int) -> None:
        # Grains are sent in ascending order. So once all tasks have reported, the lowest failure is the one that sequential
        # loading would raise.
        if self.failed is None or first_grain < self.failed_grain:
            self.failed, self.failed_grain = task, first_grain

    def plan_again(self, grain_count: int | None) -> None:
        """Reload the batch with this number of grains; ``None`` fails it."""
        if grain_count is None:
            self.is_given_up = True
        else:
            self.must_regroup = True
            self.next_grain_count = grain_count
            self.death_count = 0

    def begin_again(self) -> None:
        """Discard the loaded grains."""
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
    __slots__ = ("is_leaving", "is_ready", "least_tasks", "tasks")

    def __init__(self, least_tasks: int = 0) -> None:
        self.least_tasks = least_tasks  # it may have this many, however long they take
        self.is_ready = False
        self.is_leaving = False  # released, with tasks left
        self.tasks: set[TaskId] = set()

    def culprit(self, said: TaskId | None, held: Container[TaskId]) -> TaskId | None:
        """Return the task that killed the worker; ``held`` are the tasks that wait for a slot.

        Without a reported task, assume the first one, though the worker may have finished it without reporting. From the second
        death on it is certain, because the task then goes to a worker without other tasks.
        """
        return said if said in self.tasks else min(self.tasks, key=lambda task: (task in held, task), default=None)


@final
class Slots:
    """All slots and their states: free, filled by one batch, or leased to user code."""

    def __init__(self) -> None:
        self.states: dict[SlotId, SlotState] = {}
        self.free: list[SlotId] = []  # last in, first out: reuses memory that is still in the CPU cache
        self.is_growth_refused = False  # True also while a request is pending
        self.asks_for_growth = False

    @property
    def held_count(self) -> int:
        """Number of slots that user code references."""
        return sum(state is SlotState.LEASED for state in self.states.values())

    def release(self, slot: SlotId) -> None:
        """Mark a slot as free: it is new, or its batch no longer needs it."""
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
            # Prevents further requests until the engine replies.
            self.is_growth_refused = True
