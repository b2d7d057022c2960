"""Map positions of an epoch to indices, without storing a list of indices.

A shuffle is a keyed permutation that computes the index from the position. So an epoch of 10**9 samples starts at once, takes
no memory, and can start at any position.

There are two algorithms. Only the length selects between them, so that the order never depends on the machine:

* Up to ``_SORTED_LENGTH`` samples, positions are sorted by a hash of (seed, epoch, position). The permutation is exactly
  uniform and small enough to store.
* Above, a Feistel network over the next power of two, with cycle walking: outputs beyond the end are fed in again, less than
  twice on average. It computes a block at a time, because NumPy's cost per call outweighs its cost per element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from infeed.plan.seeds import derive, mix_array

Indices = npt.NDArray[np.int64]

_SORTED_LENGTH: Final = 1 << 14
# Feistel half-rounds, alternating left and right. Fewer leave structure between neighbouring positions; more only cost time.
_ROUNDS: Final = 6


class _Mixer(NamedTuple):
    """Two odd multipliers and a shift between them, in the narrowest type that holds an index.

    Half the width is twice as fast.
    """

    dtype: type[np.uint32] | type[np.uint64]
    first: int
    fold: int
    second: int


_MIX_32: Final = _Mixer(np.uint32, 0x85EBCA6B, 13, 0xC2B2AE35)
_MIX_64: Final = _Mixer(np.uint64, 0xBF58476D1CE4E5B9, 29, 0x94D049BB133111EB)

# Separates the draw at a position from the seed of a grain that starts there, which derives from the same numbers.
_DRAWS: Final = 0x44524157

# Positions computed at once. Small blocks cost more per position, because the last cycle walks cost as much for 10 elements as
# for 1000. Large blocks take 0.7 ms, a noticeable delay before the first batch. So the first block is short, and later blocks
# are as long as fits into a CPU cache.
_FIRST_BLOCK: Final = 1 << 15
_BLOCK: Final = 1 << 16


def plain_indices(indices: Indices | list[Any]) -> list[Any]:
    """Return indices as Python integers, the type that datasets receive from any sampler and that messages show."""
    plain: list[Any] = indices.tolist() if isinstance(indices, np.ndarray) else indices
    return plain


class Order(ABC):
    """The indices of one epoch, by position."""

    length: int

    @abstractmethod
    def take(self, start: int, stop: int) -> Indices:
        """Return the indices at positions ``start`` to ``stop``, which must lie within the epoch."""


@final
class SequentialOrder(Order):
    """The index equals the position."""

    def __init__(self, length: int) -> None:
        self.length = length

    def take(self, start: int, stop: int) -> Indices:
        return np.arange(start, stop, dtype=np.int64)


@final
class ShuffledOrder(Order):
    """A permutation of ``range(length)`` determined by (seed, epoch).

    >>> sorted(ShuffledOrder(10, seed=1, epoch=0).take(0, 10).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, length: int, *, seed: int, epoch: int, count: int | None = None) -> None:
        """Create the permutation. ``count`` limits the epoch to that many samples, different ones in every epoch."""
        self._domain = length
        self.length = length if count is None else count
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
            self._mixer = _MIX_32 if bits <= 32 else _MIX_64
            width = 8 * np.dtype(self._mixer.dtype).itemsize
            self._round_keys = [derive(self._key, r) >> (64 - width) for r in range(_ROUNDS)]

    def take(self, start: int, stop: int) -> Indices:
        begin = start - self._block_start
        end = stop - self._block_start
        if begin < 0 or end > len(self._block):
            room = _BLOCK if len(self._block) else _FIRST_BLOCK
            block_stop = min(self._domain, max(stop, start + room))
            self._block = self._permute(np.arange(start, block_stop, dtype=self._mixer.dtype))
            self._block_start = start
            begin, end = 0, stop - start
        return self._block[begin:end]

    def _permute(self, positions: npt.NDArray[Any]) -> Indices:
        limit = self._domain
        values = self._feistel(positions)
        outside = np.flatnonzero(values >= limit)
        while outside.size:
            values[outside] = self._feistel(values[outside])
            outside = outside[values[outside] >= limit]
        return values.astype(np.int64)

    def _feistel(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        number = self._mixer.dtype
        width = 8 * values.itemsize
        right_bits = number(self._right_bits)
        left = values >> right_bits
        right = values & number((1 << self._right_bits) - 1)
        scratch, folded = np.empty_like(values), np.empty_like(values)
        for turn, key in enumerate(self._round_keys):
            source, target, bits = (right, left, self._left_bits) if turn % 2 == 0 else (left, right, self._right_bits)
            # Compute `bits` bits that depend on all of `source` and on the key. In place, because allocation would be half the
            # cost.
            np.bitwise_xor(source, number(key), out=scratch)
            np.multiply(scratch, number(self._mixer.first), out=scratch)
            np.right_shift(scratch, number(self._mixer.fold), out=folded)
            np.bitwise_xor(scratch, folded, out=scratch)
            np.multiply(scratch, number(self._mixer.second), out=scratch)
            np.right_shift(scratch, number(width - bits), out=scratch)
            np.bitwise_xor(target, scratch, out=target)
        np.left_shift(left, right_bits, out=left)
        np.bitwise_or(left, right, out=left)
        return left


@final
class RepeatingOrder(Order):
    """Draws from ``range(length)`` with replacement at every position.

    >>> order = RepeatingOrder(3, 100, seed=1, epoch=0)
    >>> sorted(set(order.take(0, 100).tolist()))
    [0, 1, 2]
    """

    def __init__(self, length: int, count: int, *, seed: int, epoch: int) -> None:
        self.length = count
        self._domain = length
        self._key = derive(seed, epoch, _DRAWS)

    def take(self, start: int, stop: int) -> Indices:
        return _scaled(_hashes(self._key, start, stop), self._domain).astype(np.int64)


@final
class WeightedOrder(Order):
    """Draws an index at every position with a probability proportional to its weight."""

    def __init__(self, ladder: npt.NDArray[np.float64], count: int, *, seed: int, epoch: int) -> None:
        """Create the order from the result of ``weight_ladder``, which is the only memory it uses."""
        self.length = count
        self._ladder = ladder
        self._key = derive(seed, epoch, _DRAWS)

    def take(self, start: int, stop: int) -> Indices:
        # A float holds the upper 53 bits: evenly spaced in [0, 1).
        heights = (_hashes(self._key, start, stop) >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._ladder[-1]
        found: Indices = np.searchsorted(self._ladder, heights, side="right").astype(np.int64)
        np.minimum(found, len(self._ladder) - 1, out=found)  # rounding can reach the upper end
        return found


def weight_ladder(weights: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the cumulative sums of the weights. A draw between two sums selects one index; weight 0 is never selected."""
    ladder = np.cumsum(weights, dtype=np.float64)
    # Omit trailing zero weights, so that no draw selects an index beyond the last positive weight.
    return ladder[: int(np.searchsorted(ladder, ladder[-1], side="left")) + 1]


def _hashes(key: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
    return mix_array(np.arange(start, stop, dtype=np.uint64) ^ np.uint64(key))


def _scaled(hashes: npt.NDArray[np.uint64], limit: int) -> npt.NDArray[np.uint64]:
    """Map 64 random bits to numbers below ``limit``, without visible bias: the upper half of the 128-bit product."""
    low_half, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    high, low = hashes >> shift, hashes & low_half
    limit_high, limit_low = np.uint64(limit >> 32), np.uint64(limit & 0xFFFFFFFF)
    middle = high * limit_low + ((low * limit_low) >> shift)
    scaled: npt.NDArray[np.uint64] = high * limit_high + (middle >> shift) + ((low * limit_high + (middle & low_half)) >> shift)
    return scaled
