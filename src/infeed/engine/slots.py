"""Slot allocation: memory for batches in flight, requested by the scheduler and announced to workers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Final, final

from infeed.delivery.host import HostDelivery
from infeed.errors import MemoryLimitError
from infeed.formatting import format_bytes, format_count
from infeed.memory.arena import Arena, Block
from infeed.scheduler.messages import SlotId
from infeed.workers.pool import WorkerPool

# Unless the user sets prefetch, this limits the batches in flight, but not below the minimum that keeps workers busy.
_IN_FLIGHT_BYTES: Final = 256 << 20
# Tiny batches get a larger window: waking a process costs as much as loading a tiny batch, and a deep queue is filled and
# emptied in bulk.
_TINY_BYTES: Final = 4 << 20
_TINY_WINDOW: Final = 256
# Maximum growth of the usual window when slow samples stall the others.
_WIDEST: Final = 8


@final
class SlotAllocator:
    """Allocates the slots of one engine, and keeps the latest memory shortage for the error message."""

    def __init__(
        self,
        arena: Arena,
        pool: WorkerPool,
        delivery: HostDelivery,
        windows: Callable[[int], tuple[int, int]],
        worker_count: int,
        *,
        is_window_fixed: bool,
    ) -> None:
        """Create an allocator for ``worker_count`` workers.

        Args:
            windows: Returns, for a worker count, the usual number of batches in flight and the minimum that keeps every worker
                busy.
            is_window_fixed: The prefetch options set the window, or loading is in the main process.
        """
        self._arena, self._pool, self._delivery = arena, pool, delivery
        self._windows, self._is_window_fixed = windows, is_window_fixed
        self.window, self._least_window = windows(worker_count)
        self._usual_window = self.window
        self._slot_bytes = 0  # size of the largest batch so far
        self._shortage: MemoryLimitError | None = None
        self._widening = 1

    def learn_size(self, nbytes: int) -> int | None:
        """Adapt the window to a batch of ``nbytes``; return the new window if it changes."""
        if nbytes <= self._slot_bytes:
            return None
        self._slot_bytes = nbytes
        return self._changed_window()

    def learn_worker_count(self, count: int) -> int | None:
        """Adapt the window to the number of workers; return the new window if it changes."""
        self._usual_window, self._least_window = self._windows(count)
        return self._changed_window()

    def widen(self) -> int | None:
        """Double the window, up to its limits; return the new window, or ``None`` if it cannot grow."""
        if self._is_window_fixed or not self._slot_bytes or self._widening >= _WIDEST:
            return None
        self._widening *= 2
        return self._changed_window()

    def _changed_window(self) -> int | None:
        nbytes, window = self._slot_bytes, self._usual_window * self._widening
        if nbytes and not self._is_window_fixed:
            window = max(window, min(_TINY_WINDOW, _TINY_BYTES // nbytes))
            window = max(self._least_window, min(window, _IN_FLIGHT_BYTES // nbytes))
        if window == self.window:
            return None
        self.window = window
        return window

    def add_slot(self) -> SlotId | None:
        """Add a slot, if there is memory for it."""
        try:
            slot = self._arena.add_slot(self._slot_bytes)
        except MemoryLimitError as error:
            self._note(error)
            return None
        self._announce()
        return slot

    def enlarge(self, slot: SlotId, nbytes: int, free_slots: Iterable[SlotId]) -> Block | None:
        """Return a block of at least ``nbytes`` for the slot; ``None`` if memory is short even without ``free_slots``."""
        try:
            try:
                return self._arena.enlarge(slot, nbytes)
            except MemoryLimitError:
                self._arena.reclaim(free_slots)
                return self._arena.enlarge(slot, nbytes)
        except MemoryLimitError as error:
            self._note(error)
            return None
        finally:
            self._announce()

    def collect(self) -> list[SlotId]:
        """Run the garbage collector and return the slots of the batches that it freed."""
        gc.collect()
        ended = self._delivery.ended_slots()
        self._delivery.settle()
        return [*ended, *self._delivery.ended_slots()]

    def _note(self, error: MemoryLimitError) -> None:
        # Without the traceback: it references the frame of `next` and so the iteration, which must end when it is dropped.
        self._shortage = MemoryLimitError(str(error))

    def error(self, held_count: int) -> MemoryLimitError:
        """Return the error to raise when no batch can be loaded for lack of memory."""
        assert self._shortage is not None
        text = str(self._shortage)
        if held_count:
            held = format_count(held_count, "batch", "batches")
            text += f"\n  your code holds {held} (about {format_bytes(self._slot_bytes)} each)"
        return MemoryLimitError(text)  # a new one: a raised exception references frames

    def _announce(self) -> None:
        gone, new = self._arena.take_changes()
        for number in gone:
            self._pool.remove_segment(number)
            self._delivery.forget_segment(number)
        for handle in new:
            self._pool.add_segment(handle)
