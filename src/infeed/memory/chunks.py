"""Laying bytes into shared memory."""

from __future__ import annotations

from typing import Any, Literal, final

import numpy as np

from infeed.memory.holding import ALIGN, Extent, Held, hold
from infeed.memory.segments import round_up


@final
class Chunks:
    """Bytes to be laid one behind the other into an extent."""

    def __init__(self) -> None:
        self.size = 0
        self.keeps: list[Held] = []  # shared objects that are named in them
        self._parts: list[tuple[int, Any, bool]] = []

    def add(self, data: Any, *, are_places: bool = False) -> int:
        """Where this array, or whatever has a buffer, will begin in the extent. ``are_places``: these are such numbers."""
        array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8, len(data))
        begin = round_up(self.size, ALIGN)
        self._parts.append((begin, array, are_places))
        self.size = begin + array.nbytes
        return begin

    def held(self) -> Extent:
        """An extent with all of it."""
        extent = hold(self.size)
        for begin, array, are_places in self._parts:
            there: Any = np.ndarray(array.shape, array.dtype, extent.memory, extent.begin + begin, order=order_of(array))
            # Places count from the beginning of the bin: a column reads without adding anything.
            there[...] = array + array.dtype.type(extent.begin) if are_places else array
        return extent


def order_of(array: np.ndarray[Any, Any]) -> Literal["C", "F"]:
    """The order in which a copy keeps its elements."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
