"""The messages between the engine and its workers, and their encoding as bytes for workers in other processes.

Two messages per task are on the hot path and have a fixed binary format; all others are pickled. The engine sends a layout to a
worker once and then refers to it by number, so both ends of the pipe keep a table.
"""

from __future__ import annotations

import enum
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, final

import cloudpickle
import numpy as np

from infeed.autotune.capacity import WorkerKind
from infeed.collate.arrays import ArrayTable
from infeed.collate.layout import Layout
from infeed.collate.packing import Handed, Packed
from infeed.memory.arena import Block
from infeed.memory.pickling import dumps_by_value, settle_sparse
from infeed.memory.segments import Address, SegmentHandle
from infeed.memory.serialized_dataset import SerializedDataset
from infeed.plan.order import Indices
from infeed.plan.seeds import derive
from infeed.plan.sharding import Cut
from infeed.scheduler.messages import TaskId
from infeed.workers.exceptions import Failure
from infeed.workers.recorder import Observe

# How long a worker has to exit before it is killed. An idle worker needs 1 ms. User code may never return, and Ctrl+C must
# stay responsive.
END_S: Final = 0.5
# How long an idle worker waits for another loader before it exits.
IDLE_S: Final = 60.0

# --- the first message to a worker ------------------------------------------------------------------------------------


class Making(enum.Enum):
    """How samples become a batch."""

    ROWS = "rows"  # written into the slot row by row, by default collation
    COLLATED = "collated"  # passed as a list to the user's collate_fn; the result is packed into the slot
    SINGLE = "single"  # batch_size=None: each sample unchanged, or passed through collate_fn
    GATHERED = "gathered"  # rows copied from in-memory arrays


@final
@dataclass(frozen=True, slots=True)
class Source:
    """The user's dataset and functions; pickled by value for worker processes."""

    dataset: Any
    making: Making
    is_stream: bool
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], Any] | None
    table: ArrayTable | None = None
    # Torch's default_collate, if batches must match its results; called if rows cannot be written one by one.
    torch_collate: Callable[[list[Any]], Any] | None = None

    @property
    def is_batched(self) -> bool:
        """Whether the dataset has ``__getitems__``, which takes a list of indices."""
        return callable(getattr(self.dataset, "__getitems__", None))


class Seeding(enum.Enum):
    """How a worker treats the global random generators for each grain."""

    SET = "set"  # seed them: worker processes
    LEND = "lend"  # seed them, then restore them: main process (num_workers=0)
    LEAVE = "leave"  # do not seed them: threads


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The settings of a worker at start-up; messages carry the rest."""

    worker: int
    worker_count: int
    seed: int
    grain_size: int
    seeding: Seeding
    cut: Cut  # how an iterable dataset is split among ranks
    kind: WorkerKind
    retries: int = 0  # how often to retry a sample that raises
    handles_bad_samples: bool = False  # bad samples are skipped or replaced: report all of a task together
    is_watched: bool = False  # samples have a time limit: record each one
    observe: Observe = "timeline"
    probes: bool = False  # measure whether threads would be as fast
    probes_gil: bool = False  # also measure the GIL share; one worker is enough
    sets_epochs: bool = True  # calls set_epoch of the dataset, its transforms and collate_fn
    torch_seed: int | None = None  # torch loader only: base of the worker seeds, as in torch

    @property
    def share(self) -> int:
        """The number of this worker, unique among all ranks."""
        return self.worker + (self.cut.shard.rank << 32)

    @property
    def worker_seed(self) -> int:
        """The seed of the generators at worker start-up, and the seed in ``WorkerInfo``."""
        return derive(self.seed, self.share) if self.torch_seed is None else self.torch_seed + self.worker

    @property
    def is_as_torch(self) -> bool:
        """Whether to reproduce torch's worker environment for user code: seeds and ``get_worker_info``."""
        return self.torch_seed is not None and self.seeding is Seeding.SET


