"""Starts worker processes: forks them with the fork server, or spawns them where forking is not safe."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, final

from infeed.memory.segments import SegmentStore
from infeed.memory.serialized_dataset import SerializedDataset
from infeed.workers.interpreter import (
    StartMethod,
    explaining_limits,
    forbid_forks,
    interpreter_environment,
    start_interpreter,
    started,
    uses_fork,
)
from infeed.workers.native_threads import modules_for
from infeed.workers.preload import preloadable
from infeed.workers.protocol import END_S, IDLE_S
from infeed.workers.transport import Link, can_use_poll

if sys.platform == "linux":
    from infeed.workers.forkserver import FORK_SERVER, ForkRefusedError, ForkServer, ServerGoneError
if sys.platform != "win32":
    from infeed.workers.transport_pipes import PipeLink

_LOG: Final = logging.getLogger("infeed")

# How many fork servers to try per worker, because a server may be killed during the start.
_SERVERS: Final = 5


def prepare(start_method: StartMethod) -> None:
    """Start the fork server while the rest of the engine is created, because its start-up delays the first batch."""
    if sys.platform == "linux" and uses_fork(start_method):
        with explaining_limits():
            FORK_SERVER.get()


class Process(ABC):
    """The engine's handle of a worker process."""

    exit_code: int | None = None  # None while unknown

    @property
    @abstractmethod
    def pid(self) -> int: ...

    @abstractmethod
    def kill(self) -> None: ...

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code, negative for a signal; ``None`` after a timeout."""
        if self.exit_code is None:
            self.exit_code = self._wait(timeout_s)
        return self.exit_code

    @abstractmethod
    def _wait(self, timeout_s: float) -> int | None: ...


if sys.platform == "linux":

    @final
    class ForkedProcess(Process):
        def __init__(self, server: ForkServer, pid: int) -> None:
            self._server, self._pid = server, pid

        @property
        def pid(self) -> int:
            return self._pid

        def kill(self) -> None:
            self._server.kill(self._pid)

        def _wait(self, timeout_s: float) -> int | None:
            return self._server.wait_exit(self._pid, timeout_s)


@final
class SpawnedProcess(Process):
    def __init__(self) -> None:
        self._owned: list[subprocess.Popen[bytes]] = []

    def start(self, entry: str, *, threads: int, pass_fds: tuple[int, ...]) -> None:
        environ = interpreter_environment(threads)
        start_interpreter(self._owned, f"infeed.workers.main:{entry}", environ=environ, pass_fds=pass_fds)

    @property
    def pid(self) -> int:
        process = started(self._owned)
        return -1 if process is None else process.pid

    def kill(self) -> None:
        process = started(self._owned)
        if process is not None:
            process.kill()

    def _wait(self, timeout_s: float) -> int | None:
        process = started(self._owned)
        try:
            return 0 if process is None else process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


@final
class Launch:
    """The start of one worker: its link and its process, once they exist.

    The owner registers the launch before the launch holds anything. If a signal handler raises during the start, the owner can
    still close everything. A worker exits when its link is closed, even if its pid was never received.
    """

    def __init__(self) -> None:
        self.link: Link | None = None
        self.process: Process | None = None

    def open(self, link: Link) -> tuple[int, ...]:
        """Open this link, closing that of an earlier attempt. Return the descriptors that the worker inherits."""
        self.close()
        self.link = link
        return link.open()

    def own(self, process: Process) -> None:
        """Register the process."""
        self.process = process

    def adopt(self, worker: IdleWorker) -> None:
        """Register a worker that was started for another loader."""
        self.link, self.process = worker.link, worker.process

    def close(self) -> None:
        if self.link is not None:
            self.link.close()


@final
class Starter:
    """Starts the processes of one worker pool: forks them as long as that is safe, then spawns them."""

    def __init__(self, *, serialized: SerializedDataset, store: SegmentStore, start_method: StartMethod, threads: int) -> None:
        self._store = store
        self._threads = threads
        self.uses_fork = uses_fork(start_method)
        # Duplicates: a worker may be replaced after the user has closed files of the dataset. Windows workers refer to handles
        # by number, so handles are not duplicated.
        self._fds = list(serialized.fds) if sys.platform == "win32" else []
        if sys.platform != "win32":
            self._close_fds = weakref.finalize(self, _close_all, self._fds)
            with explaining_limits():
                for fd in serialized.fds:
                    self._fds.append(os.dup(fd))
        # Computed once, because it visits everything that the user's modules have imported.
        self._preload = [*modules_for(threads), *preloadable(serialized.modules)] if self.uses_fork else []

    def start(self, launch: Launch) -> None:
        """Start a worker's process.

        Raises:
            WorkerStartError: a system limit was reached, or there is no Python to start.
        """
        with explaining_limits():
            self._start(launch)

    def _start(self, launch: Launch) -> None:
        if sys.platform == "linux" and self.uses_fork:
            try:
                self._fork(launch)
                return
            except ForkRefusedError as refused:
                self.uses_fork = False
                if refused.is_final:
                    forbid_forks()
                _LOG.warning("spawning workers instead of forking them, which takes longer: %s", refused)
        self._spawn(launch)

    if sys.platform == "linux":

        def _fork(self, launch: Launch) -> None:
            for attempt in range(1, _SERVERS + 1):
                link = PipeLink()
                ends = launch.open(link)
                try:
                    server = FORK_SERVER.get(self._preload)
                    server.preload(self._preload)
                    launch.own(ForkedProcess(server, server.fork([*ends, *self._shared_fds()])))
                except ServerGoneError:
                    # The server was killed, or has just exited while idle; try another.
                    if attempt == _SERVERS:
                        raise
                else:
                    link.close_inherited()
                    return

    def _spawn(self, launch: Launch) -> None:
        link: Link
        if sys.platform != "win32" and can_use_poll():
            # The kernel's parent-death signal follows the starting thread, so only the main thread may use it. A killed worker
            # cannot remove segment names, so the store must not need names.
            is_bound = threading.current_thread() is threading.main_thread() and self._store.descriptor() is not None
            entry = "over_pipes_bound" if is_bound else "over_pipes"
            link = PipeLink()
        else:
            from infeed.workers.transport_portable import ConnectionLink  # slow import that few programs need

            entry = "over_connection"
            link = ConnectionLink()
        ends = launch.open(link)
        process = SpawnedProcess()
        launch.own(process)
        process.start(entry, threads=self._threads, pass_fds=(*ends, *self._shared_fds()))
        link.close_inherited()

    def _shared_fds(self) -> tuple[int, ...]:
        """Return the descriptors that all workers inherit, in addition to their pipe ends."""
        descriptor = self._store.descriptor()
        return (*(() if descriptor is None else (descriptor,)), *self._fds)

    def close(self) -> None:
        """Release the descriptors; no more workers will be started."""
        if sys.platform != "win32":
            self._close_fds()
        if sys.platform == "linux" and self.uses_fork:
            FORK_SERVER.reap()


if sys.platform != "win32":

    def _close_all(fds: list[int]) -> None:
        while fds:
            os.close(fds.pop())


# --- idle spawned workers, kept for the next loader of this process
#
# Spawning a worker takes as long as importing what the dataset needs: seconds with torch. A worker whose epoch has ended is
# therefore kept for 60 s. It drops its dataset and receives another, as if it had just started. Forked workers are not kept,
# because the fork server starts new ones in milliseconds.
#
# A worker is reused only if a new one would behave the same: the environment and `worker_init_fn` are the same, user code left
# no thread or process running, and no user module that the worker imported has changed since. `loader.close()` ends its
# workers: nothing remains of a loader that the user has closed.

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
                launch.adopt(worker)
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
