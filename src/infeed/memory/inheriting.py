"""Support for ``multiprocessing`` locks, values and queues in a dataset, and for tensors in shared memory.

``multiprocessing`` pickles these objects only while it starts a process, because the process must inherit the named
semaphore, descriptor or handle behind them. While infeed pickles the dataset, this module acts as the process that
``multiprocessing`` is starting: it collects descriptors or handles, and every worker inherits them. Workers inherit torch
storages in shared memory in the same way, or open them by name.

Objects of a fork context are refused, because they have no name that another process could open.

Workers share the resource tracker of the main process, if it has one, as child processes of ``multiprocessing`` do.
Otherwise the first worker to exit would remove shared memory that it had only attached.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

# Memory that processes share only by fork, and what to use instead.
ANONYMOUS_MEMORY: Final = "anonymous shared memory (mmap)"
USE_ARRAY: Final = "create it over a multiprocessing.RawArray"

# In a worker: the inherited descriptors.
_handed: Final[list[int]] = []


@final
class HandedFd:
    """A descriptor of the main process, as an index into the descriptors that a worker inherits."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """Duplicate the inherited descriptor. ``multiprocessing`` calls this when it unpickles an object."""
        return os.dup(_handed[self._number])


def hand(fd: int) -> HandedFd:
    """Return what a pickle contains for a descriptor of this process. Only in ``starting``, and not on Windows."""
    assert _now.start is not None
    return HandedFd(_now.start.duplicate_for_child(fd))


@final
class _Starting:
    """The interface that ``multiprocessing`` expects of the process object being started."""

    DupFd = HandedFd

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """Return what the pickle contains for a descriptor: its index among the inherited ones, or the handle on Windows."""
        if fd not in self.fds:  # on Windows, CreateProcess rejects duplicate handles
            self.fds.append(fd)
        if sys.platform == "win32":
            return fd  # an inherited handle has the same number in the child
        return self.fds.index(fd)


@final
class _Now(threading.local):
    start: _Starting | None = None


_now: Final = _Now()


@contextmanager
def starting() -> Iterator[list[int]]:
    """Allow pickling of ``multiprocessing`` objects in this context; yield the descriptors that workers must inherit."""
    context: Any = sys.modules.get("multiprocessing.context")
    before, start = _now.start, _Starting()
    popen = None if context is None else context.get_spawning_popen()
    try:
        _now.start = start
        if context is not None:
            context.set_spawning_popen(start)
        yield start.fds
    finally:
        _now.start = before
        if context is not None:
            context.set_spawning_popen(popen)


def tracker_fd() -> int | None:
    """Return the descriptor of this process's resource tracker, or ``None`` if it has not started one."""
    module: Any = None if sys.platform == "win32" else sys.modules.get("multiprocessing.resource_tracker")
    return None if module is None else module._resource_tracker._fd


def use_tracker(fd: int) -> None:
    """In a worker: use the resource tracker of the main process, as ``multiprocessing.spawn`` does."""
    from multiprocessing import resource_tracker

    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = fd


def reduce_shared(obj: Any) -> Any:
    """Reduce connections, shared memory and ctypes values as ``multiprocessing`` does, or return ``NotImplemented``."""
    # Ignore reducers that other packages registered: torch's would move tensors into torch's shared memory.
    is_number = any(base.__module__ == "_ctypes" for base in type(obj).__mro__)
    if not is_number and not type(obj).__module__.startswith("multiprocessing"):
        return NotImplemented
    reduction: Any = sys.modules.get("multiprocessing.reduction")
    context: Any = sys.modules.get("multiprocessing.context")
    start = None if reduction is None else context.get_spawning_popen()
    if not isinstance(start, _Starting):
        return NotImplemented
    if sys.platform == "win32" and type(obj).__name__ == "PipeConnection":
        # The reducer of multiprocessing serves one receiver: the first process to open the handle takes it from the sender.
        return type(obj), (start.duplicate_for_child(obj.fileno()), obj.readable, obj.writable)
    reduce = reduction.ForkingPickler._extra_reducers.get(type(obj))
    return NotImplemented if reduce is None else reduce(obj)


def is_shared_storage(torch: Any, storage: Any) -> bool:
    """Whether a torch storage is in memory that a worker can map."""
    if not storage.is_shared():
        return False
    if storage.filename is not None or torch.multiprocessing.get_sharing_strategy() == "file_system":
        return True
    return bool(storage._share_fd_cpu_()[0] >= 0)  # torch calls a private file mapping shared, but it has no descriptor


def reduce_shared_storage(torch: Any, storage: Any) -> Any:
    """Reduce a shared storage during worker start-up.

    torch's reducer supports a single receiver, but all workers read the same pickle.
    """
    if storage.filename is not None:
        return _map_file, (storage.filename, storage.nbytes())
    if torch.multiprocessing.get_sharing_strategy() == "file_system":
        return _open_named_storage, storage._share_filename_cpu_()
    fd, size = storage._share_fd_cpu_()
    return _open_storage, (hand(fd), size)


def _map_file(path: str, size: int) -> Any:
    import torch  # lazy: needed only for torch storages

    return torch.UntypedStorage.from_file(path, shared=True, nbytes=size)


def _open_named_storage(manager: bytes, name: bytes, size: int) -> Any:
    import torch  # lazy: needed only for torch storages

    return torch.UntypedStorage._new_shared_filename_cpu(manager, name, size)


def _open_storage(handed: HandedFd, size: int) -> Any:
    import torch  # lazy: needed only for torch storages

    storage: Any = torch.UntypedStorage
    fd = handed.detach()
    try:
        return storage._new_shared_fd_cpu(fd, size)
    finally:
        os.close(fd)


def take_handed(fds: Sequence[int]) -> None:
    """In a worker: set the inherited descriptors that the dataset refers to."""
    _handed[:] = fds
