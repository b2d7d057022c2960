"""Blocks for slots: they never overlap, respect the limit, and are in few segments."""

import mmap
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infeed.errors import MemoryLimitError
from infeed.memory.arena import Arena, Block
from infeed.memory.segments import PAGE_BYTES, PrivateStore, Segment, SegmentHandle, SegmentStore, round_up
from infeed.scheduler.messages import SlotId

MIB = 1 << 20


class PaperStore(SegmentStore):
    """Records its segments without allocating memory, so that terabytes are possible."""

    def __init__(self, limit_bytes: int = 1 << 60) -> None:
        self.live: dict[int, int] = {}
        self.created = 0
        self._limit = limit_bytes

    def create(self, size: int, *, cure: str = "") -> Segment:
        if size > self._limit:
            raise MemoryLimitError("the machine has no more")
        handle = SegmentHandle(self.created, round_up(max(size, 1)))
        self.created += 1
        self.live[handle.number] = handle.size
        return Segment(handle, mmap.mmap(-1, 1))

    def release(self, handle: SegmentHandle) -> None:
        del self.live[handle.number]

    def descriptor(self) -> int | None:
        return None

    def close(self) -> None:
        self.live.clear()


def assert_apart(blocks: list[Block], sizes: dict[int, int]) -> None:
    """Fails if two blocks share a byte, or if one is not in an existing segment."""
    for number, block in enumerate(blocks):
        assert 0 <= block.offset <= block.offset + block.size <= sizes[block.segment]
        assert block.offset % 64 == 0
        for other in blocks[:number]:
            if other.segment == block.segment:
                assert block.offset + block.size <= other.offset or other.offset + other.size <= block.offset


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * MIB), st.integers(0, 30)), max_size=40))
@settings(max_examples=150)
def test_blocks_never_overlap_and_accounting_is_exact(steps: list[tuple[bool, int, int]]) -> None:
    """Whatever is added, enlarged or refused: existing slots have their own bytes, within the limit."""
    store = PaperStore()
    limit = 20 * MIB
    arena = Arena(store, limit_bytes=limit)
    slots: list[SlotId] = []
    for adds, size, which in steps:
        before = {slot: arena.block(slot) for slot in slots}
        try:
            if adds or not slots:
                slots.append(arena.add_slot(size))
                assert arena.block(slots[-1]).size >= size
            else:
                assert arena.enlarge(slots[which % len(slots)], size).size >= size
        except MemoryLimitError:
            changed = [slot for slot in slots if arena.block(slot) != before[slot]]
            assert changed in ([], [slots[which % len(slots)]]), "a refusal must not touch other slots"
            assert all(arena.block(slot).size == 0 for slot in changed)
        assert_apart([block for block in map(arena.block, slots) if block.size], store.live)
        assert arena.total_bytes == sum(store.live.values()) <= limit + PAGE_BYTES


def test_a_slot_that_cannot_be_enlarged_has_no_block_until_it_can() -> None:
    """Its old block may belong to another slot by now, so the slot must not use it."""
    arena = Arena(PaperStore(), limit_bytes=8 * MIB)
    slot = arena.add_slot(3 * MIB)

    with pytest.raises(MemoryLimitError):
        arena.enlarge(slot, 100 * MIB)

    assert arena.block(slot).size == 0
    other = arena.add_slot(3 * MIB)
    assert_apart([arena.enlarge(slot, 4 * MIB), arena.block(other)], {0: 8 * MIB, 1: 8 * MIB, 2: 8 * MIB})


def test_blocks_of_unused_slots_make_room_for_a_larger_one() -> None:
    """Unused small blocks are freed, and each slot gets a new one when it is needed."""
    arena = Arena(PaperStore(), limit_bytes=8 * MIB)
    slots = [arena.add_slot(4 * MIB), arena.add_slot(4 * MIB)]
    with pytest.raises(MemoryLimitError):
        arena.add_slot(6 * MIB)

    arena.reclaim(slots)
    arena.reclaim(slots)

    assert arena.total_bytes == 0
    assert arena.block(arena.add_slot(6 * MIB)).size >= 6 * MIB
    assert [arena.block(slot).size for slot in slots] == [0, 0]


def test_a_slot_is_enlarged_up_to_the_limit() -> None:
    """Slots are enlarged by slightly more than requested, or exactly as requested near the limit."""
    arena = Arena(PaperStore(), limit_bytes=10 * MIB)
    slot = arena.add_slot(64)

    assert arena.enlarge(slot, 10 * MIB).size >= 10 * MIB


def test_enlarging_to_the_current_size_changes_nothing() -> None:
    """No block moves without need."""
    arena = Arena(PaperStore(), limit_bytes=100 * MIB)
    slot = arena.add_slot(1000)
    block = arena.block(slot)

    assert arena.enlarge(slot, block.size) == block


