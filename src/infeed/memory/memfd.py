"""Anonymous segments: extents of one ``memfd``. Linux only; see ``segments``."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from typing import Final, final

from infeed.memory.segments import (
    FIX,
    Address,
    Segment,
    SegmentHandle,
    SegmentReader,
    SegmentStore,
    check_available,
    refused,
    round_up,
)

assert sys.platform == "linux"

_PUNCH_HOLE: Final = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, linux/falloc.h


@final
class MemfdStore(SegmentStore):
    def __init__(self) -> None:
        self.name = f"infeed.{os.urandom(8).hex()}"
        try:
            self._fd = os.memfd_create(self.name, os.MFD_CLOEXEC)
        except OSError as error:
            raise refused(0, error) from error
        self._end = 0
        self._count = 0
        self._closer = weakref.finalize(self, os.close, self._fd)

    def create(self, size: int, *, fix: str = FIX) -> Segment:
        size = round_up(max(size, 1))
        check_available(size, fix)
        offset = self._end
        try:
            os.posix_fallocate(self._fd, offset, size)
            memory = mmap.mmap(self._fd, size, offset=offset)
        except OSError as error:
            self._punch(offset, size)
            raise refused(size, error, fix) from error
        self._end += size
        self._count += 1
        return Segment(SegmentHandle(self._count - 1, size, offset), memory)

    def release(self, handle: SegmentHandle) -> None:
        self._punch(handle.offset, handle.size)

    def _punch(self, offset: int, size: int) -> None:
        # Python does not wrap fallocate. If the call fails, the memory is freed at close instead.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate(self._fd, _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(size))

    def descriptor(self) -> int | None:
        return self._fd

    def address(self) -> Address | None:
        return Address(self.name, 0, os.getpid(), self._fd)

    @property
    def can_be_found(self) -> bool:
        return os.path.isdir("/proc/self/fd")

    def close(self) -> None:
        self._closer()


def open_memfd(address: Address) -> int:
    """Open the memory of another process's store and return a descriptor of this process.

    Raises:
        OSError: That process has exited or released the store, or belongs to another user or container.
    """
    path = f"/proc/{address.pid}/fd/{address.fd}"
    # The system reuses pids and descriptor numbers; the name shows whether this is still the same memfd.
    if not os.readlink(path).startswith(f"/memfd:{address.name} "):
        raise FileNotFoundError(errno.ENOENT, "no longer exists", path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


@final
class MemfdReader(SegmentReader):
    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor

    def attach(self, handle: SegmentHandle, *, private: bool = False) -> mmap.mmap:
        try:
            if private:
                return mmap.mmap(self._fd, handle.size, offset=handle.offset, access=mmap.ACCESS_COPY)
            # The pages already exist. Mapping them all now avoids page faults during the copy.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            return mmap.mmap(self._fd, handle.size, flags=flags, offset=handle.offset)
        except OSError as error:
            raise refused(handle.size, error) from error
