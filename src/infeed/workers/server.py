"""The fork server: a clean process that forks workers on request. This module runs in it; ``forkserver`` talks to it.

Clean means: a fresh interpreter, one thread, no user code. It imports modules that are installed, because a fork then has them
for nothing, and it never holds a dataset. Before each fork it counts its threads; with more than one it refuses, because a
thread that holds a lock at the moment of the fork would leave it locked in the child for ever.
"""

from __future__ import annotations

import array
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, final

assert sys.platform == "linux"

from infeed.workers.child import leave, run_worker
from infeed.workers.insides import (
    die_with_parent,
    flush_output,
    ignore_interrupts,
    importing,
    keep_to_oneself,
    name_process,
    open_process,
)
from infeed.workers.pipes import PipeEnd
from infeed.workers.seeding import seed_lazily

# With no worker and nothing asked of it for this long, the server ends; the next loader starts another. Shorter would cost
# notebooks a start with every cell, longer keeps memory for nothing.
_IDLE_S: Final = 120.0
_HEAD: Final = struct.Struct("<I")
_RULE: Final = "a process with threads cannot be forked safely"
_AT_START: Final = "what runs when Python starts (a debugger, sitecustomize)"
_MAX_FDS: Final = 200  # of one message; the kernel takes 253


class Preload(NamedTuple):
    modules: list[str]
    argv: list[str]  # of the program: modules may read it when they are imported


class Fork(NamedTuple):
    """Fork a worker; its pipe ends, the store's descriptor and those that the dataset needs come along."""


class Kill(NamedTuple):
    pid: int


class Forked(NamedTuple):
    pid: int


class Refused(NamedTuple):
    """It is not safe to fork, or not possible."""

    why: str


class Exited(NamedTuple):
    pid: int
    code: int  # as subprocess gives it: negative for a signal


ToServer: TypeAlias = Preload | Fork | Kill
FromServer: TypeAlias = Forked | Refused | Exited


def send(sock: socket.socket, message: object, fds: list[int] | None = None) -> None:
    body = pickle.dumps(message, 5)
    data = _HEAD.pack(len(body)) + body
    sent = socket.send_fds(sock, [data], fds) if fds else sock.send(data)
    if sent < len(data):
        sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """One message and the descriptors that came with it.

    Raises:
        EOFError: the other side is gone.
    """
    head, fds = b"", array.array("i")
    while len(head) < _HEAD.size:
        data, found, _, _ = socket.recv_fds(sock, _HEAD.size - len(head), _MAX_FDS)
        if not data:
            raise EOFError
        head += data
        fds.extend(found)
    (size,) = _HEAD.unpack(head)
    body = b""
    while len(body) < size:
        data = sock.recv(size - len(body))
        if not data:
            raise EOFError
        body += data
    return pickle.loads(body), list(fds)


def main(parent_pid: int, fd: int) -> NoReturn:
    """Serve the process at the other end of socket ``fd``, until it is gone."""
    name_process("infeed:server")
    ignore_interrupts()
    seed_lazily()
    with socket.socket(fileno=fd) as sock:
        _Server(sock, open_process(parent_pid)).serve()
    leave()


@final
class _Server:
    def __init__(self, sock: socket.socket, parent: int | None) -> None:
        self._sock = sock
        # Readable when the user's process has ended, also if a forked child of it holds the other end of the socket.
        self._parent = parent
        self._children: set[int] = set()
        self._culprits: list[str] = [_AT_START] if _thread_count() > 1 else []
        self._tried: set[str] = set()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        # Python needs a handler to be there before it writes to the wake-up descriptor.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        gc.freeze()
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        if self._parent is not None:
            poll.register(self._parent, select.POLLIN)
        while True:
            events = poll.poll(None if self._children else _IDLE_S * 1000)
            if not events:
                return
            ready = {fd for fd, _ in events}
            if self._parent in ready:
                self._kill_all()
                return
            try:
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                    self._reap()
                if self._sock.fileno() in ready:
                    self._answer(*receive(self._sock))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                self._kill_all()
                return

    def _answer(self, message: ToServer, fds: list[int]) -> None:
        match message:
            case Preload(modules, argv):
                sys.argv[:] = argv
                self._preload(modules)
            case Fork():
                self._fork(fds)
            case Kill(pid):
                if pid in self._children:  # not reaped, so the number is still this worker's
                    os.kill(pid, signal.SIGKILL)

    def _preload(self, modules: list[str]) -> None:
        for name in modules:
            if name in self._tried:
                continue
            self._tried.add(name)
            try:
                with importing():
                    importlib.import_module(name)
            except BaseException:  # the worker that needs it will fail in its own right, and be heard
                continue
            if _thread_count() > 1 and not self._culprits:
                self._culprits.append(name)
        # What was imported now is shared with every fork: keep the collector from touching, and so copying, its pages.
        gc.freeze()

    def _fork(self, fds: list[int]) -> None:
        why = self._why_not()
        pid = -1
        if why is None:
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
            send(self._sock, Refused(why))
            return
        self._children.add(pid)
        send(self._sock, Forked(pid))

    def _why_not(self) -> str | None:
        """Why it is not safe to fork, if so."""
        count = _thread_count()
        if count == 0:
            return f"without /proc nobody knows which libraries started threads, and {_RULE}"
        if count > 1:
            return f"{', '.join(self._culprits) or 'unknown'} started threads in the fork server, and {_RULE}"
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
            if self._parent is not None:
                os.close(self._parent)
            read_fd, write_fd, *rest = fds
            keep_to_oneself(read_fd, write_fd)
            run_worker(PipeEnd(read_fd, write_fd), rest)
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
