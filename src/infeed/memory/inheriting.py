"""Locks, values and queues of ``multiprocessing`` in a dataset: they travel only while a process is being started.

``multiprocessing`` refuses to pickle them at any other time, because what is behind them (a named semaphore, a descriptor)
has to be handed to the process as well. Workers are processes being started, so while the dataset is pickled this module
stands where ``multiprocessing`` expects whoever starts one: it collects descriptors, and workers are handed them at birth.

What was made in a fork context has no name that another process could open, and is refused. So is everything on Windows.
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
        self.fds.append(fd)
        return len(self.fds) - 1


@contextmanager
def starting() -> Iterator[list[int]]:
    """Let objects of ``multiprocessing`` be pickled inside; yields the descriptors that a worker must be handed for them."""
    context: Any = sys.modules.get("multiprocessing.context")
    if context is None or sys.platform == "win32":
        yield []
        return
    start = _Starting()
    before = context.get_spawning_popen()
    context.set_spawning_popen(start)
    try:
        yield start.fds
    finally:
        context.set_spawning_popen(before)


def reduce_shared(obj: Any) -> Any:
    """As ``multiprocessing`` reduces connections, shared memory and numbers in it for a process, or ``NotImplemented``."""
    # Not what others have registered with it: torch's tensors would be moved into shared memory of torch's.
    is_number = any(base.__module__ == "_ctypes" for base in type(obj).__mro__)
    if not is_number and not type(obj).__module__.startswith("multiprocessing"):
        return NotImplemented
    reduction: Any = sys.modules.get("multiprocessing.reduction")
    context: Any = sys.modules.get("multiprocessing.context")
    if reduction is None or not isinstance(context.get_spawning_popen(), _Starting):
        return NotImplemented
    reduce = reduction.ForkingPickler._extra_reducers.get(type(obj))
    return NotImplemented if reduce is None else reduce(obj)


def take_handed(fds: Sequence[int]) -> None:
    """In a worker: these are the descriptors for what is in the dataset."""
    _handed[:] = fds
