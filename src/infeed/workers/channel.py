"""Pipes between the engine and its workers: frames of bytes, and one wait for all of them.

The engine's end never blocks: what a full pipe does not take is kept and sent when there is room, so that an engine and a
worker that both have much to say cannot wait for each other. A worker's end blocks.

Two ways with one interface: plain pipes with ``poll`` (Linux, macOS), and the connections of ``multiprocessing`` (Windows, and
wherever ``poll`` is missing), whose worker reads in a thread of its own, so that there the engine is not held up either.
"""

from __future__ import annotations

import os
import select
import struct
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from multiprocessing import connection
from typing import Any, Final, final

_HEAD: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 16


def can_use_poll() -> bool:
    return getattr(select, "poll", None) is not None


class Link(ABC):
    """The engine's end of one worker's channel."""

    @abstractmethod
    def send(self, frames: Iterable[bytes]) -> None:
        """Send frames in order, or keep what does not fit now. A channel that is gone takes nothing and says nothing: its
        end is heard by ``receive``."""

    @abstractmethod
    def receive(self) -> list[bytes]:
        """Frames that have arrived; may be none.

        Raises:
            EOFError: the worker's end is closed and all its frames have been received.
        """

    @abstractmethod
    def close(self) -> None: ...


class WorkerEnd(ABC):
    """A worker's end: blocking."""

    @abstractmethod
    def send(self, frames: list[bytes]) -> None: ...

    @abstractmethod
    def has_pending(self) -> bool:
        """Whether ``receive`` would return at once, as far as is known without asking the system."""

    @abstractmethod
    def receive(self) -> bytes:
        """The next frame.

        Raises:
            EOFError: the engine is gone, or done with this worker.
        """


class Poller(ABC):
    """Waits for any of an engine's links, or for a wake-up from another thread."""

    @abstractmethod
    def add(self, link: Any) -> None: ...

    @abstractmethod
    def remove(self, link: Any) -> None: ...

    @abstractmethod
    def wait(self, timeout_s: float | None) -> list[Any]:
        """Links with something to receive; none after ``timeout_s`` or a wake-up."""

    @abstractmethod
    def wake(self) -> None:
        """End the wait, from any thread."""

    @abstractmethod
    def close(self) -> None: ...


def _joined(frames: Iterable[bytes]) -> bytes:
    return b"".join([_HEAD.pack(len(frame)) + frame for frame in frames])


class _Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        data = self._rest + data if self._rest else data
        frames = []
        begin, end = 0, len(data)
        while end - begin >= 4:
            (size,) = _HEAD.unpack_from(data, begin)
            if end - begin - 4 < size:
                break
            frames.append(data[begin + 4 : begin + 4 + size])
            begin += 4 + size
        self._rest = data[begin:]
        return frames

    def missing(self) -> int:
        """Bytes that complete the frame in progress, as far as is known."""
        return _HEAD.unpack_from(self._rest)[0] + 4 - len(self._rest) if len(self._rest) >= 4 else 0