class Birth(NamedTuple):
    """The first message that a loader sends to its worker."""

    spec: WorkerSpec
    serialized: SerializedDataset
    segments: list[SegmentHandle]
    sys_path: list[str]
    sys_argv: list[str]  # user modules may read it at import time
    directory: str | None
    environ: dict[str, str]
    status_board: SegmentHandle
    threads: int  # per native thread pool
    memory: Address | None = None  # of the segment store, if the process was started for another loader


# --- to a worker ----------------------------------------------------------------------------------------------------


class LoadGrains(NamedTuple):
    """Load rows of a batch of ``row_count`` rows, from ``first_row`` on; row r is at ``first_position + r``."""

    task: TaskId
    epoch: int
    first_position: int  # of the batch
    row_count: int  # of the batch
    first_row: int  # of this task
    block: Block | None
    layout: Layout | None  # the expected layout; None while unknown
    is_whole: bool  # this task is the whole batch, so the worker may choose another layout
    indices: Indices | list[Any]  # of this task
    is_careful: bool = False  # a worker died loading this task: record each sample before it is loaded
    rows: list[int] | None = None  # planned rows of this task; None if no sample of the batch was dropped


class LoadNext(NamedTuple):
    """Load the next ``row_count`` elements of this worker's share of the iterable dataset."""

    task: TaskId
    epoch: int
    first_position: int
    row_count: int
    block: Block | None
    layout: Layout | None


class OpenStream(NamedTuple):
    """Begin an epoch of an iterable dataset, or continue one that an earlier worker or an earlier run has begun.

    The worker restores the dataset to ``state``, its state after ``state_rows`` elements, if there is one. It then reads and
    discards the next ``skip`` elements.
    """

    epoch: int
    state_rows: int
    skip: int
    state: Any
    is_alone: bool  # no other worker reads: get_worker_info() reports one worker
    is_known: bool  # is_alone is decided; if not, the dataset's first batch decides, by a call of get_worker_info()
    is_over: bool = False  # this share has ended: restore the dataset, but read nothing


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


class ReportStack(NamedTuple):
    """Ask for the worker's stack, on platforms without a better way. The worker replies even while user code runs."""


ToWorker: TypeAlias = LoadGrains | LoadNext | OpenStream | PlaceTask | DropTask | MapSegment | UnmapSegment | ReportStack


# --- from a worker --------------------------------------------------------------------------------------------------


class Started(NamedTuple):
    pass


class StartFailed(NamedTuple):
    failure: Failure


class StreamNote(NamedTuple):
    """A worker's report on its share of an iterable dataset, with each answer to ``LoadNext``."""

    shards_itself: bool  # the dataset called get_worker_info()
    state: Any = None  # of the dataset after these rows or, after the end, for the next epoch; None if it has no state_dict()
    bad: tuple[tuple[int, Failure], ...] = ()  # elements skipped before or among these rows


class RowsLoaded(NamedTuple):
    """The rows are in the slot. ``layout`` is ``None`` if it is the expected one."""

    task: TaskId
    elapsed_ns: int
    row_count: int
    layout: Layout | None
    beside: list[list[Any]]
    stream: StreamNote | None = None


class PackedLoaded(NamedTuple):
    """A batch of any structure is in the slot."""

    task: TaskId
    elapsed_ns: int
    row_count: int
    packed: Packed | Handed  # Handed: passed by reference, from workers in this process
    stream: StreamNote | None = None


class Unplaced(NamedTuple):
    """The worker holds the loaded samples: the task has no block, or ``nbytes`` do not fit into it."""

    task: TaskId
    nbytes: int
    layout: Layout | None


class Mismatched(NamedTuple):
    """The samples do not match the layout of the rest of the batch."""

    task: TaskId


class Emptied(NamedTuple):
    """The iterable dataset had no elements left for this task."""

    task: TaskId
    stream: StreamNote


class LoadFailed(NamedTuple):
    task: TaskId
    failure: Failure
    stream: StreamNote | None = None
    bad: tuple[tuple[int, Failure], ...] = ()  # rows that cannot be loaded, if bad samples are handled


class Idle(NamedTuple):
    """A spawned worker has dropped its dataset after ``RESET`` and waits for another."""

    files: tuple[str, ...]  # of imported modules that may be the user's


