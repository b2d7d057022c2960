"""Batches in page-locked memory, without a copy: segments of the arena are registered with the accelerator, once each.

Registering takes half a second for a gigabyte, so it is done by a thread, and only for segments that batches come from. Until
it is done, batches are pinned by torch itself, with a copy.

NOTE [asynchronous reads]
  A copy to the device that was begun with ``non_blocking=True`` goes on when the host's tensor is gone already. torch's own
  pinned memory knows the streams that read it; memory that was merely registered does not. So a slot whose batch the user has
  let go of is not free yet: it is when all is done that the user's stream had been given by then. Whoever copies on a stream of
  their own makes the stream that uses the result wait for it, and so it is waited for here as well.
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

from infeed.delivery.backend import Backend, BackendError, Mark
from infeed.scheduler.messages import SlotId

_LOG: Final = logging.getLogger("infeed")
# Times that the user let go of batches which the device has not come to yet. A loop that is further ahead of the device gains
# nothing, and would fill all memory.
_MOST_WAITING: Final = 4


@final
class Pinner:
    """Registers segments of one arena; owned by its delivery."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()  # guards all that follows
        self._addresses: dict[int, int] = {}  # of segments that are registered, or about to be
        self._memories: dict[int, mmap] = {}  # held, so that nothing else can be mapped there before it is unregistered
        self._registered: set[int] = set()
        self._is_refused = False
        self._work: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def use(self, segment: int, memory: mmap) -> None:
        """A batch comes from this segment: have it registered, if it is not."""
        if segment in self._addresses or self._is_refused:
            return
        with self._lock:
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            self._addresses[segment], self._memories[segment] = address, memory
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="infeed:pinning", daemon=True)
                self._thread.start()
        self._work.put((segment, address, len(memory)))

    def is_registered(self, segment: int) -> bool:
        return segment in self._registered

    def forget(self, segment: int) -> None:
        """The segment goes: nobody looks into it any more."""
        with self._lock:
            self._unregister(segment)

    def close(self) -> None:
        """Unregister everything, when what is being registered is."""
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
                    _LOG.warning("batches are copied into pinned memory, because their own cannot be pinned: %s", error)


@final
class PendingReads:
    """Slots that the user has let go of, and that the accelerator may still be reading. See NOTE [asynchronous reads]."""

    def __init__(self, backend: Backend, ended: Callable[[], list[SlotId]]) -> None:
        self._backend = backend
        self._ended = ended
        self._waiting: deque[tuple[Mark, list[SlotId]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def free(self) -> list[SlotId]:
        """Slots that nobody reads any more, of those that were let go of."""
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
        """Until all that has been let go of by now is free."""
        for mark, _ in self._waiting:
            mark.wait()
