"""A crew: the workers of one engine, whatever they are. The engine talks to all kinds through this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from infeed.memory.segments import SegmentHandle
from infeed.scheduler.messages import TaskId, WorkerId
from infeed.workers.protocol import FromWorker, ToWorker

if TYPE_CHECKING:
    from infeed.workers.launcher import Process


class Death(NamedTuple):
    """A worker is gone, and cannot touch memory any more."""

    text: str  # "(pid 4711) was killed by SIGKILL"
    cause: str | None = None  # who did it, if the kernel tells: "the container's memory limit ..."
    is_blamed: bool = True  # on what it was at; not if it went with its fork server, and all others with it


News: TypeAlias = tuple[WorkerId, FromWorker | Death]


class WorkerPool(ABC):
    """Starts workers, carries messages, notices deaths, stops workers. Owns every thread and process of an engine."""

    @abstractmethod
    def start(self, worker: WorkerId) -> None:
        """Start a worker, or start it again after its death or its stop. ``Started`` or ``StartFailed`` is heard from it."""

    @abstractmethod
    def stop(self, worker: WorkerId) -> None:
        """Let a worker end that has nothing to do. Nothing is heard of it any more, and nothing is waited for.

        One that does not come back, because it is still starting, is seen to by later calls of ``receive``, or by ``close``.
        """

    @abstractmethod
    def send(self, worker: WorkerId, message: ToWorker) -> None:
        """Send, at the latest when ``flush`` or ``receive`` is called next.

        Never blocks on the worker. To a worker that is gone it does nothing; its ``Death`` is on the way.
        """

    @abstractmethod
    def flush(self) -> None:
        """Let all that was sent go out: many small messages in one system call."""

    @abstractmethod
    def receive(self, timeout_s: float | None) -> list[News]:
        """Wait until a worker has something to tell; results come before deaths.

        Returns:
            What was told; nothing if the time is up (``None`` waits for ever) or ``wake`` was called.
        """

    def recall(self, tasks: Iterable[TaskId]) -> None:
        """Nobody wants these tasks any more. Those that are not begun yet need not be, but all are answered."""
        del tasks

    @abstractmethod
    def add_segment(self, handle: SegmentHandle) -> None:
        """Let all workers map a new segment, before any message that needs it."""

    @abstractmethod
    def remove_segment(self, number: int) -> None: ...

    def kill(self, worker: WorkerId) -> None:
        """End a worker that does not come back. Its ``Death`` is heard of. Threads cannot be ended."""
        del worker

    def stack_of(self, worker: WorkerId, stack_fd: int) -> str | None:
        """The Python stack of a worker, if it can be had within a moment."""
        del worker, stack_fd
        return None

    def processes(self) -> dict[WorkerId, Process]:
        """The workers that are processes, in their order."""
        return {}

    def pids(self) -> dict[WorkerId, int]:
        """Process numbers of the workers that are processes."""
        return {worker: process.pid for worker, process in self.processes().items()}

    @abstractmethod
    def wake(self) -> None:
        """End ``receive``, from any thread."""

    @abstractmethod
    def close(self, *, keeps_workers: bool = False) -> None:
        """Stop all workers; return when they are gone. See NOTE [close order] in ``engine.py``.

        Args:
            keeps_workers: Whether processes that are slow to start may wait for another loader instead: see ``idle.py``.
        """
