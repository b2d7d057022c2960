"""The user's process's side of the fork server: one per process, started when first needed, shared by all loaders."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import Final, final

assert sys.platform == "linux"

from infeed.errors import WorkerStartError
from infeed.workers.launch import start_interpreter
from infeed.workers.server import Exited, Fork, Forked, Kill, Preload, Refused, receive, send

_LOG: Final = logging.getLogger("infeed")
# For a worker that closed its pipe to be gone as well. It is, unless it hangs in the kernel.
_EXIT_S: Final = 5.0


class ForkRefusedError(WorkerStartError):
    """The server has threads, so it will not fork."""


@final
class ForkServer:
    """A connection to a server. All methods are safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the socket: one request and its answer at a time
        self._exits: dict[int, int] = {}
        self.owner_pid = os.getpid()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_interpreter("infeed.workers.server:main", [theirs.fileno()], pass_fds=(theirs.fileno(),))
        self._sock = ours
        self._is_broken = False

    @property
    def is_alive(self) -> bool:
        return not self._is_broken and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def preload(self, modules: Iterable[str]) -> None:
        """Let the server import these before it forks next."""
        with self._lock:
            send(self._sock, Preload(sorted(modules)))

    def fork(self, fds: list[int]) -> int:
        """Fork a worker that is given these descriptors; its process number.

        Raises:
            ForkRefusedError: forking would not be safe; start it another way.
            WorkerStartError: the server is gone.
        """
        with self._lock:
            try:
                send(self._sock, Fork(), fds)
                while True:
                    message, _ = receive(self._sock)
                    if isinstance(message, Forked):
                        return message.pid
                    if isinstance(message, Refused):
                        raise ForkRefusedError(", ".join(message.culprits))
                    self._note(message)
            except ForkRefusedError:
                raise
            except (EOFError, OSError) as error:
                self._is_broken = True
                code = self._process.poll()
                raise WorkerStartError(
                    f"the fork server (pid {self._process.pid}) ended with exit code {code}; see its output above, "
                    "or use start_method='spawn'"
                ) from error
            except BaseException:
                # Interrupted between question and answer: the next answer would be taken for another question's.
                self._is_broken = True
                raise

    def kill(self, pid: int) -> None:
        """Kill a worker if it is still there."""
        with self._lock:
            try:
                send(self._sock, Kill(pid))
            except OSError as error:  # the server is gone, and its workers with it
                _LOG.debug("fork server is gone: %s", error)

    def wait_exit(self, pid: int, timeout_s: float = _EXIT_S) -> int | None:
        """The exit code of a worker, negative for a signal; ``None`` if the server is gone or the time is up."""
        with self._lock:
            try:
                self._sock.settimeout(timeout_s)
                while pid not in self._exits:
                    message, _ = receive(self._sock)
                    self._note(message)
            except (EOFError, OSError):
                return None
            finally:
                self._sock.settimeout(None)
            return self._exits.pop(pid)

    def close(self) -> None:
        """End the server and every worker that it forked."""
        if self.owner_pid != os.getpid():
            self._sock.close()
            return
        self._sock.close()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
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
