"""The last step on the host: a filled slot becomes the batch that the user gets, over the slot's own memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

from infeed.collate.layout import Layout
from infeed.collate.packing import Handed, Packed, unpack
from infeed.collate.rows import RowReader
from infeed.delivery.backend import Backend
from infeed.delivery.pinning import PendingReads, Pinner
from infeed.memory.arena import Arena
from infeed.memory.leases import Lease
from infeed.scheduler.messages import SlotId

# Readers are kept for layouts and row counts that come again.
_READERS_KEPT: Final = 128


@final
class HostDelivery:
    """Hands out batches as arrays and tensors that look into the arena."""

    def __init__(self, arena: Arena, backend: Backend | None = None, *, is_staged: bool = False) -> None:
        """
        Args:
            backend: with one, batches are in page-locked memory as soon as their segment is registered.
            is_staged: a `Stage` copies the batches to the device and holds each until it is copied. The user never has them, so
                nothing else can be reading a slot that was released.
        """
        self._arena = arena
        self._backend = backend
        self._pinner = None if backend is None else Pinner(backend)
        self._cooling = None if backend is None or is_staged else PendingReads(backend, arena.ended_leases)
        self.ended_slots = arena.ended_leases if self._cooling is None else self._cooling.free
        self.given_bytes = 0  # of all batches so far
        self._readers: dict[tuple[int, int], RowReader] = {}
        self._alive: dict[int, Layout] = {}

    def rows(self, slot: SlotId, layout: Layout, row_count: int, beside: Mapping[int, list[list[Any]]]) -> Any:
        """A batch that was written row by row; ``beside`` has what travelled beside the slot, by first row of the task."""
        key = (id(layout), row_count)
        reader = self._readers.get(key)
        if reader is None:
            if len(self._readers) >= _READERS_KEPT:
                self._readers.clear()
                self._alive.clear()
            reader = self._readers[key] = RowReader(layout, row_count)
            # Its id is in the key, so it must not be given to another object.
            self._alive[id(layout)] = layout
        self.given_bytes += reader.nbytes
        parts = [beside[row] for row in sorted(beside)] if len(beside) > 1 else list(beside.values())
        return reader.read(self._lease(slot), parts)

    def tree(self, slot: SlotId, packed: Packed | Handed) -> Any:
        """A batch of any kind that was packed into the slot."""
        if not isinstance(packed, Handed):
            self.given_bytes += sum(packed.sizes)
        return unpack(packed, self._lease(slot))

    @property
    def is_cooling(self) -> bool:
        """Whether slots become free by themselves, when the accelerator has read them."""
        return bool(self._cooling)

    def settle(self) -> None:
        """Wait until nothing reads what the user has let go of."""
        if self._cooling is not None:
            self._cooling.wait()

    def forget_segment(self, number: int) -> None:
        if self._pinner is not None:
            self._pinner.forget(number)

    def close(self) -> None:
        """Let go of the accelerator. Batches that are kept stay as they are, but are page-locked no more."""
        if self._backend is not None and self._pinner is not None:
            self._backend.mark().wait()
            self._pinner.close()

    def _lease(self, slot: SlotId) -> Lease:
        if self._pinner is not None:
            segment = self._arena.block(slot).segment
            self._pinner.use(segment, self._arena.memory(segment))
        return self._arena.lease(slot)
