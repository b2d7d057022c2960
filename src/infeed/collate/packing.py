"""Any tree at all into a slot: the way of batches that the user's own ``collate_fn`` made, and of single samples.

The object is pickled with the bytes of its arrays and tensors outside. The bytes go into the slot, the short rest travels
beside it, and in the user's process the object is built over the slot without a copy, whatever classes it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from mmap import mmap
from typing import Any, final

from infeed.memory.leases import Lease
from infeed.memory.pickling import dump, load, spans


@final
@dataclass(frozen=True, slots=True)
class Packed:
    """What travels beside the slot: the pickle, and where in the slot its buffers are."""

    data: bytes
    offsets: list[int]
    sizes: list[int]


@final
class Packing:
    """An object ready to be put into a slot."""

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
    """A tree that stays in the process in which it was made: there is nothing to pack."""

    nbytes = 0

    def __init__(self, tree: object) -> None:
        self.tree = tree

    @property
    def packed(self) -> Handed:
        return self

    def write(self, memory: mmap, block_offset: int) -> None:
        del memory, block_offset


def unpack(packed: Packed | Handed, lease: Lease) -> Any:
    """The object, over the slot."""
    if isinstance(packed, Handed):
        return packed.tree
    view = memoryview(lease).cast("B")
    buffers = [view[offset : offset + size] for offset, size in zip(packed.offsets, packed.sizes, strict=True)]
    return load(packed.data, buffers)
