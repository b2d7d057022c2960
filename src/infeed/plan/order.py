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
# Separates the order of blocks from the order within windows.
_BLOCKS: Final = 0x424C4F43

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


class Blocks(ABC):
    """Blocks of consecutive indices in a random order, grouped into windows of several blocks."""

    @abstractmethod
    def window_at(self, position: int) -> int:
        """Return the number of the window that contains a position."""

    @abstractmethod
    def window(self, number: int) -> tuple[int, Indices]:
        """Return the first position of a window, and the indices of its blocks, one block after the other."""


@final
class EqualBlocks(Blocks):
    """Blocks of one size, without a list of blocks.

    The blocks of an epoch begin at a random index, so that neighbours are different samples in every epoch, and so are the
    samples of the incomplete block, which is the last one.
    """

    def __init__(self, length: int, size: int, window: int, *, seed: int, epoch: int) -> None:
        self._length, self._size, self._window = length, size, window
        self._full_count = length // size
        key = derive(seed, epoch, _BLOCKS)
        self._shift = key % length if length else 0
        self._order = ShuffledOrder(self._full_count, seed=key, epoch=epoch)

    def window_at(self, position: int) -> int:
        return position // (self._size * self._window)

    def window(self, number: int) -> tuple[int, Indices]:
        first, last = number * self._window, min((number + 1) * self._window, self._full_count)
        starts = self._order.take(first, last) * self._size if first < last else np.empty(0, dtype=np.int64)
        indices = (starts[:, None] + np.arange(self._size)).ravel()
        if last < (number + 1) * self._window:
            indices = np.concatenate([indices, np.arange(self._full_count * self._size, self._length)])
        indices += self._shift
        indices[indices >= self._length] -= self._length
        return first * self._size, indices


@final
class ListedBlocks(Blocks):
    """Blocks of given sizes, such as the row groups of Parquet files."""

    def __init__(self, stops: Indices, window: int, *, seed: int, epoch: int) -> None:
        """Create the blocks. ``stops`` has the end of each block, in increasing order."""
        count = len(stops)
        order = ShuffledOrder(count, seed=derive(seed, epoch, _BLOCKS), epoch=epoch).take(0, count)
        self._stops = stops[order]
        self._starts = np.concatenate([[0], stops[:-1]])[order] if count else stops
        self._bounds = np.concatenate([[0], np.cumsum(self._stops - self._starts)])
        self._window = window
        self._window_stops = self._bounds[[min(stop, count) for stop in range(window, count + window, window)]]

    def window_at(self, position: int) -> int:
        return int(np.searchsorted(self._window_stops, position, side="right"))

    def window(self, number: int) -> tuple[int, Indices]:
        first, last = number * self._window, (number + 1) * self._window
        parts = [np.arange(a, b) for a, b in zip(self._starts[first:last], self._stops[first:last], strict=True)]
        return int(self._bounds[first]), np.concatenate(parts)


@final
class BlockShuffledOrder(Order):
    """A permutation that keeps neighbours close: blocks in random order, and samples shuffled within windows of blocks.

    >>> blocks = EqualBlocks(10, 2, 2, seed=1, epoch=0)
    >>> sorted(BlockShuffledOrder(blocks, 10, seed=1, epoch=0).take(0, 10).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, blocks: Blocks, length: int, *, seed: int, epoch: int) -> None:
        self.length = length
        self._blocks = blocks
        self._key = derive(seed, epoch)
        self._start = 0
        self._indices: Indices = np.empty(0, dtype=np.int64)  # of one window, from _start on

    def take(self, start: int, stop: int) -> Indices:
        parts = []
        while start < stop:
            if not self._start <= start < self._start + len(self._indices):
                number = self._blocks.window_at(start)
                self._start, indices = self._blocks.window(number)
                self._indices = indices[ShuffledOrder(len(indices), seed=self._key, epoch=number).take(0, len(indices))]
            part = self._indices[start - self._start : stop - self._start]
            parts.append(part)
            start += len(part)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


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
        return _scaled(hash_positions(self._key, start, stop), self._domain).astype(np.int64)


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
        heights = (hash_positions(self._key, start, stop) >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._ladder[-1]
        found: Indices = np.searchsorted(self._ladder, heights, side="right").astype(np.int64)
        np.minimum(found, len(self._ladder) - 1, out=found)  # rounding can reach the upper end
        return found


def weight_ladder(weights: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the cumulative sums of the weights. A draw between two sums selects one index; weight 0 is never selected."""
    ladder = np.cumsum(weights, dtype=np.float64)
    # Omit trailing zero weights, so that no draw selects an index beyond the last positive weight.
    return ladder[: int(np.searchsorted(ladder, ladder[-1], side="left")) + 1]


def hash_positions(key: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
    return mix_array(np.arange(start, stop, dtype=np.uint64) ^ np.uint64(key))


def _scaled(hashes: npt.NDArray[np.uint64], limit: int) -> npt.NDArray[np.uint64]:
    """Map 64 random bits to numbers below ``limit``, without visible bias: the upper half of the 128-bit product."""
    low_half, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    high, low = hashes >> shift, hashes & low_half
    limit_high, limit_low = np.uint64(limit >> 32), np.uint64(limit & 0xFFFFFFFF)
    middle = high * limit_low + ((low * limit_low) >> shift)
    scaled: npt.NDArray[np.uint64] = high * limit_high + (middle >> shift) + ((low * limit_high + (middle & low_half)) >> shift)
    return scaled
