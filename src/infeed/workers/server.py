"""The fork server: a clean process that forks workers on request. ``forkserver`` is its client in the user's process.

The server is a fresh interpreter with one thread and no user code, and it never holds a dataset. It imports installed modules,
which forked workers then have without importing them again.

Before each fork the server counts its threads and refuses to fork if there is more than one. A lock that another thread holds
during the fork would stay locked in the child forever.

Some modules start threads at import. The server then replaces itself with a new interpreter (``exec``) that imports the same
modules except those; workers import them after the fork. The process id stays the same, so its workers and the user's process
are not affected.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, NoReturn, final

assert sys.platform == "linux"

from infeed.import_hooks import trace_imports
from infeed.workers.forkserver_protocol import (
    Exited,
    Fork,
    Forked,
    Guess,
    Hold,
    Kill,
    Preload,
    Refused,
    ToServer,
    receive,
    send,
)
from infeed.workers.main import leave, run_worker
from infeed.workers.preload import is_installed
from infeed.workers.process_tools import (
    die_with_parent,
    flush_output,
    ignore_interrupts,
    importing,
    keep_to_oneself,
    name_process,
    open_process,
)
from infeed.workers.rng import seed_lazily
from infeed.workers.transport_pipes import PipeEnd

# The server exits after this long without workers and requests; the next loader starts another. A shorter time would cost
# notebooks a server start per cell; a longer one would waste memory.
_IDLE_S: Final = 120.0
_RULE: Final = "a process with threads cannot fork safely"
_AT_START: Final = "code that runs at Python start-up (a debugger, sitecustomize)"
# The size up to which a write to a pipe is atomic (PIPE_BUF).
_CHUNK: Final = 4096
# How often the server replaces itself because of modules that start threads. After that it imports no new modules.
_MOST_RESTARTS: Final = 6
# Known to start a thread at import, whatever the environment. Others are found by importing them, which takes two restarts.
_UNSAFE: Final = frozenset({"polars", "_polars_runtime_32", "_polars_runtime_64", "_polars_runtime_compat"})


def main(parent_pid: int, fd: int) -> NoReturn:
    """Serve the process at the other end of socket ``fd`` until that process ends."""
    state = _read_state()
    name_process("infeed:server")
    ignore_interrupts()
    seed_lazily()
    with socket.socket(fileno=fd) as sock:
        _Server(sock, parent_pid, state).serve()
    leave()


def main_bound(parent_pid: int, fd: int) -> NoReturn:
    """Like ``main``, but the kernel kills this process when its parent ends, even during an import."""
    die_with_parent()
    main(parent_pid, fd)


@final
@dataclass
class _State:
    """The state that a server passes to the interpreter that replaces it."""

    environ: dict[str, str]  # environment for imports
    argv: list[str] = field(default_factory=lambda: ["-c"])
    clean: list[str] = field(default_factory=list)  # imported without starting a thread; in import order
    tried: set[str] = field(default_factory=set)
    unsafe: set[str] = field(default_factory=lambda: set(_UNSAFE))  # start a thread at import, or import such a module
    suspect: str | None = None  # importing it started a thread; the next interpreter finds out which module did
    needed: list[str] = field(default_factory=list)  # to import before the next fork
    guessed: list[str] = field(default_factory=list)  # to import while the server is idle
    is_used: bool = False  # a loader has sent the modules that it needs
    children: set[int] = field(default_factory=set)
    restarts: int = 0

    def is_unsafe(self, name: str) -> bool:
        """Whether importing this module imports an unsafe one. Python imports parent packages first."""
        parts = name.split(".")
        return any(".".join(parts[:count]) in self.unsafe for count in range(1, len(parts) + 1))


def _read_state() -> _State:
    if len(sys.argv) < 2:
        return _State(dict(os.environ))
    with open(int(sys.argv[1]), "rb") as file:
        file.seek(0)
        state: _State = pickle.load(file)
    return state


@final
class _EnvironReads(dict[bytes, bytes]):
    """Replaces the data of ``os.environ`` and records which variables are read."""

    def __init__(self, data: dict[bytes, bytes]) -> None:
        super().__init__(data)
        self.keys_read: set[bytes] = set()

    def __getitem__(self, key: bytes) -> bytes:
        self.keys_read.add(key)
        return super().__getitem__(key)


@final
class _Server:
    def __init__(self, sock: socket.socket, parent_pid: int, state: _State) -> None:
        self._sock = sock
        # Readable when the user's process has ended, even if a forked child of it holds the other end of the socket.
        self._parent = open_process(parent_pid)
        self._state = state
        self._children = state.children
        self._held: list[int] = []  # descriptors for the next worker
        self._had_threads = _thread_count() > 1
        self._reads = _EnvironReads(_environ_data())
        if not state.is_used:
            _set_environ_data(self._reads)
        self._wake_read, self._wake_write = os.pipe()
        self._reports_read, self._reports_write = os.pipe()
        for fd in (self._wake_read, self._wake_write, self._reports_read, self._reports_write):
            os.set_blocking(fd, False)
        self._unread = b""  # an incomplete line of an import report
        # Python writes to the wake-up descriptor only for signals that have a handler.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        self._import_again()
        self._reap()  # workers that ended while this interpreter started
        poll = select.poll()
        for fd in (self._sock, self._wake_read, self._reports_read, self._parent):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        while True:
            # An import may restart the interpreter, which would lose held descriptors.
            guessed = [] if self._held else self._state.guessed
            events = poll.poll(0 if guessed else None if self._children else _IDLE_S * 1000)
            if not events and not guessed:
                return
            ready = {fd for fd, _ in events}
            if self._parent in ready:
                self._kill_all()
                return
            try:
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                    self._reap()
                if self._reports_read in ready:
                    self._read_reports()
                if self._sock.fileno() in ready:
                    self._answer(*receive(self._sock))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                self._kill_all()
                return
            if not events:
                self._import(guessed.pop(0))

    def _answer(self, message: ToServer, fds: list[int]) -> None:
        match message:
            case Preload(modules, argv, environ):
                sys.argv[:] = self._state.argv = argv
                self._settle(environ, modules)
                # Import now, not on the fork request: a restart of the interpreter would lose that request.
                self._state.needed = [*modules, *self._state.guessed]
                self._state.guessed.clear()
                self._import_needed()
            case Guess(modules, argv):
                sys.argv[:] = self._state.argv = argv
                self._state.guessed += modules
            case Hold():
                self._held += fds
            case Fork():
                held, self._held = self._held, []
                self._fork([*held, *fds])
            case Kill(pid):
                if pid in self._children:  # not reaped, so the pid is still this worker's
                    os.kill(pid, signal.SIGKILL)

    # --- importing

    def _settle(self, environ: dict[str, str], modules: list[str]) -> None:
        """Stop guessing when the first loader has sent the modules that it needs.

        A program may set environment variables before it imports the modules that read them. If it did so after this server
        started, guessed modules have read stale values, and the server restarts its interpreter.
        """
        state = self._state
        if state.is_used:
            return
        state.is_used = True
        state.guessed.clear()
        _set_environ_data(dict(self._reads))
        read = {os.fsdecode(key) for key in self._reads.keys_read}
        # A module may have set a variable itself, both here and in the user's process.
        is_stale = any(environ.get(name) not in (state.environ.get(name), os.environ.get(name)) for name in read)
        state.environ = environ
        if is_stale:
            state.clean, state.tried, state.needed = [], set(), modules
            self._restart()

    def _import_again(self) -> None:
        """Import the modules of the previous interpreter, and those that it was about to import."""
        state = self._state
        sys.argv[:] = state.argv
        names, state.clean = state.clean, []
        for name in names:
            self._import(name, is_known=True)
        suspect, state.suspect = state.suspect, None
        if suspect is not None:
            self._find_culprit(suspect)
        self._import_needed()

    def _import_needed(self) -> None:
        while self._state.needed:
            self._import(self._state.needed.pop(0))

    def _import(self, name: str, *, is_known: bool = False) -> None:
        state = self._state
        is_late = state.restarts > _MOST_RESTARTS or name in state.tried
        if self._had_threads or state.is_unsafe(name) or (is_late and not is_known):
            return
        state.tried.add(name)
        if not _is_imported(name):
            return  # the worker that needs the module raises and reports the import error
        if _thread_count() <= 1:
            state.clean.append(name)
        elif not is_known:
            state.suspect = name
            self._restart()

    def _find_culprit(self, name: str) -> None:
        """Import a module again, and restart the interpreter as soon as there is a second thread."""
        state = self._state

        def executed(module: str, importers: list[str]) -> None:
            if _thread_count() <= 1:
                state.clean.append(module)
            else:
                state.unsafe.update([module, *importers])
                self._restart()

        with trace_imports(executed):
            is_imported = _is_imported(name)
        if is_imported:
            state.clean.append(name)

    def _restart(self) -> None:
        """Replace this interpreter with a new one in the same process."""
        state = self._state
        state.restarts += 1
        flush_output()
        with suppress(OSError):  # the threads then remain, and this server refuses to fork
            memory = os.memfd_create("infeed:server", 0)
            with open(memory, "wb", closefd=False) as file:
                pickle.dump(state, file)
            code = sys.orig_argv.index("-c") + 1
            os.execve(sys.executable, [*sys.orig_argv[: code + 1], str(memory)], state.environ)

    def _read_reports(self) -> None:
        """Queue the modules that workers imported after the fork; the server imports them while it is idle."""
        *lines, self._unread = (self._unread + os.read(self._reports_read, 65536)).split(b"\n")
        self._state.guessed += [line.decode() for line in lines]

    def _fork(self, fds: list[int]) -> None:
        why = self._why_not()
        is_final = why is not None
        pid = -1
        if why is None:
            # Forks share the pages of imported modules; the garbage collector would write to them and so copy them.
            gc.freeze()
            flush_output()
            try:
                pid = os.fork()
            except OSError as error:
                why = f"the fork server cannot fork: {error.strerror}"
        if pid == 0:
            self._become_worker(fds)
        for fd in fds:
            os.close(fd)
        if why is not None:
            send(self._sock, Refused(why, is_final))
            return
        self._children.add(pid)
        send(self._sock, Forked(pid))

    def _why_not(self) -> str | None:
        """Return why it is not safe to fork, or ``None`` if it is."""
        count = _thread_count()
        if count == 0:
            return f"the number of threads is unknown without /proc, and {_RULE}"
        if count > 1:
            culprit = _AT_START if self._had_threads else "a module that the dataset needs"
            return f"{culprit} started threads in the fork server, and {_RULE}"
        return None

    def _become_worker(self, fds: list[int]) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            self._sock.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            os.close(self._reports_read)
            if self._parent is not None:
                os.close(self._parent)
            read_fd, write_fd, *rest = fds
            keep_to_oneself(read_fd, write_fd, self._reports_write)
            run_worker(PipeEnd(read_fd, write_fd), rest, _ImportReports(self._reports_write).look)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        leave(code)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._children.discard(pid)
            send(self._sock, Exited(pid, os.waitstatus_to_exitcode(status)))

    def _kill_all(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)  # leave no zombies to the process that inherits them


@final
class _ImportReports:
    """Reports to the fork server the installed modules that this worker imported since the fork: later workers need them too.

    For a new package, only the package name is reported. Importing it imports most of its submodules; later workers, which find
    the package already imported, report the rest.
    """

    def __init__(self, fd: int) -> None:
        """
        Args:
            fd: a non-blocking pipe; if the server does not read, reports are lost.
        """
        self._fd = fd
        self._known = set(sys.modules)
        self._count = len(sys.modules)

    def look(self) -> None:
        if len(sys.modules) != self._count:
            self._report()

    def _report(self) -> None:
        modules = dict(sys.modules)
        self._count = len(modules)
        new = modules.keys() - self._known
        self._known |= new
        data = b""
        for name in modules:  # in import order
            if name in new and name.rpartition(".")[0] not in new and _is_reported(name, modules[name]):
                line = f"{name}\n".encode()
                if len(data) + len(line) > _CHUNK:
                    self._write(data)
                    data = b""
                data += line
        self._write(data)

    def _write(self, data: bytes) -> None:
        with suppress(OSError):
            os.write(self._fd, data)


def _is_reported(name: str, module: ModuleType) -> bool:
    try:
        return name.partition(".")[0] != "infeed" and is_installed(module)
    except Exception:  # user code may put any object there
        return False


def _thread_count() -> int:
    """Return the number of threads of this process, or 0 if it is unknown."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # no /proc
        return 0


def _is_imported(name: str) -> bool:
    try:
        with importing():
            importlib.import_module(name)
    except BaseException:  # modules may raise anything
        return False
    return True


def _environ_data() -> dict[bytes, bytes]:
    environ: Any = os.environ
    data: dict[bytes, bytes] = environ._data
    return data


def _set_environ_data(data: dict[bytes, bytes]) -> None:
    for environ in (os.environ, os.environb):
        setattr(environ, "_data", data)  # noqa: B010  # type checkers do not know _data
