"""Which slots there are, and who has them."""

from __future__ import annotations

from typing import final

from infeed.scheduler.messages import SlotId
from infeed.scheduler.records import SlotState


@final
class Slots:
    """A slot is free, or filled by one batch, or leased to the user."""

    def __init__(self) -> None:
        self.states: dict[SlotId, SlotState] = {}
        self.free: list[SlotId] = []  # last in, first out: the memory that is still in the processor's cache
        self.is_growth_refused = False  # or not answered yet
        self.asks_for_growth = False

    @property
    def held_count(self) -> int:
        """Slots that the user looks into."""
        return sum(state is SlotState.LEASED for state in self.states.values())

    def release(self, slot: SlotId) -> None:
        """Let it be free: it is new, or whoever had it needs it no more."""
        self.states[slot] = SlotState.FREE
        self.free.append(slot)
        self.is_growth_refused = False

    def take(self) -> SlotId:
        slot = self.free.pop()
        self.states[slot] = SlotState.FILLING
        return slot

    def lease(self, slot: SlotId) -> None:
        self.states[slot] = SlotState.LEASED

    def ask_for_growth(self) -> None:
        if not self.is_growth_refused:
            self.asks_for_growth = True
            # Until it is answered nobody asks again.
            self.is_growth_refused = True
