"""Locks, values and queues of ``multiprocessing`` in a dataset, and shared tensors.

``multiprocessing`` pickles them only while it starts a process, because the process has to inherit what is behind them: a named
semaphore, a descriptor, a handle. Workers are such processes. So while the dataset is pickled, this module stands in for the
process that ``multiprocessing`` expects: it collects the descriptors or handles, and every worker inherits them. Storages of
torch in shared memory are inherited in the same way, or opened by name.

Objects of a fork context have no name that another process could open, and are refused.

Workers also share the resource tracker of the user's process, if it has one, as processes of ``multiprocessing`` do. With a
tracker of its own, the first worker that ends would remove shared memory that it had only attached to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

# In a worker: the descriptors that it was handed.
_handed: Final[list[int]] = []


@final
class HandedFd:
    """A descriptor of the user's process, by its number among those that a worker is handed."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """A descriptor of this process for the same thing; called where ``multiprocessing`` builds an object again."""
        return os.dup(_handed[self._number])


@final
class _Starting:
    """What ``multiprocessing`` asks of whoever is starting a process."""

    DupFd = HandedFd

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """What stands for a descriptor in the pickle: its place among the inherited ones; on Windows the handle itself."""
        if fd not in self.fds:  # on Windows, CreateProcess refuses a handle that is named twice
            self.fds.append(fd)
        if sys.platform == "win32":
            # An inherited handle has the same number in the child.
            os.set_handle_inheritable(fd, True)
            return fd
        return self.fds.index(fd)


@contextmanager
def starting() -> Iterator[list[int]]:
    """Let objects of ``multiprocessing`` be pickled inside; yields the descriptors that a worker must be handed for them."""
    context: Any = sys.modules.get("multiprocessing.context")
    if context is None:
        yield []
        return
    start = _Starting()
    before = context.get_spawning_popen()
    context.set_spawning_popen(start)
    try:
        yield start.fds
    finally:
        context.set_spawning_popen(before)


def tracker_fd() -> int | None:
    """The descriptor of the resource tracker that this process uses; ``None`` if it has not started one."""
    module: Any = None if sys.platform == "win32" else sys.modules.get("multiprocessing.resource_tracker")
    return None if module is None else module._resource_tracker._fd


def use_tracker(fd: int) -> None:
    """In a worker: use the tracker of the user's process, as ``multiprocessing.spawn`` does."""
    from multiprocessing import resource_tracker

    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = fd


def reduce_shared(obj: Any) -> Any:
    """As ``multiprocessing`` reduces connections, shared memory and numbers in it for a process, or ``NotImplemented``."""
    # Not what others have registered with it: torch's tensors would be moved into shared memory of torch's.
    is_number = any(base.__module__ == "_ctypes" for base in type(obj).__mro__)
    if not is_number and not type(obj).__module__.startswith("multiprocessing"):
        return NotImplemented
    reduction: Any = sys.modules.get("multiprocessing.reduction")
    context: Any = sys.modules.get("multiprocessing.context")
    start = None if reduction is None else context.get_spawning_popen()
    if not isinstance(start, _Starting):
        return NotImplemented
    if sys.platform == "win32" and type(obj).__name__ == "PipeConnection":
        # multiprocessing's own way serves one process only: the first that opens the handle takes it away from the sender.
        return type(obj), (start.duplicate_for_child(obj.fileno()), obj.readable, obj.writable)
    reduce = reduction.ForkingPickler._extra_reducers.get(type(obj))
    return NotImplemented if reduce is None else reduce(obj)


def is_shared_storage(torch: Any, storage: Any) -> bool:
    """Whether a storage of torch's lies in memory that a worker can map as well."""
    if not storage.is_shared():
        return False
    if storage.filename is not None or torch.multiprocessing.get_sharing_strategy() == "file_system":
        return True
    return bool(storage._share_fd_cpu_()[0] >= 0)  # a private mapping of a file has none, though torch calls it shared


def reduce_shared_storage(torch: Any, storage: Any) -> Any:
    """The reduction of such a storage while workers are started.

    Not torch's own, which is made to be read by one process: all workers read the same pickle.
    """
    if storage.filename is not None:
        return _map_file, (storage.filename, storage.nbytes())
    if torch.multiprocessing.get_sharing_strategy() == "file_system":
        return _open_named_storage, storage._share_filename_cpu_()
    fd, size = storage._share_fd_cpu_()
    context: Any = sys.modules["multiprocessing.context"]
    return _open_storage, (HandedFd(context.get_spawning_popen().duplicate_for_child(fd)), size)


def _map_file(path: str, size: int) -> Any:
    import torch  # it is one of torch's

    return torch.UntypedStorage.from_file(path, shared=True, nbytes=size)


def _open_named_storage(manager: bytes, name: bytes, size: int) -> Any:
    import torch  # it is one of torch's

    return torch.UntypedStorage._new_shared_filename_cpu(manager, name, size)


def _open_storage(handed: HandedFd, size: int) -> Any:
    import torch  # it is one of torch's

    storage: Any = torch.UntypedStorage
    fd = handed.detach()
    try:
        return storage._new_shared_fd_cpu(fd, size)
    finally:
        os.close(fd)


def take_handed(fds: Sequence[int]) -> None:
    """In a worker: these are the descriptors for what is in the dataset."""
    _handed[:] = fds
