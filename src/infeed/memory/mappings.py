"""Arrays and tensors in memory that this process shares with its forked children (Linux).

Examples are views of ``multiprocessing.Array``, ``SharedMemory``, ``mmap.mmap`` and ``tensor.share_memory_()``. If they were
pickled by value, each worker would silently have a copy. Instead, workers inherit a descriptor of the mapping and map it. A
mapping without a descriptor is refused.

On other systems ``multiprocessing`` does not fork by default, and any loader copies such arrays.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any, Final, final

import numpy as np

from infeed.memory.inheriting import ANONYMOUS_MEMORY, HandedFd, hand

if sys.platform == "linux":
    import fcntl

# Writable shared mappings in /proc/self/maps: begin, end, offset, inode, path. Mappings of devices, such as GPUs, are left out.
_MAPPING: Final = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) rw-s ([0-9a-f]+) \S+ (\d+) +(/(?!dev/(?!shm/|zero )).*)$", re.MULTILINE
)
# The kernel's path of memory that was mapped without a descriptor.
_ANONYMOUS: Final = "/dev/zero (deleted)"
# infeed's own memory. Batches in it are pickled by value, because their slot is reused once this process has released it.
_OWN: Final = ("/memfd:infeed", "/dev/shm/infeed.")


@final
class SharedMapping:
    """A shared mapping of this process. In a pickle it is a descriptor that workers inherit; unpickled, an ``mmap``."""

    def __init__(self, begin: int, end: int, offset: int, inode: int, path: str) -> None:
        self.begin, self.end, self.offset, self.inode, self.path = begin, end, offset, inode, path

    def __reduce__(self) -> Any:
        assert self.descriptor is not None
        size = min(self.end - self.begin, os.fstat(self.descriptor).st_size - self.offset)
        return _map, (hand(self.descriptor), size, self.offset)

    @cached_property
    def descriptor(self) -> int | None:
        """A descriptor of this process that is open for the mapped file."""
        if sys.platform == "linux":
            for name in os.listdir("/proc/self/fd"):
                with suppress(OSError):  # that of the listing itself is closed
                    # Not the device, which differs on overlay file systems.
                    is_same = os.readlink(f"/proc/self/fd/{name}") == self.path and os.fstat(int(name)).st_ino == self.inode
                    if is_same and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
                        return int(name)
        return None


def _map(handed: HandedFd, size: int, offset: int) -> mmap.mmap:
    fd = handed.detach()
    try:
        return mmap.mmap(fd, size, offset=offset)
    finally:
        os.close(fd)


@final
class SharedMappings:
    """The shared mappings of this process, for the time in which one object is pickled."""

    def __init__(self) -> None:
        self._mappings: list[SharedMapping] | None = None

    def find(self, begin: int, end: int) -> tuple[SharedMapping, int] | None:
        """Return the mapping that contains these addresses, and the offset of the first one in it."""
        if self._mappings is None:
            self._mappings = []
            with suppress(OSError), open("/proc/self/maps", "rb") as file:  # there may be no /proc
                self._mappings += user_mappings(file.read())
        for mapping in self._mappings:
            if mapping.begin <= begin and end <= mapping.end:
                return mapping, begin - mapping.begin
        return None

    def reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        """Reduce an array in a shared mapping, or return ``NotImplemented``.

        Raises:
            TypeError: Workers cannot map the memory.
        """
        cls = type(array)
        is_plain = cls.__reduce__ is np.ndarray.__reduce__ and cls.__reduce_ex__ is np.ndarray.__reduce_ex__
        if not is_plain or array.nbytes == 0 or array.dtype.hasobject:
            return NotImplemented
        pointer: int = array.__array_interface__["data"][0]
        reach = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
        begin = pointer + sum(step for step in reach if step < 0)
        found = self.find(begin, pointer + sum(step for step in reach if step > 0) + array.itemsize)
        if found is None:
            return NotImplemented
        mapping, offset = found
        if mapping.descriptor is None:
            if _is_over_mmap(array):
                raise _refused("array")
            return NotImplemented  # such as a buffer of a driver
        where = offset + pointer - begin
        return _array_over, (mapping, where, cls, array.shape, array.dtype, array.strides, array.flags.writeable)

    def find_storage(self, storage: Any, begin: int, end: int) -> tuple[SharedMapping, int] | None:
        """Return the mapping of a part of a torch storage, and the offset of the part in it.

        Raises:
            TypeError: Workers cannot map the memory.
        """
        found = self.find(storage.data_ptr() + begin, storage.data_ptr() + end)
        if found is None or found[0].descriptor is not None:
            return found
        cuda = sys.modules["torch"].cuda
        if found[0].path == _ANONYMOUS and not (cuda.is_initialized() and storage.is_pinned()):
            raise _refused("tensor")
        return None


def user_mappings(maps: bytes) -> Iterator[SharedMapping]:
    """Yield the user's shared mappings in the text of ``/proc/self/maps``."""
    for begin, end, offset, inode, path in _MAPPING.findall(maps):
        name = os.fsdecode(path)
        if not name.startswith(_OWN):
            yield SharedMapping(int(begin, 16), int(end, 16), int(offset, 16), int(inode), name)


def _is_over_mmap(array: Any) -> bool:
    base = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return isinstance(base, mmap.mmap)


def _refused(what: str) -> TypeError:
    return TypeError(f"cannot pickle this {what}: it is in {ANONYMOUS_MEMORY}, and workers would have a copy")


def _array_over(
    memory: mmap.mmap, offset: int, cls: type[Any], shape: Any, dtype: np.dtype[Any], strides: Any, is_writable: bool
) -> Any:
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, memory, offset, strides)
    array.flags.writeable = is_writable
    return array if cls is np.ndarray else array.view(cls)
