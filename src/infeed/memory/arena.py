"""The shared memory in which batches are assembled: segments, cut into blocks, lent to slots.

A slot is a number that the scheduler deals in. Its block (where it lies, how large it is) may change while it is free: when
batches grow, a slot gets a larger block before it is filled again. Blocks that nobody uses go back to their segment, and a
segment without used blocks goes back to the system.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from mmap import mmap
from typing import Final, NamedTuple, final

from infeed.errors import MemoryLimitError
from infeed.formatting import format_bytes
from infeed.memory.leases import Lease, LeaseBook
from infeed.memory.segments import Segment, SegmentHandle, SegmentStore, round_up
from infeed.scheduler.messages import SlotId

# A segment holds at least this much, so that tiny batches do not cost a mapping each...
_SEGMENT_BYTES: Final = 4 << 20
# ...and this share of what the arena has already, so that hoarding 10**5 batches takes some dozens of mappings.
_GROWTH: Final = 8
# Blocks begin on cache lines, so that two workers never write into the same one.
_ALIGN: Final = 64


class Block(NamedTuple):
    """Where a slot's bytes are."""

    segment: int
    offset: int
    size: int


_NO_BLOCK: Final = Block(-1, 0, 0)


@dataclass(slots=True)
class _Extent:
    """A segment with its free blocks, all of one size."""

    segment: Segment
    block_size: int
    used: int = 0
    free: list[int] = field(default_factory=list)


@final
class Arena:
    """Blocks for slots, within a limit in bytes. Owned by one engine."""

    def __init__(self, store: SegmentStore, *, limit_bytes: int) -> None:
        self._store = store
        self._limit = limit_bytes
        self._extents: dict[int, _Extent] = {}
        self._blocks: dict[SlotId, Block] = {}
        self._book = LeaseBook()
        self.ended_leases = self._book.ended
        self._next_slot = 0
        self.total_bytes = 0
        # Segments that workers have not been told of yet, and those they must forget.
        self.new_segments: list[SegmentHandle] = []
        self.gone_segments: list[int] = []

    def add_slot(self, size: int) -> SlotId:
        """A new slot with a block of at least ``size`` bytes.

        Raises:
            MemoryLimitError: it would pass the limit, or the machine has no more.
        """
        block = self._allocate(size)
        slot = SlotId(self._next_slot)
        self._next_slot += 1
        self._blocks[slot] = block
        return slot

    def block(self, slot: SlotId) -> Block:
        return self._blocks[slot]

    def used_bytes(self, free: Iterable[SlotId]) -> int:
        """What slots take that are being filled, are filled, or are looked into; ``free`` are those that nobody uses."""
        blocks = self._blocks
        unused = sum(blocks[slot].size for slot in {*free, *self._book.pending})
        # Of segments, which are few, and not of all slots; there are none any more once it is closed.
        return max(0, sum(extent.used * extent.block_size for extent in list(self._extents.values())) - unused)

    def enlarge(self, slot: SlotId, size: int) -> Block:
        """Give a slot that nobody looks into a block of at least ``size`` bytes; its contents are lost.

        Raises:
            MemoryLimitError: as ``add_slot``; the slot has no block then.
        """
        block = self._blocks[slot]
        if block.size >= size:
            return block
        self._give_up(slot)
        try:
            # A little more than asked: where batches vary in size, one that is slightly larger than the last should fit.
            self._blocks[slot] = self._allocate(size + size // 8)
        except MemoryLimitError:
            self._blocks[slot] = self._allocate(size)
        return self._blocks[slot]

    def reclaim(self, slots: Iterable[SlotId]) -> None:
        """Take the blocks of slots that nobody uses: memory for a slot that needs a larger one than there is."""
        for slot in slots:
            self._give_up(slot)

    def _give_up(self, slot: SlotId) -> None:
        block = self._blocks[slot]
        if block is not _NO_BLOCK:
            self._blocks[slot] = _NO_BLOCK
            self._free(block)

    def memory(self, segment: int) -> mmap:
        return self._extents[segment].segment.memory

    def lease(self, slot: SlotId) -> Lease:
        """Lend the slot to the user, until the last view is gone."""
        segment, offset, size = self._blocks[slot]
        return self._book.grant(self._extents[segment].segment.memory, offset, size, slot)

    def segment_handles(self) -> list[SegmentHandle]:
        """All segments there are, for a worker that starts now."""
        return [extent.segment.handle for extent in self._extents.values()]

    def close(self) -> None:
        """Let go of all memory. What the user still looks into stays as it is, and mapped, until they let go as well."""
        # Nothing is released to the store: it would take the bytes from under batches that are kept.
        self._extents.clear()

    def _allocate(self, size: int) -> Block:
        size = round_up(max(size, 1), _ALIGN)
        for number, extent in self._extents.items():
            # Not one that is far too large: a small batch would sit in the room of a big one for as long as it is kept.
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
                f"memory_limit={format_bytes(self._limit)} is reached: {format_bytes(self.total_bytes)} are in use and "
                f"one more batch takes {format_bytes(size)}; raise memory_limit, lower batch_size or prefetch, or let go "
                "of batches that you keep (copy what you need of them)"
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
        # Ascending, popped from the end: the first blocks are lent last and stay untouched in a quiet loop.
        extent.free = [index * size for index in range(1, count)]
        self._extents[segment.handle.number] = extent
        self.new_segments.append(segment.handle)
        return Block(segment.handle.number, 0, size)

    def _free(self, block: Block) -> None:
        extent = self._extents[block.segment]
        extent.used -= 1
        extent.free.append(block.offset)
        if extent.used == 0:
            del self._extents[block.segment]
            self._store.release(extent.segment.handle)
            self.total_bytes -= extent.segment.handle.size
            self.gone_segments.append(block.segment)
