"""The worker pool interface: the engine uses it for worker processes, threads and ``num_workers=0``."""

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
    """A worker has died and cannot write to shared memory any more."""

    text: str  # "(pid 4711) was killed by SIGKILL"
    cause: str | None = None  # if the kernel reports it: "the container's memory limit ..."
    is_blamed: bool = True  # on its current task; False if the fork server died and took all workers with it


News: TypeAlias = tuple[WorkerId, FromWorker | Death]


class WorkerPool(ABC):
    """Starts and stops workers, transfers messages and detects deaths. Owns every thread and process of an engine."""

    @abstractmethod
    def start(self, worker: WorkerId) -> None:
        """Start a worker, or restart it after a death or a stop. It answers with ``Started`` or ``StartFailed``."""

    @abstractmethod
    def stop(self, worker: WorkerId) -> None:
        """Stop an idle worker without waiting for it. ``receive`` returns no more messages from it.

        If it does not exit because it is still starting, later calls of ``receive`` or ``close`` clean it up.
        """

    @abstractmethod
    def send(self, worker: WorkerId, message: ToWorker) -> None:
        """Send a message at the latest with the next call of ``flush`` or ``receive``.

        Never blocks on the worker. Messages to a dead worker are dropped; ``receive`` will return its ``Death``.
        """

    @abstractmethod
    def flush(self) -> None:
        """Write all pending messages, many small ones in one system call."""

    @abstractmethod
    def receive(self, timeout_s: float | None) -> list[News]:
        """Wait for messages from workers; results come before deaths.

        Returns:
            The messages; empty after ``timeout_s`` (``None`` waits forever) or ``wake``.
        """

    def recall(self, tasks: Iterable[TaskId]) -> None:
        """Cancel tasks. Workers may skip those that have not started, but they answer all of them."""
        del tasks

    @abstractmethod
    def add_segment(self, handle: SegmentHandle) -> None:
        """Make all workers map a new segment before any message that refers to it."""

    @abstractmethod
    def remove_segment(self, number: int) -> None: ...

    def kill(self, worker: WorkerId) -> None:
        """Kill a worker that does not respond. ``receive`` returns its ``Death``. Threads cannot be killed."""
        del worker

    def stack_of(self, worker: WorkerId, stack_fd: int, *, kills: bool = False) -> str | None:
        """Return the Python stack of a worker, if it is available quickly.

        Args:
            stack_fd: descriptor of the stack file in the worker; ``UNKNOWN`` if it has none.
            kills: a worker that has a stack file dies as soon as it has written its stack.
        """
        del worker, stack_fd, kills
        return None

    def processes(self) -> dict[WorkerId, Process]:
        """Return the workers that are processes, in order."""
        return {}

    def pids(self) -> dict[WorkerId, int]:
        """Return the pids of the workers that are processes."""
        return {worker: process.pid for worker, process in self.processes().items()}

    def place_of(self, worker: WorkerId) -> str:
        """Return where a worker runs, such as " on node 10.0.0.3", or an empty text for this machine."""
        del worker
        return ""

    def missing(self) -> str:
        """Return which workers wait for resources of a cluster, and for which; an empty text if none does."""
        return ""

    @abstractmethod
    def wake(self) -> None:
        """Interrupt ``receive``. Callable from any thread."""

    @property
    def can_close_here(self) -> bool:
        """Whether this thread may close the pool. The garbage collector ends loaders in any thread."""
        return True

    @abstractmethod
    def close(self, *, keeps_workers: bool = False) -> None:
        """Stop all workers and wait until they have exited. See NOTE [close order] in ``engine/engine.py``.

        Args:
            keeps_workers: Whether processes with a slow start-up may stay idle for another loader. See ``launcher.py``.
        """
