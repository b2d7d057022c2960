"""Pipes between the engine and its workers: frames of bytes, and one wait for all of them.

The engine's end never blocks: what a full pipe does not take is kept and sent when there is room, so that an engine and a
worker that both have much to say cannot wait for each other. A worker's end blocks.

Two ways with this interface: plain pipes with ``poll`` (``pipes``; Linux and macOS), and the connections of ``multiprocessing``
(``connections``; Windows, and wherever ``poll`` is missing).
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

    Made without anything behind it, so that somebody owns it before there is anything to close.
    """

    @abstractmethod
    def open(self) -> tuple[int, ...]:
        """Make the channel; the descriptors (handles, on Windows) that the worker inherits."""

    @abstractmethod
    def close_inherited(self) -> None:
        """Close the worker's ends here, once it has them."""

    @abstractmethod
    def send(self, frames: Iterable[bytes]) -> None:
        """Send frames in order, or keep what does not fit now. A channel that is gone takes nothing and says nothing: its
        end is heard by ``receive``."""

    @abstractmethod
    def receive(self) -> list[bytes]:
        """Frames that have arrived; may be none.

        Raises:
            EOFError: the worker's end is closed and all its frames have been received.
        """

    @abstractmethod
    def close(self) -> None:
        """Close whatever is open of it. Idempotent."""


class WorkerEnd(ABC):
    """A worker's end: blocking."""

    @abstractmethod
    def send(self, frame: bytes) -> None: ...

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next frame.

        Raises:
            EOFError: the engine is gone, or done with this worker.
            TimeoutError: none came within the time.
        """


class Poller(ABC):
    """Waits for any of an engine's links, or for a wake-up from another thread."""

    @abstractmethod
    def add(self, link: Any) -> None: ...

    @abstractmethod
    def remove(self, link: Any) -> None: ...

    @abstractmethod
    def wait(self, timeout_s: float | None) -> list[Any]:
        """Links with something to receive; none after ``timeout_s`` or a wake-up."""

    @abstractmethod
    def wake(self) -> None:
        """End the wait, from any thread."""

    @abstractmethod
    def close(self) -> None: ...


def open_poller() -> Poller:
    if sys.platform != "win32" and can_use_poll():
        from infeed.workers.transport_pipes import PipePoller

        return PipePoller()
    from infeed.workers.transport_portable import ConnectionPoller

    return ConnectionPoller()
