"""A batch's hold on its slot, in plain Python.

A lease is a ctypes array over the slot's bytes. NumPy arrays and torch tensors made over it keep it alive through the buffer
protocol, and so do all views of them. When the last one is gone the lease is, and a weak reference tells the arena that the
slot may be used again.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from functools import lru_cache
from mmap import mmap
from typing import TypeAlias, final

from infeed.scheduler.messages import SlotId

Lease: TypeAlias = ctypes.Array[ctypes.c_char]


@lru_cache(maxsize=64)
def _lease_type(size: int) -> type[Lease]:
    # A subclass, because plain ctypes arrays cannot be weakly referenced.
    return type("Lease", (ctypes.c_char * size,), {})


@final
class _LeaseRef(weakref.ref[Lease]):
    __slots__ = ("slot",)

    slot: SlotId


@final
class LeaseBook:
    """Hands out leases and collects those that ended."""

    def __init__(self) -> None:
        # By slot: a slot has one lease at a time.
        self._refs: dict[SlotId, _LeaseRef] = {}
        self._ended: deque[weakref.ref[Lease]] = deque()

    def grant(self, memory: mmap, offset: int, size: int, slot: SlotId) -> Lease:
        """A lease over ``size`` bytes of a segment; ``ended`` names the slot once nothing looks into it any more."""
        lease = _lease_type(size).from_buffer(memory, offset)
        # Called wherever the last view dies: any thread, any line of the user's, perhaps in the middle of garbage collection.
        # So no lock, no decision, and no line of Python: Ctrl+C could come there, and what is raised there is lost.
        ref = _LeaseRef(lease, self._ended.append)
        ref.slot = slot
        self._refs[slot] = ref
        return lease

    @property
    def pending(self) -> tuple[SlotId, ...]:
        """Slots whose leases ended, and that nobody has asked for yet."""
        return tuple(ref.slot for ref in list(self._ended) if isinstance(ref, _LeaseRef))

    def ended(self) -> list[SlotId]:
        """Slots whose leases ended since the last call."""
        if not self._ended:
            return []
        slots = []
        while self._ended:
            ref = self._ended.popleft()
            assert isinstance(ref, _LeaseRef)
            del self._refs[ref.slot]
            slots.append(ref.slot)
        return slots