class Stack(NamedTuple):
    """The worker's stack as text: the answer to ``ReportStack``."""

    text: str


FromWorker: TypeAlias = (
    Started | StartFailed | RowsLoaded | PackedLoaded | Unplaced | Mismatched | Emptied | LoadFailed | Idle | Stack
)


_TASK: Final = struct.Struct("<B10q")
_DONE: Final = struct.Struct("<B4q")
_NUMBER: Final = struct.Struct("<q")

_GRAINS, _GRAINS_PICKLED, _OTHER, _LAYOUT, _ROWS, _REPORT_STACK, _PART, _RESET = range(8)
# One byte each, because the thread that reads a worker's pipe compares every message with them.
REPORT_STACK: Final = bytes([_REPORT_STACK])
# The engine is about to close the pipe, but lives on. If the pipe closes without this message, the worker assumes that the
# engine is gone.
PART: Final = bytes([_PART])
# The loader no longer needs the worker. Another loader may send it a dataset.
RESET: Final = bytes([_RESET])
_NONE: Final = -1
# By the last number of an answer's header: no note, or a note without state and bad elements.
_NOTES: Final = (None, StreamNote(shards_itself=False), StreamNote(shards_itself=True))
# The size of the layout table; a full table is cleared. Otherwise a loader with a new layout in every batch would grow it
# without limit.
_LAYOUTS_KEPT: Final = 64


@final
class TaskEncoder:
    """Encodes messages at the engine's end of one worker's pipe."""

    def __init__(self) -> None:
        # By id. The layout is in the value too, so that Python does not reuse its id.
        self._numbers: dict[int, tuple[int, Layout]] = {}

    def encode(self, message: ToWorker, frames: list[bytes]) -> None:
        """Append the frames of a message. If pickling a user object in it raises, append nothing."""
        if isinstance(message, LoadGrains):
            task, epoch, position, row_count, first_row, block, layout, is_whole, indices, is_careful, rows = message
            if rows is None and isinstance(indices, np.ndarray):
                tag, body = _GRAINS, indices.tobytes()
            else:
                tag, body = _GRAINS_PICKLED, dumps_by_value((indices, rows))
            number = self._number(layout, frames)
            segment, offset, size = block or (_NONE, _NONE, _NONE)
            frames.append(
                _TASK.pack(
                    tag, task, epoch, position, row_count, first_row, segment, offset, size, number, is_whole + 2 * is_careful
                )
                + body
            )
        elif isinstance(message, ReportStack):
            frames.append(REPORT_STACK)
        elif isinstance(message, LoadNext | PlaceTask):
            number = self._number(message.layout, frames)
            frames.append(bytes([_OTHER]) + dumps((number, message._replace(layout=None))))
        else:
            frames.append(bytes([_OTHER]) + dumps((_NONE, message)))

    def _number(self, layout: Layout | None, frames: list[bytes]) -> int:
        """Return the number of a layout. Sends the layout first if the worker does not have it yet."""
        if layout is None:
            return _NONE
        known = self._numbers.get(id(layout))
        if known is not None:
            return known[0]
        data = dumps_by_value(layout)
        if len(self._numbers) == _LAYOUTS_KEPT:
            self._numbers.clear()
        number = len(self._numbers)
        self._numbers[id(layout)] = number, layout
        frames.append(bytes([_LAYOUT]) + _NUMBER.pack(number) + data)
        return number


class DecodeError(Exception):
    """A task cannot be decoded because the worker cannot rebuild a user object; see ``__cause__``. Internal."""

    def __init__(self, task: TaskId) -> None:
        super().__init__(task)
        self.task = task


