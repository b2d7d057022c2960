"""The pool of worker processes: starts and stops them, exchanges messages over their pipes, and detects their deaths."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Hashable
from typing import Any, Final, final

from infeed.memory.limits import OomWatch
from infeed.memory.segments import SegmentHandle, SegmentStore
from infeed.memory.serialized_dataset import SerializedDataset
from infeed.scheduler.messages import WorkerId
from infeed.workers.interpreter import StartMethod, command_line, explaining_limits, search_path
from infeed.workers.launcher import IDLE_WORKERS, IdleWorker, Launch, Process, SpawnedProcess, Starter, are_unchanged
from infeed.workers.pool import Death, News, WorkerPool
from infeed.workers.process_tools import child_environment, current_directory, signal_name
from infeed.workers.protocol import (
    END_S,
    PART,
    RESET,
    Birth,
    FromWorker,
    Idle,
    MapSegment,
    ReportStack,
    Stack,
    Started,
    TaskEncoder,
    ToWorker,
    UnmapSegment,
    WorkerSpec,
    decode_answer,
)
from infeed.workers.status import StatusBoard
from infeed.workers.status import take as take_stack
from infeed.workers.transport import Link, open_poller

_SIGKILL: Final = 9  # not in `signal` on Windows
# How long a worker has to reply with its stack.
_STACK_S: Final = 0.5
# How long workers have to drop their dataset, so that the next loader can reuse them. The training loop waits meanwhile.
RESET_S: Final = END_S
# Answers to tiny tasks would each wake the engine, which doubles the cost of a task. After an answer the engine therefore
# sleeps until this time has passed, and then reads all answers together.
_COALESCE_NS: Final = 100_000


@final
class _LiveWorker:
    def __init__(self, link: Link, process: Process, started_at: float) -> None:
        self.link, self.process, self.started_at = link, process, started_at
        self.is_started = False
        # A worker reused before it confirmed the reset: messages before its Idle answer are for the previous loader.
        self.is_resetting = False
        self.encoder = TaskEncoder()
        self.frames: list[bytes] = []  # not yet written to the pipe


@final
class _Leaver:
    """A process that was asked to exit."""

    def __init__(self, worker: WorkerId, process: Process) -> None:
        self.worker, self.process = worker, process
        self._deadline = time.monotonic() + END_S
        self._is_killed = False

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended. Does not block; kills the process after the deadline."""
        if self.process.wait(0) is not None:
            return True
        if time.monotonic() < self._deadline:
            return False
        if self._is_killed:
            return True  # exit code unknown: the process ended with its fork server
        self.process.kill()
        self._is_killed = True
        self._deadline = time.monotonic() + END_S
        return False


