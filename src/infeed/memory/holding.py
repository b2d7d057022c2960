"""Where shared objects lie: memory that any process of this machine can find while the process that made it lives.

An object has an extent of a bin. A bin is one segment with a store of its own, mapped whole and once into each process that
looks into it, and given back when the last view of anything in it is gone. Large objects have a bin of their own, so that their
memory comes back with them; small ones share bins, so that a process has few descriptors however many objects it shares.
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
# The most that objects share. It doubles with every 32 bins, four times: many systems allow a process a thousand descriptors.
_LARGEST_BIN: Final = 16 << 20
ALIGN: Final = 64
_HEADER: Final = ALIGN  # the bin's name


class Held:
    """An object whose contents lie in a bin, and which pickles as where they lie."""

    __slots__ = ()


@final
@dataclass(frozen=True, slots=True)
class Extent:
    """Where an object lies, in this process."""

    memory: mmap.mmap
    name: str  # of the bin
    begin: int
    size: int

    def reference(self) -> tuple[Address, int, int]:
        """What another process needs to ``open_extent``."""
        return _bins[self.name, False].current_address(), self.begin, self.size

    def view(self) -> memoryview:
        return memoryview(self.memory).toreadonly()[self.begin : self.begin + self.size]

    def whole_bin(self) -> np.ndarray[Any, Any]:
        """All bytes of the bin. Nothing that is made over this array can be made writable; over the mapping itself it could."""
        return np.frombuffer(memoryview(self.memory).toreadonly(), np.uint8)


@final
@dataclass(frozen=True, slots=True)
class _Bin:
    address: Address
    pointer: int  # where it is mapped
    memory: weakref.ref[mmap.mmap]
    is_made_here: bool

    def current_address(self) -> Address:
        # A forked child has its parent's descriptors under the same numbers, and may live longer.
        return replace(self.address, pid=os.getpid()) if self.is_made_here and self.address.fd is not None else self.address


# By name, and whether it is the private mapping. Entries leave with their mappings, from wherever the last view dies: so
# whoever goes through them takes a copy first.
_bins: Final[dict[tuple[str, bool], _Bin]] = {}


def _remember(memory: mmap.mmap, address: Address, store: SegmentStore | None, *, private_of: mmap.mmap | None = None) -> None:
    pointer = pointer_of(np.frombuffer(memory, np.uint8))
    key = (address.name, private_of is not None)
    _bins[key] = _Bin(address, pointer, weakref.ref(memory), store is not None)
    # A private mapping keeps the other, and with it the store: what lies in it must stay to be found.
    weakref.finalize(memory, _forget, key, pointer, store, private_of)


def _forget(key: tuple[str, bool], pointer: int, store: SegmentStore | None, kept: mmap.mmap | None) -> None:
    del kept
    entry = _bins.get(key)
    if entry is not None and entry.pointer == pointer:  # two threads may have mapped it at the same moment
        _bins.pop(key, None)
    if store is not None:
        store.close()


@final
class _Allocator:
    """Finds room; one per process, because a forked child must not write where its parent does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: weakref.ref[mmap.mmap] | None = None  # the bin that small objects go to
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
    """Room for an object.

    Raises:
        MemoryLimitError: there is not that much memory.
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
    """The extent that another process, or this one, has a reference to.

    Raises:
        InfeedError: it cannot be opened.
    """
    return Extent(_mapped(address), address.name, begin, size)


def private_memory(extent: Extent) -> mmap.mmap:
    """The extent's bin mapped for writing: what this process writes, no other sees."""
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
    """The bin that this address in memory is in, and where in it."""
    for entry in tuple(_bins.values()):
        if entry.pointer <= pointer < entry.pointer + entry.address.size:
            whole = _bins.get((entry.address.name, False), entry)
            return whole.current_address(), pointer - entry.pointer
    return None


def pointer_of(array: np.ndarray[Any, Any]) -> int:
    pointer: int = array.__array_interface__["data"][0]
    return pointer
