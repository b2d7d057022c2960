"""Transport over a pair of plain pipes per worker, polled with ``poll``. Linux and macOS."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, starmap
from math import ceil
from typing import Any, Final, final

from infeed.workers.transport import Link, Poller, WorkerEnd

assert sys.platform != "win32"

_HEAD: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 16
# Pipe capacity after the first write that does not fit, such as a batch of 100,000 indices or of long strings. Not set earlier,
# because Linux limits the total pipe capacity of a user.
_LARGE_BYTES: Final = 1 << 20
_LONGEST_S: Final = 1e6


def _joined(frames: Iterable[bytes]) -> bytes:
    return b"".join([_HEAD.pack(len(frame)) + frame for frame in frames])


def _enlarge(fd: int) -> None:
    set_size: int | None = getattr(fcntl, "F_SETPIPE_SZ", None)  # Linux only
    if set_size is not None:
        with suppress(OSError):  # the user's total pipe limit is reached, or the system maximum is lower
            fcntl.fcntl(fd, set_size, _LARGE_BYTES)


def _close(fds: list[int], *places: int) -> None:
    """Remove descriptors from a list and close them.

    It is one call into C, so a signal handler that raises finds each descriptor either on the list or closed.
    """
    deque(map(os.close, map(fds.pop, places)), maxlen=0)


def _close_all(fds: list[int]) -> None:
    _close(fds, *reversed(range(len(fds))))


class _Frames:
    """Splits a byte stream into length-prefixed frames."""

    def __init__(self) -> None:
        self._rest = bytearray()  # incomplete frame; appended in place, so that each piece does not copy a large frame
        self._needed = 0

    def feed(self, data: bytes) -> list[bytes]:
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        frames = []
        begin, end = 0, len(data)
        self._needed = _HEAD.size
        while end - begin >= _HEAD.size:
            (size,) = _HEAD.unpack_from(data, begin)
            if end - begin - _HEAD.size < size:
                self._needed = _HEAD.size + size
                break
            begin += _HEAD.size
            frames.append(data[begin : begin + size])
            begin += size
        self._rest += data[begin:]
        return frames

    def missing(self) -> int:
        """Return the number of bytes still needed for the current frame, as far as is known."""
        return self._needed - len(self._rest) if self._rest else 0


@final
class PipeLink(Link):
    def __init__(self) -> None:
        self._fds: list[int] = []  # all open descriptors
        self.write_fd = self.read_fd = -1
        self._frames = _Frames()
        self._outbox = bytearray()
        self._is_broken = self._is_large = False
        self._poller: PipePoller | None = None

    def join(self, poller: PipePoller | None) -> None:
        """Set the poller that waits for room in the pipe."""
        self._poller = poller

    def open(self) -> tuple[int, ...]:
        # One call into C: a signal handler cannot raise between the system call and the list.
        self._fds.extend(chain.from_iterable(starmap(os.pipe, ((), ()))))
        task_read, self.write_fd, self.read_fd, done_write = self._fds
        os.set_blocking(self.write_fd, False)
        os.set_blocking(self.read_fd, False)
        return task_read, done_write

    def close_inherited(self) -> None:
        _close(self._fds, 3, 0)

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outbox)

    def send(self, frames: Iterable[bytes]) -> None:
        data = _joined(frames)
        if self._outbox:
            self._outbox += data
            return
        sent = self._write(data)
        if sent < len(data) and not self._is_large:
            self._is_large = True
            _enlarge(self.write_fd)
            sent += self._write(data[sent:])
        if sent < len(data) and not self._is_broken:
            self._outbox += data[sent:]
            if self._poller is not None:
                self._poller.watch_room(self)

    def flush(self) -> None:
        """Write as much of the outbox as the pipe accepts."""
        sent = self._write(bytes(self._outbox[:_LARGE_BYTES]))
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
            # Read a large frame in one call: 1 MB in pieces of 64 KB would be joined 16 times.
            data = os.read(self.read_fd, max(_READ_BYTES, self._frames.missing()))
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        return self._frames.feed(data)

    def close(self) -> None:
        self.write_fd = self.read_fd = -1
        _close_all(self._fds)


@final
class PipeEnd(WorkerEnd):
    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._frames = _Frames()
        self._inbox: deque[bytes] = deque()
        self._is_large = False
        self._poll = select.poll()
        self._poll.register(read_fd, select.POLLIN)

    def send(self, frame: bytes) -> None:
        data = memoryview(_joined((frame,)))
        if len(data) > _READ_BYTES and not self._is_large:
            self._is_large = True
            _enlarge(self._write_fd)
        while data:
            data = data[os.write(self._write_fd, data) :]

    def receive(self, timeout_s: float | None = None) -> bytes:
        while not self._inbox:
            if timeout_s is not None and not self._poll.poll(ceil(timeout_s * 1000)):
                raise TimeoutError
            data = os.read(self._read_fd, max(_READ_BYTES, self._frames.missing()))
            if not data:
                raise EOFError
            self._inbox.extend(self._frames.feed(data))
        return self._inbox.popleft()


@final
class PipePoller(Poller):
    def __init__(self) -> None:
        self._wake_fds: list[int] = []
        # Covers an interrupt while the engine is constructed, before it owns its poller.
        weakref.finalize(self, _close_all, self._wake_fds)
        self._poll = select.poll()
        self._links: dict[int, PipeLink] = {}
        self._wake_fds.extend(chain.from_iterable(starmap(os.pipe, ((),))))
        self._wake_read, self._wake_write = self._wake_fds
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll.register(self._wake_read, select.POLLIN)

    def add(self, link: PipeLink) -> None:
        self._links[link.read_fd] = link
        self._poll.register(link.read_fd, select.POLLIN)
        link.join(self)

    def remove(self, link: PipeLink) -> None:
        self._links.pop(link.read_fd, None)
        self._unregister(link.read_fd)
        if self._links.pop(link.write_fd, None) is not None:
            self._unregister(link.write_fd)
        link.join(None)

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
        # poll() limits the timeout to some days. After an early wake-up, the caller checks the clock and waits again.
        limit_ms = None if timeout_s is None else max(0, ceil(min(timeout_s, _LONGEST_S) * 1000))
        for fd, _ in self._poll.poll(limit_ms):
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
            return  # a wake-up is already pending, or the poller is closed

    def close(self) -> None:
        self._wake_read = self._wake_write = -1
        _close_all(self._wake_fds)
