"""Which index stands at which position of an epoch, without a list of them.

A shuffle is a keyed permutation: position to index by arithmetic, so that an epoch of 10**9 samples begins at once, takes no
memory, and can be entered anywhere.

Two ways, chosen by length alone, so that the order never depends on the machine:

* up to ``_SORTED_LENGTH`` samples, positions are sorted by a hash of (seed, epoch, position): an exactly uniform permutation,
  and small enough to keep;
* above, a Feistel network over the next power of two, with cycle walking (an output beyond the end is put in again, less than
  twice on average), evaluated a block at a time because NumPy's cost per call outweighs its cost per element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final, final

import numpy as np
import numpy.typing as npt

from infeed.plan.seeds import derive, mix_array

Indices = npt.NDArray[np.int64]

_SORTED_LENGTH: Final = 1 << 14
# Half-rounds, left and right in turn. Fewer leave visible structure between neighbouring positions; more only cost time.
_ROUNDS: Final = 8
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_FOLD: Final = np.uint64(29)
# Positions worked out at once. Larger wastes work at the end of small epochs, smaller pays NumPy's overhead per batch.
_BLOCK: Final = 1 << 13


class Order(ABC):
    """The indices of one epoch, by position."""

    length: int

    @abstractmethod
    def take(self, start: int, stop: int) -> Indices:
        """Indices at positions ``start`` to ``stop``, which must lie within the epoch."""


@final
class SequentialOrder(Order):
    """Position and index are the same."""

    def __init__(self, length: int) -> None:
        self.length = length

    def take(self, start: int, stop: int) -> Indices:
        return np.arange(start, stop, dtype=np.int64)


@final
class ShuffledOrder(Order):
    """A permutation of ``range(length)`` fixed by (seed, epoch).

    >>> sorted(ShuffledOrder(10, seed=1, epoch=0).take(0, 10).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        self.length = length
        self._key = derive(seed, epoch)
        self._block_start = 0
        self._block: Indices = np.empty(0, dtype=np.int64)
        if length <= _SORTED_LENGTH:
            hashes = mix_array(np.arange(length, dtype=np.uint64) ^ np.uint64(self._key))
            self._block = np.argsort(hashes, kind="stable").astype(np.int64)
        else:
            bits = (length - 1).bit_length()
            self._left_bits = bits // 2
            self._right_bits = bits - self._left_bits
            self._round_keys = [np.uint64(derive(self._key, r)) for r in range(_ROUNDS)]

    def take(self, start: int, stop: int) -> Indices:
        begin = start - self._block_start
        end = stop - self._block_start
        if begin < 0 or end > len(self._block):
            block_stop = min(self.length, max(stop, start + _BLOCK))
            self._block = self._permute(np.arange(start, block_stop, dtype=np.uint64))
            self._block_start = start
            begin, end = 0, stop - start
        return self._block[begin:end]

    def _permute(self, positions: npt.NDArray[np.uint64]) -> Indices:
        limit = np.uint64(self.length)
        values = self._feistel(positions)
        outside = np.flatnonzero(values >= limit)
        while outside.size:
            values[outside] = self._feistel(values[outside])
            outside = outside[values[outside] >= limit]
        return values.astype(np.int64)

    def _feistel(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left = values >> np.uint64(self._right_bits)
        right = values & np.uint64((1 << self._right_bits) - 1)
        scratch = np.empty_like(values)
        for number, key in enumerate(self._round_keys):
            if number % 2 == 0:
                _scatter(right, key, self._left_bits, scratch)
                left ^= scratch
            else:
                _scatter(left, key, self._right_bits, scratch)
                right ^= scratch
        left <<= np.uint64(self._right_bits)
        left |= right
        return left


def _scatter(half: npt.NDArray[np.uint64], key: np.uint64, bits: int, out: npt.NDArray[np.uint64]) -> None:
    """``bits`` bits that depend on all bits of ``half`` and of the key; in place, because allocation is half the cost."""
    np.bitwise_xor(half, key, out=out)
    out *= _MIX_1
    out ^= out >> _FOLD
    out *= _MIX_2
    out >>= np.uint64(64 - bits)