@final
class PipeLink(Link):
    def __init__(self, write_fd: int, read_fd: int) -> None:
        self.write_fd, self.read_fd = write_fd, read_fd
        os.set_blocking(write_fd, False)
        os.set_blocking(read_fd, False)
        self._frames = _Frames()
        self._outbox = bytearray()
        self._is_broken = False
        self.poller: PipePoller | None = None

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outbox)

    def send(self, frames: Iterable[bytes]) -> None:
        data = _joined(frames)
        if self._outbox:
            self._outbox += data
            return
        sent = self._write(data)
        if sent < len(data) and not self._is_broken:
            self._outbox += data[sent:]
            if self.poller is not None:
                self.poller.watch_room(self)

    def flush(self) -> None:
        """Send what was kept, as far as there is room."""
        sent = self._write(bytes(self._outbox[:_READ_BYTES]))
        del self._outbox[:sent]
        if self._is_broken:
            self._outbox.clear()

    def _write(self, data: bytes) -> int:
        try:
            return os.write(self.write_fd, data)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, OSError):
            self._is_broken = True
            return 0

    def receive(self) -> list[bytes]:
        try:
            # A large frame is asked for in one go: a megabyte of objects in pieces of 64 KB would be joined sixteen times.
            data = os.read(self.read_fd, max(_READ_BYTES, self._frames.missing()))
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        return self._frames.feed(data)

    def close(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            os.close(self.read_fd)
            self.write_fd = self.read_fd = -1


@final
class PipeEnd(WorkerEnd):
    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._frames = _Frames()
        self._inbox: deque[bytes] = deque()

    def send(self, frames: list[bytes]) -> None:
        data = memoryview(_joined(frames))
        while data:
            data = data[os.write(self._write_fd, data) :]

    def has_pending(self) -> bool:
        return bool(self._inbox)

    def receive(self) -> bytes:
        while not self._inbox:
            data = os.read(self._read_fd, max(_READ_BYTES, self._frames.missing()))
            if not data:
                raise EOFError
            self._inbox.extend(self._frames.feed(data))
        return self._inbox.popleft()


if sys.platform != "win32":

    @final
    class PipePoller(Poller):
        def __init__(self) -> None:
            self._poll = select.poll()
            self._links: dict[int, PipeLink] = {}
            self._wake_read, self._wake_write = os.pipe()
            os.set_blocking(self._wake_read, False)
            os.set_blocking(self._wake_write, False)
            self._poll.register(self._wake_read, select.POLLIN)

        def add(self, link: PipeLink) -> None:
            self._links[link.read_fd] = link
            self._poll.register(link.read_fd, select.POLLIN)
            link.poller = self

        def remove(self, link: PipeLink) -> None:
            self._links.pop(link.read_fd, None)
            self._unregister(link.read_fd)
            if self._links.pop(link.write_fd, None) is not None:
                self._unregister(link.write_fd)
            link.poller = None

        def watch_room(self, link: PipeLink) -> None:
            self._links[link.write_fd] = link
            self._poll.register(link.write_fd, select.POLLOUT)

        def _unregister(self, fd: int) -> None:
            try:
                self._poll.unregister(fd)
            except KeyError:
                return

        def wait(self, timeout_s: float | None) -> list[Any]:
            ready = []
            for fd, _ in self._poll.poll(None if timeout_s is None else max(0, int(timeout_s * 1000))):
                if fd == self._wake_read:
                    os.read(fd, 64)
                    continue
                link = self._links[fd]
                if fd == link.read_fd:
                    ready.append(link)
                    continue
                link.flush()
                if not link.has_outgoing:
                    del self._links[fd]
                    self._unregister(fd)
            return ready

        def wake(self) -> None:
            try:
                os.write(self._wake_write, b"w")
            except (BlockingIOError, OSError):
                return  # awake already, or closed

        def close(self) -> None:
            if self._wake_read >= 0:
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_read = self._wake_write = -1

else:

    class PipePoller(Poller):
        def __init__(self) -> None:
            raise NotImplementedError("Windows has no poll(); ConnectionPoller is used there")

        def watch_room(self, link: PipeLink) -> None:
            raise NotImplementedError


@final
class ConnectionLink(Link):
    def __init__(self, conn: connection.Connection) -> None:
        self.conn = conn

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
        self.conn.close()


@final
class ConnectionEnd(WorkerEnd):
    def __init__(self, conn: connection.Connection) -> None:
        self._conn = conn

    def send(self, frames: list[bytes]) -> None:
        for frame in frames:
            self._conn.send_bytes(frame)

    def has_pending(self) -> bool:
        return False

    def receive(self) -> bytes:
        try:
            return self._conn.recv_bytes()
        except OSError:
            raise EOFError from None


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
        ready = connection.wait([self._wake_read, *self._links], timeout_s)
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


def open_poller() -> Poller:
    return PipePoller() if can_use_poll() else ConnectionPoller()
