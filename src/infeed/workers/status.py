"""The status board and stack dumps: what each worker is doing, visible to the engine while user code runs.

Each worker writes its task, row, memory and CPU time into its cell of the status board in shared memory. The engine reads it
without asking the worker.

Stack dumps work even if native code holds the GIL, on Linux. There ``faulthandler`` writes the stack into an anonymous file
when a signal arrives; its handler is C and does not need the GIL. The engine sends the signal and reads the file through
``/proc``. On other platforms the thread that reads the worker's pipe answers, unless native code holds the GIL.
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
from infeed.workers.recorder import (
    RECORDER_NUMBERS,
    Observe,
    Recorder,
    RecorderReader,
    mirror_counters,
    resume_counters,
)

_NUMBERS: Final = 16  # per cell: two cache lines
_NUMBER_BYTES: Final = 8
_PAGE: Final = _NUMBERS + RECORDER_NUMBERS  # one worker's part of the status board: its cell and its recorder
_TASK, _ROW, _SINCE, _RSS, _STACK, _COUNT, _CPU, _QUEUED, _PRIVATE = range(9)
UNKNOWN: Final = -1


class Doing(NamedTuple):
    """A snapshot of one worker's cell."""

    task: TaskId | None  # None: idle, or starting
    row: int  # of the batch; the element for an iterable dataset; UNKNOWN if not counted or not loading
    row_count: int  # number of rows from there; more than one if tiny samples are not recorded individually
    since_ns: int  # on the ``time.perf_counter`` clock, which all processes of a machine share; 0: idle
    rss_bytes: int  # resident memory at the last measurement; 0: never measured
    stack_fd: int  # descriptor of the stack file in the worker; UNKNOWN: none
    cpu_ns: int  # CPU time at the last measurement
    queued_ns: int  # time runnable but waiting for a CPU core; 0 if the platform does not report it
    private_bytes: int  # memory not shared with other processes, at the last measurement

    @property
    def exact_row(self) -> int | None:
        """The current row, if it is recorded individually."""
        return self.row if self.row >= 0 and self.row_count == 1 else None


def _span(worker: int) -> slice:
    """Return where the cell of a worker is on the status board; its recorder follows."""
    return slice(worker * _PAGE, worker * _PAGE + _NUMBERS)


@final
class Cell:
    """One worker's cell of the status board. Only the worker writes it while it runs."""

    __slots__ = ("_numbers",)

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers

    @staticmethod
    def over(memory: Any, worker: int) -> Cell:
        """Return the cell of a worker in a status board that this process has mapped."""
        return Cell(memoryview(memory).cast("q")[_span(worker)])

    def start(self, stack_fd: int) -> None:
        numbers = self._numbers
        numbers[_TASK] = 0
        numbers[_ROW] = UNKNOWN
        numbers[_STACK] = stack_fd
        numbers[_SINCE] = perf_counter_ns()

    def begin(self, task: TaskId) -> int:
        """Record the start of a task; return the time."""
        numbers = self._numbers
        numbers[_ROW] = UNKNOWN
        now = numbers[_SINCE] = perf_counter_ns()
        numbers[_TASK] = task + 1
        return now

    def at(self, row: int) -> int:
        """Record the start of a row; return the time."""
        numbers = self._numbers
        numbers[_ROW] = row
        numbers[_COUNT] = 1
        now = numbers[_SINCE] = perf_counter_ns()
        return now

    def among(self, row: int, count: int) -> None:
        """Record that the worker loads one of ``count`` rows from ``row``."""
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


def recorder_over(memory: Any, worker: int, observe: Observe) -> Recorder:
    """Return the recorder of a worker in a status board that this process has mapped."""
    if observe == "off":
        return Recorder(is_on=False)  # in private memory
    begin = _span(worker).stop
    return Recorder(memoryview(memory).cast("q")[begin : begin + RECORDER_NUMBERS], is_spanning=observe == "timeline")


