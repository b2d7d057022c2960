"""Where every worker notes what it is at, so that it can be read when the worker cannot be asked: it hangs, or is dead.

One cell of some numbers for each worker, in memory that both sides see. Only the worker writes, and nobody waits: what is read
may be a moment old, which is all that a message about a hang or a death needs. Behind it is the worker's tape (``tape.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from mmap import mmap
from time import perf_counter_ns
from typing import Any, Final, NamedTuple, final

from infeed.memory.segments import SegmentHandle, SegmentStore
from infeed.scheduler.messages import TaskId, WorkerId
from infeed.workers.insides import MemoryUse
from infeed.workers.silence import Silence
from infeed.workers.tape import TAPE_NUMBERS, Observe, Tape, TapeReader

_NUMBERS: Final = 16  # of a cell: two cache lines
_NUMBER_BYTES: Final = 8
_PAGE: Final = _NUMBERS + TAPE_NUMBERS  # what a worker has of the board
_TASK, _ROW, _SINCE, _RSS, _STACK, _COUNT, _CPU, _QUEUED, _PRIVATE = range(9)
UNKNOWN: Final = -1


class Doing(NamedTuple):
    """What a worker is at."""

    task: TaskId | None  # None: nothing, or starting
    row: int  # of the batch; of a stream, the element. UNKNOWN where nobody counts, or outside of loading
    row_count: int  # how many rows it is at, from there on: more than one where tiny samples are not noted one by one
    since_ns: int  # on the clock ``time.perf_counter``, which all processes of a machine share; 0: not at all
    rss_bytes: int  # memory, when it was last looked at; 0: never
    stack_fd: int  # where its stack is written when it is asked for; UNKNOWN: nowhere
    cpu_ns: int  # processor time, when it was last looked at
    queued_ns: int  # how long it was ready to run and waited for a core; 0 where the platform does not tell
    private_bytes: int  # memory that it shares with nobody, when it was last looked at

    @property
    def exact_row(self) -> int | None:
        """The row it is at, if it says so."""
        return self.row if self.row >= 0 and self.row_count == 1 else None


@final
class Cell:
    """The worker's side."""

    __slots__ = ("_numbers",)

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers

    @staticmethod
    def over(memory: Any, worker: int) -> Cell:
        """The cell of a worker in a board that is mapped here."""
        return Cell(memoryview(memory).cast("q")[worker * _PAGE : worker * _PAGE + _NUMBERS])

    def start(self, stack_fd: int) -> None:
        numbers = self._numbers
        numbers[_TASK] = 0
        numbers[_ROW] = UNKNOWN
        numbers[_STACK] = stack_fd
        numbers[_SINCE] = perf_counter_ns()

    def begin(self, task: TaskId) -> int:
        """It is at this task, since now, which is returned."""
        numbers = self._numbers
        numbers[_ROW] = UNKNOWN
        now = numbers[_SINCE] = perf_counter_ns()
        numbers[_TASK] = task + 1
        return now

    def at(self, row: int) -> int:
        """It is at this row, since now, which is returned."""
        numbers = self._numbers
        numbers[_ROW] = row
        numbers[_COUNT] = 1
        now = numbers[_SINCE] = perf_counter_ns()
        return now

    def among(self, row: int, count: int) -> None:
        """At one of several rows."""
        numbers = self._numbers
        numbers[_ROW] = row
        numbers[_COUNT] = count
        numbers[_SINCE] = perf_counter_ns()

    def rest(self) -> None:
        self._numbers[_TASK] = 0
        self._numbers[_SINCE] = 0

    def note_usage(self, memory: MemoryUse, cpu_ns: int, queued_ns: int) -> None:
        self._numbers[_RSS] = memory.resident_bytes
        self._numbers[_PRIVATE] = memory.private_bytes
        self._numbers[_CPU] = cpu_ns
        self._numbers[_QUEUED] = queued_ns


def tape_over(memory: Any, worker: int, observe: Observe) -> Tape | Silence:
    """The tape of a worker in a board that is mapped here."""
    if observe == "off":
        return Silence()
    begin = worker * _PAGE + _NUMBERS
    return Tape(memoryview(memory).cast("q")[begin : begin + TAPE_NUMBERS], is_spanning=observe == "timeline")


@final
class Board:
    """The engine's side."""

    def __init__(self, workers: Sequence[WorkerId], store: SegmentStore | None) -> None:
        """In a segment of ``store``, or without one in memory of this process alone."""
        size = (max(workers) + 1) * _PAGE * _NUMBER_BYTES
        self.handle: SegmentHandle | None = None
        if store is None:
            self._memory: Any = array("q", bytes(size))
        else:
            segment = store.create(size)
            self.handle, self._memory = segment.handle, segment.memory
        self._numbers = memoryview(self._memory).cast("B").cast("q")

    def cell(self, worker: WorkerId) -> Cell:
        return Cell.over(memoryview(self._memory).cast("B"), worker)

    def tape(self, worker: WorkerId, observe: Observe) -> Tape | Silence:
        return tape_over(memoryview(self._memory).cast("B"), worker, observe)

    def reader(self, worker: WorkerId) -> TapeReader:
        return TapeReader(self._numbers, worker * _PAGE + _NUMBERS)

    def doing(self, worker: WorkerId) -> Doing:
        task, row, since_ns, rss, stack, count, cpu_ns, queued_ns, private, *_ = self._numbers[
            worker * _PAGE : worker * _PAGE + _NUMBERS
        ]
        return Doing(TaskId(task - 1) if task else None, row, count, since_ns, rss, stack, cpu_ns, queued_ns, private)

    def close(self) -> None:
        """Let go of the memory: a mapping has a descriptor of its own, for as long as it is there. Its readers are closed."""
        self._numbers.release()
        if isinstance(self._memory, mmap):
            self._memory.close()

    def vacate(self, worker: WorkerId) -> None:
        """Nobody is there any more."""
        for number in range(_NUMBERS):
            self._numbers[worker * _PAGE + number] = 0

    def clear(self, worker: WorkerId) -> None:
        """Before it starts (again): what an earlier one of this number did is no longer of interest."""
        for number in range(_NUMBERS):
            self._numbers[worker * _PAGE + number] = 0
        self._numbers[worker * _PAGE + _STACK] = UNKNOWN
        self._numbers[worker * _PAGE + _ROW] = UNKNOWN
        self._numbers[worker * _PAGE + _SINCE] = perf_counter_ns()
