"""Starting a worker's process: it is forked by the fork server, or spawned where there is no safe fork."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, final

from infeed.errors import ConfigError
from infeed.memory.parcel import Parcel
from infeed.memory.segments import SegmentStore
from infeed.workers.channel import Link, can_use_poll
from infeed.workers.launch import explaining_limits, start_interpreter
from infeed.workers.preload import preloadable
from infeed.workers.threadpools import modules_for

if sys.platform == "linux":
    from infeed.workers.forkserver import ForkRefusedError, ForkServer, ServerGoneError, bury_fork_server, fork_server
if sys.platform != "win32":
    from infeed.workers.pipes import PipeLink

_LOG: Final = logging.getLogger("infeed")

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


class Process(ABC):
    """A worker's process, as the engine's side knows it."""

    pid: int

    @abstractmethod
    def kill(self) -> None: ...

    @abstractmethod
    def wait(self, timeout_s: float) -> int | None:
        """The exit code, negative for a signal; ``None`` if it is not known in time."""


if sys.platform == "linux":

    @final
    class ForkedProcess(Process):
        def __init__(self, server: ForkServer, pid: int) -> None:
            self._server = server
            self.pid = pid

        def kill(self) -> None:
            self._server.kill(self.pid)

        def wait(self, timeout_s: float) -> int | None:
            return self._server.wait_exit(self.pid, timeout_s)


@final
class SpawnedProcess(Process):
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
class Starter:
    """Starts the processes of one crew: forks them for as long as that is safe, and spawns them from then on."""

    def __init__(self, *, parcel: Parcel, store: SegmentStore, start_method: StartMethod, threads: int) -> None:
        self._parcel = parcel
        self._store = store
        self._threads = threads
        self.uses_fork = uses_fork(start_method)
        # Looked for once: it goes through everything that the user's modules have imported.
        self._preload = [*modules_for(threads), *preloadable(parcel.modules)] if self.uses_fork else []

    def start(self) -> tuple[Link, Process]:
        """Start a worker's process, and give the engine's end of what it is talked to over.

        Raises:
            WorkerStartError: a limit of the system was met, or there is no Python to start.
        """
        with explaining_limits():
            return self._start()

    def _start(self) -> tuple[Link, Process]:
        if sys.platform == "linux" and self.uses_fork:
            try:
                return self._fork()
            except ServerGoneError:
                # It was killed, or ended by itself a moment ago; another will do. If that fails too, the user hears of it.
                return self._fork()
            except ForkRefusedError as refused:
                self.uses_fork = False
                _LOG.warning("workers are spawned instead of forked: %s", refused)
        return self._spawn()

    if sys.platform == "linux":

        def _fork(self) -> tuple[Link, Process]:
            with _pipes() as (link, ends):
                server = fork_server()
                server.preload(self._preload)
                return link, ForkedProcess(server, server.fork([*ends, *self._shared_fds()]))

    def _spawn(self) -> tuple[Link, Process]:
        shared = self._shared_fds()
        if sys.platform != "win32" and can_use_poll():
            # To the kernel the parent is the thread that starts it, which must not end before this process does. And a worker
            # that is killed removes no names.
            is_bound = threading.current_thread() is threading.main_thread() and self._store.descriptor() is not None
            entry = "over_pipes_bound" if is_bound else "over_pipes"
            with _pipes() as (link, ends):
                return link, self._spawn_at(entry, (*ends, *shared))
        from infeed.workers.connections import open_pipe  # takes a while to import, and few need it

        connection, theirs = open_pipe()
        with theirs:
            handles = (theirs.fileno(), *shared)
            try:
                return connection, self._spawn_at("over_connection", handles)
            except BaseException:
                connection.close()
                raise

    def _shared_fds(self) -> tuple[int, ...]:
        """What all workers get, besides the ends of their own pipes."""
        descriptor = self._store.descriptor()
        return (*(() if descriptor is None else (descriptor,)), *self._parcel.fds)

    def _spawn_at(self, entry: str, fds: tuple[int, ...]) -> SpawnedProcess:
        return SpawnedProcess(start_interpreter(f"infeed.workers.spawned:{entry}", threads=self._threads, pass_fds=fds))

    def close(self) -> None:
        """No more will be started."""
        if sys.platform == "linux" and self.uses_fork:
            bury_fork_server()


if sys.platform != "win32":

    @contextmanager
    def _pipes() -> Iterator[tuple[PipeLink, tuple[int, int]]]:
        """The engine's ends of two pipes, and the ends that a worker reads and writes, which are open until it has them."""
        task_read, task_write = os.pipe()
        try:
            done_read, done_write = os.pipe()
        except OSError:
            os.close(task_read)
            os.close(task_write)
            raise
        link = PipeLink(task_write, done_read)
        try:
            yield link, (task_read, done_write)
        except BaseException:
            link.close()
            raise
        finally:
            os.close(task_read)
            os.close(done_write)
