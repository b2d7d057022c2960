"""The pool of a loader with workers of two kinds: processes on this machine and actors on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from infeed.memory.segments import SegmentHandle
from infeed.scheduler.messages import WorkerId
from infeed.workers.launcher import Process
from infeed.workers.pool import News, WorkerPool
from infeed.workers.protocol import ToWorker


@final
class MixedPool(WorkerPool):
    """The first ``local_count`` workers belong to one pool, the others to another."""

    def __init__(self, local: WorkerPool, remote: Callable[[Callable[[], None]], WorkerPool], local_count: int) -> None:
        """
        Args:
            local: the pool in which ``receive`` waits.
            remote: makes the other pool, which calls its argument when there is something to receive.
        """
        self._local, self._remote = local, remote(local.wake)
        self._local_count = local_count

    def _pool(self, worker: WorkerId) -> WorkerPool:
        return self._local if worker < self._local_count else self._remote

    def start(self, worker: WorkerId) -> None:
        self._pool(worker).start(worker)

    def stop(self, worker: WorkerId) -> None:
        self._pool(worker).stop(worker)

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        self._pool(worker).send(worker, message)

    def flush(self) -> None:
        self._local.flush()
        self._remote.flush()

    def receive(self, timeout_s: float | None) -> list[News]:
        news = self._remote.receive(0)
        # Messages that arrive from here on wake the local pool.
        local = self._local.receive(0 if news else timeout_s)
        return [*news, *local, *self._remote.receive(0)]

    def add_segment(self, handle: SegmentHandle) -> None:
        self._local.add_segment(handle)
        self._remote.add_segment(handle)

    def remove_segment(self, number: int) -> None:
        self._local.remove_segment(number)
        self._remote.remove_segment(number)

    def kill(self, worker: WorkerId) -> None:
        self._pool(worker).kill(worker)

    def stack_of(self, worker: WorkerId, stack_fd: int, *, kills: bool = False) -> str | None:
        return self._pool(worker).stack_of(worker, stack_fd, kills=kills)

    def processes(self) -> dict[WorkerId, Process]:
        return self._local.processes()

    def place_of(self, worker: WorkerId) -> str:
        return self._pool(worker).place_of(worker)

    def missing(self) -> str:
        return self._remote.missing()

    def wake(self) -> None:
        self._local.wake()

    @property
    def can_close_here(self) -> bool:
        return self._remote.can_close_here

    def close(self, *, keeps_workers: bool = False) -> None:
        try:
            self._remote.close()  # first: it wakes the local pool
        finally:
            self._local.close(keeps_workers=keeps_workers)
