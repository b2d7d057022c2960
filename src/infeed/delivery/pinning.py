"""Batches in page-locked (pinned) memory without a copy: each segment of the arena is registered with the accelerator once.

Registering takes 0.5 s per GB, so a thread does it, and only for segments that batches come from. Until a segment is
registered, torch pins its batches with a copy.

NOTE [asynchronous reads]
  A copy to the device with ``non_blocking=True`` may continue after the host tensor is freed. torch's own pinned memory tracks
  the streams that read it; registered memory does not. So a released slot is not free yet: it becomes free when all work that
  the user's stream had queued at the release is done. If user code copies on another stream, the stream that uses the result
  waits for that copy, and so this wait covers it too.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from mmap import mmap
from typing import Final, final

from infeed.delivery.backend import Backend, BackendError, DeviceEvent
from infeed.scheduler.messages import SlotId

_LOG: Final = logging.getLogger("infeed")
# Maximum number of releases that the device has not reached yet. A training loop further ahead of the device gains nothing and
# would fill all memory.
_MOST_WAITING: Final = 4


@final
class Pinner:
    """Registers the segments of one arena in a thread. Its ``HostDelivery`` owns it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()  # guards all fields below
        self._addresses: dict[int, int] = {}  # of segments that are registered or queued
        self._memories: dict[int, mmap] = {}  # referenced, so that the address is not reused before it is unregistered
        self._registered: set[int] = set()
        self._is_refused = False
        self._work: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def use(self, segment: int, memory: mmap) -> None:
        """Queue a segment for registration if it is not registered. Called for each batch."""
        if segment in self._addresses or self._is_refused:
            return
        with self._lock:
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            self._addresses[segment], self._memories[segment] = address, memory
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="infeed:pinning", daemon=True)
                self._thread.start()
        self._work.put((segment, address, len(memory)))

    def forget(self, segment: int) -> None:
        """Unregister a segment that is about to be freed and that no batch references any more."""
        with self._lock:
            self._unregister(segment)

    def close(self) -> None:
        """Wait for pending registrations, then unregister everything."""
        self._work.put(None)
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for segment in list(self._addresses):
                self._unregister(segment)

    def _unregister(self, segment: int) -> None:
        address = self._addresses.pop(segment, None)
        if address is not None and segment in self._registered:
            self._registered.discard(segment)
            self._backend.unregister(address)
        self._memories.pop(segment, None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            segment, address, nbytes = work
            with self._lock:
                if self._is_refused or self._addresses.get(segment) != address:
                    continue
                try:
                    self._backend.register(address, nbytes)
                    self._registered.add(segment)
                except BackendError as error:
                    self._is_refused = True
                    _LOG.warning("cannot page-lock the memory of batches, so they are copied into pinned memory: %s", error)


@final
class PendingReads:
    """Slots that user code has released but the accelerator may still read. See NOTE [asynchronous reads]."""

    def __init__(self, backend: Backend, ended: Callable[[], list[SlotId]]) -> None:
        self._backend = backend
        self._ended = ended
        self._waiting: deque[tuple[DeviceEvent, list[SlotId]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def free(self) -> list[SlotId]:
        """Return the released slots that the accelerator no longer reads."""
        ended = self._ended()
        if ended:
            self._waiting.append((self._backend.mark(), ended))
        slots: list[SlotId] = []
        while self._waiting and (len(self._waiting) > _MOST_WAITING or self._waiting[0][0].is_done()):
            mark, done = self._waiting.popleft()
            mark.wait()
            slots += done
        return slots

    def wait(self) -> None:
        """Wait until the accelerator no longer reads any slot released so far."""
        for mark, _ in self._waiting:
            mark.wait()
