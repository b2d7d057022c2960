"""A worker process: its entry points, its message loop, and its exit.

The interpreter of a spawned worker calls an entry point with the numbers of the descriptors that it inherits. A forked worker
starts in ``run_worker``.
"""

from __future__ import annotations

import gc
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from mmap import mmap
from time import perf_counter_ns, process_time_ns
from typing import Final, NoReturn, final

from infeed.memory.inheriting import take_handed, use_tracker
from infeed.memory.scripts import explain_missing_names
from infeed.memory.segments import (
    SegmentHandle,
    SegmentReader,
    forget_attached_names,
    keep_attached_names,
    open_descriptor,
    open_reader,
    remove_attached_names,
)
from infeed.memory.serialized_dataset import receive
from infeed.workers.exceptions import BUILDING, Failure
from infeed.workers.info import release_dataset
from infeed.workers.loop import Runner, serve
from infeed.workers.native_threads import limit_pools
from infeed.workers.process_tools import (
    adopt_environment,
    die_with_parent,
    end_process,
    flush_output,
    ignore_interrupts,
    importing,
    keep_freed_memory,
    keep_to_oneself,
    memory_use,
    name_process,
    queued_ns,
    watch_parent,
)
from infeed.workers.program_state import ProgramState
from infeed.workers.protocol import (
    END_S,
    IDLE_S,
    PART,
    REPORT_STACK,
    RESET,
    Birth,
    FromWorker,
    Idle,
    MapSegment,
    Source,
    Stack,
    Started,
    StartFailed,
    TaskDecoder,
    ToWorker,
    UnmapSegment,
    encode_answer,
    encode_plain,
)
from infeed.workers.rng import seed_lazily
from infeed.workers.status import UNKNOWN, Cell, arm, main_stack, recorder_over
from infeed.workers.transport import WorkerEnd

# The share of END_S for flushing the multiprocessing queues of user code. A queue without a reader may never drain.
_QUEUES_S: Final = 0.8 * END_S
# How long the reader thread has to reach the end of the pipe after a send has failed.
_READER_S: Final = 5.0


@final
class _MappedSegments:
    """The engine's segments, mapped into this process."""

    def __init__(self, reader: SegmentReader) -> None:
        self._reader = reader
        self._handles: dict[int, SegmentHandle] = {}
        self._memory: dict[int, mmap] = {}

    def memory(self, segment: int) -> mmap:
        """Return the mapped segment. Maps it on first use, because an announced segment may be gone before it is used."""
        memory = self._memory.get(segment)
        if memory is None:
            memory = self._memory[segment] = self._reader.attach(self._handles[segment])
        return memory

    def add(self, handle: SegmentHandle) -> None:
        self._handles[handle.number] = handle

    def remove(self, number: int) -> None:
        self._handles.pop(number, None)
        self._memory.pop(number, None)


class _ResetError(Exception):
    """The loader has sent ``RESET``: it no longer needs this worker."""


def run_worker(end: WorkerEnd, fds: Sequence[int], report_imports: Callable[[], None] | None = None) -> None:
    """Serve one loader after another until the pipe is closed.

    Args:
        fds: inherited descriptors: that of the shared memory, if it has one, then those that the dataset needs.
        report_imports: called before each answer: reports imports to the fork server, if this worker was forked.
    """
    explain_missing_names(sys.modules["__main__"], "workers do not run the script")
    before = threading.active_count()
    timeout_s: float | None = None
    while True:
        try:
            birth: Birth = pickle.loads(end.receive(timeout_s))
        except (EOFError, TimeoutError):
            return
        name_process(f"infeed:worker:{birth.spec.worker}")
        memory_fds = fds[: len(fds) - len(birth.serialized.fds)]
        take_handed(fds[len(memory_fds) :])
        if birth.serialized.has_tracker and fds:  # a reused worker already has the tracker
            use_tracker(fds[-1])
        try:
            memory_fd = memory_fds[0] if memory_fds else open_descriptor(birth.memory)
        except OSError:
            return  # the loader is gone already
        if not _work_for(birth, end, memory_fd, report_imports):
            return
        if memory_fd is not None:
            os.close(memory_fd)
        fds, timeout_s = (), IDLE_S
        if threading.active_count() > before or _has_children():
            return  # a thread or process of user code is still running, so the worker cannot be reused
        with suppress(OSError):
            end.send(encode_answer(Idle(_own_files())))
        # Frees reference cycles of the dataset. Runs after the answer, because a collection is slow with torch imported.
        gc.unfreeze()
        gc.collect()