@final
class StatusBoard:
    """The cells and recorders of all workers. Engine side."""

    def __init__(self, workers: Sequence[WorkerId], store: SegmentStore | None) -> None:
        """Allocate the board in a segment of ``store``; if ``None``, in private memory of this process."""
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

    def recorder(self, worker: WorkerId, observe: Observe) -> Recorder:
        return recorder_over(memoryview(self._memory).cast("B"), worker, observe)

    def reader(self, worker: WorkerId) -> RecorderReader:
        return RecorderReader(self._numbers, _span(worker).stop)

    def doing(self, worker: WorkerId) -> Doing:
        task, row, since_ns, rss, stack, count, cpu_ns, queued_ns, private, *_ = self._numbers[_span(worker)]
        return Doing(TaskId(task - 1) if task else None, row, count, since_ns, rss, stack, cpu_ns, queued_ns, private)

    def copy_of_cell(self, worker: WorkerId) -> bytes:
        """Return the cell of a worker, for ``mirror``."""
        cell: bytes = self._numbers[_span(worker)].tobytes()
        return cell

    def resume(self, worker: WorkerId, counters: bytes) -> None:
        """Set the counters that the next recorder of a worker continues."""
        resume_counters(self._numbers, _span(worker).stop, counters)

    def mirror(self, worker: WorkerId, cell: bytes, counters: bytes, spans: bytes, shift_ns: int) -> None:
        """Show what a worker on another machine is doing and has recorded.

        Args:
            cell: what ``copy_of_cell`` returned there.
            counters: what ``RecorderReader.counters`` returned there.
            spans: its spans since the last call.
            shift_ns: how far the clock of this machine is ahead of the other.
        """
        span = _span(worker)
        numbers = memoryview(cell).cast("q").tolist()
        if numbers[_SINCE]:
            numbers[_SINCE] += shift_ns
        numbers[_STACK] = UNKNOWN
        numbers[_PRIVATE] = 0  # of another machine's memory
        self._numbers[span] = array("q", numbers)
        mirror_counters(self._numbers, span.stop, counters, spans, shift_ns)

    def show_silent(self, worker: WorkerId, task: TaskId | None, since_ns: int) -> None:
        """Show that a worker on another machine has not replied since this time, probably because of this task."""
        numbers = self._numbers[_span(worker)]
        numbers[_TASK] = 0 if task is None else task + 1
        numbers[_ROW] = UNKNOWN
        numbers[_SINCE] = since_ns

    def close(self) -> None:
        """Release the memory, because a mapping holds a file descriptor. This also closes the readers."""
        self._numbers.release()
        if isinstance(self._memory, mmap):
            self._memory.close()

    def vacate(self, worker: WorkerId) -> None:
        """Clear the cell of a worker that has ended."""
        self._numbers[_span(worker)] = array("q", bytes(_NUMBERS * _NUMBER_BYTES))

    def clear(self, worker: WorkerId) -> None:
        """Reset the cell before a worker starts or restarts, so that it shows nothing of its predecessor."""
        self.vacate(worker)
        numbers = self._numbers[_span(worker)]
        numbers[_STACK] = numbers[_ROW] = UNKNOWN
        numbers[_SINCE] = perf_counter_ns()


# Signals that request a stack dump: real-time signals, because those have no predefined meaning. The second one also kills the
# worker: a signal interrupts system calls such as sleep(), so a sample that hangs in one would continue and seem to succeed.
_SIGNAL: Final = 50
_KILLING_SIGNAL: Final = 51
_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_FILE: Final = "infeed-stack"
_TAKE_S: Final = 1.0
_SETTLE_S: Final = 0.05
_LOOK_S: Final = 0.005
_MOST_BYTES: Final = 8192
_armed: Final[list[int]] = []


def arm() -> int | None:
    """Register the stack dump handlers at worker start-up. Return the descriptor of the stack file, or ``None``."""
    if _armed:
        return _armed[0]  # a reused worker, now with another loader
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    import faulthandler

    try:
        fd = os.memfd_create(_FILE)
        faulthandler.register(_SIGNAL, file=fd, all_threads=False)
        faulthandler.register(_KILLING_SIGNAL, file=fd, all_threads=False, chain=True)  # the default action is to terminate
    except (OSError, RuntimeError, ValueError):  # no descriptor left, or the kernel refuses: no stack dumps
        return None
    _armed.append(fd)
    return fd


def take(pid: int, fd: int, *, kills: bool = False) -> str | None:
    """Return the stack of a worker that has called ``arm``; ``None`` if it is not available.

    Args:
        kills: the worker dies as soon as it has written its stack.
    """
    if sys.platform != "linux":
        return None
    path = f"/proc/{pid}/fd/{fd}"
    try:
        # Check before sending the signal: the pid may belong to another process by now, which the signal would kill.
        if _FILE not in os.readlink(path):
            return None
        with open(path, "rb", buffering=0) as file:
            begin = os.fstat(file.fileno()).st_size
            os.kill(pid, _KILLING_SIGNAL if kills else _SIGNAL)
            end = _written(file.fileno(), begin)
            # pread, because this descriptor has its own offset, which starts at 0.
            data = os.pread(file.fileno(), min(end - begin, _MOST_BYTES), begin)
    except OSError:
        return None
    return _theirs(data.decode(errors="replace"))


def _theirs(text: str) -> str | None:
    """Return the frames without those of infeed; all frames if there are no others."""
    lines = [line for line in text.splitlines() if line.startswith("  File")]
    theirs = [line for line in lines if f'"{_PACKAGE}' not in line and '"<string>"' not in line]
    return "\n".join(theirs or lines) or None


def _written(fd: int, begin: int) -> int:
    """Wait until the stack is completely written; return the end of the file."""
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
    """Return the stack of a thread of this process."""
    frame = sys._current_frames().get(ident or 0)
    if frame is None:
        return None
    found = reversed(traceback.extract_stack(frame))
    return _theirs("\n".join(f'  File "{one.filename}", line {one.lineno} in {one.name}' for one in found))


def main_stack() -> str | None:
    """Return the stack of the main thread. The thread that reads the pipe calls it."""
    return thread_stack(threading.main_thread().ident)
