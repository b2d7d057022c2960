"""Messages as bytes, for workers in other processes.

Two messages per task are on the hot path and have a fixed form; the rest is pickled. A layout is sent to a worker once and then
meant by its number, so both ends of a worker's pipe keep a table.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, Final, NamedTuple, TypeAlias, final

import cloudpickle
import numpy as np

from infeed.collate.layout import Layout
from infeed.collate.packing import Handed, Packed
from infeed.memory.arena import Block
from infeed.memory.pickling import dumps_by_value, settle_sparse
from infeed.memory.segments import SegmentHandle
from infeed.plan.order import Indices
from infeed.scheduler.messages import TaskId
from infeed.workers.exceptions import Failure

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


_TASK: Final = struct.Struct("<B10q")
_DONE: Final = struct.Struct("<B4q")
_NUMBER: Final = struct.Struct("<q")

_GRAINS, _GRAINS_PICKLED, _OTHER, _LAYOUT, _ROWS, _ROWS_PICKLED, _TELL_STACK, _PART, _RESET = range(9)
# Short, because the thread that reads a worker's pipe compares every message with them.
TELL_STACK: Final = bytes([_TELL_STACK])
# The end of the pipe follows, and the engine lives on. Without this it is gone, as far as a worker can tell.
PART: Final = bytes([_PART])
# The loader is done with the worker, which may be sent another dataset.
RESET: Final = bytes([_RESET])
_NONE: Final = -1
# Layouts that are known by number; beyond, the table begins anew. A loader whose every batch has another layout must not
# grow it without end.
_LAYOUTS_KEPT: Final = 64


@final
class TaskEncoder:
    """The engine's end of one worker's pipe."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[Layout] = []

    def encode(self, message: ToWorker, frames: list[bytes]) -> None:
        """Append the frames of a message."""
        if isinstance(message, LoadGrains):
            task, epoch, position, row_count, first_row, block, layout, is_whole, indices, is_careful, rows = message
            number = self._number(layout, frames)
            segment, offset, size = block or (_NONE, _NONE, _NONE)
            if rows is None and isinstance(indices, np.ndarray):
                tag, body = _GRAINS, indices.tobytes()
            else:
                tag, body = _GRAINS_PICKLED, dumps_by_value((indices, rows))
            frames.append(
                _TASK.pack(
                    tag, task, epoch, position, row_count, first_row, segment, offset, size, number, is_whole + 2 * is_careful
                )
                + body
            )
        elif isinstance(message, TellStack):
            frames.append(TELL_STACK)
        elif isinstance(message, LoadNext | PlaceTask):
            number = self._number(message.layout, frames)
            frames.append(bytes([_OTHER]) + dumps((number, message._replace(layout=None))))
        else:
            frames.append(bytes([_OTHER]) + dumps((_NONE, message)))

    def _number(self, layout: Layout | None, frames: list[bytes]) -> int:
        """The number by which the worker knows the layout; if it does not yet, it is told first."""
        if layout is None:
            return _NONE
        number = self._numbers.get(id(layout))
        if number is not None:
            return number
        if len(self._alive) == _LAYOUTS_KEPT:
            self._numbers.clear()
            self._alive.clear()
        number = len(self._alive)
        self._numbers[id(layout)] = number
        self._alive.append(layout)
        frames.append(bytes([_LAYOUT]) + _NUMBER.pack(number) + dumps_by_value(layout))
        return number


class DecodeError(Exception):
    """A task cannot be read: a class of the user's cannot be built in the worker. The cause says why. Internal."""

    def __init__(self, task: TaskId) -> None:
        super().__init__(task)
        self.task = task


