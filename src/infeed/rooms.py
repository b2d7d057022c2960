"""Memory for slots, as the scheduler asks for it; workers are told of what comes and goes."""

from __future__ import annotations

from typing import final

from infeed.errors import MemoryLimitError
from infeed.memory.arena import Arena, Block
from infeed.reports import memory_error
from infeed.scheduler.machine import Scheduler
from infeed.scheduler.messages import SlotId
from infeed.workers.crew import Crew


@final
class Rooms:
    """Belongs to one engine. What it cannot give it remembers, for when the user has to hear of it."""

    def __init__(self, arena: Arena, crew: Crew, scheduler: Scheduler) -> None:
        self._arena, self._crew, self._scheduler = arena, crew, scheduler
        self._shortage: MemoryLimitError | None = None

    def add_slot(self, nbytes: int) -> SlotId | None:
        """Another slot, if there is memory for it."""
        try:
            slot = self._arena.add_slot(nbytes)
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

    def _note(self, error: MemoryLimitError) -> None:
        # Without its traceback, which holds the frame of `next`, that holds the epoch; and when that is forgotten, all of this
        # is to end.
        self._shortage = MemoryLimitError(str(error))

    def error(self, held_count: int, nbytes: int) -> MemoryLimitError:
        """What to raise when nothing can be loaded any more."""
        assert self._shortage is not None
        return memory_error(self._shortage, held_count, nbytes)

    def _announce(self) -> None:
        for number in self._arena.gone_segments:
            self._crew.remove_segment(number)
        for handle in self._arena.new_segments:
            self._crew.add_segment(handle)
        self._arena.gone_segments.clear()
        self._arena.new_segments.clear()