def _has_children() -> bool:
    """Whether child processes of user code are still alive."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and bool(process.active_children())


def _own_files() -> tuple[str, ...]:
    """Return the files of imported modules that may be the user's: not from Python, installed packages or infeed."""
    installed = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return tuple(
        file
        for file in files
        if isinstance(file, str) and os.path.isfile(file) and not file.startswith(installed) and "site-packages" not in file
    )


def _work_for(birth: Birth, end: WorkerEnd, memory_fd: int | None, report_imports: Callable[[], None] | None) -> bool:
    """Serve one loader. Return True if the loader asked for a reset, which is then complete."""
    reader = open_reader(memory_fd)
    segments = _MappedSegments(reader)
    doing = BUILDING
    began_ns = perf_counter_ns()
    try:
        status_board = reader.attach(birth.status_board)
        cell = Cell.over(status_board, birth.spec.worker)
        stack_fd = arm()
        cell.start(UNKNOWN if stack_fd is None else stack_fd)
        cell.note_usage(memory_use(), 0, 0)
        adopt_environment(birth.environ)
        limit_pools(birth.threads)
        keep_freed_memory()
        sys.path[:] = birth.sys_path
        sys.argv[:] = birth.sys_argv
        _change_directory(birth.directory)
        for handle in birth.segments:
            segments.add(handle)
        with importing():
            loaded: tuple[ProgramState, Source] = receive(birth.serialized, reader)
        program_state, source = loaded
        program_state.settle()
        del program_state, loaded
        recorder = recorder_over(status_board, birth.spec.worker, birth.spec.observe)
        runner = Runner(birth.spec, source, segments, cell, recorder)
        doing = "running worker_init_fn"
        runner.start()
        recorder.started(began_ns)
    except BaseException as error:  # report everything, including an import that calls sys.exit()
        # If the engine is gone too, it caused this error, and no process is left to report to.
        with suppress(OSError):
            end.send(encode_answer(StartFailed(Failure.of(error, doing).packed())))
            keep_attached_names()  # other workers are starting and still have to open the segments by name
        return False
    # The dataset lives until the worker is reset or exits, so the garbage collector need not scan it again.
    gc.freeze()
    gc.enable()
    cell.rest()
    try:
        end.send(encode_answer(Started()))
        _serve(end, runner, segments, cell, report_imports)
    except (EOFError, BrokenPipeError):
        runner.finish()
        return False
    except _ResetError:
        pass
    runner.finish()
    release_dataset()
    del runner, source, segments, cell, recorder, status_board, reader
    forget_attached_names()
    return True


def _serve(
    end: WorkerEnd, runner: Runner, segments: _MappedSegments, cell: Cell, report_imports: Callable[[], None] | None
) -> None:
    decode = TaskDecoder().decode
    # CPU time of imports and of building the dataset does not count as loading.
    cpu_before, queued_before = process_time_ns(), queued_ns()

    def receive(timeout_s: float | None) -> ToWorker:
        while True:
            frame = end.receive(timeout_s)
            if frame == RESET:
                raise _ResetError
            message = decode(frame)
            if isinstance(message, MapSegment):
                segments.add(message.handle)
            elif message is not None:
                if isinstance(message, UnmapSegment):
                    segments.remove(message.number)  # all tasks that use it have been answered
                return message

    def send(answer: FromWorker) -> None:
        frame = encode_plain(answer)
        if frame is None:
            assert not isinstance(answer, Started | StartFailed | Idle | Stack)
            cell.begin(answer.task)  # pickling user objects may take any time, so the status board shows the task
            frame = encode_answer(answer)
            cell.rest()
        if report_imports is not None:
            report_imports()
        end.send(frame)

    def send_aside(answer: FromWorker) -> None:
        end.send(encode_answer(answer))

    def measure() -> None:
        cell.note_usage(memory_use(), process_time_ns() - cpu_before, queued_ns() - queued_before)

    if report_imports is not None:
        report_imports()
    serve(runner, receive, send, send_aside, measure)