def test_exceeding_the_limit_is_an_error_with_numbers_and_a_fix() -> None:
    """The limit, the current size, the request, and the fix."""
    arena = Arena(PaperStore(), limit_bytes=10 * MIB)
    arena.add_slot(8 * MIB)
    text = (
        "memory_limit=10.0 MiB reached: 8.0 MiB is in use, and the next batch needs 3.0 MiB; raise memory_limit, lower "
        "batch_size or prefetch, or release batches that you keep (copy the parts that you need)"
    )

    with pytest.raises(MemoryLimitError, match=re.escape(text)):
        arena.add_slot(3 * MIB)


def test_a_slot_below_the_limit_is_allocated_however_little_is_left() -> None:
    """Segments are smaller than usual if necessary."""
    arena = Arena(PaperStore(), limit_bytes=3 * MIB)
    for _ in range(3):
        arena.add_slot(MIB)

    assert arena.total_bytes == 3 * MIB


def test_a_machine_without_memory_for_a_whole_segment_allocates_one_slot() -> None:
    """Growing ahead must not cause a failure."""
    arena = Arena(PaperStore(limit_bytes=MIB), limit_bytes=100 * MIB)

    assert arena.block(arena.add_slot(MIB)).size == MIB
    with pytest.raises(MemoryLimitError, match="the machine has no more"):
        arena.add_slot(2 * MIB)


@pytest.mark.parametrize("size", [1, 64, 10_000, MIB], ids=["a byte", "a line", "small", "large"])
def test_many_kept_batches_take_few_segments(size: int) -> None:
    """10**5 kept batches take some dozens of mappings, because the arena grows by a fraction of its size."""
    store = PaperStore()
    arena = Arena(store, limit_bytes=1 << 60)
    for _ in range(100_000):
        arena.add_slot(size)

    assert store.created < 100
    assert arena.total_bytes <= 1.2 * 100_000 * round_up(size, 64) + 8 * MIB


def test_a_segment_without_used_blocks_is_released() -> None:
    """Batches that grew leave nothing behind, and workers unmap the segment."""
    store = PaperStore()
    arena = Arena(store, limit_bytes=100 * MIB)
    slot = arena.add_slot(1000)
    old = arena.block(slot).segment

    arena.enlarge(slot, 20 * MIB)

    gone, new = arena.take_changes()
    assert gone == [old]
    assert [handle.number for handle in new] == [old, arena.block(slot).segment]
    assert arena.take_changes() == ([], [])
    assert [*store.live] == [arena.block(slot).segment]


def test_a_freed_block_is_reused() -> None:
    """By another slot of about the same size."""
    arena = Arena(PaperStore(), limit_bytes=100 * MIB)
    grown, _kept = arena.add_slot(1000), arena.add_slot(1000)
    left = arena.block(grown)
    arena.enlarge(grown, 20 * MIB)

    assert left in [arena.block(arena.add_slot(1000)) for _ in range(4200)]


def test_a_small_slot_does_not_use_a_large_block() -> None:
    """Otherwise a tiny kept batch would hold the memory of a large one."""
    arena = Arena(PaperStore(), limit_bytes=1 << 40)
    large = arena.add_slot(MIB)
    small = arena.add_slot(100)

    assert arena.block(small).segment != arena.block(large).segment


def test_two_leases_do_not_share_memory() -> None:
    """Writes to one are not visible in the other, and the arena's own view is the same memory."""
    arena = Arena(PrivateStore(), limit_bytes=10 * MIB)
    one, other = arena.add_slot(100), arena.add_slot(100)
    first = np.frombuffer(arena.lease(one), dtype=np.uint8)
    second = np.frombuffer(arena.lease(other), dtype=np.uint8)
    first[:] = 1
    second[:] = 2
    segment, offset, size = arena.block(one)

    assert set(arena.memory(segment)[offset : offset + size]) == {1}
    assert set(second) == {2}


def test_a_lease_outlives_the_arena() -> None:
    """Kept batches stay valid after close, and ending their leases is harmless."""
    arena = Arena(PrivateStore(), limit_bytes=10 * MIB)
    slot = arena.add_slot(100)
    kept = np.frombuffer(arena.lease(slot), dtype=np.uint8)
    kept[:] = 5

    arena.close()

    assert set(kept) == {5}
    del kept
    assert arena.ended_leases() == [slot]


def test_used_blocks_are_those_of_slots_in_use() -> None:
    arena = Arena(PaperStore(), limit_bytes=1 << 40)
    slots = [arena.add_slot(size) for size in (100, 5000, 5000, 9 * MIB)]
    assert arena.used_bytes([]) == sum(arena.block(slot).size for slot in slots)
    arena.enlarge(slots[0], 40_000)
    arena.reclaim(slots[1:2])
    in_use = [arena.block(slot).size for slot in (slots[0], slots[3])]
    assert arena.used_bytes(slots[1:3]) == sum(in_use)
    arena.close()
    assert arena.used_bytes(slots[1:3]) == 0
