"""Transport over ``multiprocessing`` connections, for Windows and platforms without ``poll``.

Sending on a connection blocks while the other side does not read. The worker always reads, in a separate thread, so the engine
is not held up.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from multiprocessing import connection
from typing import Any, Final, final

from infeed.workers.transport import Link, Poller, WorkerEnd

# Windows has a separate class with the same methods.
if sys.platform == "win32":
    from multiprocessing.connection import PipeConnection as Connection
else:
    from multiprocessing.connection import Connection


# Windows waits for at most 64 handles at a time, and one of them is for Ctrl+C. More connections are polled in groups, in turn,
# each for _TURN_S.
_AT_ONCE: Final = 60
_TURN_S: Final = 0.002


def _wait(connections: list[Any], timeout_s: float | None) -> list[Any]:
    if len(connections) <= _AT_ONCE:
        return connection.wait(connections, timeout_s)
    groups = [connections[begin : begin + _AT_ONCE] for begin in range(0, len(connections), _AT_ONCE)]
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not (ready := [conn for group in groups for conn in connection.wait(group, 0)]):
        for group in groups:
            left_s = _TURN_S if deadline is None else min(_TURN_S, deadline - time.monotonic())
            if left_s <= 0:
                return []
            if ready := connection.wait(group, left_s):
                return ready
    return ready


@final
class ConnectionLink(Link):
    conn: Connection[Any, Any]

    def __init__(self) -> None:
        self._ends: tuple[Connection[Any, Any], ...] = ()  # the engine's end, then the worker's

    def open(self) -> tuple[int, ...]:
        # Unreferenced connections close themselves, so an interrupt here leaks nothing.
        self._ends = connection.Pipe()
        self.conn, theirs = self._ends
        _make_inheritable(theirs.fileno())
        return (theirs.fileno(),)

    def close_inherited(self) -> None:
        for theirs in self._ends[1:]:
            theirs.close()

    def send(self, frames: Iterable[bytes]) -> None:
        try:
            for frame in frames:
                self.conn.send_bytes(frame)
        except OSError:
            return

    def receive(self) -> list[bytes]:
        frames = []
        try:
            while self.conn.poll(0):
                frames.append(self.conn.recv_bytes())
        except (EOFError, OSError):
            if not frames:
                raise EOFError from None
        return frames

    def close(self) -> None:
        for end in self._ends:
            end.close()


@final
class ConnectionEnd(WorkerEnd):
    def __init__(self, conn: Connection[Any, Any]) -> None:
        self._conn = conn

    def send(self, frame: bytes) -> None:
        self._conn.send_bytes(frame)

    def receive(self, timeout_s: float | None = None) -> bytes:
        try:
            has_come = timeout_s is None or self._conn.poll(timeout_s)
            if has_come:
                return self._conn.recv_bytes()
        except OSError:
            raise EOFError from None
        raise TimeoutError


@final
class ConnectionPoller(Poller):
    def __init__(self) -> None:
        self._links: dict[Any, ConnectionLink] = {}
        self._wake_read, self._wake_write = connection.Pipe(duplex=False)

    def add(self, link: ConnectionLink) -> None:
        self._links[link.conn] = link

    def remove(self, link: ConnectionLink) -> None:
        self._links.pop(link.conn, None)

    def wait(self, timeout_s: float | None) -> list[Any]:
        ready = _wait([self._wake_read, *self._links], timeout_s)
        if self._wake_read in ready:
            self._wake_read.recv_bytes()
        return [self._links[conn] for conn in ready if conn in self._links]

    def wake(self) -> None:
        try:
            self._wake_write.send_bytes(b"w")
        except OSError:
            return

    def close(self) -> None:
        self._wake_read.close()
        self._wake_write.close()


def inherited_end(handle: int) -> ConnectionEnd:
    """Return the worker's end of an inherited handle. Called in the worker."""
    return ConnectionEnd(Connection(handle))


if sys.platform == "win32":

    def _make_inheritable(handle: int) -> None:
        os.set_handle_inheritable(handle, True)

else:

    def _make_inheritable(handle: int) -> None:
        del handle  # pass_fds makes it inheritable
