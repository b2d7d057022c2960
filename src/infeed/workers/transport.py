"""Transport between the engine and its workers: byte frames over one channel per worker, and one poller for all channels.

The engine's end never blocks. It buffers data that a full pipe does not accept, so that an engine and a worker with large
messages cannot deadlock. A worker's end blocks.

Two modules implement this interface: ``transport_pipes`` (plain pipes with ``poll``; Linux and macOS) and
``transport_portable`` (``multiprocessing`` connections; Windows, and platforms without ``poll``).
"""

from __future__ import annotations

import select
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any


def can_use_poll() -> bool:
    return getattr(select, "poll", None) is not None


class Link(ABC):
    """The engine's end of one worker's channel.

    The constructor opens nothing, so that the link has an owner before there is anything to close.
    """

    @abstractmethod
    def open(self) -> tuple[int, ...]:
        """Open the channel; return the descriptors (handles on Windows) that the worker inherits."""

    @abstractmethod
    def close_inherited(self) -> None:
        """Close the worker's ends in this process, after the worker has inherited them."""

    @abstractmethod
    def send(self, frames: Iterable[bytes]) -> None:
        """Send frames in order; buffer the part that does not fit now.

        A closed channel drops frames silently; ``receive`` reports the end.
        """

    @abstractmethod
    def receive(self) -> list[bytes]:
        """Return the frames that have arrived; may be empty.

        Raises:
            EOFError: the worker's end is closed and all its frames have been received.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all open ends. Idempotent."""


class WorkerEnd(ABC):
    """The worker's end of its channel. Blocking."""

    @abstractmethod
    def send(self, frame: bytes) -> None: ...

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> bytes:
        """Return the next frame.

        Raises:
            EOFError: the engine is gone, or has closed this worker's channel.
            TimeoutError: no frame arrived within ``timeout_s``.
        """


class Poller(ABC):
    """Waits for any link of an engine, or for a wake-up from another thread."""

    @abstractmethod
    def add(self, link: Any) -> None: ...

    @abstractmethod
    def remove(self, link: Any) -> None: ...

    @abstractmethod
    def wait(self, timeout_s: float | None) -> list[Any]:
        """Return the links that are ready to receive; empty after ``timeout_s`` or a wake-up."""

    @abstractmethod
    def wake(self) -> None:
        """Interrupt ``wait``. Callable from any thread."""

    @abstractmethod
    def close(self) -> None: ...


def open_poller() -> Poller:
    if sys.platform != "win32" and can_use_poll():
        from infeed.workers.transport_pipes import PipePoller

        return PipePoller()
    from infeed.workers.transport_portable import ConnectionPoller

    return ConnectionPoller()
