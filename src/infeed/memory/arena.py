"""The shared memory in which batches are assembled: segments divided into blocks, one block per slot.

A slot is a number that the scheduler assigns. The block of a free slot may change: when batches grow, the arena allocates a
larger block before the slot is filled again. Unused blocks return to their segment; the arena releases a segment that has no
used blocks.

User code holds a batch's slot by its lease: a ctypes array over the slot's bytes. NumPy arrays and torch tensors over it, and
all their views, keep it alive through the buffer protocol. When the last one is gone, the lease is freed, and a weak reference
informs the arena that the slot can be reused.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from mmap import mmap
from typing import Final, NamedTuple, TypeAlias, final

from infeed.errors import MemoryLimitError
from infeed.formatting import format_bytes
from infeed.memory.segments import Segment, SegmentHandle, SegmentStore, round_up
from infeed.scheduler.messages import SlotId

# Minimum segment size, so that small batches do not need one mapping each.
_SEGMENT_BYTES: Final = 4 << 20
# A new segment is also at least 1/8 of the arena, so that holding 10**5 batches takes only dozens of mappings.
_GROWTH: Final = 8
# Blocks are aligned to cache lines, so that two workers never write to the same line.
_ALIGN: Final = 64


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


class Block(NamedTuple):
    """Location of a slot's bytes."""

    segment: int
    offset: int
    size: int


_NO_BLOCK: Final = Block(-1, 0, 0)


@dataclass(slots=True)
class _Extent:
    """A segment and its free blocks, all of the same size."""

    segment: Segment
    block_size: int
    used: int = 0
    free: list[int] = field(default_factory=list)


@final
class Arena:
    """Allocates blocks for slots within a limit in bytes. Owned by one engine."""

    def __init__(self, store: SegmentStore, *, limit_bytes: int) -> None:
        self._store = store
        self._limit = limit_bytes
        self._extents: dict[int, _Extent] = {}
        self._blocks: dict[SlotId, Block] = {}
        self._book = LeaseBook()
        self.ended_leases = self._book.ended
        self._next_slot = 0
        self.total_bytes = 0
        # Since the last `take_changes`.
        self._gone_segments: list[int] = []
        self._new_segments: list[SegmentHandle] = []

    def add_slot(self, size: int) -> SlotId:
        """Create a slot with a block of at least ``size`` bytes.

        Raises:
            MemoryLimitError: The block would exceed the limit, or the machine is out of memory.
        """
        block = self._allocate(size)
        slot = SlotId(self._next_slot)
        self._next_slot += 1
        self._blocks[slot] = block
        return slot

    def block(self, slot: SlotId) -> Block:
        return self._blocks[slot]

    def used_bytes(self, free: Iterable[SlotId]) -> int:
        """Return the bytes of all slots that are being filled, are filled or are referenced; ``free`` lists unused slots."""
        blocks = self._blocks
        unused = sum(blocks[slot].size for slot in {*free, *self._book.pending})
        # Sum over segments, which are far fewer than slots. After close() there are none, hence the max().
        return max(0, sum(extent.used * extent.block_size for extent in list(self._extents.values())) - unused)

    def enlarge(self, slot: SlotId, size: int) -> Block:
        """Assign a block of at least ``size`` bytes to an unreferenced slot; its contents are lost.

        Raises:
            MemoryLimitError: As in ``add_slot``; the slot then has no block.
        """
        block = self._blocks[slot]
        if block.size >= size:
            return block
        self._give_up(slot)
        try:
            # Allocate 1/8 more than requested: if batch sizes vary, a slightly larger batch then still fits.
            self._blocks[slot] = self._allocate(size + size // 8)
        except MemoryLimitError:
            self._blocks[slot] = self._allocate(size)
        return self._blocks[slot]

    def reclaim(self, slots: Iterable[SlotId]) -> None:
        """Free the blocks of unused slots, to make memory available for a slot that needs a larger block."""
        for slot in slots:
            self._give_up(slot)

    def _give_up(self, slot: SlotId) -> None:
        block = self._blocks[slot]
        if block is not _NO_BLOCK:
            self._blocks[slot] = _NO_BLOCK
            self._free(block)

    def take_changes(self) -> tuple[list[int], list[SegmentHandle]]:
        """Return the segments that workers must unmap, and those that they must map, since the last call."""
        changes = self._gone_segments, self._new_segments
        self._gone_segments, self._new_segments = [], []
        return changes

    def memory(self, segment: int) -> mmap:
        return self._extents[segment].segment.memory

    def lease(self, slot: SlotId) -> Lease:
        """Lease the slot to user code until the last view of it is gone."""
        segment, offset, size = self._blocks[slot]
        return self._book.grant(self._extents[segment].segment.memory, offset, size, slot)

    def close(self) -> None:
        """Release all memory. Batches that user code still references stay valid and mapped until it releases them."""
        # Do not release segments to the store: that would free the memory of batches that user code still holds.
        self._extents.clear()

    def _allocate(self, size: int) -> Block:
        size = round_up(max(size, 1), _ALIGN)
        for number, extent in self._extents.items():
            # Skip blocks that are far too large: a small batch would occupy a large block for as long as it is held.
            if extent.free and size <= extent.block_size <= 2 * size:
                extent.used += 1
                return Block(number, extent.free.pop(), extent.block_size)
        return self._allocate_in_new_segment(size)

    def _allocate_in_new_segment(self, size: int) -> Block:
        room = self._limit - self.total_bytes
        wanted = max(_SEGMENT_BYTES, self.total_bytes // _GROWTH)
        count = max(1, min(wanted, room) // size)
        if size > room:
            raise MemoryLimitError(
                f"memory_limit={format_bytes(self._limit)} reached: {format_bytes(self.total_bytes)} is in use, and the next "
                f"batch needs {format_bytes(size)}; raise memory_limit, lower batch_size or prefetch, or release batches that "
                "you keep (copy the parts that you need)"
            )
        try:
            segment = self._store.create(count * size)
        except MemoryLimitError:
            if count == 1:
                raise
            segment = self._store.create(size)
            count = 1
        self.total_bytes += segment.handle.size
        extent = _Extent(segment, size, used=1)
        # Ascending, popped from the end: the first blocks are used last and stay untouched while few slots are in use.
        extent.free = [index * size for index in range(1, count)]
        self._extents[segment.handle.number] = extent
        self._new_segments.append(segment.handle)
        return Block(segment.handle.number, 0, size)

    def _free(self, block: Block) -> None:
        extent = self._extents[block.segment]
        extent.used -= 1
        extent.free.append(block.offset)
        if extent.used == 0:
            del self._extents[block.segment]
            self._store.release(extent.segment.handle)
            self.total_bytes -= extent.segment.handle.size
            self._gone_segments.append(block.segment)
