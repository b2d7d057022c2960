"""What the scheduler hears (events, past tense) and what it asks for (actions, imperative).

Named tuples rather than frozen dataclasses: as immutable, and made in half the time, which counts at several per batch.
"""

from __future__ import annotations

from typing import NamedTuple, NewType, TypeAlias

BatchId = NewType("BatchId", int)  # counts up over the life of an engine, through epochs
TaskId = NewType("TaskId", int)
WorkerId = NewType("WorkerId", int)
SlotId = NewType("SlotId", int)


# --- events ---------------------------------------------------------------------------------------------------------


class BatchPlanned(NamedTuple):
    """The plan has one more batch.

    ``worker`` binds it to one worker. ``is_share``: it is the next of a stream, and cannot be loaded again.
    """

    batch: BatchId
    epoch: int
    grain_count: int
    worker: WorkerId | None = None
    is_share: bool = False


class BatchWanted(NamedTuple):
    """The user's loop waits for a batch of this epoch, having been away for ``away_ns`` since it got the last.

    Or, if not ``is_urgent``, would take one: nobody waits yet, and nothing is to be given up for it.
    """

    epoch: int
    away_ns: int = 0
    is_urgent: bool = True


class EpochAbandoned(NamedTuple):
    """The user's loop left this epoch; what was loaded for it is not wanted any more."""

    epoch: int


class WorkerReady(NamedTuple):
    worker: WorkerId


class WorkerAdded(NamedTuple):
    """There is one more, and it is being started."""

    worker: WorkerId


class WorkerReleased(NamedTuple):
    """One is no longer needed. It gets nothing more, and ends when it has told of all that it has."""

    worker: WorkerId


class WorkerDied(NamedTuple):
    """The process is gone (not merely silent), so nothing of it can write into a slot any more."""

    worker: WorkerId
    task: TaskId | None = None  # the one it was at, if it said so
    is_blamed: bool = True  # on what it was at; not if it went with others
    at_s: float = 0.0  # when, on any clock that only moves forward


class WorkersLost(NamedTuple):
    """No more workers can be started. Batches that are ready are still delivered."""


class TaskLoaded(NamedTuple):
    worker: WorkerId
    task: TaskId
    elapsed_ns: int


class TaskEmpty(NamedTuple):
    """A stream had ended before this task: the batch does not exist."""

    worker: WorkerId
    task: TaskId


class TaskUnplaced(NamedTuple):
    """The worker has loaded the samples and holds them, because it has no slot, or one that is too small."""

    worker: WorkerId
    task: TaskId


class TaskMismatched(NamedTuple):
    """The samples do not fit the layout that the batch's other tasks use."""

    worker: WorkerId
    task: TaskId


class TaskFailed(NamedTuple):
    worker: WorkerId
    task: TaskId


class BatchHasBadSamples(NamedTuple):
    """A sample of the batch is bad. It was planned anew and is to be loaded again, from the beginning.

    ``grain_count`` is what it has now: 0 if nothing is left of it, ``None`` if it is given up. ``task`` is the one that ended
    with it. Without one the worker died of it, which is heard next.
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
    """There is no memory to make the batch's slot as large as it has to be. Nothing has been written into it."""

    worker: WorkerId
    task: TaskId


class SlotFreed(NamedTuple):
    """The user let go of the last view of a delivered batch."""

    slot: SlotId


class WindowChanged(NamedTuple):
    """How many batches may be in flight."""

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
    """Give grains ``first_grain`` to ``first_grain + grain_count`` of a batch to a worker.

    ``slot`` is ``None`` while no slot exists: the worker then reports ``TaskUnplaced``. ``is_whole`` says that the task is the
    whole batch, so that the worker is free to choose the layout.
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
    """Let the worker forget the samples it holds for this task."""

    worker: WorkerId
    task: TaskId


class Grow(NamedTuple):
    """Add a slot; answered by ``SlotsAdded`` or ``GrowthRefused``."""


class Deliver(NamedTuple):
    batch: BatchId
    slot: SlotId


class DeliverError(NamedTuple):
    """Raise, in the batch's turn, what went wrong with it: the report of ``task``, or, without one, what its record says."""

    batch: BatchId
    task: TaskId | None


class Pass(NamedTuple):
    """It is the batch's turn, and nothing is left of it: all its samples were bad and left out."""

    batch: BatchId


class Forget(NamedTuple):
    """The batch is gone without being delivered: of an abandoned epoch, or the empty end of a stream."""

    batch: BatchId


class Reload(NamedTuple):
    """Forget what was loaded of the batch: all of it will be sent again."""

    batch: BatchId


class StartWorker(NamedTuple):
    """Start this worker again; it died."""

    worker: WorkerId


class StopWorker(NamedTuple):
    """Let this worker end: it was released, and has nothing left to do."""

    worker: WorkerId


class FailWorkers(NamedTuple):
    """The training loop waits for a batch, and workers die or cannot be started: give up. No action follows."""


class FailMemory(NamedTuple):
    """Nothing is in flight, the user's loop waits, and there is no slot to load into."""


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
