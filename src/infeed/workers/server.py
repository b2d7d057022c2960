"""The fork server: a clean process that forks workers on request. This module runs in it; ``forkserver`` talks to it.

Clean means: a fresh interpreter, one thread, no user code. It imports modules that are installed, because a fork then has them
for nothing, and it never holds a dataset. Before each fork it counts its threads; with more than one it refuses, because a
thread that holds a lock at the moment of the fork would leave it locked in the child for ever.

Some modules start threads when they are imported. The server then replaces itself by a new interpreter (``exec``), which
imports what the old one had, without these: workers import them after the fork. It stays the same process, so that its workers
and the user's process do not notice.
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
from infeed.workers.preload import ImportReports
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

# With no worker and nothing asked of it for this long, the server ends; the next loader starts another. Shorter would cost
# notebooks a start with every cell, longer keeps memory for nothing.
_IDLE_S: Final = 120.0
_RULE: Final = "a process with threads cannot be forked safely"
_AT_START: Final = "what runs when Python starts (a debugger, sitecustomize)"
# How often the server replaces itself because of modules that start threads. Then it imports nothing more.
_MOST_RESTARTS: Final = 6


def main(parent_pid: int, fd: int) -> NoReturn:
    """Serve the process at the other end of socket ``fd``, until it is gone."""
    state = _read_state()
    name_process("infeed:server")
    ignore_interrupts()
    seed_lazily()
    with socket.socket(fileno=fd) as sock:
        _Server(sock, parent_pid, state).serve()
    leave()


def main_bound(parent_pid: int, fd: int) -> NoReturn:
    """Likewise; the kernel ends this process with its parent, also while a module is being imported."""
    die_with_parent()
    main(parent_pid, fd)


@final
@dataclass
class _State:
    """What a server hands to the interpreter that replaces it."""

    environ: dict[str, str]  # in which modules are imported
    argv: list[str] = field(default_factory=lambda: ["-c"])
    clean: list[str] = field(default_factory=list)  # imported, and there was still one thread; in order
    tried: set[str] = field(default_factory=set)
    unsafe: set[str] = field(default_factory=set)  # start a thread when they are imported, or import such a module
    suspect: str | None = None  # one of its imports started a thread: find out which
    needed: list[str] = field(default_factory=list)  # before the next fork
    guessed: list[str] = field(default_factory=list)  # while nothing else is to be done
    is_used: bool = False  # a loader has said what it needs
    children: set[int] = field(default_factory=set)
    restarts: int = 0

    def is_unsafe(self, name: str) -> bool:
        """Whether importing this imports an unsafe module; packages are imported before what is in them."""
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
    """The data of ``os.environ``, which records what is read."""

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
        # Readable when the user's process has ended, also if a forked child of it holds the other end of the socket.
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
        self._unread = b""  # the beginning of a report
        # Python needs a handler to be there before it writes to the wake-up descriptor.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        self._import_again()
        self._reap()  # who ended while this interpreter started
        poll = select.poll()
        for fd in (self._sock, self._wake_read, self._reports_read, self._parent):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        while True:
            # A new interpreter would not know of descriptors that are held.
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
                # Not only when a fork is asked for: a new interpreter would not know of it.
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
                if pid in self._children:  # not reaped, so the number is still this worker's
                    os.kill(pid, signal.SIGKILL)

    # --- importing

    def _settle(self, environ: dict[str, str], modules: list[str]) -> None:
        """The first loader has said what it needs: guesses are over.

        A program may set variables before it imports what reads them. Where it has done so since this server started, modules
        that were imported by guess have read the wrong values.
        """
        state = self._state
        if state.is_used:
            return
        state.is_used = True
        state.guessed.clear()
        _set_environ_data(dict(self._reads))
        read = {os.fsdecode(key) for key in self._reads.keys_read}
        # A module may have set a variable itself, here as in the user's process.
        is_stale = any(environ.get(name) not in (state.environ.get(name), os.environ.get(name)) for name in read)
        state.environ = environ
        if is_stale:
            state.clean, state.tried, state.needed = [], set(), modules
            self._restart()

    def _import_again(self) -> None:
        """Import what the interpreter before this one had, and what it was at."""
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
            return  # the worker that needs it will fail in its own right, and be heard
        if _thread_count() <= 1:
            state.clean.append(name)
        elif not is_known:
            state.suspect = name
            self._restart()

    def _find_culprit(self, name: str) -> None:
        """Import a module again, and replace this interpreter as soon as there is a second thread."""
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
        """Replace this interpreter by a new one, in the same process."""
        state = self._state
        state.restarts += 1
        flush_output()
        with suppress(OSError):  # then this server cannot fork, and says so
            memory = os.memfd_create("infeed:server", 0)
            with open(memory, "wb", closefd=False) as file:
                pickle.dump(state, file)
            code = sys.orig_argv.index("-c") + 1
            os.execve(sys.executable, [*sys.orig_argv[: code + 1], str(memory)], state.environ)

    def _read_reports(self) -> None:
        """Workers say what they have imported after the fork. It is imported here, too, when there is nothing else to do."""
        *lines, self._unread = (self._unread + os.read(self._reports_read, 65536)).split(b"\n")
        self._state.guessed += [line.decode() for line in lines]

    def _fork(self, fds: list[int]) -> None:
        why = self._why_not()
        is_final = why is not None
        pid = -1
        if why is None:
            # What was imported is shared with every fork: keep the collector from touching, and so copying, its pages.
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
        """Why it is not safe to fork, if so."""
        count = _thread_count()
        if count == 0:
            return f"without /proc nobody knows which libraries started threads, and {_RULE}"
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
            run_worker(PipeEnd(read_fd, write_fd), rest, ImportReports(self._reports_write))
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
            os.waitpid(pid, 0)  # so that none is left as a zombie for whoever inherits them


def _thread_count() -> int:
    """How many threads this process has; 0 if that cannot be known."""
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
        setattr(environ, "_data", data)  # noqa: B010  # not known to type checkers
