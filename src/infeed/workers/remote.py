"""A worker on another machine: the same loop as every worker, over memory of its own. A Ray actor of this class runs it.

A worker in another process of the same machine writes into the engine's slot. A remote worker cannot: it writes the batch into
a local buffer in the same layout, and the pool copies these bytes into the slot. So batches are the same bit for bit.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from mmap import mmap
from time import perf_counter_ns, process_time_ns
from typing import Any, Final, NamedTuple, final

import numpy as np

import infeed
from infeed.collate.layout import Layout
from infeed.errors import WorkerStartError
from infeed.memory.arena import Block
from infeed.memory.pickling import load
from infeed.scheduler.messages import WorkerId
from infeed.workers.exceptions import BUILDING, Failure
from infeed.workers.loop import Runner
from infeed.workers.native_threads import limit_pools, thread_variables
from infeed.workers.process_tools import importing, keep_freed_memory, memory_use, queued_ns
from infeed.workers.program_state import ProgramState
from infeed.workers.protocol import (
    DecodeError,
    FromWorker,
    LoadFailed,
    LoadGrains,
    LoadNext,
    MapSegment,
    OpenStream,
    PackedLoaded,
    PlaceTask,
    ReportStack,
    RowsLoaded,
    Source,
    Started,
    StartFailed,
    TaskDecoder,
    UnmapSegment,
    Unplaced,
    WorkerSpec,
    encode_answer,
)
from infeed.workers.rng import seed_lazily
from infeed.workers.status import StatusBoard, thread_stack

# How often a worker records its memory use, which helps explain why it was killed.
_MEASURE_NS: Final = 100_000_000
# The local buffer grows by 1/8 more than needed, so that slightly larger batches still fit.
_GROWTH: Final = 8
# Smaller datasets are copied by every worker, so that user code may write to its arrays. Larger ones are mapped read-only and
# shared by the workers of a node.
_COPIED_BYTES: Final = 64 << 20


class RemoteBirth(NamedTuple):
    """The settings of a remote worker."""

    version: str  # of infeed
    spec: WorkerSpec
    sys_path: list[str]
    sys_argv: list[str]
    directory: str | None
    threads: int  # per native thread pool
    counters: bytes  # of the predecessor, which this worker continues


class ClusterNode(NamedTuple):
    """A node of the cluster."""

    number: str  # Ray's id of it
    address: str

    def __str__(self) -> str:
        return f"{self.address} ({self.number[:8]})"


class Report(NamedTuple):
    """The current activity of a remote worker, and its records."""

    sent_ns: int  # on the clock of the worker's machine
    cell: bytes
    counters: bytes
    spans: bytes  # since the last report
    pid: int
    node: ClusterNode


class Reply(NamedTuple):
    """The result of a task, or of the start."""

    answer: bytes
    data: Any  # bytes of the batch for its slot; an array, or None
    report: Report


@final
class _LocalBuffer:
    """The memory in which a remote worker assembles a batch. Every growth counts as a new segment."""

    def __init__(self) -> None:
        self._memory = mmap(-1, 1)
        self.segment = 0

    def memory(self, segment: int) -> mmap:
        assert segment == self.segment
        return self._memory

    def block(self) -> Block:
        return Block(self.segment, 0, len(self._memory))

    def is_grown_to(self, nbytes: int) -> bool:
        """Make room for ``nbytes``; return whether the buffer had to be replaced."""
        if nbytes <= len(self._memory):
            return False
        self._memory = mmap(-1, nbytes + nbytes // _GROWTH)
        self.segment += 1
        return True

    def array(self, nbytes: int) -> Any:
        return np.frombuffer(self._memory, np.uint8, nbytes)


@final
class RemoteWorker:
    """One worker. The pool calls ``start`` once and then ``handle``, all from one thread, and ``look`` from another."""

    def __init__(self) -> None:
        import ray  # optional: only actors of Ray create this object

        self._node = ClusterNode(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())
        self._board = StatusBoard((WorkerId(0),), None)
        self._cell = self._board.cell(WorkerId(0))
        self._reader = self._board.reader(WorkerId(0))
        self._buffer = _LocalBuffer()
        self._decoder = TaskDecoder()
        self._runner: Runner | None = None
        self._ident = 0  # of the thread that runs user code
        self._report_lock = threading.Lock()
        self._measured_ns = 0
        self._before = (0, 0)  # CPU and queue time before the first task

    def start(self, birth_data: bytes, parts: Sequence[Any]) -> Reply:
        """Build the dataset from ``parts``, the pickle and its buffers, and run ``worker_init_fn``."""
        doing = BUILDING
        try:
            birth: RemoteBirth = pickle.loads(birth_data)
            began_ns = perf_counter_ns()
            self._ident = threading.get_ident()
            self._board.resume(WorkerId(0), birth.counters)
            self._reader.take_spans(is_last=True)  # those of the predecessor
            self._cell.start(-1)
            _adopt(birth)
            seed_lazily()
            is_small = sum(part.nbytes for part in parts) <= _COPIED_BYTES
            with importing():
                buffers = [part.copy() if is_small else part for part in parts[1:]]
                loaded: tuple[ProgramState, Source] = load(bytes(parts[0]), buffers)
            program_state, source = loaded
            program_state.settle()
            recorder = self._board.recorder(WorkerId(0), birth.spec.observe)
            runner = self._runner = Runner(birth.spec, source, self._buffer, self._cell, recorder)
            doing = "running worker_init_fn"
            runner.start()
            recorder.started(began_ns)
        except BaseException as error:  # report everything, including an import that calls sys.exit()
            return self._reply(StartFailed(Failure.of(error, doing).packed()))
        self._cell.rest()
        self._before = (process_time_ns(), queued_ns())
        return self._reply(Started())

    def handle(self, frames: Sequence[bytes]) -> Reply:
        """Handle messages of which the last is a task; return its answer and the batch."""
        answer: FromWorker | None = None
        nbytes = 0
        for frame in frames:
            try:
                message = self._decoder.decode(frame)
            except DecodeError as error:
                cause = error.__cause__
                assert cause is not None
                answer = LoadFailed(error.task, Failure.of(cause, "receiving a task"))
                continue
            if message is None:
                continue
            assert self._runner is not None
            if isinstance(message, LoadGrains | LoadNext):
                answer, nbytes = self._load(self._runner, message)
            elif isinstance(message, OpenStream):
                self._runner.handle(message)
            else:
                assert not isinstance(message, MapSegment | UnmapSegment | ReportStack | PlaceTask)
        assert answer is not None
        now_ns = perf_counter_ns()
        if now_ns - self._measured_ns > _MEASURE_NS:
            self._measured_ns = now_ns
            cpu_ns, waited_ns = self._before
            self._cell.note_usage(memory_use(), process_time_ns() - cpu_ns, queued_ns() - waited_ns)
        return self._reply(answer, nbytes)

    def look(self) -> Report:
        """Return what the worker is doing. Called while user code runs."""
        return self._report()

    def stack(self) -> str:
        """Return the stack of the thread that runs user code, or an empty text."""
        return thread_stack(self._ident) or ""

    def _load(self, runner: Runner, message: LoadGrains | LoadNext) -> tuple[FromWorker, int]:
        layout, task = message.layout, message.task
        if layout is not None:
            self._grow(runner, layout.offsets(message.row_count)[1])
        try:
            answer = runner.handle(message._replace(block=None if layout is None else self._buffer.block()))
            if isinstance(answer, Unplaced):
                layout = answer.layout
                self._grow(runner, answer.nbytes)
                answer = runner.handle(PlaceTask(task, self._buffer.block(), layout))
        except BaseException as error:
            # SystemExit and similar exceptions must reach the training loop, as without workers. So must MemoryError.
            return LoadFailed(task, Failure.of(error, "loading a batch")), 0
        assert answer is not None
        return answer, _size(answer, layout)

    def _grow(self, runner: Runner, nbytes: int) -> None:
        before = self._buffer.segment
        if self._buffer.is_grown_to(nbytes):
            runner.handle(UnmapSegment(before))

    def _reply(self, answer: FromWorker, nbytes: int = 0) -> Reply:
        return Reply(encode_answer(answer), self._buffer.array(nbytes) if nbytes else None, self._report())

    def _report(self) -> Report:
        with self._report_lock:  # each span is reported once
            spans, _ = self._reader.take_spans()
            cell, counters = self._board.copy_of_cell(WorkerId(0)), self._reader.counters()
            return Report(perf_counter_ns(), cell, counters, spans, os.getpid(), self._node)


def _size(answer: FromWorker, expected: Layout | None) -> int:
    """Return how many bytes of the buffer a batch occupies."""
    if isinstance(answer, RowsLoaded):
        layout = answer.layout or expected
        assert layout is not None
        return layout.offsets(answer.row_count)[1]
    if isinstance(answer, PackedLoaded):
        packed = answer.packed
        return max(map(sum, zip(packed.offsets, packed.sizes, strict=True)), default=0)  # type: ignore[union-attr]
    return 0


def _adopt(birth: RemoteBirth) -> None:
    """Make modules and files be found as on the user's machine, as far as they exist here."""
    if birth.version != infeed.__version__:
        raise WorkerStartError(
            f"this node has infeed {infeed.__version__} and the training process has {birth.version}; install the same version"
        )
    sys.path.extend(path for path in birth.sys_path if path not in sys.path and os.path.exists(path))
    sys.argv[:] = birth.sys_argv
    if birth.directory is not None:
        with suppress(OSError):
            os.chdir(birth.directory)
    os.environ.update(thread_variables(birth.threads))
    limit_pools(birth.threads)
    keep_freed_memory()
