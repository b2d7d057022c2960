"""Transport over ``multiprocessing`` connections, for Windows and platforms without ``poll``.

Sending on a connection blocks while the other side does not read: a worker reads in a separate thread, which stops while native
code holds the GIL. The engine therefore writes to the connection's handle itself, without blocking.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import connection
from typing import Any, Final, final

from infeed.workers.transport import Link, Poller, WorkerEnd

# Windows has a separate class with the same methods.
if sys.platform == "win32":
    from multiprocessing.connection import PipeConnection as Connection
else:
    from multiprocessing.connection import Connection


# Windows waits for at most 64 handles at a time, and one of them is for Ctrl+C. More connections are polled in groups, in turn,
# each for _TURN_S. Connections that have not accepted all data are tried again as often.
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


if sys.platform == "win32":
    import _winapi

    @final
    class _PipeOutbox:
        """Writes frames to a connection without blocking, and holds those that its pipe does not accept yet."""

        def __init__(self, conn: Connection[Any, Any]) -> None:
            self._conn = conn
            self._frames: deque[bytes] = deque()
            self._write: _winapi.Overlapped | None = None  # in progress; the next frame has to wait

        @property
        def is_empty(self) -> bool:
            return self._write is None and not self._frames

        def add(self, frame: bytes) -> None:
            self._frames.append(frame)

        def flush(self) -> None:
            """Write as much as the pipe accepts. Raises ``OSError`` if the pipe is broken."""
            while self._is_ready() and self._frames:
                # One write is one message.
                self._write, _ = _winapi.WriteFile(self._conn.fileno(), self._frames.popleft(), overlapped=True)

        def _is_ready(self) -> bool:
            if self._write is not None and self._write.GetOverlappedResult(False)[1] != _ERROR_IO_INCOMPLETE:
                self._write = None
            return self._write is None

        def clear(self) -> None:
            """Drop all frames. The system must not use the memory of a frame any longer than the frame lives."""
            self._frames.clear()
            write, self._write = self._write, None
            if write is not None:
                with suppress(OSError):
                    write.cancel()
                    write.GetOverlappedResult(True)

    _ERROR_IO_INCOMPLETE: Final = 996
    _Outbox = _PipeOutbox

else:
    import socket
    import struct

    @final
    class _SocketOutbox:
        """Writes frames to a connection without blocking, and holds those that its socket does not accept yet."""

        def __init__(self, conn: Connection[Any, Any]) -> None:
            self._conn = conn
            self._data = bytearray()

        @property
        def is_empty(self) -> bool:
            return not self._data

        def add(self, frame: bytes) -> None:
            self._data += _LENGTH.pack(len(frame)) if len(frame) <= _LONGEST else _LONG_LENGTH.pack(-1, len(frame))
            self._data += frame

        def flush(self) -> None:
            """Write as much as the socket accepts. Raises ``OSError`` if the socket is broken."""
            if not self._data:
                return
            # The descriptor itself stays blocking, because the connection reads whole frames.
            connected = socket.socket(fileno=self._conn.fileno())
            try:
                while self._data:
                    sent = connected.send(self._data[:_WRITE_BYTES], socket.MSG_DONTWAIT)
                    del self._data[:sent]
            except BlockingIOError:
                return
            finally:
                connected.detach()

        def clear(self) -> None:
            """Drop all frames."""
            self._data.clear()

    # The framing of `multiprocessing.connection.Connection`.
    _LENGTH: Final = struct.Struct("!i")
    _LONG_LENGTH: Final = struct.Struct("!iQ")
    _LONGEST: Final = 0x7FFFFFFF
    _WRITE_BYTES: Final = 1 << 20
    _Outbox = _SocketOutbox


@final
class ConnectionLink(Link):
    conn: Connection[Any, Any]

    def __init__(self) -> None:
        self._ends: tuple[Connection[Any, Any], ...] = ()  # the engine's end, then the worker's
        self._outbox: _Outbox | None = None

    def open(self) -> tuple[int, ...]:
        # Unreferenced connections close themselves, so an interrupt here leaks nothing.
        self._ends = connection.Pipe()
        self.conn, theirs = self._ends
        self._outbox = _Outbox(self.conn)
        return (theirs.fileno(),)

    def close_inherited(self) -> None:
        for theirs in self._ends[1:]:
            theirs.close()

    @property
    def has_outgoing(self) -> bool:
        return self._outbox is not None and not self._outbox.is_empty

    def send(self, frames: Iterable[bytes]) -> None:
        if self._outbox is not None:
            for frame in frames:
                self._outbox.add(frame)
            self.flush()

    def flush(self) -> None:
        """Write as much of the outbox as the pipe accepts."""
        if self._outbox is None:
            return
        try:
            self._outbox.flush()
        except OSError:  # the worker is gone
            self._clear_outbox()

    def _clear_outbox(self) -> None:
        outbox, self._outbox = self._outbox, None
        if outbox is not None:
            outbox.clear()

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
        self._clear_outbox()
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
        self._is_woken = False  # whether a wake-up is in its pipe

    def add(self, link: ConnectionLink) -> None:
        self._links[link.conn] = link

    def remove(self, link: ConnectionLink) -> None:
        self._links.pop(link.conn, None)

    def wait(self, timeout_s: float | None) -> list[Any]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            is_sending = False
            for link in self._links.values():
                if link.has_outgoing:
                    link.flush()
                    is_sending |= link.has_outgoing
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            turn_s = left_s if not is_sending else _TURN_S if left_s is None else min(_TURN_S, left_s)
            ready = _wait([self._wake_read, *self._links], turn_s)
            if ready or turn_s == left_s:
                break
        if self._wake_read in ready:
            self._is_woken = False  # first: a wake-up from now on sends a message
            self._wake_read.recv_bytes()
        return [self._links[conn] for conn in ready if conn in self._links]

    def wake(self) -> None:
        # A second message would block if nothing waits any more and the pipe is full.
        if not self._is_woken:
            self._is_woken = True
            with suppress(OSError):
                self._wake_write.send_bytes(b"w")

    def close(self) -> None:
        self._wake_read.close()
        self._wake_write.close()


def inherited_end(handle: int) -> ConnectionEnd:
    """Return the worker's end of an inherited handle. Called in the worker."""
    return ConnectionEnd(Connection(handle))
