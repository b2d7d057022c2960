"""Device prefetch: start copying batches to the device before the training loop requests them."""

from __future__ import annotations

from collections import deque
from typing import Any, final

from infeed.delivery.backend import Mark, Sent, Stage


@final
class DevicePrefetch:
    """A queue of batches in transfer to the device. The note of each is the loader's progress after its delivery."""

    def __init__(self, stage: Stage, depth: int) -> None:
        self._stage = stage
        self._depth = depth
        self._queue: deque[tuple[Sent | BaseException, Any]] = deque()
        self._copying: deque[tuple[Mark, Any]] = deque()  # host batches, held until their copy is done

    @property
    def is_full(self) -> bool:
        return len(self._queue) > self._depth

    @property
    def is_empty(self) -> bool:
        return not self._queue

    def push(self, batch: Any, note: Any) -> None:
        self._release()
        while len(self._copying) > self._depth:
            # A training loop that does not wait for the device would fill all memory with pending copies. Fewer slots also stay
            # in the CPU cache: with 15 slots instead of 52, an H200 received 45 GB/s instead of 20.
            self._copying.popleft()[0].wait()
        sent = self._stage.send(batch)
        self._queue.append((sent, note))
        self._copying.append((sent.copied, batch))

    def push_error(self, error: BaseException, note: Any) -> None:
        """Queue an error that is returned in place of a batch."""
        self._queue.append((error, note))

    def pop(self) -> tuple[Any, Any]:
        """Return the next batch on the device, or the error in its place, and its note."""
        self._release()
        sent, note = self._queue.popleft()
        return (sent if isinstance(sent, BaseException) else sent.adopt()), note

    def close(self) -> None:
        """Drop all queued batches, and wait until the device no longer reads host memory."""
        self._queue.clear()
        while self._copying:
            self._copying.popleft()[0].wait()

    def _release(self) -> None:
        while self._copying and self._copying[0][0].is_done():
            self._copying.popleft()
