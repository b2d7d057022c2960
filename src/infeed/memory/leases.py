"""Leases: keep a slot reserved while anything references its batch.

A lease is a ctypes array over the slot's bytes. NumPy arrays and torch tensors over it, and all their views, keep it alive
through the buffer protocol. When the last one is gone, the lease is freed, and a weak reference informs the arena that the
slot can be reused.
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
    # A subclass, because plain ctypes arrays do not support weak references.
    return type("Lease", (ctypes.c_char * size,), {})


@final
class _LeaseRef(weakref.ref[Lease]):
    __slots__ = ("slot",)

    slot: SlotId


@final
class LeaseBook:
    """Creates leases and collects the ended ones."""

    def __init__(self) -> None:
        # A slot has one lease at a time.
        self._refs: dict[SlotId, _LeaseRef] = {}
        self._ended: deque[weakref.ref[Lease]] = deque()

    def grant(self, memory: mmap, offset: int, size: int, slot: SlotId) -> Lease:
        """Create a lease over ``size`` bytes of a segment; ``ended`` returns the slot when nothing references the lease."""
        lease = _lease_type(size).from_buffer(memory, offset)
        # The callback runs where the last view dies: in any thread, at any line of user code, or during garbage collection.
        # It must not lock or run Python code: a KeyboardInterrupt could arrive there, and exceptions raised there are lost.
        ref = _LeaseRef(lease, self._ended.append)
        ref.slot = slot
        self._refs[slot] = ref
        return lease

    @property
    def pending(self) -> tuple[SlotId, ...]:
        """Slots whose leases ended but which ``ended`` has not returned yet."""
        return tuple(ref.slot for ref in list(self._ended) if isinstance(ref, _LeaseRef))

    def ended(self) -> list[SlotId]:
        """Return the slots whose leases ended since the last call."""
        if not self._ended:
            return []
        slots = []
        while self._ended:
            ref = self._ended.popleft()
            assert isinstance(ref, _LeaseRef)
            del self._refs[ref.slot]
            slots.append(ref.slot)
        return slots
