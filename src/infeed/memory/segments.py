"""Shared memory from the operating system, in units called segments.

Two implementations have the same interface:

* **anonymous** (Linux): one ``memfd`` per store; each segment is an extent of it. It has no name, does not count against
  ``/dev/shm``, and is freed when the last process exits, so it cannot leak or collide. A worker receives one descriptor, once,
  for all segments.
* **named** (Windows, macOS, or if ``memfd_create`` is missing): one named mapping per segment. On Windows the name is removed
  with the last handle. Elsewhere the owner removes it, and so does every attached process when it exits. So a killed owner
  leaves nothing behind.

Every segment is fully allocated on creation: a shortage raises an error with numbers here and never causes SIGBUS later.

Only this module and ``memfd`` make platform-specific calls. They do not know what a segment contains.
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

from infeed.errors import InfeedError, MemoryLimitError
from infeed.formatting import format_bytes
from infeed.memory.limits import available_bytes, is_commit_limit, process_limit

PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
FIX: Final = "lower batch_size or prefetch, set memory_limit, or release batches that you keep"
# Windows charges a private mapping in full, because its process may write to every page.
PRIVATE_FIX: Final = "pass the arrays of the dataset to infeed.share"
# On systems where shared memory names are files, the size of this folder is the limit.
_SHM: Final = "/dev/shm"


@dataclass(frozen=True, slots=True)
class SegmentHandle:
    """Identifies a segment for another process: an extent of the store's descriptor, or a name."""

    number: int
    size: int
    offset: int = 0
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """Identifies a segment with a separate store for any process on this machine, while the creating process is alive."""

    name: str  # unique; the segment begins with these bytes
    size: int
    pid: int
    fd: int | None = None  # descriptor in that process; None if the name is sufficient


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment mapped into this process. The mapping exists as long as anything references it."""

    handle: SegmentHandle
    memory: mmap.mmap


class SegmentStore(ABC):
    """Creates segments; owned by one engine in the main process."""

    @abstractmethod
    def create(self, size: int, *, fix: str = FIX) -> Segment:
        """Create a fully allocated segment of at least ``size`` bytes. ``fix`` is the fix that the error message suggests.

        Raises:
            MemoryLimitError: Not enough memory is available.
        """

    @abstractmethod
    def release(self, handle: SegmentHandle) -> None:
        """Free the memory. Mappings that are still referenced stay readable."""

    @abstractmethod
    def descriptor(self) -> int | None:
        """Return the descriptor that a worker must inherit at start-up, or ``None`` if names are sufficient."""

    def address(self) -> Address | None:
        """Return an address for workers that did not inherit the descriptor; ``None`` if names are sufficient."""
        return None

    @property
    def can_be_found(self) -> bool:
        """Whether a worker that did not inherit the descriptor can open the store."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Free all segments. Mappings that are still referenced stay valid."""


class SegmentReader(ABC):
    """Maps segments of another process's store; owned by one worker."""

    @abstractmethod
    def attach(self, handle: SegmentHandle, *, private: bool = False) -> mmap.mmap:
        """Map a segment. ``private`` maps it copy-on-write: no other process sees what this process writes.

        Raises:
            InfeedError: The segment has a name, which no longer exists.
            MemoryLimitError: The segment cannot be mapped.
        """


def open_store(*, holds_segments: bool = True) -> SegmentStore:
    """Open the best store that this platform supports.

    Args:
        holds_segments: Whether the store keeps its segments alive until `release` or `close`. Pass False if views of the
            segment own it instead, as with shared objects.
    """
    if sys.platform == "linux" and getattr(os, "memfd_create", None) is not None:
        from infeed.memory.memfd import MemfdStore

        return MemfdStore()
    return NamedStore(holds_segments=holds_segments)


def open_descriptor(address: Address | None) -> int | None:
    """Open the store with this ``address()`` and return a descriptor of this process. The caller closes it.

    Raises:
        OSError: The process that owns the store has exited.
    """
    if sys.platform == "linux" and address is not None:
        from infeed.memory.memfd import open_memfd

        return open_memfd(address)
    return None