@final
class TaskDecoder:
    """The worker's end."""

    def __init__(self) -> None:
        self._layouts: dict[int, Layout | Exception] = {}

    def decode(self, frame: bytes) -> ToWorker | None:
        """The message, or ``None`` if it was for this table.

        Raises:
            DecodeError: something of the user's in it cannot be built here.
        """
        tag = frame[0]
        if tag in (_GRAINS, _GRAINS_PICKLED):
            _, number, epoch, position, row_count, first_row, *where, layout, flags = _TASK.unpack_from(frame)
            task = TaskId(number)
            body = memoryview(frame)[_TASK.size :]
            indices, rows = (np.frombuffer(body, dtype=np.int64), None) if tag == _GRAINS else _loaded(task, body)
            block = None if where[0] == _NONE else Block(*where)
            known = self._layout(task, layout)
            is_whole, is_careful = bool(flags & 1), bool(flags & 2)
            return LoadGrains(task, epoch, position, row_count, first_row, block, known, is_whole, indices, is_careful, rows)
        if tag == _LAYOUT:
            self._learn(frame)
            return None
        if tag == _TELL_STACK:
            return None  # nobody asks a worker that is told this way, and it is not busy
        number, content = pickle.loads(memoryview(frame)[1:])
        message: ToWorker = content
        if isinstance(message, LoadNext | PlaceTask):
            return message._replace(layout=self._layout(message.task, number))
        return message

    def _learn(self, frame: bytes) -> None:
        (number,) = _NUMBER.unpack_from(frame, 1)
        try:
            self._layouts[number] = pickle.loads(memoryview(frame)[1 + _NUMBER.size :])
        except Exception as error:  # a class of the user's in it; whoever needs the layout will hear of it
            self._layouts[number] = error

    def _layout(self, task: TaskId, number: int) -> Layout | None:
        layout = None if number == _NONE else self._layouts[number]
        if isinstance(layout, Exception):
            raise DecodeError(task) from layout
        return layout


def _loaded(task: TaskId, body: memoryview) -> Any:
    try:
        return pickle.loads(body)
    except Exception as error:  # an index of a class of the user's
        raise DecodeError(task) from error


def encode_answer(message: FromWorker) -> bytes:
    if isinstance(message, RowsLoaded) and message.stream_state is None and not message.bad:
        head = (message.task, message.elapsed_ns, message.row_count, message.shards_itself)
        if message.layout is None and not message.beside:
            return _DONE.pack(_ROWS, *head)
        return _DONE.pack(_ROWS_PICKLED, *head) + dumps((message.layout, message.beside))
    # The task stands in the head as well: if the rest cannot be read, it is known whose answer it was.
    task = _NONE if isinstance(message, Started | StartFailed | Idle | Stack) else message.task
    return _DONE.pack(_OTHER, task, 0, 0, 0) + dumps(message)


def decode_answer(frame: bytes) -> FromWorker:
    """The message. What the user's objects raise when they are built again is told as a failure of their batch."""
    tag, task, elapsed_ns, row_count, shards_itself = _DONE.unpack_from(frame)
    layout: Layout | None = None
    beside: list[list[Any]] = []
    try:
        if tag == _OTHER:
            message: FromWorker = pickle.loads(memoryview(frame)[_DONE.size :])
            return message
        if tag == _ROWS_PICKLED:
            layout, beside = pickle.loads(memoryview(frame)[_DONE.size :])
            settle_sparse()
    except Exception as error:  # the user's __setstate__ or __init__ may raise anything
        if task == _NONE:
            raise
        doing = "receiving a batch (an object of it cannot be built again in this process)"
        return LoadFailed(TaskId(task), Failure.of(error, doing), bool(shards_itself))
    return RowsLoaded(TaskId(task), elapsed_ns, row_count, layout, beside, bool(shards_itself))


def dumps(value: object) -> bytes:
    """Pickle in a worker: by reference where that works, else by value. In the user's process, for our own types only."""
    try:
        return pickle.dumps(value, 5)
    except (pickle.PicklingError, AttributeError, TypeError):
        data: bytes = cloudpickle.dumps(value, 5)
        return data
