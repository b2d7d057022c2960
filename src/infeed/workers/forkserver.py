"""The user's process's side of the fork server: one per process, started when first needed, shared by all loaders."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, final

assert sys.platform == "linux"

from infeed.errors import WorkerStartError
from infeed.workers.launch import command_line, start_interpreter
from infeed.workers.server import Exited, Fork, Forked, Kill, Preload, Refused, receive, send
from infeed.workers.threadpools import SERVER_THREADS

# For a worker that closed its pipe to be gone as well. It is, unless it hangs in the kernel.
_EXIT_S: Final = 5.0
# For a server that was told to end. It kills its workers and is gone in some milliseconds; if it is killed they are as well.
_CLOSE_S: Final = 1.0


class ForkRefusedError(WorkerStartError):
    """The server does not fork: it has threads, or the system has no room for another process."""


class ServerGoneError(WorkerStartError):
    """The server ended before it answered."""


@final
class ForkServer:
    """A connection to a server. All methods are safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the socket: one request and its answer at a time
        self._holder = 0  # the thread that has it
        self._exits: dict[int, int] = {}
        self.owner_pid = os.getpid()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = start_interpreter(
                    "infeed.workers.server:main", threads=SERVER_THREADS, pass_fds=[theirs.fileno()]
                )
            except BaseException:
                ours.close()
                raise
        self._sock = ours
        self._is_broken = False

    @property
    def is_alive(self) -> bool:
        return not self._is_broken and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def preload(self, modules: Iterable[str]) -> None:
        """Let the server import these before it forks next.

        Raises:
            ServerGoneError: there is no server at the other end.
        """
        with self._exclusive():
            try:
                send(self._sock, Preload(sorted(modules), command_line()))
            except OSError as error:
                raise self._gone() from error

    def fork(self, fds: list[int]) -> int:
        """Fork a worker that is given these descriptors; its process number.

        Raises:
            ForkRefusedError: forking would not be safe; start it another way.
            ServerGoneError: there is no server at the other end.
        """
        with self._exclusive():
            try:
                send(self._sock, Fork(), fds)
                while True:
                    message, _ = receive(self._sock)
                    if isinstance(message, Forked):
                        return message.pid
                    if isinstance(message, Refused):
                        raise ForkRefusedError(message.why)
                    self._note(message)
            except ForkRefusedError:
                raise
            except (EOFError, OSError) as error:
                raise self._gone() from error
            except BaseException:
                # Interrupted between question and answer: the next answer would be taken for another question's.
                self._is_broken = True
                raise

    def _gone(self) -> ServerGoneError:
        self._is_broken = True
        return ServerGoneError(
            f"the fork server (pid {self._process.pid}, a process of {sys.executable}) ended with exit code "
            f"{self._process.poll()}; see its output above, or use start_method='spawn'"
        )

    def kill(self, pid: int) -> None:
        """Kill a worker if it is still there."""
        with self._exclusive(_EXIT_S) as is_ours:
            if is_ours:
                with suppress(OSError):  # the server is gone, and its workers with it
                    send(self._sock, Kill(pid))

    def wait_exit(self, pid: int, timeout_s: float = _EXIT_S) -> int | None:
        """The exit code of a worker, negative for a signal; ``None`` if the server is gone or the time is up."""
        with self._exclusive(timeout_s) as is_ours:
            if not is_ours or self._is_broken:
                return None
            try:
                self._sock.settimeout(timeout_s)
                while pid not in self._exits:
                    message, _ = receive(self._sock)
                    self._note(message)
                self._sock.settimeout(None)
            except (TimeoutError, BlockingIOError):  # the latter if there is no time at all
                self._sock.settimeout(None)
                return None
            except (EOFError, OSError):  # the server is gone, and its workers with it
                self._is_broken = True
                return None
            except BaseException:
                # Interrupted, perhaps in the middle of a message: what follows of it would be taken for another.
                self._is_broken = True
                raise
            return self._exits.pop(pid)

    @contextmanager
    def _exclusive(self, timeout_s: float = -1) -> Iterator[bool]:
        """Hold the socket; yields whether it could be had.

        An engine may be closed by the garbage collector or a signal handler anywhere, also in the thread that is talking to the
        server already. Then nothing is said: a worker that is not waited for ends with its pipe all the same.
        """
        is_ours = self._holder != threading.get_ident() and self._lock.acquire(timeout=timeout_s)
        if is_ours:
            self._holder = threading.get_ident()
        try:
            yield is_ours
        finally:
            if is_ours:
                self._holder = 0
                self._lock.release()

    def close(self) -> None:
        """End the server and every worker that it forked."""
        if self.owner_pid != os.getpid():
            self._sock.close()
            return
        self._sock.close()
        try:
            self._process.wait(_CLOSE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # it hangs, or the user has no more patience
            self._process.kill()
            self._process.wait()

    def _note(self, message: object) -> None:
        assert isinstance(message, Exited)
        self._exits[message.pid] = message.code


@final
class _Registry:
    """The server of this process. A forked child of the user's has none until it needs one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ForkServer | None = None

    def get(self) -> ForkServer:
        with self._lock:
            server = self._server
            if server is None or server.owner_pid != os.getpid() or not server.is_alive:
                if server is not None:
                    server.close()
                server = self._server = ForkServer()
            return server

    def close(self) -> None:
        with self._lock:
            self._drop()

    def bury(self) -> None:
        """Let go of the server if it is dead. Called wherever a loader is closed, also by a signal handler or the garbage
        collector in the middle of ``get``: then it is left alone."""
        if self._lock.acquire(blocking=False):
            try:
                if self._server is not None and not self._server.is_alive:
                    self._drop()
            finally:
                self._lock.release()

    def _drop(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None

    def reset_after_fork(self) -> None:
        # In the child: the lock may have been held by a thread that does not exist here.
        self._lock = threading.Lock()


_REGISTRY: Final = _Registry()
# The server would end by itself when this process does; waiting for it here leaves no trace of it when Python has ended.
atexit.register(_REGISTRY.close)
os.register_at_fork(after_in_child=_REGISTRY.reset_after_fork)


def fork_server() -> ForkServer:
    """The fork server of this process, started if there is none."""
    return _REGISTRY.get()


def close_fork_server() -> None:
    """End this process's fork server, if it has one; the next loader that needs one starts it again."""
    _REGISTRY.close()


def bury_fork_server() -> None:
    """Let go of this process's fork server if it is dead: somebody killed it, and no loader has needed it since."""
    _REGISTRY.bury()
