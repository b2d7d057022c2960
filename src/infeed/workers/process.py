"""Workers that are processes: forked by the fork server, or spawned where there is no safe fork."""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from typing import Final, Literal, NoReturn, final

from infeed.errors import ConfigError
from infeed.memory.parcel import Parcel
from infeed.memory.pressure import OomWatch
from infeed.memory.segments import SegmentHandle, SegmentStore
from infeed.scheduler.messages import WorkerId
from infeed.workers.board import Board
from infeed.workers.channel import Link, can_use_poll, open_poller
from infeed.workers.child import Birth, ThreadedEnd, leave, run_worker
from infeed.workers.crew import Crew, Death, News
from infeed.workers.insides import child_environment, current_directory, die_with_parent, ignore_interrupts, watch_parent
from infeed.workers.launch import explaining_limits, search_path, start_interpreter
from infeed.workers.messages import MapSegment, Stack, TellStack, ToWorker, UnmapSegment
from infeed.workers.preload import preloadable
from infeed.workers.seeding import seed_lazily
from infeed.workers.sources import WorkerSpec
from infeed.workers.stacks import take as take_stack
from infeed.workers.threadpools import modules_for
from infeed.workers.wire import PART, TaskEncoder, decode_answer

if sys.platform == "linux":
    from infeed.workers.forkserver import ForkRefusedError, ForkServer, ServerGoneError, bury_fork_server, fork_server
if sys.platform != "win32":
    from infeed.workers.pipes import PipeEnd, PipeLink

_LOG: Final = logging.getLogger("infeed")
# How long close() lets workers end by themselves before it kills them. An idle one needs a millisecond; one in user code may
# never come back, and Ctrl+C must not feel dead.
_CLOSE_S: Final = 0.5
_SIGKILL: Final = 9  # not in `signal` on Windows
# How long a worker has to say where it is.
_STACK_S: Final = 0.5

StartMethod = Literal["auto", "forkserver", "spawn"]


def uses_fork(start_method: StartMethod) -> bool:
    """Whether workers are forked by a server: where the platform forks safely and can hand descriptors to a running process.

    macOS can do both, but its own libraries forbid what follows a fork.

    Raises:
        ConfigError: a fork server was asked for and there can be none.
    """
    if start_method == "spawn":
        return False
    calls = ((os, "fork"), (os, "memfd_create"), (socket, "send_fds"), (select, "poll"))
    can_fork = sys.platform == "linux" and all(getattr(module, name, None) is not None for module, name in calls)
    if start_method == "forkserver" and not can_fork:
        raise ConfigError("start_method='forkserver' needs what only Linux has; use 'auto' or 'spawn' on this platform")
    return can_fork


def prepare(start_method: StartMethod) -> None:
    """Let the fork server start while the rest of an engine is made: it is what the first batch waits for."""
    if sys.platform == "linux" and uses_fork(start_method):
        with explaining_limits():
            fork_server()


class _Process(ABC):
    """A worker's process, as the engine's side knows it."""

    pid: int

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    def wait(self, timeout_s: float) -> int | None:
        """The exit code, negative for a signal; ``None`` if it is not known in time."""


if sys.platform == "linux":

    @final
    class _ForkedProcess(_Process):
        def __init__(self, server: ForkServer, pid: int) -> None:
            self._server = server
            self.pid = pid

        def kill(self) -> None:
            self._server.kill(self.pid)

        def wait(self, timeout_s: float) -> int | None:
            return self._server.wait_exit(self.pid, timeout_s)


@final
class _SpawnedProcess(_Process):
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


@final
class _Member:
    def __init__(self, link: Link, process: _Process) -> None:
        self.link, self.process = link, process
        self.encoder = TaskEncoder()
        self.frames: list[bytes] = []  # sent, but not yet gone out


@final
class _Leaver:
    """A process that was told to end."""

    def __init__(self, worker: WorkerId, process: _Process) -> None:
        self.worker, self.process = worker, process
        self._deadline = time.monotonic() + _CLOSE_S
        self._is_killed = False

    @property
    def is_gone(self) -> bool:
        """Looks, without waiting, and helps if it takes too long."""
        if self.process.wait(0) is not None:
            return True
        if time.monotonic() < self._deadline:
            return False
        if self._is_killed:
            return True  # nobody can tell any more: it went with its server
        self.process.kill()
        self._is_killed = True
        self._deadline = time.monotonic() + _CLOSE_S
        return False


