"""Shared memory from the operating system, in pieces called segments.

Two ways, with one interface:

* **anonymous** (Linux): one ``memfd`` for all segments of a store, each an extent of it. It has no name, is not counted against
  ``/dev/shm``, and is gone with the last process that has it, so nothing can leak or collide. A worker needs one descriptor,
  handed over once, however many segments follow.
* **named** (Windows, macOS, or where ``memfd_create`` is missing): one named mapping per segment. On Windows the name goes with
  the last handle. Elsewhere the owner removes it, and so does every process that attached it when it ends, so that a killed
  owner leaves nothing behind.

Every segment is allocated in full when it is made: shortage is an error with numbers here, never a SIGBUS later.

This module and ``memfd`` are the only ones that know the platform's calls. They do not know what is stored in a segment.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

from infeed.errors import MemoryLimitError
from infeed.formatting import format_bytes
from infeed.memory.limits import available_bytes, process_limit

PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
CURE: Final = "lower batch_size or prefetch, set memory_limit, or let go of batches that you keep"
# Where names of shared memory are files, their space is that of this folder.
_SHM: Final = "/dev/shm"


@dataclass(frozen=True, slots=True)
class SegmentHandle:
    """How another process finds a segment: an extent of the store's descriptor, or a name."""

    number: int
    size: int
    offset: int = 0
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """How any process of this machine finds a segment that has a store of its own, while the process that made it lives."""

    name: str  # no other segment ever has it; its bytes are the first of the segment
    size: int
    pid: int
    fd: int | None = None  # of that process; without one the name is enough


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment mapped into this process. The mapping lives as long as anything looks into it."""

    handle: SegmentHandle
    memory: mmap.mmap


class SegmentStore(ABC):
    """Makes segments; owned by one engine of the user's process."""

    @abstractmethod
    def create(self, size: int, *, cure: str = CURE) -> Segment:
        """A new segment of at least ``size`` bytes, all of it backed by memory. ``cure`` tells the user what to do if not.

        Raises:
            MemoryLimitError: there is not that much.
        """

    @abstractmethod
    def release(self, handle: SegmentHandle) -> None:
        """Give the memory back. Mappings that are still looked into stay readable."""

    @abstractmethod
    def descriptor(self) -> int | None:
        """What a worker must be handed at birth, or ``None`` if names are enough."""

    def address(self) -> Address | None:
        """How a worker that was not handed the descriptor at birth finds it; ``None`` if names are enough."""
        return None

    @property
    def can_be_found(self) -> bool:
        """Whether such a worker can."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Give everything back; mappings that are still looked into live on."""


class SegmentReader(ABC):
    """Maps segments of another process's store; owned by one worker."""

    @abstractmethod
    def attach(self, handle: SegmentHandle, *, private: bool = False) -> mmap.mmap:
        """Map a segment. ``private`` maps it copy-on-write: what this process writes, no other sees."""


def open_store(*, holds_segments: bool = True) -> SegmentStore:
    """Open the best store that this platform has.

    Args:
        holds_segments: Whether the store keeps its segments alive until `release` or `close`. Pass False if views of the
            segment own it instead, as with shared objects.
    """
    if sys.platform == "linux" and getattr(os, "memfd_create", None) is not None:
        from infeed.memory.memfd import MemfdStore

        return MemfdStore()
    return NamedStore(holds_segments=holds_segments)


def open_descriptor(address: Address | None) -> int | None:
    """The descriptor of a store whose ``address()`` this is, in this process, which closes it when it is done.

    Raises:
        OSError: the process that has the store is gone.
    """
    if sys.platform == "linux" and address is not None:
        from infeed.memory.memfd import open_memfd

        return open_memfd(address)
    return None


def open_reader(descriptor: int | None) -> SegmentReader:
    """The reader that fits a store whose ``descriptor()`` arrived here as ``descriptor``."""
    if sys.platform == "linux" and descriptor is not None:
        from infeed.memory.memfd import MemfdReader

        return MemfdReader(descriptor)
    return NamedReader()


def make_findable(size: int) -> tuple[Segment, SegmentStore, str]:
    """A segment in a store of its own, and the name under which ``find_segment`` knows it."""
    store = open_store(holds_segments=False)
    segment = store.create(size)
    name = segment.handle.name
    if sys.platform == "linux" and name is None:
        from infeed.memory.memfd import MemfdStore

        assert isinstance(store, MemfdStore)
        name = store.name
    assert name is not None
    segment.memory[: len(name)] = name.encode()
    return segment, store, name


