"""Copy buffers into one extent of shared memory."""

from __future__ import annotations

from typing import Any, Literal, final

import numpy as np

from infeed.memory.holding import ALIGN, Extent, Held, hold
from infeed.memory.segments import round_up


@final
class Chunks:
    """Collects buffers that are then written one after the other into an extent."""

    def __init__(self) -> None:
        self.size = 0
        self.keeps: list[Held] = []  # shared objects that the buffers refer to
        self._parts: list[tuple[int, Any, bool]] = []

    def add(self, data: Any, *, are_places: bool = False) -> int:
        """Add an array or buffer and return its offset in the extent. Set ``are_places`` if it contains such offsets."""
        array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8, len(data))
        begin = round_up(self.size, ALIGN)
        self._parts.append((begin, array, are_places))
        self.size = begin + array.nbytes
        return begin

    def held(self) -> Extent:
        """Allocate an extent and write all buffers into it."""
        extent = hold(self.size)
        for begin, array, are_places in self._parts:
            there: Any = np.ndarray(array.shape, array.dtype, extent.memory, extent.begin + begin, order=order_of(array))
            # Offsets are relative to the start of the bin, so that columns read elements without an addition.
            there[...] = array + array.dtype.type(extent.begin) if are_places else array
        return extent


def order_of(array: np.ndarray[Any, Any]) -> Literal["C", "F"]:
    """Return the memory order that a copy of the array keeps."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