@final
class ProcessCrew(Crew):
    def __init__(
        self,
        *,
        parcel: Parcel,
        store: SegmentStore,
        board: Board,
        specs: dict[WorkerId, WorkerSpec],
        start_method: StartMethod,
        threads: int,
    ) -> None:
        self._parcel = parcel
        self._board = board
        self._store = store
        self._specs = specs
        self._threads = threads
        self._uses_fork = uses_fork(start_method)
        self._members: dict[WorkerId, _Member] = {}
        self._worker_of: dict[Link, WorkerId] = {}
        self._leavers: list[_Leaver] = []
        self._unflushed: list[_Member] = []
        self._segments: dict[int, SegmentHandle] = {}
        self._early: list[News] = []  # heard while a stack was waited for
        self._oom = OomWatch()
        with explaining_limits():
            self._poller = open_poller()
        self._owner_pid = os.getpid()
        # Looked for once: it goes through everything that the user's modules have imported.
        self._preload = [*modules_for(threads), *preloadable(parcel.modules)] if self._uses_fork else []

    def start(self, worker: WorkerId) -> None:
        assert self._board.handle is not None
        for leaver in self._leavers:
            if leaver.worker == worker:
                leaver.process.kill()  # two would write into one place on the board
        with explaining_limits():
            link, process = self._start_process()
        birth = Birth(
            self._specs[worker],
            self._parcel,
            list(self._segments.values()),
            search_path(),
            current_directory(),
            child_environment(self._threads),
            self._board.handle,
            self._threads,
        )
        self._board.clear(worker)
        self._members[worker] = _Member(link, process)
        self._worker_of[link] = worker
        self._poller.add(link)
        link.send([pickle.dumps(birth, 5)])

    def stop(self, worker: WorkerId) -> None:
        member = self._members.get(worker)
        if member is None:
            return  # it is dead already
        if isinstance(member.process, _SpawnedProcess):
            member.link.send([PART])  # one that is forked knows no names that it could remove
        self._dismiss(worker)
        self._early = [news for news in self._early if news[0] != worker]
        self._board.vacate(worker)
        self._leavers.append(_Leaver(worker, member.process))

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        member = self._members.get(worker)
        if member is not None:
            if not member.frames:
                self._unflushed.append(member)
            member.encoder.encode(message, member.frames)

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
                timeout_s = _CLOSE_S if timeout_s is None else min(timeout_s, _CLOSE_S)
        news, self._early = self._early, []
        for link in self._poller.wait(0 if news else timeout_s):
            worker = self._worker_of[link]
            try:
                news.extend((worker, decode_answer(frame)) for frame in link.receive())
            except EOFError:
                news.append((worker, self._bury(worker)))
        return news

    def kill(self, worker: WorkerId) -> None:
        member = self._members.get(worker)
        if member is not None:
            member.process.kill()

    def stack_of(self, worker: WorkerId, stack_fd: int) -> str | None:
        member = self._members.get(worker)
        if member is None:
            return None
        if stack_fd >= 0:
            return take_stack(member.process.pid, stack_fd)
        if self._uses_fork:
            return None
        self.send(worker, TellStack())
        deadline = time.monotonic() + _STACK_S
        heard: list[News] = []
        text: str | None = None
        while text is None and (left_s := deadline - time.monotonic()) > 0:
            for news in self.receive(left_s):
                if isinstance(news[1], Stack):
                    text = news[1].text
                else:
                    heard.append(news)
        self._early = heard
        return text or None

    def add_segment(self, handle: SegmentHandle) -> None:
        self._segments[handle.number] = handle
        for worker in self._members:
            self.send(worker, MapSegment(handle))

    def remove_segment(self, number: int) -> None:
        del self._segments[number]
        for worker in self._members:
            self.send(worker, UnmapSegment(number))

    def pids(self) -> dict[WorkerId, int]:
        return {worker: member.process.pid for worker, member in sorted(self._members.items())}

    def wake(self) -> None:
        self._poller.wake()

    def close(self) -> None:
        members = list(self._members.values())
        processes = [member.process for member in members] + [leaver.process for leaver in self._leavers]
        self._members.clear()
        self._leavers.clear()
        self._unflushed.clear()
        for member in members:
            self._poller.remove(member.link)
            member.link.close()
        self._poller.close()
        if os.getpid() != self._owner_pid:
            return  # a forked child of the user's: the workers are not its own
        deadline = time.monotonic() + _CLOSE_S
        try:
            late = [process for process in processes if process.wait(max(0.0, deadline - time.monotonic())) is None]
            for process in late:
                process.kill()
            deadline = time.monotonic() + _CLOSE_S
            for process in late:
                process.wait(max(0.0, deadline - time.monotonic()))
        except BaseException:  # Ctrl+C: the user has no more patience
            for process in processes:
                process.kill()
            raise
        if sys.platform == "linux" and self._uses_fork:
            bury_fork_server()

    def _bury(self, worker: WorkerId) -> Death:
        """Make sure that a worker whose pipe has ended is gone, and say how it went."""
        member = self._dismiss(worker)
        code = member.process.wait(_CLOSE_S)
        if code is None:
            # It closed its pipe and lives on, or its server is gone. Only a dead worker cannot write into a slot.
            member.process.kill()
            code = member.process.wait(_CLOSE_S)
        verdict = self._oom.verdict() if code == -_SIGKILL else None
        return Death(f"(pid {member.process.pid}) {_how_it_ended(code)}", verdict, is_blamed=code is not None)

    def _see_off(self) -> None:
        gone = [leaver for leaver in self._leavers if leaver.is_gone]
        for leaver in gone:
            self._leavers.remove(leaver)
            if leaver.worker not in self._members:
                self._board.vacate(leaver.worker)  # once more: it may have been starting, and have said so

    def _dismiss(self, worker: WorkerId) -> _Member:
        """Hear and tell it no more: it ends with its pipe."""
        member = self._members.pop(worker)
        if member in self._unflushed:
            self._unflushed.remove(member)
        self._poller.remove(member.link)
        del self._worker_of[member.link]
        member.link.close()
        return member

    def _start_process(self) -> tuple[Link, _Process]:
        if sys.platform == "linux" and self._uses_fork:
            try:
                return self._fork()
            except ServerGoneError:
                # It was killed, or ended by itself a moment ago; another will do. If that fails too, the user hears of it.
                return self._fork()
            except ForkRefusedError as refused:
                self._uses_fork = False
                _LOG.warning("workers are spawned instead of forked: %s", refused)
        return self._spawn()

    if sys.platform == "linux":

        def _fork(self) -> tuple[Link, _Process]:
            link, task_read, done_write = _open_pipes()
            try:
                server = fork_server()
                server.preload(self._preload)
                descriptor = self._store.descriptor()
                fds = [task_read, done_write, *([] if descriptor is None else [descriptor]), *self._parcel.fds]
                return link, _ForkedProcess(server, server.fork(fds))
            except BaseException:
                link.close()
                raise
            finally:
                os.close(task_read)
                os.close(done_write)

    def _spawn(self) -> tuple[Link, _Process]:
        descriptor = self._store.descriptor()
        shared = (*(() if descriptor is None else (descriptor,)), *self._parcel.fds)
        if sys.platform != "win32" and can_use_poll():
            link, task_read, done_write = _open_pipes()
            fds = (task_read, done_write, *shared)
            # To the kernel the parent is the thread that starts it, which must not end before this process does. And a worker
            # that is killed removes no names.
            is_bound = threading.current_thread() is threading.main_thread() and descriptor is not None
            entry = "infeed.workers.process:spawned_bound" if is_bound else "infeed.workers.process:spawned"
            try:
                return link, _SpawnedProcess(start_interpreter(entry, threads=self._threads, pass_fds=fds))
            except BaseException:
                link.close()
                raise
            finally:
                os.close(task_read)
                os.close(done_write)
        from infeed.workers.connections import open_pipe  # takes a while to import, and few need it

        connection, theirs = open_pipe()
        with theirs:
            handles = (theirs.fileno(), *shared)
            try:
                process = start_interpreter("infeed.workers.connections:spawned", threads=self._threads, pass_fds=handles)
            except BaseException:
                connection.close()
                raise
        return connection, _SpawnedProcess(process)


if sys.platform != "win32":

    def _open_pipes() -> tuple[PipeLink, int, int]:
        """The engine's ends of two pipes, and the ends for a worker to read and to write."""
        task_read, task_write = os.pipe()
        try:
            done_read, done_write = os.pipe()
        except OSError:
            os.close(task_read)
            os.close(task_write)
            raise
        return PipeLink(task_write, done_read), task_read, done_write

    def spawned_bound(*arguments: int) -> NoReturn:
        """Entry point of a spawned worker that the kernel ends with its parent.

        Threads, as in the other, do not run while native code of the user's keeps the GIL.
        """
        die_with_parent()
        spawned(*arguments)

    def spawned(parent_pid: int, read_fd: int, write_fd: int, *fds: int) -> NoReturn:
        """Entry point of a spawned worker."""
        ignore_interrupts()
        watch_parent(parent_pid, leave)
        seed_lazily()
        run_worker(ThreadedEnd(PipeEnd(read_fd, write_fd)), fds)
        leave()


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "vanished"
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended by itself with exit code {code}"
