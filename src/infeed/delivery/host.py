"""The last step on the host: turns a filled slot into the delivered batch, without copying the slot's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

from infeed.collate.layout import Layout
from infeed.collate.packing import Handed, Packed, unpack
from infeed.collate.rows import RowReader
from infeed.delivery.backend import Backend
from infeed.delivery.pinning import PendingReads, Pinner
from infeed.memory.arena import Arena, Lease
from infeed.scheduler.messages import SlotId

# Readers are cached by layout and row count.
_READERS_KEPT: Final = 128


@final
class HostDelivery:
    """Makes batches of arrays and tensors that are views of the arena."""

    def __init__(self, arena: Arena, backend: Backend | None = None, *, is_staged: bool = False) -> None:
        """
        Args:
            backend: If set, batches are in page-locked memory as soon as their segment is registered.
            is_staged: A ``Stage`` copies the batches to the device and holds each until it is copied. User code never gets
                them, so nothing else can read a released slot.
        """
        self._arena = arena
        self._backend = backend
        self._pinner = None if backend is None else Pinner(backend)
        self._cooling = None if backend is None or is_staged else PendingReads(backend, arena.ended_leases)
        self.ended_slots = arena.ended_leases if self._cooling is None else self._cooling.free
        self.delivered_bytes = 0  # total of all delivered batches
        # A reader references its layout, so Python does not reuse the layout's id, which is part of the key.
        self._readers: dict[tuple[int, int], RowReader] = {}

    def rows(self, slot: SlotId, layout: Layout, row_count: int, beside: Mapping[int, list[list[Any]]]) -> Any:
        """Return a batch written row by row; ``beside`` holds values sent outside the slot, by first row of the task."""
        key = (id(layout), row_count)
        reader = self._readers.get(key)
        if reader is None:
            if len(self._readers) >= _READERS_KEPT:
                self._readers.clear()
            reader = self._readers[key] = RowReader(layout, row_count)
        self.delivered_bytes += reader.nbytes
        parts = [beside[row] for row in sorted(beside)] if len(beside) > 1 else list(beside.values())
        return reader.read(self._arena.lease(slot) if self._pinner is None else self._pinned_lease(slot, self._pinner), parts)

    def tree(self, slot: SlotId, packed: Packed | Handed) -> Any:
        """Return a batch of any type that was packed into the slot."""
        if not isinstance(packed, Handed):
            self.delivered_bytes += sum(packed.sizes)
        return unpack(packed, self._arena.lease(slot) if self._pinner is None else self._pinned_lease(slot, self._pinner))

    @property
    def is_cooling(self) -> bool:
        """Whether released slots still wait for the accelerator to read them."""
        return bool(self._cooling)

    def settle(self) -> None:
        """Wait until the accelerator has read all batches that user code has released."""
        if self._cooling is not None:
            self._cooling.wait()

    def forget_segment(self, number: int) -> None:
        if self._pinner is not None:
            self._pinner.forget(number)

    def close(self) -> None:
        """Unregister all memory from the accelerator. Batches that user code holds stay valid, but not page-locked."""
        if self._backend is not None and self._pinner is not None:
            self._backend.mark().wait()
            self._pinner.close()

    def _pinned_lease(self, slot: SlotId, pinner: Pinner) -> Lease:
        segment = self._arena.block(slot).segment
        pinner.use(segment, self._arena.memory(segment))
        return self._arena.lease(slot)