@final
class ProcessPool(WorkerPool):
    def __init__(
        self,
        *,
        serialized: SerializedDataset,
        store: SegmentStore,
        status_board: StatusBoard,
        specs: dict[WorkerId, WorkerSpec],
        start_method: StartMethod,
        threads: int,
        init_fn: Any,
    ) -> None:
        """
        Args:
            init_fn: the user's ``worker_init_fn``; its effects on a process are valid only for pools with the same one.
        """
        self._serialized = serialized
        self._init_fn = init_fn
        self._store = store
        self._status_board = status_board
        self._specs = specs
        self._threads = threads
        self._starter = Starter(serialized=serialized, store=store, start_method=start_method, threads=threads)
        self._launches: list[Launch] = []  # workers that are starting, or whose start was interrupted
        self._members: dict[WorkerId, _LiveWorker] = {}
        self._worker_of: dict[Link, WorkerId] = {}
        self._leavers: list[_Leaver] = []
        self._unflushed: list[_LiveWorker] = []
        self._segments: dict[int, SegmentHandle] = {}
        self._early: list[News] = []  # received while waiting for a stack
        self._received_ns = 0  # time of the latest message
        self._oom = OomWatch()
        with explaining_limits():
            self._poller = open_poller()
        self._owner_pid = os.getpid()
        self._idle_key: Hashable = None  # a worker is reused only for a pool with an equal key

    def start(self, worker: WorkerId) -> None:
        assert self._status_board.handle is not None
        for leaver in self._leavers:
            if leaver.worker == worker:
                leaver.process.kill()  # two processes must not write to the same status board cell
        environ = child_environment(self._threads)
        self._idle_key = (frozenset(environ.items()), self._serialized.has_tracker)
        launch = Launch()
        self._launches.append(launch)
        idle = self._take_idle(launch)
        started_at = time.time() if idle is None else idle.started_at
        if idle is None:
            try:
                self._starter.start(launch)
            except Exception:
                launch.close()
                self._launches.remove(launch)
                raise
        link, process = launch.link, launch.process
        assert link is not None
        assert process is not None
        birth = Birth(
            self._specs[worker],
            self._serialized,
            list(self._segments.values()),
            search_path(),
            command_line(),
            current_directory(),
            environ,
            self._status_board.handle,
            self._threads,
            None if idle is None else self._store.address(),
        )
        self._status_board.clear(worker)
        member = self._members[worker] = _LiveWorker(link, process, started_at)
        member.is_resetting = idle is not None and idle.files is None
        self._worker_of[link] = worker
        self._poller.add(link)
        self._launches.remove(launch)
        link.send([pickle.dumps(birth, 5)])

    def _take_idle(self, launch: Launch) -> IdleWorker | None:
        # A process inherits descriptors only at start, so a dataset with descriptors needs new processes.
        if self._starter.uses_fork or len(self._serialized.fds) > self._serialized.has_tracker:
            return None
        return IDLE_WORKERS.take(self._idle_key, self._init_fn, launch)

    def stop(self, worker: WorkerId) -> None:
        member = self._members.get(worker)
        if member is None:
            return  # already dead
        if isinstance(member.process, SpawnedProcess):
            member.link.send([PART])  # forked workers know no segment names that they could remove
        self._dismiss(worker)
        self._early = [news for news in self._early if news[0] != worker]
        self._status_board.vacate(worker)
        self._leavers.append(_Leaver(worker, member.process))

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        member = self._members.get(worker)
        if member is not None:
            was_flushed = not member.frames
            member.encoder.encode(message, member.frames)
            if was_flushed:
                self._unflushed.append(member)

    def flush(self) -> None:
        for member in self._unflushed:
            member.link.send(member.frames)
            member.frames.clear()
        self._unflushed.clear()

    def receive(self, timeout_s: float | None) -> list[News]:
        self.flush()
        if self._leavers:
            self._see_off()
            if self._leavers:
                timeout_s = END_S if timeout_s is None else min(timeout_s, END_S)
        news, self._early = self._early, []
        if not news and timeout_s != 0:
            sleep_ns = self._received_ns + _COALESCE_NS - time.perf_counter_ns()
            if sleep_ns > 0:
                time.sleep(sleep_ns / 1e9)
        for link in self._poller.wait(0 if news else timeout_s):
            worker = self._worker_of[link]
            try:
                answers = [decode_answer(frame) for frame in link.receive()]
                news.extend((worker, answer) for answer in self._own_answers(self._members[worker], answers))
            except EOFError:
                news.append((worker, self._reap(worker)))
        if news:
            self._received_ns = time.perf_counter_ns()
        return news

    def _own_answers(self, member: _LiveWorker, answers: list[FromWorker]) -> list[FromWorker]:
        """Return the answers that are for this engine, not for the loader that used the worker before."""
        if member.is_started:
            return answers
        while member.is_resetting and answers:
            answer = answers.pop(0)
            if isinstance(answer, Idle):
                member.is_resetting = False
                if not are_unchanged(answer.files, member.started_at):
                    member.process.kill()  # it has imported a file that has changed since; the engine replaces the worker
        member.is_started = any(isinstance(answer, Started) for answer in answers)
        return answers

    def kill(self, worker: WorkerId) -> None:
        member = self._members.get(worker)
        if member is not None:
            member.process.kill()

    def stack_of(self, worker: WorkerId, stack_fd: int, *, kills: bool = False) -> str | None:
        member = self._members.get(worker)
        if member is None:
            return None
        if stack_fd >= 0:
            return take_stack(member.process.pid, stack_fd, kills=kills)
        if self._starter.uses_fork:
            return None
        self.send(worker, ReportStack())
        deadline = time.monotonic() + _STACK_S
        others: list[News] = []
        text: str | None = None
        while text is None and (left_s := deadline - time.monotonic()) > 0:
            for news in self.receive(left_s):
                if isinstance(news[1], Stack):
                    text = news[1].text
                else:
                    others.append(news)
        self._early = others
        return text or None

    def add_segment(self, handle: SegmentHandle) -> None:
        self._segments[handle.number] = handle
        for worker in self._members:
            self.send(worker, MapSegment(handle))

    def remove_segment(self, number: int) -> None:
        del self._segments[number]
        for worker in self._members:
            self.send(worker, UnmapSegment(number))

    def processes(self) -> dict[WorkerId, Process]:
        return {worker: member.process for worker, member in sorted(self._members.items())}

    def wake(self) -> None:
        self._poller.wake()

    def close(self, *, keeps_workers: bool = False) -> None:
        if keeps_workers and not self._starter.uses_fork and self._store.can_be_found and os.getpid() == self._owner_pid:
            self._keep_workers()
        members = list(self._members.values())
        launches = list(self._launches)
        processes = [member.process for member in members] + [leaver.process for leaver in self._leavers]
        processes += [one.process for one in launches if one.process is not None and one.process not in processes]
        self._launches.clear()
        self._members.clear()
        self._leavers.clear()
        self._unflushed.clear()
        for member in members:
            self._poller.remove(member.link)
            member.link.close()
        for launch in launches:
            launch.close()
        self._poller.close()
        if os.getpid() != self._owner_pid:
            return  # in a forked child of the user's process: the workers belong to the parent
        deadline = time.monotonic() + END_S
        try:
            late = [process for process in processes if process.wait(max(0.0, deadline - time.monotonic())) is None]
            for process in late:
                process.kill()
            deadline = time.monotonic() + END_S
            for process in late:
                process.wait(max(0.0, deadline - time.monotonic()))
        except BaseException:  # Ctrl+C: do not wait any longer
            for process in processes:
                process.kill()
            raise
        finally:
            self._starter.close()

    def _keep_workers(self) -> None:
        """Ask all workers to drop the dataset. Keep those that do so in time, or are still starting, for other loaders."""
        self._unflushed.clear()  # no task may follow the reset
        for member in self._members.values():
            member.link.send([RESET])
        deadline = time.monotonic() + RESET_S
        while any(member.is_started for member in self._members.values()) and (left_s := deadline - time.monotonic()) > 0:
            for worker, answer in self.receive(left_s):
                if isinstance(answer, Idle):
                    self._keep(worker, answer.files)
        if self._store.descriptor() is None:
            return  # a worker that is still starting would open segment names that disappear with this loader
        for worker in [worker for worker, member in self._members.items() if not member.is_started]:
            self._keep(worker, None)

    def _keep(self, worker: WorkerId, files: tuple[str, ...] | None) -> None:
        member = self._forget(worker)
        idle = IdleWorker(member.link, member.process, member.started_at, files)
        if not IDLE_WORKERS.put(self._idle_key, self._init_fn, idle):
            member.link.close()
            self._leavers.append(_Leaver(worker, member.process))

    def _reap(self, worker: WorkerId) -> Death:
        """Make sure that a worker whose pipe was closed is dead, and return how it ended."""
        member = self._dismiss(worker)
        code = member.process.wait(END_S)
        if code is None:
            # It closed its pipe but still runs, or its fork server is gone. A live worker could still write into a slot.
            member.process.kill()
            code = member.process.wait(END_S)
        diagnosis = self._oom.diagnosis() if code == -_SIGKILL else None
        return Death(f"(pid {member.process.pid}) {_how_it_ended(code)}", diagnosis, is_blamed=code is not None)

    def _see_off(self) -> None:
        gone = [leaver for leaver in self._leavers if leaver.is_gone]
        for leaver in gone:
            self._leavers.remove(leaver)
            if leaver.worker not in self._members:
                self._status_board.vacate(leaver.worker)  # again: a starting worker may have written to it since

    def _dismiss(self, worker: WorkerId) -> _LiveWorker:
        """Close the link to a worker, which exits when its pipe is closed."""
        member = self._forget(worker)
        member.link.close()
        return member

    def _forget(self, worker: WorkerId) -> _LiveWorker:
        member = self._members.pop(worker)
        if member in self._unflushed:
            self._unflushed.remove(member)
        self._poller.remove(member.link)
        del self._worker_of[member.link]
        return member


# Windows exit codes of crashed processes: the NTSTATUS of the exception.
_CRASHES: Final = {
    0xC0000005: "an access violation",
    0xC0000017: "lack of memory",
    0xC000001D: "an illegal instruction",
    0xC0000094: "an integer division by zero",
    0xC00000FD: "a stack overflow",
    0xC0000135: "a DLL that was not found",
    0xC0000374: "a corrupted heap",
    0xC0000409: "a corrupted stack or abort()",
}


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "exited with an unknown code; its fork server may have died"
    if code >= 0x80000000:
        return f"crashed: {_CRASHES.get(code, 'an exception in native code')} (code 0x{code:08X})"
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"exited with code {code}"
