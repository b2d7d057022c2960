"""Workers that are processes: told what to do over their pipes, heard, seen off, and buried when they die."""

from __future__ import annotations

import os
import pickle
import signal
import time
from typing import Final, final

from infeed.memory.parcel import Parcel
from infeed.memory.pressure import OomWatch
from infeed.memory.segments import SegmentHandle, SegmentStore
from infeed.scheduler.messages import WorkerId
from infeed.workers.board import Board
from infeed.workers.channel import Link, open_poller
from infeed.workers.child import END_S, Birth
from infeed.workers.crew import Crew, Death, News
from infeed.workers.insides import child_environment, current_directory
from infeed.workers.launch import command_line, explaining_limits, search_path
from infeed.workers.messages import MapSegment, Stack, TellStack, ToWorker, UnmapSegment
from infeed.workers.sources import WorkerSpec
from infeed.workers.stacks import take as take_stack
from infeed.workers.starting import Process, SpawnedProcess, Starter, StartMethod
from infeed.workers.wire import PART, TaskEncoder, decode_answer

_SIGKILL: Final = 9  # not in `signal` on Windows
# How long a worker has to say where it is.
_STACK_S: Final = 0.5
# Workers that answer tiny tasks would wake the engine with each of them, which makes them cost twice as much. So when it has
# heard something it is deaf for this long, and hears the answers that have come meanwhile together.
_DEAF_NS: Final = 100_000


@final
class _Member:
    def __init__(self, link: Link, process: Process) -> None:
        self.link, self.process = link, process
        self.encoder = TaskEncoder()
        self.frames: list[bytes] = []  # sent, but not yet gone out


@final
class _Leaver:
    """A process that was told to end."""

    def __init__(self, worker: WorkerId, process: Process) -> None:
        self.worker, self.process = worker, process
        self._deadline = time.monotonic() + END_S
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
        self._deadline = time.monotonic() + END_S
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
        self._specs = specs
        self._threads = threads
        self._starter = Starter(parcel=parcel, store=store, start_method=start_method, threads=threads)
        self._members: dict[WorkerId, _Member] = {}
        self._worker_of: dict[Link, WorkerId] = {}
        self._leavers: list[_Leaver] = []
        self._unflushed: list[_Member] = []
        self._segments: dict[int, SegmentHandle] = {}
        self._early: list[News] = []  # heard while a stack was waited for
        self._heard_ns = 0  # when something last was
        self._oom = OomWatch()
        with explaining_limits():
            self._poller = open_poller()
        self._owner_pid = os.getpid()

    def start(self, worker: WorkerId) -> None:
        assert self._board.handle is not None
        for leaver in self._leavers:
            if leaver.worker == worker:
                leaver.process.kill()  # two would write into one place on the board
        link, process = self._starter.start()
        birth = Birth(
            self._specs[worker],
            self._parcel,
            list(self._segments.values()),
            search_path(),
            command_line(),
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
        if isinstance(member.process, SpawnedProcess):
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
                timeout_s = END_S if timeout_s is None else min(timeout_s, END_S)
        news, self._early = self._early, []
        if not news and timeout_s != 0:
            deaf_ns = self._heard_ns + _DEAF_NS - time.perf_counter_ns()
            if deaf_ns > 0:
                time.sleep(deaf_ns / 1e9)
        for link in self._poller.wait(0 if news else timeout_s):
            worker = self._worker_of[link]
            try:
                news.extend((worker, decode_answer(frame)) for frame in link.receive())
            except EOFError:
                news.append((worker, self._bury(worker)))
        if news:
            self._heard_ns = time.perf_counter_ns()
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
        if self._starter.uses_fork:
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
        deadline = time.monotonic() + END_S
        try:
            late = [process for process in processes if process.wait(max(0.0, deadline - time.monotonic())) is None]
            for process in late:
                process.kill()
            deadline = time.monotonic() + END_S
            for process in late:
                process.wait(max(0.0, deadline - time.monotonic()))
        except BaseException:  # Ctrl+C: the user has no more patience
            for process in processes:
                process.kill()
            raise
        self._starter.close()

    def _bury(self, worker: WorkerId) -> Death:
        """Make sure that a worker whose pipe has ended is gone, and say how it went."""
        member = self._dismiss(worker)
        code = member.process.wait(END_S)
        if code is None:
            # It closed its pipe and lives on, or its server is gone. Only a dead worker cannot write into a slot.
            member.process.kill()
            code = member.process.wait(END_S)
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


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "vanished, perhaps with the fork server"
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended by itself with exit code {code}"
