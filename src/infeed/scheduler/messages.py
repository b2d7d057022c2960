"""Scheduler input (events, past tense) and output (actions, imperative).

Named tuples are immutable like frozen dataclasses and take half the time to create; several are created per batch.
"""

from __future__ import annotations

from typing import NamedTuple, NewType, TypeAlias

BatchId = NewType("BatchId", int)  # increases over the life of an engine, across epochs
TaskId = NewType("TaskId", int)
WorkerId = NewType("WorkerId", int)
SlotId = NewType("SlotId", int)


# --- events ---------------------------------------------------------------------------------------------------------


class BatchPlanned(NamedTuple):
    """The planner added a batch.

    ``worker`` binds the batch to one worker. ``is_share``: it is the next batch of an iterable dataset and cannot be reloaded.
    """

    batch: BatchId
    epoch: int
    grain_count: int
    worker: WorkerId | None = None
    is_share: bool = False


class BatchWanted(NamedTuple):
    """The training loop waits for a batch of this epoch, ``away_ns`` after it received the last one.

    If not ``is_urgent``, the training loop does not wait yet: the scheduler delivers a ready batch, but evicts nothing for it.
    """

    epoch: int
    away_ns: int = 0
    is_urgent: bool = True


class EpochAbandoned(NamedTuple):
    """The training loop left this epoch; the scheduler discards its loaded batches."""

    epoch: int


class WorkerReady(NamedTuple):
    worker: WorkerId


class WorkerAdded(NamedTuple):
    """The engine is starting an additional worker."""

    worker: WorkerId


class WorkerReleased(NamedTuple):
    """The worker is no longer needed. It gets no more tasks and stops after reporting those it has."""

    worker: WorkerId


class WorkerDied(NamedTuple):
    """The process has ended (it is not merely unresponsive), so it can no longer write into a slot."""

    worker: WorkerId
    task: TaskId | None = None  # the task it was running, if it reported one
    is_blamed: bool = True  # count the death against that task; False if the worker died together with others
    at_s: float = 0.0  # time of death, on any monotonic clock


class WorkersLost(NamedTuple):
    """No more workers can be started. The scheduler still delivers batches that are ready."""


class TaskLoaded(NamedTuple):
    worker: WorkerId
    task: TaskId
    elapsed_ns: int


class TaskEmpty(NamedTuple):
    """The iterable dataset ended before this task, so the batch does not exist."""

    worker: WorkerId
    task: TaskId


class TaskUnplaced(NamedTuple):
    """The worker has loaded the samples and holds them, because it has no slot or its slot is too small."""

    worker: WorkerId
    task: TaskId


class TaskMismatched(NamedTuple):
    """The samples do not fit the layout of the batch's other tasks."""

    worker: WorkerId
    task: TaskId


class TaskFailed(NamedTuple):
    worker: WorkerId
    task: TaskId


class BatchHasBadSamples(NamedTuple):
    """A sample of the batch is bad. The engine has planned the batch again, and all of it must be reloaded.

    ``grain_count`` is the new number of grains: 0 if no sample is left, ``None`` if the batch has failed. ``task`` is the task
    that reported the sample. If it is ``None``, the sample killed the worker and ``WorkerDied`` follows.
    """

    batch: BatchId
    grain_count: int | None
    worker: WorkerId
    task: TaskId | None = None


class SlotsAdded(NamedTuple):
    slots: tuple[SlotId, ...]


class GrowthRefused(NamedTuple):
    """There is no memory for another slot."""


class PlaceRefused(NamedTuple):
    """There is no memory to enlarge the batch's slot to the required size. Nothing has been written into it."""

    worker: WorkerId
    task: TaskId


class SlotFreed(NamedTuple):
    """User code released the last view of a delivered batch."""

    slot: SlotId


class WindowChanged(NamedTuple):
    """The maximum number of batches in flight changed."""

    window: int


class Closed(NamedTuple):
    pass


Event: TypeAlias = (
    BatchPlanned
    | BatchWanted
    | EpochAbandoned
    | WorkerReady
    | WorkerAdded
    | WorkerReleased
    | WorkerDied
    | WorkersLost
    | TaskLoaded
    | TaskEmpty
    | TaskUnplaced
    | TaskMismatched
    | TaskFailed
    | BatchHasBadSamples
    | SlotsAdded
    | GrowthRefused
    | PlaceRefused
    | SlotFreed
    | WindowChanged
    | Closed
)


# --- actions --------------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """Send grains ``first_grain`` to ``first_grain + grain_count`` of a batch to a worker.

    ``slot`` is ``None`` while no slot exists; the worker then reports ``TaskUnplaced``. ``is_whole``: the task is the whole
    batch, so the worker may choose the layout.
    """

    worker: WorkerId
    task: TaskId
    batch: BatchId
    first_grain: int
    grain_count: int
    slot: SlotId | None
    is_whole: bool


class Place(NamedTuple):
    """Let the worker write the samples it holds into the batch's slot."""

    worker: WorkerId
    task: TaskId
    batch: BatchId
    slot: SlotId


class Drop(NamedTuple):
    """Let the worker discard the samples it holds for this task."""

    worker: WorkerId
    task: TaskId


class Grow(NamedTuple):
    """Add a slot. The engine replies with ``SlotsAdded`` or ``GrowthRefused``."""


class Deliver(NamedTuple):
    batch: BatchId
    slot: SlotId


class DeliverError(NamedTuple):
    """Raise the batch's error in its turn: the one that ``task`` reported or, without a task, the one in its record."""

    batch: BatchId
    task: TaskId | None


class Pass(NamedTuple):
    """Skip the batch in its turn: all its samples were bad and left out."""

    batch: BatchId


class Forget(NamedTuple):
    """Forget a batch that is not delivered: its epoch was abandoned, or an iterable dataset ended before it."""

    batch: BatchId


class Reload(NamedTuple):
    """Discard the loaded samples of the batch; the scheduler sends all of it again."""

    batch: BatchId


class StartWorker(NamedTuple):
    """Restart this worker after its death."""

    worker: WorkerId


class StopWorker(NamedTuple):
    """Stop this worker: it was released and has no tasks left."""

    worker: WorkerId


class FailWorkers(NamedTuple):
    """Give up: the training loop waits for a batch, and workers keep dying or cannot be started. No action follows."""


class FailMemory(NamedTuple):
    """Give up: the training loop waits, nothing is in flight, and there is no slot to load into."""


Action: TypeAlias = (
    Send
    | Place
    | Drop
    | Grow
    | Deliver
    | DeliverError
    | Pass
    | Forget
    | Reload
    | StartWorker
    | StopWorker
    | FailWorkers
    | FailMemory
)
