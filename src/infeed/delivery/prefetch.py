"""Batches that are on their way to the device before the user's loop asks for them."""

from __future__ import annotations

from collections import deque
from typing import Any, final

from infeed.delivery.backend import Mark, Sent, Stage


@final
class DevicePrefetch:
    """A queue of batches that are being copied, each with what the loop will have had when it has it."""

    def __init__(self, stage: Stage, depth: int) -> None:
        self._stage = stage
        self._depth = depth
        self._queue: deque[tuple[Sent | BaseException, Any]] = deque()
        self._copying: deque[tuple[Mark, Any]] = deque()  # batches on the host, held until nothing reads them

    @property
    def is_full(self) -> bool:
        return len(self._queue) > self._depth

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def push(self, batch: Any, note: Any) -> None:
        self._release()
        while len(self._copying) > self._depth:
            # A loop that asks without waiting for the device would fill all memory with batches on their way; and what is used
            # again soon is still in the processor's cache: with 15 slots instead of 52 an H200 took 45 GB/s instead of 20.
            self._copying.popleft()[0].wait()
        sent = self._stage.send(batch)
        self._queue.append((sent, note))
        self._copying.append((sent.copied, batch))

    def push_error(self, error: BaseException, note: Any) -> None:
        """What is raised in place of a batch, in its turn."""
        self._queue.append((error, note))

    def pop(self) -> tuple[Any, Any]:
        """The next batch, on the device, or the error in its place; and its note."""
        self._release()
        sent, note = self._queue.popleft()
        return (sent if isinstance(sent, BaseException) else sent.adopt()), note

    def close(self) -> None:
        """Forget what nobody will ask for, when nothing reads the host's memory any more."""
        self._queue.clear()
        while self._copying:
            self._copying.popleft()[0].wait()

    def _release(self) -> None:
        while self._copying and self._copying[0][0].is_done():
            self._copying.popleft()
