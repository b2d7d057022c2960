"""What the engine tells a worker (imperative) and what a worker tells the engine (past tense).

Named tuples, like the scheduler's. How they cross to another process is the business of ``workers/wire.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from infeed.batch.layout import Layout
from infeed.batch.packing import Handed, Packed
from infeed.memory.arena import Block
from infeed.memory.segments import SegmentHandle
from infeed.plan.order import Indices
from infeed.scheduler.messages import TaskId
from infeed.workers.failures import Failure

# --- to a worker ----------------------------------------------------------------------------------------------------


class LoadGrains(NamedTuple):
    """Load rows ``first_row`` and following of a batch of ``row_count`` rows; row r is at ``first_position + r``."""

    task: TaskId
    epoch: int
    first_position: int  # of the batch
    row_count: int  # of the batch
    first_row: int  # of this task
    block: Block | None
    layout: Layout | None  # what is expected; None while unknown
    is_whole: bool  # this task is the whole batch: the worker is free in the layout
    indices: Indices | list[Any]  # of this task
    is_careful: bool = False  # a worker died with it: note each sample
    rows: list[int] | None = None  # of this task, as first planned; None if no sample of the batch was left out


class LoadNext(NamedTuple):
    """Load the next ``row_count`` elements of this worker's share of the stream."""

    task: TaskId
    epoch: int
    first_position: int
    row_count: int
    block: Block | None
    layout: Layout | None


class OpenStream(NamedTuple):
    """Begin an epoch of the stream, or go on in one that an earlier worker, or an earlier run, has begun.

    The dataset is put where it was after ``state_rows`` elements by its own ``state``, if there is one, and reads and forgets
    the next ``skip``.
    """

    epoch: int
    state_rows: int
    skip: int
    state: Any
    is_alone: bool  # no other worker reads: the dataset is told that it has one worker
    is_known: bool  # whether that is decided; if not, it is by whether the dataset asks before its first batch is read
    is_over: bool = False  # this share has ended: the dataset is put where it was, and nothing is read


class PlaceTask(NamedTuple):
    """Write the samples held for this task into this block."""

    task: TaskId
    block: Block
    layout: Layout | None


class DropTask(NamedTuple):
    task: TaskId


class MapSegment(NamedTuple):
    handle: SegmentHandle


class UnmapSegment(NamedTuple):
    number: int


class TellStack(NamedTuple):
    """Say where you are; answered also while user code runs, where the platform has no better way."""


ToWorker: TypeAlias = LoadGrains | LoadNext | OpenStream | PlaceTask | DropTask | MapSegment | UnmapSegment | TellStack


# --- from a worker --------------------------------------------------------------------------------------------------


class Started(NamedTuple):
    pass


class StartFailed(NamedTuple):
    failure: Failure


class RowsLoaded(NamedTuple):
    """Rows are in the slot. ``layout`` is ``None`` where it is the one that was expected."""

    task: TaskId
    elapsed_ns: int
    row_count: int
    layout: Layout | None
    beside: list[list[Any]]
    shards_itself: bool = False  # of a stream: the dataset asked which worker it is in
    stream_state: Any = None  # of a stream that can say where it is: after these rows
    bad: tuple[tuple[int, Failure], ...] = ()  # elements of a stream that were left out before these rows, or among them


class PackedLoaded(NamedTuple):
    """A tree of any kind is in the slot."""

    task: TaskId
    elapsed_ns: int
    row_count: int
    packed: Packed | Handed  # handed over by workers of this process
    shards_itself: bool = False
    stream_state: Any = None
    bad: tuple[tuple[int, Failure], ...] = ()


class Unplaced(NamedTuple):
    """Samples are loaded and held: there is no block, or ``nbytes`` do not fit into it."""

    task: TaskId
    nbytes: int
    layout: Layout | None


class Mismatched(NamedTuple):
    """Samples do not fit the layout that the rest of the batch uses."""

    task: TaskId


class Emptied(NamedTuple):
    """The stream had no element left for this task."""

    task: TaskId
    shards_itself: bool = False
    bad: tuple[tuple[int, Failure], ...] = ()
    stream_state: Any = None  # what the next epoch begins from


class LoadFailed(NamedTuple):
    task: TaskId
    failure: Failure
    shards_itself: bool = False
    bad: tuple[tuple[int, Failure], ...] = ()  # rows of the batch that cannot be loaded, if they are to be mended


class Idle(NamedTuple):
    """A spawned worker has dropped its dataset, as ``RESET`` asks, and waits for another."""

    files: tuple[str, ...]  # of modules that it has imported and that may be the user's own


class Stack(NamedTuple):
    """Where the worker is, as text: the answer to ``TellStack``."""

    text: str


FromWorker: TypeAlias = (
    Started | StartFailed | RowsLoaded | PackedLoaded | Unplaced | Mismatched | Emptied | LoadFailed | Idle | Stack
)
