"""Keeps idle spawned workers for the next loader of this process.

Spawning a worker takes as long as importing what the dataset needs: seconds with torch. A worker whose epoch has ended is
therefore kept for 60 s. It drops its dataset and receives another, as if it had just started. Forked workers are not kept,
because the fork server starts new ones in milliseconds.

A worker is reused only if a new one would behave the same: the environment and `worker_init_fn` are the same, user code left no
thread or process running, and no user module that the worker imported has changed since.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, final

from infeed.workers.launcher import Launch, Process
from infeed.workers.main import END_S, IDLE_S
from infeed.workers.transport import Link

# A worker is not reused in the last 10 s before IDLE_S: it may be about to exit.
_TAKE_S: Final = IDLE_S - 10.0
_MOST: Final = max(8, os.cpu_count() or 1)


@final
@dataclass(frozen=True)
class IdleWorker:
    link: Link
    process: Process
    started_at: float  # time.time(), comparable with file modification times
    files: tuple[str, ...] | None  # of imported user modules; None if the worker is still starting
    since_s: float = field(default_factory=time.monotonic)

    def is_usable(self) -> bool:
        """Whether the worker can take another dataset: it is alive, not about to exit, and its module files are unchanged."""
        is_in_time = time.monotonic() - self.since_s < _TAKE_S
        return is_in_time and self.process.wait(0) is None and are_unchanged(self.files or (), self.started_at)

    def kill(self) -> None:
        self.link.close()
        self.process.kill()
        self.process.wait(END_S)


def are_unchanged(files: Iterable[str], since: float) -> bool:
    """Whether none of these files was modified since the given time."""
    try:
        return all(os.stat(file).st_mtime < since for file in files)
    except OSError:
        return False


@final
class IdleWorkers:
    """The idle workers of this process, each with the environment and ``worker_init_fn`` that the next loader must share."""

    def __init__(self) -> None:
        # Guards the list. Reentrant, because the garbage collector may close a loader at any point, which calls ``put``.
        self._lock = threading.RLock()
        self._workers: list[tuple[Hashable, Any, IdleWorker]] = []
        self._pid = os.getpid()
        self._is_closed = False

    def put(self, environ: Hashable, init_fn: Any, worker: IdleWorker) -> bool:
        """Keep a worker. Return False if there are enough, or Python is exiting."""
        with self._lock:
            self._forget_parents()
            if self._is_closed or len(self._workers) >= _MOST:
                return False
            self._workers.append((environ, init_fn, worker))
            return True

    def take(self, environ: Hashable, init_fn: Any, launch: Launch) -> IdleWorker | None:
        """Return a worker that can take another dataset, if any. ``launch`` owns it before it leaves the list."""
        while True:
            with self._lock:
                self._forget_parents()
                fitting = [entry for entry in self._workers if entry[0] == environ and entry[1] is init_fn]
                if not fitting:
                    return None
                # Prefer workers that have finished starting.
                found = next((entry for entry in fitting if entry[2].files is not None), fitting[0])
                worker = found[2]
                launch.link, launch.process = worker.link, worker.process
                self._workers.remove(found)
            if worker.is_usable():
                return worker
            worker.kill()

    def clear(self) -> None:
        """End all idle workers. A worker exits when its pipe is closed; one that does not is killed."""
        with self._lock:
            self._forget_parents()
            workers = [worker for *_, worker in self._workers]
            self._workers = []
        for worker in workers:
            worker.link.close()
        deadline = time.monotonic() + END_S
        for worker in workers:
            if worker.process.wait(max(0.0, deadline - time.monotonic())) is None:
                worker.process.kill()
                worker.process.wait(END_S)

    def close(self) -> None:
        self._is_closed = True
        self.clear()

    def _forget_parents(self) -> None:
        """Empty the list in a forked child of the user's process: the workers belong to the parent."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._workers = []


IDLE_WORKERS: Final = IdleWorkers()
atexit.register(IDLE_WORKERS.close)
