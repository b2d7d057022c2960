"""The user's process's side of the fork server: one per process, started when first needed, shared by all loaders."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, final

assert sys.platform == "linux"

from infeed.errors import WorkerStartError
from infeed.workers.forkserver_protocol import MAX_FDS, Exited, Fork, Forked, Guess, Hold, Kill, Preload, Refused, receive, send
from infeed.workers.interpreter import command_line, interpreter_environment, start_interpreter, started
from infeed.workers.native_threads import SERVER_THREADS
from infeed.workers.preload import is_right_guess

# For a worker that closed its pipe to be gone as well. It is, unless it hangs in the kernel.
_EXIT_S: Final = 5.0
# For a server that was told to end. It kills its workers and is gone in some milliseconds; if it is killed they are as well.
_CLOSE_S: Final = 1.0
# Variables of the server that keep libraries from starting threads when they are imported. What the user has set stays.
# Arrow's jemalloc has a thread that frees memory in the background; no other variable keeps it from being started.
_DEFAULTS: Final = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


class ForkRefusedError(WorkerStartError):
    """The server does not fork: it has threads, or the system has no room for another process.

    If it is final, another server of this process would refuse as well.
    """

    def __init__(self, why: str, *, is_final: bool) -> None:
        super().__init__(why)
        self.is_final = is_final


class ServerGoneError(WorkerStartError):
    """The server ended before it answered."""


@final
class ForkServer:
    """A connection to a server. All methods are safe from any thread."""

    def __init__(self) -> None:
        """Nothing is started yet, so that the registry owns it before there is anything to end."""
        self._lock = threading.RLock()  # guards the socket: one request and its answer at a time
        self._exits: dict[int, int] = {}
        self._living: set[int] = set()  # workers, as far as is known
        self.guessed: set[str] = set()  # imported, or about to be, before any loader has said what it needs
        self._is_used = False  # one has
        self.owner_pid = os.getpid()
        self._owned: list[subprocess.Popen[bytes]] = []
        self._sock, self._theirs = socket.socketpair()
        self._is_broken = True  # until it is started

    def start(self) -> None:
        with self._theirs:
            # To the kernel the parent is the thread that starts it, which must not end before this process does.
            is_bound = threading.current_thread() is threading.main_thread()
            entry = f"infeed.workers.server:{'main_bound' if is_bound else 'main'}"
            start_interpreter(self._owned, entry, environ=_environment(), pass_fds=[self._theirs.fileno()])
        self._is_broken = False

    @property
    def is_alive(self) -> bool:
        process = started(self._owned)
        return not self._is_broken and process is not None and process.poll() is None

    @property
    def pid(self) -> int:
        process = started(self._owned)
        return -1 if process is None else process.pid

    def guess(self, modules: Iterable[str]) -> None:
        """Let the server import these while nothing else is asked of it; it forks whether or not it has."""
        with self._exclusive(0) as is_ours:
            if is_ours:
                names = list(modules)
                self.guessed.update([] if self._is_used else names)
                with suppress(OSError):  # it is gone: another will be started
                    send(self._sock, Guess(names, command_line()))

    def preload(self, modules: Iterable[str]) -> None:
        """Let the server import these before it forks next.

        Raises:
            ServerGoneError: there is no server at the other end.
        """
        with self._exclusive():
            self._is_used = True
            self.guessed.clear()
            try:
                send(self._sock, Preload(sorted(modules), command_line(), _environment()))
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
                for begin in range(0, len(fds) - MAX_FDS, MAX_FDS):
                    send(self._sock, Hold(), fds[begin : begin + MAX_FDS])
                send(self._sock, Fork(), fds[(len(fds) - 1) // MAX_FDS * MAX_FDS :])
                while True:
                    message, _ = receive(self._sock)
                    if isinstance(message, Forked):
                        self._living.add(message.pid)
                        return message.pid
                    if isinstance(message, Refused):
                        raise ForkRefusedError(message.why, is_final=message.is_final)
                    self._note(message)
            except (EOFError, OSError) as error:
                raise self._gone() from error

    def _gone(self) -> ServerGoneError:
        self._is_broken = True
        process = started(self._owned)
        return ServerGoneError(
            f"the fork server (pid {self.pid}, a process of {sys.executable}) ended with exit code "
            f"{None if process is None else process.poll()}; see its output above, or use start_method='spawn'"
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
            return self._exits.pop(pid)

    @contextmanager
    def _exclusive(self, timeout_s: float = -1) -> Iterator[bool]:
        """Hold the socket; yields whether it could be had.

        An engine may be closed by the garbage collector or a signal handler anywhere, also in the thread that is talking to the
        server already. Then nothing is said: a worker that is not waited for ends with its pipe all the same.
        """
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            yield False
            return
        try:
            yield self._lock.acquire(timeout=timeout_s)
        except Exception:
            raise
        except BaseException:
            # Interrupted, perhaps between question and answer: the next answer would be taken for another question's.
            self._is_broken |= self._lock._is_owned()  # type: ignore[attr-defined]
            raise
        finally:
            # Not by a variable: a signal handler may have raised before it was set.
            if self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock.release()

    def close(self) -> None:
        """End the server and every worker that it forked."""
        self._sock.close()
        self._theirs.close()
        process = started(self._owned)
        if process is None or self.owner_pid != os.getpid():
            return
        if not self._living:
            process.kill()  # it may be at an import, which takes seconds
        try:
            process.wait(_CLOSE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # it hangs, or the user has no more patience
            process.kill()
            process.wait()

    def _note(self, message: object) -> None:
        assert isinstance(message, Exited)
        self._exits[message.pid] = message.code
        self._living.discard(message.pid)


def _environment() -> dict[str, str]:
    return {**_DEFAULTS, **interpreter_environment(SERVER_THREADS)}


@final
class _Registry:
    """The server of this process. A forked child of the user's has none until it needs one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ForkServer | None = None

    def get(self, needed: Collection[str] | None) -> ForkServer:
        with self._lock:
            server = self._server
            is_usable = server is not None and server.owner_pid == os.getpid() and server.is_alive
            if is_usable and server is not None and needed is not None:
                is_usable = is_right_guess(server.guessed, needed)
            if server is None or not is_usable:
                if server is not None:
                    server.close()
                server = self._server = ForkServer()
                try:
                    server.start()
                except BaseException:
                    self._drop()
                    raise
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


def fork_server(needed: Collection[str] | None = None) -> ForkServer:
    """The fork server of this process, started if there is none.

    Args:
        needed: the modules that a loader's workers need, if that is known. A server with others that they must not have is
            replaced, unless another loader uses it.
    """
    return _REGISTRY.get(needed)


def close_fork_server() -> None:
    """End this process's fork server, if it has one; the next loader that needs one starts it again."""
    _REGISTRY.close()


def bury_fork_server() -> None:
    """Let go of this process's fork server if it is dead: somebody killed it, and no loader has needed it since."""
    _REGISTRY.bury()
