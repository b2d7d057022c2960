"""Memory for slots, as the scheduler asks for it; workers are told of what comes and goes."""

from __future__ import annotations

import gc
from typing import Final, final

from infeed.engine.faults import memory_error
from infeed.engine.records import EngineSetup
from infeed.errors import MemoryLimitError
from infeed.memory.arena import Block
from infeed.scheduler.messages import SlotId
from infeed.scheduler.scheduler import Scheduler

# Unless the user sets prefetch, batches in flight are held to this, or to as many as keep workers busy...
_IN_FLIGHT_BYTES: Final = 256 << 20
# ...and there may be more of them than usual while they are tiny: waking a process costs as much as loading a tiny batch, and
# a deep queue is filled and emptied many at a time.
_TINY_BYTES: Final = 4 << 20
_TINY_WINDOW: Final = 256
# Where slow samples hold up the rest, there may be so many times the usual.
_WIDEST: Final = 8


@final
class SlotAllocator:
    """Belongs to one engine. What it cannot give it remembers, for when the user has to hear of it."""

    def __init__(self, setup: EngineSetup, scheduler: Scheduler) -> None:
        self._setup, self._scheduler = setup, scheduler
        self._arena, self._pool, self._delivery = setup.arena, setup.pool, setup.delivery
        self.window, self._least_window = setup.windows(len(setup.first_workers))
        self._usual_window = self.window
        self._slot_bytes = 0  # what the largest batch so far takes
        self._shortage: MemoryLimitError | None = None
        self._widening = 1

    def learn_size(self, nbytes: int) -> int | None:
        """A batch takes this much: how many may be in flight now, if that is to change."""
        if nbytes <= self._slot_bytes:
            return None
        self._slot_bytes = nbytes
        return self._changed_window()

    def learn_worker_count(self, count: int) -> int | None:
        """There are so many workers: how many batches may be in flight now, if that is to change."""
        self._usual_window, self._least_window = self._setup.windows(count)
        return self._changed_window()

    def widen(self) -> int | None:
        """Let more be in flight: how many batches, or ``None`` if there may not be more."""
        if self._setup.is_window_fixed or not self._slot_bytes or self._widening >= _WIDEST:
            return None
        self._widening *= 2
        return self._changed_window()

    def _changed_window(self) -> int | None:
        nbytes, window = self._slot_bytes, self._usual_window * self._widening
        if nbytes and not self._setup.is_window_fixed:
            window = max(window, min(_TINY_WINDOW, _TINY_BYTES // nbytes))
            window = max(self._least_window, min(window, _IN_FLIGHT_BYTES // nbytes))
        if window == self.window:
            return None
        self.window = window
        return window

    def add_slot(self) -> SlotId | None:
        """Another slot, if there is memory for it."""
        try:
            slot = self._arena.add_slot(self._slot_bytes)
        except MemoryLimitError as error:
            self._note(error)
            return None
        self._announce()
        return slot

    def block(self, slot: SlotId, nbytes: int) -> Block | None:
        """The slot's block, made large enough; ``None`` if there is no memory for it, even with that of all free slots."""
        block = self._arena.block(slot)
        if block.size >= nbytes:
            return block
        try:
            try:
                return self._arena.enlarge(slot, nbytes)
            except MemoryLimitError:
                self._arena.reclaim(self._scheduler.free_slots)
                return self._arena.enlarge(slot, nbytes)
        except MemoryLimitError as error:
            self._note(error)
            return None
        finally:
            self._announce()

    def collect(self) -> list[SlotId]:
        """Slots of batches that only the garbage collector can find: they are no longer the user's."""
        gc.collect()
        ended = self._delivery.ended_slots()
        self._delivery.settle()
        return [*ended, *self._delivery.ended_slots()]

    def _note(self, error: MemoryLimitError) -> None:
        # Without its traceback, which holds the frame of `next`, that holds the epoch; and when that is forgotten, all of this
        # is to end.
        self._shortage = MemoryLimitError(str(error))

    def error(self, held_count: int) -> MemoryLimitError:
        """What to raise when nothing can be loaded any more."""
        assert self._shortage is not None
        return memory_error(self._shortage, held_count, self._slot_bytes)

    def _announce(self) -> None:
        for number in self._arena.gone_segments:
            self._pool.remove_segment(number)
            self._delivery.forget_segment(number)
        for handle in self._arena.new_segments:
            self._pool.add_segment(handle)
        self._arena.gone_segments.clear()
        self._arena.new_segments.clear()
