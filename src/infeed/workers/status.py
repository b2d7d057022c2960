"""The Python stack of a worker, taken from outside: also of one that is in native code and answers nobody.

On Linux a worker lets ``faulthandler`` write its stack into an anonymous file when a signal of its own arrives: the handler is
C and needs no interpreter lock. The engine sends the signal and reads the file through ``/proc``. Elsewhere the thread that
reads the worker's pipe is asked, which works unless native code holds the interpreter.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Sequence
from mmap import mmap
from time import perf_counter_ns
from typing import Any, Final, NamedTuple, final

from infeed.memory.segments import SegmentHandle, SegmentStore
from infeed.scheduler.messages import TaskId, WorkerId
from infeed.workers.process_tools import MemoryUse
from infeed.workers.recorder import RECORDER_NUMBERS, NullRecorder, Observe, Recorder, RecorderReader

_NUMBERS: Final = 16  # of a cell: two cache lines
_NUMBER_BYTES: Final = 8
_PAGE: Final = _NUMBERS + RECORDER_NUMBERS  # what a worker has of the board
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


def recorder_over(memory: Any, worker: int, observe: Observe) -> Recorder | NullRecorder:
    """The tape of a worker in a board that is mapped here."""
    if observe == "off":
        return NullRecorder()
    begin = worker * _PAGE + _NUMBERS
    return Recorder(memoryview(memory).cast("q")[begin : begin + RECORDER_NUMBERS], is_spanning=observe == "timeline")


@final
class StatusBoard:
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

    def recorder(self, worker: WorkerId, observe: Observe) -> Recorder | NullRecorder:
        return recorder_over(memoryview(self._memory).cast("B"), worker, observe)

    def reader(self, worker: WorkerId) -> RecorderReader:
        return RecorderReader(self._numbers, worker * _PAGE + _NUMBERS)

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


# Which signal asks for the stack. A real-time one: nobody else has a meaning for it.
_SIGNAL: Final = 50
_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_FILE: Final = "infeed-stack"
_TAKE_S: Final = 1.0
_SETTLE_S: Final = 0.05
_LOOK_S: Final = 0.005
_MOST_BYTES: Final = 8192
_armed: Final[list[int]] = []


def arm() -> int | None:
    """In a worker, when it starts: be ready to be asked. The descriptor of where the stack will be, if there is one."""
    if _armed:
        return _armed[0]  # a worker that works for another loader now
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    import faulthandler

    try:
        fd = os.memfd_create(_FILE)
        faulthandler.register(_SIGNAL, file=fd, all_threads=False)
    except (OSError, RuntimeError, ValueError):  # no descriptor left, or a kernel that refuses: then there is no stack
        return None
    _armed.append(fd)
    return fd


def take(pid: int, fd: int) -> str | None:
    """The stack of a worker that is armed; ``None`` if it cannot be had."""
    if sys.platform != "linux":
        return None
    path = f"/proc/{pid}/fd/{fd}"
    try:
        # Looked at before the signal is sent: by now the number may be another process's, which the signal would end.
        if _FILE not in os.readlink(path):
            return None
        with open(path, "rb", buffering=0) as file:
            begin = os.fstat(file.fileno()).st_size
            os.kill(pid, _SIGNAL)
            end = _written(file.fileno(), begin)
            # The writer's own place in the file is another one: opened anew, this begins at 0.
            data = os.pread(file.fileno(), min(end - begin, _MOST_BYTES), begin)
    except OSError:
        return None
    return _theirs(data.decode(errors="replace"))


def _theirs(text: str) -> str | None:
    """Without the frames that are ours and the same every time; all of it if there are no others."""
    lines = [line for line in text.splitlines() if line.startswith("  File")]
    theirs = [line for line in lines if f'"{_PACKAGE}' not in line and '"<string>"' not in line]
    return "\n".join(theirs or lines) or None


def _written(fd: int, begin: int) -> int:
    """Where the file ends when the stack is all in it."""
    deadline = time.monotonic() + _TAKE_S
    end, quiet_since = begin, time.monotonic()
    while (now := time.monotonic()) < deadline:
        size = os.fstat(fd).st_size
        if size != end:
            end, quiet_since = size, now
        elif end > begin and now - quiet_since > _SETTLE_S:
            break
        time.sleep(_LOOK_S)
    return end


def thread_stack(ident: int | None) -> str | None:
    """The stack of a thread of this process."""
    frame = sys._current_frames().get(ident or 0)
    if frame is None:
        return None
    found = reversed(traceback.extract_stack(frame))
    return _theirs("\n".join(f'  File "{one.filename}", line {one.lineno} in {one.name}' for one in found))


def main_stack() -> str | None:
    """The stack of this process's main thread, for a thread that is asked for it."""
    return thread_stack(threading.main_thread().ident)