def find_segment(address: Address, *, private: bool = False) -> mmap.mmap:
    """Map a segment of any process for reading; ``private`` for writing too, which no other process sees.

    Raises:
        OSError: it is gone, or may not be opened.
    """
    access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
    if sys.platform == "linux" and address.fd is not None:
        from infeed.memory.memfd import open_memfd

        fd = open_memfd(address)
        try:
            memory = mmap.mmap(fd, address.size, access=access)
        finally:
            os.close(fd)
    else:
        memory = _map_named(address.name, address.size, create=False, access=access)
        if address.pid != os.getpid():
            _found_names[address.name] = (address.pid, os.getppid() == address.pid)
    if memory[: len(address.name)] != address.name.encode():
        raise FileNotFoundError(errno.ENOENT, "no longer there", address.name)
    return memory


def round_up(size: int, unit: int = PAGE_BYTES) -> int:
    """
    >>> round_up(1, 4096), round_up(4096, 4096), round_up(0, 4096)
    (4096, 4096, 0)
    """
    return -(-size // unit) * unit


def check_available(size: int, cure: str) -> None:
    """Raise ``MemoryLimitError`` if there is not that much memory to take."""
    available = available_bytes()
    if size > available:
        raise MemoryLimitError(_shortage(size, f"{format_bytes(available)} is available; {cure}"))


def _shortage(size: int, found: str) -> str:
    return f"asked for {format_bytes(size)} of shared memory, {found}"


def refused(size: int, error: OSError, cure: str = CURE, *, is_named: bool = False) -> MemoryLimitError:
    """What it means that the system gave no memory: which limit was met, how large it is, and what to do about it."""
    space, longest, files = process_limit("AS"), process_limit("FSIZE"), process_limit("NOFILE")
    if error.errno == errno.ENOMEM and space is not None:
        found = f"but a process may have {format_bytes(space)} of address space (ulimit -v); raise that limit, or {cure}"
    elif error.errno == errno.EFBIG and longest is not None:
        found = f"but a file may have {format_bytes(longest)} (ulimit -f), and so may memory; raise that limit, or {cure}"
    elif error.errno == errno.EMFILE:
        found = f"but this process has all the {files} files open that it may (ulimit -n); raise that limit, or close some"
    elif error.errno == errno.ENOSPC and is_named and os.path.isdir(_SHM):
        space, free = _folder_bytes(_SHM)
        found = (
            f"{format_bytes(free)} of {format_bytes(space)} is free in {_SHM}; make that larger (docker run --shm-size), "
            f"or {cure}"
        )
    elif error.errno in (errno.ENOSPC, errno.ENOMEM):
        found = f"{format_bytes(available_bytes())} is available; {cure}"
    else:
        found = f"but the system refused: {error.strerror}; let {_SHM} be there and writable, or use worker='thread'"
    return MemoryLimitError(_shortage(size, found))


@final
class PrivateStore(SegmentStore):
    """Memory of this process alone, for workers that are threads of it or none at all."""

    def __init__(self) -> None:
        self._count = 0

    def create(self, size: int, *, cure: str = CURE) -> Segment:
        size = round_up(max(size, 1))
        check_available(size, cure)
        try:
            memory = _map_private(size)
        except OSError as error:
            raise refused(size, error, cure) from error
        self._count += 1
        return Segment(SegmentHandle(self._count - 1, size), memory)

    def release(self, handle: SegmentHandle) -> None:
        del handle  # goes with its mapping

    def descriptor(self) -> int | None:
        return None

    def close(self) -> None:
        return


@final
class NamedStore(SegmentStore):
    """One named mapping per segment.

    On Windows a name disappears with its last handle, and a mapping is such a handle. So the store holds every mapping until
    the segment is released: a worker may attach it at any time before that.
    """

    def __init__(self, *, holds_segments: bool = True) -> None:
        # macOS allows 31 characters. The pid identifies the owner to whoever finds the name.
        self._prefix = f"/infeed.{os.getpid()}.{os.urandom(4).hex()}"
        self._names: set[str] = set()
        self._held: dict[str, mmap.mmap] | None = {} if holds_segments else None
        self._count = 0
        self._closer = weakref.finalize(self, _unlink_own, self._names, os.getpid())

    def create(self, size: int, *, cure: str = CURE) -> Segment:
        size = round_up(max(size, 1))
        check_available(size, cure)
        name = f"{self._prefix}.{self._count}"
        try:
            memory = _map_named(name, size, create=True)
        except OSError as error:
            with suppress(OSError):  # what made the one fail may make the other
                _unlink(name)
            raise refused(size, error, cure, is_named=True) from error
        self._names.add(name)
        if self._held is not None:
            self._held[name] = memory
        self._count += 1
        return Segment(SegmentHandle(self._count - 1, size, name=name), memory)

    def release(self, handle: SegmentHandle) -> None:
        assert handle.name is not None
        _unlink(handle.name)
        self._names.discard(handle.name)
        if self._held is not None:
            self._held.pop(handle.name, None)

    def descriptor(self) -> int | None:
        return None

    def close(self) -> None:
        self._closer()
        if self._held is not None:
            self._held.clear()


# Names that this process attached, to be removed when it ends: the owner does it too, unless it was killed.
_attached_names: Final[set[str]] = set()
_is_kept: Final = threading.Event()  # set where others need them after this process
# Names that it found by their address, with the process that made them and whether that is its parent. Others may still want to
# find them: they are removed only if their maker was killed.
_found_names: Final[dict[str, tuple[int, bool]]] = {}
# How long a process whose pipe has ended may take to be gone.
_DYING_S: Final = 0.05


@final
class NamedReader(SegmentReader):
    def attach(self, handle: SegmentHandle, *, private: bool = False) -> mmap.mmap:
        assert handle.name is not None
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        try:
            memory = _map_named(handle.name, handle.size, create=False, access=access)
        except OSError as error:
            raise refused(handle.size, error, is_named=True) from error
        _attached_names.add(handle.name)
        return memory


def forget_attached_names() -> None:
    """Leave the names of all segments that this process attached to their owner, which lives on."""
    _attached_names.clear()


def keep_attached_names() -> None:
    """This process ends before others that need them."""
    _is_kept.set()


def remove_attached_names() -> None:
    """Remove the names of all segments that this process attached: for a worker whose owner closed the pipe or is gone."""
    if not _is_kept.is_set():
        _unlink_all(_attached_names)
    for name, (pid, is_parent) in tuple(_found_names.items()):
        if _is_gone(pid, is_parent=is_parent):
            _unlink(name)
    _found_names.clear()


def _is_gone(pid: int, *, is_parent: bool) -> bool:
    if sys.platform == "win32":
        return False  # nothing to remove there
    if is_parent:
        # A dead process may keep its number for as long as nobody asks how it ended, but it loses its children at once.
        deadline = time.monotonic() + _DYING_S
        while os.getppid() == pid and time.monotonic() < deadline:
            time.sleep(_DYING_S / 10)
        return os.getppid() != pid
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _unlink_own(names: set[str], pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child, which ends before its parent does
        _unlink_all(names)


def _unlink_all(names: set[str]) -> None:
    for name in tuple(names):
        _unlink(name)
    names.clear()


if sys.platform == "win32":

    def _folder_bytes(folder: str) -> tuple[int, int]:
        del folder  # no folder is behind memory here
        return 0, 0

    def _map_private(size: int) -> mmap.mmap:
        return mmap.mmap(-1, size)

    import _winapi  # the calls behind multiprocessing.shared_memory

    def _map_named(name: str, size: int, *, create: bool, access: int = mmap.ACCESS_WRITE) -> mmap.mmap:
        # `mmap` opens a name that exists and creates one that does not. A worker must never create one: it would read zeros.
        name = name.lstrip("/")
        if create:
            handle = _winapi.CreateFileMapping(
                _winapi.INVALID_HANDLE_VALUE, _winapi.NULL, _winapi.PAGE_READWRITE, size >> 32, size & 0xFFFFFFFF, name
            )
            exists = _winapi.GetLastError() == _winapi.ERROR_ALREADY_EXISTS
        else:
            handle = _winapi.OpenFileMapping(_winapi.FILE_MAP_READ, False, name)
            exists = False
        try:
            if exists:
                raise FileExistsError(errno.EEXIST, "exists already", name)
            return mmap.mmap(-1, size, tagname=name, access=access)
        finally:
            _winapi.CloseHandle(handle)

    def _unlink(name: str) -> None:
        del name  # goes with its last handle

else:
    # The call behind multiprocessing.shared_memory. That class itself cannot be used before Python 3.13: it registers every
    # attached segment with a tracker process that removes it when the first worker ends.
    import _posixshmem

    def _folder_bytes(folder: str) -> tuple[int, int]:
        """Its size and what of it is free."""
        found = os.statvfs(folder)
        return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail

    def _map_private(size: int) -> mmap.mmap:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _map_named(name: str, size: int, *, create: bool, access: int = mmap.ACCESS_WRITE) -> mmap.mmap:
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = _posixshmem.shm_open(name, flags, mode=0o600)
        try:
            if create:
                os.ftruncate(fd, size)
                if sys.platform == "linux":
                    os.posix_fallocate(fd, 0, size)
            return mmap.mmap(fd, size, access=access)
        finally:
            os.close(fd)

    def _unlink(name: str) -> None:
        with suppress(FileNotFoundError):
            _posixshmem.shm_unlink(name)
