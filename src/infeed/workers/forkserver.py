"""The client of the fork server, in the user's process.

Each process has one fork server, which starts when it is first needed. All loaders share it.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, final

assert sys.platform == "linux"

from infeed.errors import WorkerStartError
from infeed.workers.forkserver_protocol import MAX_FDS, Exited, Fork, Forked, Guess, Hold, Kill, Preload, Refused, receive, send
from infeed.workers.interpreter import command_line, interpreter_environment, start_interpreter, started
from infeed.workers.native_threads import SERVER_THREADS
from infeed.workers.preload import is_right_guess

# How long a worker that closed its pipe has to exit. Only a worker that hangs in the kernel needs longer.
_EXIT_S: Final = 5.0
# How long the server has to exit. It kills its workers and exits within milliseconds; if it is killed, its workers die too.
_CLOSE_S: Final = 1.0
# Environment variables that keep libraries from starting threads at import; values set by the user take precedence.
# Arrow's jemalloc frees memory in a background thread, and no other variable prevents its start.
_DEFAULTS: Final = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


class ForkRefusedError(WorkerStartError):
    """The server does not fork: it has threads, or the system cannot create another process.

    If ``is_final``, another server of this process would refuse as well.
    """

    def __init__(self, why: str, *, is_final: bool) -> None:
        super().__init__(why)
        self.is_final = is_final


class ServerGoneError(WorkerStartError):
    """The server ended before it answered."""


@final
class ForkServer:
    """A connection to a server. All methods are thread-safe."""

    def __init__(self, make_lock: Callable[[], threading.RLock] = threading.RLock) -> None:
        """Create the connection without a process, so that `FORK_SERVER` owns it before ``start``."""
        self._lock = make_lock()  # guards the socket: one request and its answer at a time
        self._exits: dict[int, int] = {}
        self._living: set[int] = set()  # workers without a reported exit
        self.guessed: set[str] = set()  # modules to import before any loader has sent the modules that it needs
        self._is_used = False  # a loader has sent the modules that it needs
        self.owner_pid = os.getpid()
        self._owned: list[subprocess.Popen[bytes]] = []
        self._sock, self._theirs = socket.socketpair()
        self._is_broken = True  # until start() succeeds

    def start(self) -> None:
        with self._theirs:
            # The kernel's parent-death signal follows the starting thread, so only the main thread may use it.
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
        """Ask the server to import these modules while it is idle; forks do not wait for them."""
        with self._exclusive(0) as is_ours:
            if is_ours:
                names = list(modules)
                self.guessed.update([] if self._is_used else names)
                with suppress(OSError):  # the server is gone; the next loader starts another
                    send(self._sock, Guess(names, command_line()))

    def preload(self, modules: Iterable[str]) -> None:
        """Ask the server to import these modules before the next fork.

        Raises:
            ServerGoneError: the server has ended.
        """
        with self._exclusive():
            self._is_used = True
            self.guessed.clear()
            try:
                send(self._sock, Preload(sorted(modules), command_line(), _environment()))
            except OSError as error:
                raise self._gone() from error

    def fork(self, fds: list[int]) -> int:
        """Fork a worker that receives these descriptors, and return its pid.

        Raises:
            ForkRefusedError: the server cannot fork, or not safely; spawn the worker instead.
            ServerGoneError: the server has ended.
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
        code = None if process is None else process.poll()
        ended = "ended" if code is None else f"exited with code {code}"
        return ServerGoneError(
            f"the fork server (pid {self.pid}, a process of {sys.executable}) {ended}; see its output above, or use "
            "start_method='spawn'"
        )

    def kill(self, pid: int) -> None:
        """Kill a worker if it still runs."""
        with self._exclusive(_EXIT_S) as is_ours:
            if is_ours:
                with suppress(OSError):  # the server is gone, and its workers with it
                    send(self._sock, Kill(pid))

    def wait_exit(self, pid: int, timeout_s: float = _EXIT_S) -> int | None:
        """Return the exit code of a worker, negative for a signal; ``None`` after a timeout or if the server is gone."""
        with self._exclusive(timeout_s) as is_ours:
            if not is_ours or self._is_broken:
                return None
            try:
                self._sock.settimeout(timeout_s)
                while pid not in self._exits:
                    message, _ = receive(self._sock)
                    self._note(message)
                self._sock.settimeout(None)
            except (TimeoutError, BlockingIOError):  # BlockingIOError if timeout_s is 0
                self._sock.settimeout(None)
                return None
            except (EOFError, OSError):  # the server is gone, and its workers with it
                self._is_broken = True
                return None
            return self._exits.pop(pid)

    @contextmanager
    def _exclusive(self, timeout_s: float = -1) -> Iterator[bool]:
        """Lock the socket; yield whether the lock was acquired.

        The garbage collector or a signal handler may close an engine at any point, even in a thread that is in the middle of a
        request. The request of that engine is then skipped; its workers still exit when their pipes close.
        """
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as in threading.Condition
            yield False
            return
        try:
            yield self._lock.acquire(timeout=timeout_s)
        except Exception:
            raise
        except BaseException:
            # Interrupted, perhaps between request and answer: the next request would then read the wrong answer.
            self._is_broken |= self._lock._is_owned()  # type: ignore[attr-defined]
            raise
        finally:
            # Ask the lock instead of a variable: a signal handler may have raised before the variable was set.
            if self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock.release()

    def close(self) -> None:
        """End the server and all workers that it forked."""
        self._sock.close()
        self._theirs.close()
        process = started(self._owned)
        if process is None or self.owner_pid != os.getpid():
            return
        if not self._living:
            process.kill()  # an import in progress would delay its exit by seconds
        try:
            process.wait(_CLOSE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # the server hangs, or the user pressed Ctrl+C
            process.kill()
            process.wait()

    def _note(self, message: object) -> None:
        assert isinstance(message, Exited)
        self._exits[message.pid] = message.code
        self._living.discard(message.pid)


def _environment() -> dict[str, str]:
    return {**_DEFAULTS, **interpreter_environment(SERVER_THREADS)}


@final
class _Owner:
    """Holds the fork server of this process. A forked child of the user's process starts a new one when needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ForkServer | None = None

    def get(self, needed: Collection[str] | None = None) -> ForkServer:
        """Return the fork server of this process. Starts it if necessary.

        Args:
            needed: the modules that a loader's workers need, if known. A server that guessed modules which these workers must
                not have is replaced, unless another loader uses it.
        """
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
        """End the server, if any. The next loader that needs a server starts one."""
        with self._lock:
            self._drop()

    def reap(self) -> None:
        """Release the server if it is dead.

        Any loader that closes calls this, even from a signal handler or the garbage collector during ``get``. In that case the
        lock is held and the call does nothing.
        """
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
        # The lock may have been held by a thread that does not exist in the child.
        self._lock = threading.Lock()


FORK_SERVER: Final = _Owner()
# The server exits with this process anyway; waiting here guarantees that it is gone when Python exits.
atexit.register(FORK_SERVER.close)
os.register_at_fork(after_in_child=FORK_SERVER.reset_after_fork)