def _change_directory(directory: str | None) -> None:
    if directory is None:
        return
    with suppress(OSError):  # missing or not accessible: relative paths then fail where user code opens them
        os.chdir(directory)


@final
class ThreadedEnd(WorkerEnd):
    """A worker's end of the pipe, read by a thread that ends the process when the engine is gone.

    For workers without a fork server to kill them: user code that never returns must not outlive the user's process.
    """

    def __init__(self, end: WorkerEnd) -> None:
        self._end = end
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lock = threading.Lock()  # held while a message is sent: two threads send
        self._reader = threading.Thread(target=self._read, name="infeed:reader", daemon=True)
        self._reader.start()

    def send(self, frame: bytes) -> None:
        try:
            with self._lock:
                self._end.send(frame)
        except OSError:
            # The reader thread handles the engine's last messages, reaches the end of the pipe, and ends the process.
            if threading.current_thread() is not self._reader:
                self._reader.join(_READER_S)
            raise

    def receive(self, timeout_s: float | None = None) -> bytes:
        try:
            return self._inbox.get() if timeout_s is None else self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None

    def _read(self) -> None:
        try:
            while True:
                frame = self._end.receive()
                if frame == REPORT_STACK:
                    self.send(encode_answer(Stack(main_stack() or "")))
                elif frame == PART:
                    keep_attached_names()
                else:
                    self._inbox.put(frame)
        except (EOFError, BrokenPipeError):
            leave()


def leave(code: int = 0) -> NoReturn:
    """Flush output and end this process now, without waiting for user code."""
    _leaving.acquire()  # never released: a second caller must not end the process while the first one cleans up
    try:
        flush_output()
        remove_attached_names()
        _send_queued()
    finally:
        end_process(code)


_leaving: Final = threading.Lock()


def _send_queued() -> None:
    """Run the exit handlers of ``multiprocessing``, which above all flush its queues."""
    util = sys.modules.get("multiprocessing.util")
    if util is None:
        return

    def end() -> None:
        with suppress(Exception):
            util._run_finalizers()
        flush_output()

    with suppress(RuntimeError):  # the system allows no more threads
        thread = threading.Thread(target=end, name="infeed:ending", daemon=True)
        thread.start()
        thread.join(_QUEUES_S)


def over_connection(parent_pid: int, handle: int, *fds: int) -> NoReturn:
    """Entry point of a worker that communicates over a ``multiprocessing`` connection."""
    from infeed.workers.transport_portable import inherited_end

    # A forked child of user code may use the dataset's descriptors, but a program on Windows has no use for its handles.
    keep_to_oneself(handle, *(fds if sys.platform == "win32" else ()))
    _work(parent_pid, inherited_end(handle), fds)


if sys.platform != "win32":
    from infeed.workers.transport_pipes import PipeEnd

    def over_pipes_bound(*arguments: int) -> NoReturn:
        """Entry point of a worker that the kernel kills when its parent ends.

        The other entry points rely on threads, which cannot run while native user code holds the GIL.
        """
        die_with_parent()
        over_pipes(*arguments)

    def over_pipes(parent_pid: int, read_fd: int, write_fd: int, *fds: int) -> NoReturn:
        """Entry point of a worker that communicates over a pair of pipes."""
        keep_to_oneself(read_fd, write_fd)
        _work(parent_pid, PipeEnd(read_fd, write_fd), fds)


def _work(parent_pid: int, end: WorkerEnd, fds: Sequence[int]) -> NoReturn:
    ignore_interrupts()
    watch_parent(parent_pid, leave)
    seed_lazily()
    run_worker(ThreadedEnd(end), fds)
    leave()
