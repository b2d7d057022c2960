"""Storage of shared objects: any process on this machine can map it while the process that created it is alive.

Every object occupies an extent of a bin. A bin is one segment with a separate store. Each process maps it once as a whole,
and the bin is freed when the last view of any object in it is gone. A large object has a separate bin, so that its memory is
freed with it. Small objects share bins, so that a process needs few descriptors however many objects it shares.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np

from infeed.errors import InfeedError, MemoryLimitError
from infeed.formatting import format_bytes
from infeed.memory.limits import available_bytes
from infeed.memory.segments import Address, SegmentStore, find_segment, make_findable, round_up

_FIRST_BIN: Final = 256 << 10
# Largest bin that objects share. It doubles with every 32 bins, up to four times: many systems allow 1000 descriptors.
_LARGEST_BIN: Final = 16 << 20
ALIGN: Final = 64
_HEADER: Final = ALIGN  # contains the name of the bin


class Held:
    """An object whose contents are in a bin. Its pickle contains only their location."""

    __slots__ = ()


@final
@dataclass(frozen=True, slots=True)
class Extent:
    """Location of an object in this process."""

    memory: mmap.mmap
    name: str  # name of the bin
    begin: int
    size: int

    def reference(self) -> tuple[Address, int, int]:
        """Return the arguments with which another process calls ``open_extent``."""
        return _bins[self.name, False].current_address(), self.begin, self.size

    def view(self) -> memoryview:
        return memoryview(self.memory).toreadonly()[self.begin : self.begin + self.size]

    def whole_bin(self) -> np.ndarray[Any, Any]:
        """Return all bytes of the bin. Views of this array cannot be made writable; views of the mapping itself could."""
        return np.frombuffer(memoryview(self.memory).toreadonly(), np.uint8)


@final
@dataclass(frozen=True, slots=True)
class _Bin:
    address: Address
    pointer: int  # address of the mapping
    memory: weakref.ref[mmap.mmap]
    is_made_here: bool

    def current_address(self) -> Address:
        # A forked child has the same descriptor numbers and may outlive its parent, so use its pid.
        return replace(self.address, pid=os.getpid()) if self.is_made_here and self.address.fd is not None else self.address


# Keyed by name and whether the mapping is private. Finalizers remove entries wherever the last view dies, in any thread.
# Iterate over a copy.
_bins: Final[dict[tuple[str, bool], _Bin]] = {}


def _remember(memory: mmap.mmap, address: Address, store: SegmentStore | None, *, private_of: mmap.mmap | None = None) -> None:
    pointer = pointer_of(np.frombuffer(memory, np.uint8))
    key = (address.name, private_of is not None)
    _bins[key] = _Bin(address, pointer, weakref.ref(memory), store is not None)
    # A private mapping keeps the shared mapping and its store alive: other processes must still find the bin.
    weakref.finalize(memory, _forget, key, pointer, store, private_of)


def _forget(key: tuple[str, bool], pointer: int, store: SegmentStore | None, kept: mmap.mmap | None) -> None:
    del kept
    entry = _bins.get(key)
    if entry is not None and entry.pointer == pointer:  # two threads may have mapped it at the same time
        _bins.pop(key, None)
    if store is not None:
        store.close()


@final
class _Allocator:
    """Allocates extents. One per process, because a forked child must not write to its parent's bins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: weakref.ref[mmap.mmap] | None = None  # the current bin for small objects
        self._name = ""
        self._end = 0

    def take(self, size: int) -> Extent:
        size = round_up(max(size, 1), ALIGN)
        with self._lock:
            largest = _LARGEST_BIN << min(4, len(_bins) // 32)
            if size > largest // 4:
                memory, name = _make_bin(_HEADER + size)
                return Extent(memory, name, _HEADER, size)
            opened = None if self._open is None else self._open()
            if opened is None or self._end + size > len(opened):
                usual = _FIRST_BIN if opened is None else 2 * len(opened)
                opened, self._name = _make_bin(min(largest, max(usual, round_up(4 * size))))
                self._open = weakref.ref(opened)
                self._end = _HEADER
            extent = Extent(opened, self._name, self._end, size)
            self._end += size
            return extent


def _make_bin(size: int) -> tuple[mmap.mmap, str]:
    segment, store, name = make_findable(size)
    _remember(segment.memory, Address(name, segment.handle.size, os.getpid(), store.descriptor()), store)
    return segment.memory, name


_allocators: Final[dict[int, _Allocator]] = {}


def hold(size: int) -> Extent:
    """Allocate an extent for an object.

    Raises:
        MemoryLimitError: Not enough memory is available.
    """
    allocator = _allocators.setdefault(os.getpid(), _Allocator())
    try:
        return allocator.take(size)
    except MemoryLimitError as error:
        raise MemoryLimitError(
            f"share() asked for {format_bytes(size)} of shared memory, {format_bytes(available_bytes())} is available; let go "
            "of what you do not need, share parts of it, or keep it in files"
        ) from error


def open_extent(address: Address, begin: int, size: int) -> Extent:
    """Open an extent from a reference that this or another process created.

    Raises:
        InfeedError: The extent cannot be opened.
    """
    return Extent(_mapped(address), address.name, begin, size)


def private_memory(extent: Extent) -> mmap.mmap:
    """Map the extent's bin copy-on-write: no other process sees what this process writes."""
    return _mapped(extent.reference()[0], private_of=extent.memory)


def _mapped(address: Address, *, private_of: mmap.mmap | None = None) -> mmap.mmap:
    entry = _bins.get((address.name, private_of is not None))
    memory = None if entry is None else entry.memory()
    if memory is not None:
        return memory
    try:
        memory = find_segment(address, private=private_of is not None)
    except OSError as error:
        raise InfeedError(
            f"a shared object of process {address.pid} cannot be opened ({error.strerror or error}): that process must be of "
            "this machine, container and user, live, and hold the object until it has been opened here; keep a reference to "
            "it there, or share it in this process"
        ) from error
    _remember(memory, address, None, private_of=private_of)
    return memory


def find_held(pointer: int) -> tuple[Address, int] | None:
    """Return the bin that contains this memory address, and the offset in it."""
    for entry in tuple(_bins.values()):
        if entry.pointer <= pointer < entry.pointer + entry.address.size:
            whole = _bins.get((entry.address.name, False), entry)
            return whole.current_address(), pointer - entry.pointer
    return None


def pointer_of(array: np.ndarray[Any, Any]) -> int:
    pointer: int = array.__array_interface__["data"][0]
    return pointer
