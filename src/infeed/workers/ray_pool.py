"""The pool of workers on a Ray cluster. Each worker is an actor; Ray chooses its node and reports its death.

The training loop's thread submits tasks. When the result of a task has reached the object store of this node, Ray calls back.
The pool's thread then copies the batch into its slot and passes the answer on, so the copy does not delay the training loop.

NOTE [late results]
  A slot may be reused as soon as its task was answered or its worker is dead. So only the pool's thread writes into slots and
  reports deaths: once it has reported the death of an actor, it drops what still arrives from it.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final

import numpy as np

import infeed
from infeed.collate.layout import Layout
from infeed.errors import WorkerDiedError, WorkerStartError
from infeed.formatting import format_count
from infeed.memory.arena import Block
from infeed.memory.segments import SegmentHandle
from infeed.scheduler.messages import TaskId, WorkerId
from infeed.workers.exceptions import BUILDING, Failure, kept
from infeed.workers.interpreter import command_line, explaining_limits, search_path
from infeed.workers.pool import Death, News, WorkerPool
from infeed.workers.process_tools import current_directory
from infeed.workers.protocol import (
    DropTask,
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
    Started,
    StartFailed,
    TaskEncoder,
    ToWorker,
    UnmapSegment,
    Unplaced,
    WorkerSpec,
    decode_answer,
)
from infeed.workers.ray_cluster import DISCONNECTED, Connection
from infeed.workers.ray_options import RayWorkers
from infeed.workers.remote import ClusterNode, RemoteBirth, RemoteWorker, Reply, Report
from infeed.workers.status import StatusBoard
from infeed.workers.write import Segments

_LOG: Final = logging.getLogger("infeed")
# How often the pool asks a busy worker what it is doing.
_LOOK_S: Final = 1.0
_SOONEST_LOOK_S: Final = 0.02
# A worker that has not replied for this many looks holds the GIL.
_SILENT_LOOKS: Final = 2
# How long a worker has to reply with its stack.
_STACK_S: Final = 1.0
# How long workers have to exit before they are killed. An idle actor needs 10 ms.
_END_S: Final = 0.5
# Warn if workers have waited this long for resources of the cluster, and again when the wait has doubled.
_WAIT_S: Final = 10.0
# Tasks wait while the expected results of a node would take more than this share of its object store, beside the datasets.
# Above 80% Ray writes objects to disk. Each loader may have one task per node anyway.
_STORE_SHARE: Final = 0.5
_CONTROL: Final = "control"
_THREAD: Final = "infeed:ray"


Call: TypeAlias = Literal["start", "task", "look"]


class _Sent(NamedTuple):
    """A task that a worker has not answered."""

    frames: list[bytes]
    block: Block | None
    layout: Layout | None
    at_ns: int


class _Arrived(NamedTuple):
    """An answer, and the batch if it has no block yet or does not fit into it."""

    answer: bytes
    is_placed: bool
    data: Any
    layout: Layout | None


class _Held(NamedTuple):
    """A batch that waits for a block."""

    answer: RowsLoaded | PackedLoaded
    data: Any


class _Done(NamedTuple):
    """A call of an actor has returned or failed."""

    member: _Member
    call: Call
    task: TaskId
    future: Any


class _Place(NamedTuple):
    """A held batch has got a block."""

    member: _Member
    held: _Held
    block: Block


_NO_TASK: Final = TaskId(-1)


@final
class _Member:
    """One actor."""

    def __init__(self, worker: WorkerId, actor: Any, at_ns: int) -> None:
        self.worker, self.actor = worker, actor
        self.encoder = TaskEncoder()
        self.frames: list[bytes] = []  # of messages that are sent with the next task
        self.tasks: dict[TaskId, _Sent] = {}  # submitted, not answered
        self.queued: deque[tuple[TaskId, _Sent]] = deque()  # not submitted: the object store of the node is full
        self.held: dict[TaskId, _Held] = {}
        self.began_ns = at_ns
        self.received_ns = at_ns  # time of the latest reply
        self.report: Report | None = None  # None: Ray has not placed it yet
        self.shift_ns: int | None = None  # of this machine's clock against that of its node
        self.asked_ns = 0  # when it was asked what it is doing; 0: it has replied
        self.is_started = False
        self.is_dead = False  # its death is reported


# The open pools of this process, which share the object stores of the cluster.
_POOLS: Final[set[RayPool]] = set()


@final
class RayPool(WorkerPool):
    def __init__(
        self,
        *,
        connection: Connection,
        parts: Sequence[Any],
        segments: Segments,
        status_board: StatusBoard,
        specs: dict[WorkerId, WorkerSpec],
        options: RayWorkers,
        threads: int,
        sample_timeout_s: float,
        ranks: int,
        on_news: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            parts: the pickled dataset and its buffers.
            segments: the engine's memory, into which the pool copies batches.
            threads: per native thread pool of a worker.
            ranks: number of processes that share the cluster.
            on_news: called from another thread when ``receive`` has something to return.
        """
        self._connection, ray = connection, connection.ray
        self._segments, self._status_board, self._specs = segments, status_board, specs
        self._threads, self._ranks = threads, ranks
        self._on_news = on_news
        self._actor_class = ray.remote(concurrency_groups={_CONTROL: 1})(RemoteWorker).options(
            num_cpus=options.cpus,
            memory=options.memory,
            resources=dict(options.resources) or None,
            runtime_env=None if options.runtime_env is None else dict(options.runtime_env),
            # Not the default strategy: that would place the actors of a Ray Train worker in its placement group.
            scheduling_strategy="SPREAD",
            max_restarts=0,  # a restart by Ray would delay the news of the death by a second
            max_task_retries=0,
        )
        self._options = options
        self._parts = ray.put([np.frombuffer(part, np.uint8) for part in parts])
        self._parts_bytes = sum(memoryview(part).nbytes for part in parts)
        self._members: dict[WorkerId, _Member] = {}
        self._stopped: dict[Any, Any] = {}  # actors that were asked to exit, by the reference that becomes ready then
        self._lock = threading.Lock()  # guards the members' tasks and the status board: two threads submit
        self._inbox: queue.SimpleQueue[_Done | _Place | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[tuple[_Member, FromWorker | Death | _Arrived] | None] = queue.SimpleQueue()
        self._batch_bytes = 0  # of the largest batch so far
        self._store_bytes = connection.store_sizes()
        self._look_s = min(_LOOK_S, max(_SOONEST_LOOK_S, sample_timeout_s / 4)) if sample_timeout_s else _LOOK_S
        self._warned_s = _WAIT_S / 2
        self._failure: Exception | None = None  # after which no worker can answer any more
        self._owner_pid = os.getpid()
        _POOLS.add(self)
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        with explaining_limits():
            self._thread.start()

    # --- called by the training loop's thread

    def start(self, worker: WorkerId) -> None:
        counters = self._status_board.reader(worker).counters()
        birth = RemoteBirth(
            infeed.__version__,
            self._specs[worker],
            search_path(),
            command_line(),
            current_directory(),
            self._threads,
            counters,
        )
        packed = pickle.dumps(birth, 5)
        with self._guarded():
            self._connection.check()
            actor = self._actor_class.remote()
            member = _Member(worker, actor, time.perf_counter_ns())
            with self._lock:
                self._status_board.vacate(worker)
                self._members[worker] = member
                self._look(member)
            self._call(member, "start", _NO_TASK, actor.start, packed, self._parts)

    def stop(self, worker: WorkerId) -> None:
        with self._lock:
            member = self._members.pop(worker, None)
            if member is not None:
                self._status_board.vacate(worker)
        if member is not None:
            with self._guarded():
                self._connection.check()
                ray = self._connection.ray
                if member.is_started:
                    self._stopped[self._end(member)] = member.actor
                else:  # Ray may not have placed it, so it could not exit
                    ray.kill(member.actor)
                if self._stopped:
                    for end in ray.wait(list(self._stopped), num_returns=len(self._stopped), timeout=0)[0]:
                        del self._stopped[end]

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        member = self._members.get(worker)
        if member is None or isinstance(message, MapSegment | UnmapSegment | ReportStack):
            return
        if isinstance(message, DropTask):
            member.held.pop(message.task, None)
        elif isinstance(message, PlaceTask):
            held = member.held.pop(message.task)
            self._inbox.put(_Place(member, held, message.block))
        else:
            self._send(member, message)

    def _send(self, member: _Member, message: LoadGrains | LoadNext | OpenStream) -> None:
        with self._lock:
            if isinstance(message, OpenStream):
                member.encoder.encode(message, member.frames)
                return
            # The worker writes into its own memory: its place in the slot means nothing there.
            member.encoder.encode(message._replace(block=None), member.frames)
            sent = _Sent(member.frames, message.block, message.layout, time.perf_counter_ns())
            member.frames = []
            if not member.is_dead:  # else `receive` is about to return its death
                member.queued.append((message.task, sent))
                with self._guarded():
                    self._submit(member)

    def flush(self) -> None:
        return  # every task is submitted at once

    def receive(self, timeout_s: float | None) -> list[News]:
        news: list[News] = []
        is_waiting = timeout_s != 0 and self._failure is None
        with suppress(queue.Empty):
            item = self._news.get(timeout=timeout_s) if is_waiting else self._news.get_nowait()
            while True:
                if item is not None and self._members.get(item[0].worker) is item[0]:
                    news.append(self._to_news(*item))
                item = self._news.get_nowait()
        failure = self._failure
        if failure is None or news:
            return news
        if isinstance(failure, WorkerDiedError):
            raise WorkerDiedError(str(failure))
        raise WorkerDiedError(
            f"workers on the Ray cluster are lost after {failure!r}; check the cluster, then start a new epoch"
        ) from failure

    def _to_news(self, member: _Member, item: FromWorker | Death | _Arrived) -> News:
        if isinstance(item, Death):
            with self._lock:
                del self._members[member.worker]
            return member.worker, item
        if not isinstance(item, _Arrived):
            member.is_started |= isinstance(item, Started)
            return member.worker, item
        answer = decode_answer(item.answer)
        if item.is_placed or not isinstance(answer, RowsLoaded | PackedLoaded):
            return member.worker, answer
        layout = None
        if isinstance(answer, RowsLoaded):
            layout = answer.layout or item.layout
            answer = answer._replace(layout=layout)
        member.held[answer.task] = _Held(answer, item.data)
        return member.worker, Unplaced(answer.task, 0 if item.data is None else item.data.nbytes, layout)

    def add_segment(self, handle: SegmentHandle) -> None:
        del handle

    def remove_segment(self, number: int) -> None:
        del number

    def kill(self, worker: WorkerId) -> None:
        member = self._members.get(worker)
        if member is not None:
            with self._guarded():
                self._connection.ray.kill(member.actor)

    def stack_of(self, worker: WorkerId, stack_fd: int, *, kills: bool = False) -> str | None:
        del stack_fd, kills
        member = self._members.get(worker)
        if member is None or member.report is None or not self._connection.is_open:
            return None
        ray = self._connection.ray
        try:
            ref = member.actor.stack.options(concurrency_group=_CONTROL).remote()
            stack: str = ray.get(ref, timeout=_STACK_S)
        except ray.exceptions.RayError:  # it holds the GIL, or has died
            return None
        return stack or None

    def place_of(self, worker: WorkerId) -> str:
        member = self._members.get(worker)
        return "" if member is None or member.report is None else f" on node {member.report.node}"

    def missing(self) -> str:
        members = list(self._members.values())
        count = sum(member.report is None for member in members)
        if not count or not self._connection.is_open:
            return ""
        needs = self._connection.describe_free(self._options)
        return f"Ray has not started {count} of {format_count(len(members), 'worker')}; each needs {needs}"

    def wake(self) -> None:
        self._news.put(None)

    @property
    def can_close_here(self) -> bool:
        # Closing waits for the pool's thread, and for the threads in which Ray calls back, which Python has not started.
        return not threading.current_thread().name.startswith((_THREAD, "Dummy-"))

    def close(self, *, keeps_workers: bool = False) -> None:
        del keeps_workers
        if os.getpid() != self._owner_pid:
            return  # in a forked child: Ray belongs to the parent
        self._inbox.put(None)
        self._thread.join()
        members, self._members = list(self._members.values()), {}
        actors = [*self._stopped.values(), *(member.actor for member in members)]
        self._stopped = {}
        self._failure = None
        try:
            if self._connection.is_open:  # otherwise ray.shutdown() has ended all actors
                self._end_all([member for member in members if member.is_started], actors)
        finally:
            self._parts = None
            _POOLS.discard(self)

    def _end_all(self, members: list[_Member], actors: list[Any]) -> None:
        """Ask members to exit, and kill all actors after a moment."""
        ray = self._connection.ray
        try:
            ends = [self._end(member) for member in members]
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=_END_S)
        finally:
            for actor in actors:
                ray.kill(actor)

    def _end(self, member: _Member) -> Any:
        """Ask an actor to exit after its current task; return a reference that becomes ready when it has."""
        self._connection.check()
        return member.actor.__ray_terminate__.remote()

    # --- called by both threads

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Let ``receive`` raise exceptions of the body: the pool's thread has no caller, and the engine is amid an action."""
        try:
            yield
        except Exception as error:
            if self._failure is None:
                self._failure = kept(error) if self._connection.is_open else WorkerDiedError(DISCONNECTED)
            self._news.put(None)
            if self._on_news is not None:
                self._on_news()

    def _call(
        self, member: _Member, call: Literal["start", "task", "look"], task: TaskId, method: Any, *arguments: Any
    ) -> None:
        self._connection.check()
        future = method.remote(*arguments).future()
        future.add_done_callback(lambda done: self._inbox.put(_Done(member, call, task, done)))

    def _submit(self, member: _Member) -> None:
        """Submit queued tasks, as far as the node's object store can take their results. Call it with the lock."""
        while member.queued and self._has_room(member):
            task, sent = member.queued.popleft()
            member.tasks[task] = sent
            self._call(member, "task", task, member.actor.handle, sent.frames)

    def _submit_all(self) -> None:
        """Submit queued tasks of all workers, after a result has been received or lost."""
        with self._lock:
            waiting = [member for member in self._members.values() if member.queued]
            for member in sorted(waiting, key=lambda one: one.queued[0][0]):  # the oldest batch first
                self._submit(member)

    def _results_on(self, node: ClusterNode) -> int:
        """Return how many results of this pool are on a node, or are about to be."""
        members = list(self._members.values())
        return sum(len(one.tasks) for one in members if one.report is not None and one.report.node == node)

    def _has_room(self, member: _Member) -> bool:
        if member.report is None or not self._batch_bytes:
            return not member.tasks
        node = member.report.node
        if not self._results_on(node):
            return True
        if node.number not in self._store_bytes:  # it has joined since
            self._store_bytes = {node.number: 0.0, **self._connection.store_sizes()}
        room = self._store_bytes[node.number]
        pools = list(_POOLS)
        free = room - sum(pool._parts_bytes for pool in pools)
        needed = self._batch_bytes + sum(pool._results_on(node) * pool._batch_bytes for pool in pools)
        return not room or needed <= _STORE_SHARE * free / self._ranks

    # --- the pool's thread

    def _run(self) -> None:
        with self._guarded():
            self._serve()

    def _serve(self) -> None:
        next_look = time.monotonic() + self._look_s
        while True:
            left_s = next_look - time.monotonic()
            if left_s <= 0:
                next_look = time.monotonic() + self._look_s
                self._look_at_all()
                continue
            try:
                event = self._inbox.get(timeout=left_s)
            except queue.Empty:
                continue
            if event is None:
                return
            if self._members.get(event.member.worker) is event.member and not event.member.is_dead:
                if isinstance(event, _Place):
                    self._copy(event.held.data, event.block)
                    self._report(event.member, event.held.answer)
                else:
                    self._take(event)
            del event  # do not reference a batch while this thread waits

    def _report(self, member: _Member, item: FromWorker | Death | _Arrived) -> None:
        self._news.put((member, item))
        if self._on_news is not None:
            self._on_news()

    def _take(self, done: _Done) -> None:
        member, call, task, future = done
        error = future.exception()
        if call == "look":
            member.asked_ns = 0
            if error is None:
                self._note(member, future.result())
            return
        if error is not None:
            self._fail(member, call, task, error)
            return
        reply: Reply = future.result()
        self._note(member, reply.report)
        if call == "start":
            self._report(member, decode_answer(reply.answer))
            return
        with self._lock:
            sent = member.tasks.pop(task)
        data = reply.data
        nbytes = 0 if data is None else data.nbytes
        self._batch_bytes = max(self._batch_bytes, nbytes)
        is_placed = sent.block is not None and nbytes <= sent.block.size
        if sent.block is not None and is_placed:
            self._copy(data, sent.block)
            data = None
        self._submit_all()
        self._report(member, _Arrived(reply.answer, is_placed, data, sent.layout))

    def _copy(self, data: Any, block: Block) -> None:
        if data is not None:
            np.copyto(np.frombuffer(self._segments.memory(block.segment), np.uint8, data.nbytes, block.offset), data)

    def _fail(self, member: _Member, call: str, task: TaskId, error: BaseException) -> None:
        """Handle a failed call: the actor has died, its result is lost, or infeed's own code raised there."""
        ray = self._connection.ray
        exceptions = ray.exceptions
        if isinstance(error, exceptions.RayTaskError) and call == "task":
            with self._lock:
                member.tasks.pop(task, None)
            self._submit_all()
            cause = error.cause if isinstance(error.cause, BaseException) else error
            self._report(member, LoadFailed(task, Failure.of(cause, "loading a batch")))
            return
        text = _reason(error)
        is_hopeless = isinstance(
            error, exceptions.RayTaskError | exceptions.RuntimeEnvSetupError | exceptions.ActorUnschedulableError
        )
        if call == "start" and (is_hopeless or "creation task" in text):
            self._report(member, StartFailed(Failure.of(WorkerStartError(text), BUILDING)))
            return
        report = member.report
        who = "(not placed yet)" if report is None else f"(pid {report.pid} on node {report.node})"
        # The result is gone, or Ray has lost contact to the actor, but the actor may live: start another, to load it again.
        is_lost = not isinstance(error, exceptions.RayActorError) or isinstance(error, exceptions.ActorUnavailableError)
        if is_lost:
            ray.kill(member.actor)
        is_node = "node has died" in text or "node was" in text
        cause_text = "Ray killed it because its node ran out of memory" if "low on memory" in text else None
        self._report(member, Death(f"{who} died: {text}", cause_text, is_blamed=not (is_lost or is_node)))
        with self._lock:
            member.is_dead = True  # see NOTE [late results]
            member.tasks.clear()
            member.queued.clear()
        self._submit_all()

    # --- what workers are doing

    def _note(self, member: _Member, report: Report) -> None:
        now_ns = time.perf_counter_ns()
        member.received_ns = now_ns
        shift_ns = now_ns - report.sent_ns
        member.shift_ns = shift_ns if member.shift_ns is None else min(member.shift_ns, shift_ns)
        if member.report is not None and report.sent_ns < member.report.sent_ns:
            return  # an answer has overtaken it
        member.report = report
        with self._lock:
            self._status_board.mirror(member.worker, report.cell, report.counters, report.spans, member.shift_ns)

    def _look(self, member: _Member) -> None:
        member.asked_ns = time.perf_counter_ns()
        self._call(member, "look", _NO_TASK, member.actor.look.options(concurrency_group=_CONTROL))

    def _look_at_all(self) -> None:
        self._connection.check()  # after ray.shutdown() no call returns
        now_ns = time.perf_counter_ns()
        waiting_s: list[float] = []
        for member in list(self._members.values()):
            if member.is_dead:
                continue
            if member.report is None:
                waiting_s.append((now_ns - member.began_ns) / 1e9)
            elif member.is_started and not member.tasks:
                continue
            elif not member.asked_ns:
                self._look(member)
            elif now_ns - member.asked_ns > _SILENT_LOOKS * self._look_s * 1e9:
                task = min(member.tasks, default=None)
                with self._lock:
                    self._status_board.show_silent(member.worker, task, member.received_ns)
        if waiting_s and max(waiting_s) > 2 * self._warned_s:
            self._warned_s = max(waiting_s)
            _LOG.warning("%s; waited %.0f s; add nodes, stop other jobs, or lower num_workers", self.missing(), self._warned_s)


def _reason(error: BaseException) -> str:
    """Return why an actor died, in one line: the last part of Ray's message, which begins with a list of its properties."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    parts = [line for line in lines if not line.startswith(("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:"))]
    text = " ".join(parts).removeprefix("The actor died unexpectedly before finishing this task.").strip()
    text = text.partition(" Some common causes include")[0]  # a paragraph of guesses
    return text or type(error).__name__