@final
class TaskDecoder:
    """Decodes messages at the worker's end of its pipe."""

    def __init__(self) -> None:
        self._layouts: dict[int, Layout | Exception] = {}

    def decode(self, frame: bytes) -> ToWorker | None:
        """Return the message, or ``None`` if it only updates the layout table.

        Raises:
            DecodeError: a user object in the message cannot be rebuilt in this process.
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
        number, content = pickle.loads(memoryview(frame)[1:])
        message: ToWorker = content
        if isinstance(message, LoadNext | PlaceTask):
            return message._replace(layout=self._layout(message.task, number))
        return message

    def _learn(self, frame: bytes) -> None:
        (number,) = _NUMBER.unpack_from(frame, 1)
        try:
            self._layouts[number] = pickle.loads(memoryview(frame)[1 + _NUMBER.size :])
        except Exception as error:  # from a user class; decoding a task that needs the layout raises it
            self._layouts[number] = error

    def _layout(self, task: TaskId, number: int) -> Layout | None:
        layout = None if number == _NONE else self._layouts[number]
        if isinstance(layout, Exception):
            raise DecodeError(task) from layout
        return layout


def _loaded(task: TaskId, body: memoryview) -> Any:
    try:
        return pickle.loads(body)
    except Exception as error:  # from an index of a user class
        raise DecodeError(task) from error


def encode_plain(answer: FromWorker) -> bytes | None:
    """Return the frame of an answer without user objects; ``None`` if the answer has any: pickling them may take any time."""
    if type(answer) is not RowsLoaded:
        return None
    task, elapsed_ns, row_count, layout, beside, stream = answer
    if layout is not None or beside or (stream is not None and (stream.state is not None or stream.bad)):
        return None
    return _DONE.pack(_ROWS, task, elapsed_ns, row_count, 0 if stream is None else 1 + stream.shards_itself)


def encode_answer(answer: FromWorker) -> bytes:
    """Return the frame of an answer; if an object in it cannot be pickled, that of a failure of its task."""
    plain = encode_plain(answer)
    if plain is not None:
        return plain
    if isinstance(answer, Started | StartFailed | Idle | Stack):
        return _DONE.pack(_OTHER, _NONE, 0, 0, 0) + dumps(answer)
    try:
        if isinstance(answer, LoadFailed):
            answer = answer._replace(failure=answer.failure.packed(), bad=_packed(answer.bad))
        if isinstance(answer, RowsLoaded | PackedLoaded | Emptied) and answer.stream is not None and answer.stream.bad:
            answer = answer._replace(stream=answer.stream._replace(bad=_packed(answer.stream.bad)))
        # The header repeats the task, so that the engine can report a body that it cannot decode.
        stream = None if isinstance(answer, Unplaced | Mismatched) else answer.stream
        return _DONE.pack(_OTHER, answer.task, 0, 0, 0 if stream is None else 1 + stream.shards_itself) + dumps(answer)
    except BaseException as error:  # a user object that cannot be pickled may raise anything
        failure = Failure.of(error, "sending a batch (it contains an object that cannot be pickled)")
        return encode_answer(LoadFailed(answer.task, failure))


def _packed(bad: tuple[tuple[int, Failure], ...]) -> tuple[tuple[int, Failure], ...]:
    return tuple((row, failure.packed()) for row, failure in bad)


def decode_answer(frame: bytes) -> FromWorker:
    """Return the message. If rebuilding a user object raises, return a failure of its batch instead."""
    tag, task, elapsed_ns, row_count, stream = _DONE.unpack_from(frame)
    if tag == _ROWS:
        return RowsLoaded(TaskId(task), elapsed_ns, row_count, None, [], _NOTES[stream])
    try:
        message: FromWorker = pickle.loads(memoryview(frame)[_DONE.size :])
        settle_sparse()
    except Exception as error:  # the user's __setstate__ or __init__ may raise anything
        if task == _NONE:
            raise
        doing = "receiving a batch (it contains an object that cannot be unpickled in this process)"
        return LoadFailed(TaskId(task), Failure.of(error, doing), _NOTES[stream])
    return message


def dumps(value: object) -> bytes:
    """Pickle by reference, or by value where that fails. In the user's process, only for infeed's types."""
    try:
        return pickle.dumps(value, 5)
    except (pickle.PicklingError, AttributeError, TypeError):
        data: bytes = cloudpickle.dumps(value, 5)
        return data