def open_reader(descriptor: int | None) -> SegmentReader:
    """Return the reader for a store whose ``descriptor()`` this process received as ``descriptor``."""
    if sys.platform == "linux" and descriptor is not None:
        from infeed.memory.memfd import MemfdReader

        return MemfdReader(descriptor)
    return NamedReader()


def make_findable(size: int, *, fix: str) -> tuple[Segment, SegmentStore, str]:
    """Create a segment in a separate store; return both and the name with which ``find_segment`` verifies it."""
    store = open_store(holds_segments=False)
    segment = store.create(size, fix=fix)
    name = segment.handle.name
    if sys.platform == "linux" and name is None:
        from infeed.memory.memfd import MemfdStore

        assert isinstance(store, MemfdStore)
        name = store.name
    assert name is not None
    segment.memory[: len(name)] = name.encode()
    return segment, store, name


def find_segment(address: Address, *, private: bool = False) -> mmap.mmap:
    """Map a segment of any process for reading. ``private`` maps it copy-on-write.

    Raises:
        OSError: The segment no longer exists or cannot be opened.
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
        raise FileNotFoundError(errno.ENOENT, "no longer exists", address.name)
    return memory


def round_up(size: int, unit: int = PAGE_BYTES) -> int:
    """Round ``size`` up to a multiple of ``unit``.

    >>> round_up(1, 4096), round_up(4096, 4096), round_up(0, 4096)
    (4096, 4096, 0)
    """
    return -(-size // unit) * unit


def check_available(size: int, fix: str) -> None:
    """Raise ``MemoryLimitError`` if less than ``size`` bytes of memory is available."""
    available = available_bytes()
    if size > available:
        raise MemoryLimitError(_shortage(size, f"{format_bytes(available)} is available; {fix}"))


def _shortage(size: int, found: str) -> str:
    return f"cannot allocate {format_bytes(size)} of shared memory: {found}"


def refused(size: int, error: OSError, fix: str = FIX, *, is_named: bool = False) -> MemoryLimitError:
    """Return an error for a failed allocation: which limit was reached, how large it is, and how to fix it."""
    space, longest, files = process_limit("AS"), process_limit("FSIZE"), process_limit("NOFILE")
    if is_commit_limit(error):
        found = f"Windows is out of memory and page file space; increase the page file, use fewer workers, or {fix}"
    elif error.errno == errno.ENOMEM and space is not None:
        found = f"address space is limited to {format_bytes(space)} (ulimit -v); raise that limit, or {fix}"
    elif error.errno == errno.EFBIG and longest is not None:
        found = f"files, and so shared memory, are limited to {format_bytes(longest)} (ulimit -f); raise that limit, or {fix}"
    elif error.errno == errno.EMFILE:
        found = f"this process has reached its limit of {files} open files (ulimit -n); raise that limit, or close files"
    elif error.errno == errno.ENOSPC and is_named and os.path.isdir(_SHM):
        space, free = _folder_bytes(_SHM)
        found = f"{format_bytes(free)} of {format_bytes(space)} is free in {_SHM}; enlarge it (docker run --shm-size), or {fix}"
    elif error.errno in (errno.ENOSPC, errno.ENOMEM):
        found = f"{format_bytes(available_bytes())} is available; {fix}"
    else:
        found = f"{error.strerror}; {f'make {_SHM} writable, or ' if os.path.isdir(_SHM) else ''}use worker='thread'"
    return MemoryLimitError(_shortage(size, found))


@final
class PrivateStore(SegmentStore):
    """Memory of this process only, for thread workers and for ``num_workers=0``."""

    def __init__(self) -> None:
        self._count = 0

    def create(self, size: int, *, fix: str = FIX) -> Segment:
        size = round_up(max(size, 1))
        check_available(size, fix)
        try:
            memory = _map_private(size)
        except OSError as error:
            raise refused(size, error, fix) from error
        self._count += 1
        return Segment(SegmentHandle(self._count - 1, size), memory)

    def release(self, handle: SegmentHandle) -> None:
        del handle  # freed with its mapping

    def descriptor(self) -> int | None:
        return None

    def close(self) -> None:
        return


@final
class NamedStore(SegmentStore):
    """One named mapping per segment.

    On Windows a name disappears with its last handle, and a mapping counts as a handle. A worker may attach a segment until
    its release, so the store keeps every mapping until then.
    """

    def __init__(self, *, holds_segments: bool = True) -> None:
        # macOS allows 31 characters. The pid identifies the owner to anyone who finds the name.
        self._prefix = f"/infeed.{os.getpid()}.{os.urandom(4).hex()}"
        self._names: set[str] = set()
        self._held: dict[str, mmap.mmap] | None = {} if holds_segments else None
        self._count = 0
        self._closer = weakref.finalize(self, _unlink_own, self._names, os.getpid())

    def create(self, size: int, *, fix: str = FIX) -> Segment:
        size = round_up(max(size, 1))
        check_available(size, fix)
        name = f"{self._prefix}.{self._count}"
        try:
            memory = _map_named(name, size, create=True)
        except OSError as error:
            with suppress(OSError):  # it may fail for the same reason as the mapping
                _unlink(name)
            raise refused(size, error, fix, is_named=True) from error
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


# Names that this process attached and removes when it exits. The owner removes them too, unless it was killed.
_attached_names: Final[set[str]] = set()
_is_kept: Final = threading.Event()  # set if other processes need the names after this process exits
# Names that this process opened by address, with the creating process and whether that is the parent. Other processes may
# still open them, so they are removed only if the creator was killed.
_found_names: Final[dict[str, tuple[int, bool]]] = {}
# How long a process may take to exit after its pipe was closed.
_DYING_S: Final = 0.05


@final
class NamedReader(SegmentReader):
    def attach(self, handle: SegmentHandle, *, private: bool = False) -> mmap.mmap:
        assert handle.name is not None
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        fix = PRIVATE_FIX if private else FIX
        try:
            memory = _map_named(handle.name, handle.size, create=False, access=access)
        except FileNotFoundError as error:
            raise InfeedError(
                f"cannot open shared memory {handle.name} ({format_bytes(handle.size)}): the process that created it has "
                "released it or has exited"
            ) from error
        except OSError as error:
            raise refused(handle.size, error, fix, is_named=True) from error
        _attached_names.add(handle.name)
        return memory


def forget_attached_names() -> None:
    """Leave the removal of all attached names to their owner, which outlives this process."""
    _attached_names.clear()


def keep_attached_names() -> None:
    """Do not remove attached names at exit: other processes that outlive this one need them."""
    _is_kept.set()


def remove_attached_names() -> None:
    """Remove the names of all attached segments: for a worker whose owner closed the pipe or has exited."""
    if not _is_kept.is_set():
        _unlink_all(_attached_names)
    for name, (pid, is_parent) in tuple(_found_names.items()):
        if _is_gone(pid, is_parent=is_parent):
            _unlink(name)
    _found_names.clear()


def _is_gone(pid: int, *, is_parent: bool) -> bool:
    if sys.platform == "win32":
        return False  # Windows has no names to remove
    if is_parent:
        # A dead process keeps its pid until its parent waits for it, but its children get a new parent immediately.
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
    if os.getpid() == pid:  # not in a forked child, which exits before its parent
        _unlink_all(names)


def _unlink_all(names: set[str]) -> None:
    for name in tuple(names):
        _unlink(name)
    names.clear()


if sys.platform == "win32":

    def _folder_bytes(folder: str) -> tuple[int, int]:
        del folder  # on Windows, no folder limits shared memory
        return 0, 0

    def _map_private(size: int) -> mmap.mmap:
        return mmap.mmap(-1, size)

    import _winapi  # the module that multiprocessing.shared_memory uses

    def _map_named(name: str, size: int, *, create: bool, access: int = mmap.ACCESS_WRITE) -> mmap.mmap:
        # `mmap` opens an existing name and creates a missing one. A worker must never create one: it would read zeros.
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
                raise FileExistsError(errno.EEXIST, "already exists", name)
            return mmap.mmap(-1, size, tagname=name, access=access)
        finally:
            _winapi.CloseHandle(handle)

    def _unlink(name: str) -> None:
        del name  # removed with its last handle

else:
    # The module that multiprocessing.shared_memory uses. SharedMemory itself is unusable before Python 3.13: it registers every
    # attached segment with a tracker process, which removes the segment when the first worker exits.
    import _posixshmem

    def _folder_bytes(folder: str) -> tuple[int, int]:
        """Return the total and free bytes of the folder's file system."""
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
