"""Packs any object into a slot: batches from the user's ``collate_fn``, and single samples.

The worker pickles the object with the bytes of arrays and tensors out-of-band. The bytes go into the slot; the short pickle
is sent outside it. The main process re-creates the object over the slot without a copy, whatever its classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from mmap import mmap
from typing import Any, final

from infeed.memory.arena import Lease
from infeed.memory.pickling import dump, load, spans


@final
@dataclass(frozen=True, slots=True)
class Packed:
    """The part sent outside the slot: the pickle, and the positions of its buffers in the slot."""

    data: bytes
    offsets: list[int]
    sizes: list[int]


@final
class Packing:
    """A pickled object, ready to be written into a slot."""

    def __init__(self, obj: object) -> None:
        data, self._buffers = dump(obj)
        sizes = [buffer.nbytes for buffer in self._buffers]
        offsets, self.nbytes = spans(sizes)
        self.packed = Packed(data, offsets, sizes)

    def write(self, memory: mmap, block_offset: int) -> None:
        with memoryview(memory) as view:
            for buffer, offset, size in zip(self._buffers, self.packed.offsets, self.packed.sizes, strict=True):
                view[block_offset + offset : block_offset + offset + size] = buffer


@final
class Handed:
    """An object that stays in the process that created it, so it needs no packing."""

    nbytes = 0

    def __init__(self, tree: object) -> None:
        self.tree = tree

    @property
    def packed(self) -> Handed:
        return self

    def write(self, memory: mmap, block_offset: int) -> None:
        del memory, block_offset


def unpack(packed: Packed | Handed, lease: Lease) -> Any:
    """Re-create the object over the slot."""
    if isinstance(packed, Handed):
        return packed.tree
    view = memoryview(lease).cast("B")
    buffers = [view[offset : offset + size] for offset, size in zip(packed.offsets, packed.sizes, strict=True)]
    return load(packed.data, buffers)
