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
from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from infeed.plan.seeds import derive, mix_array

Indices = npt.NDArray[np.int64]

_SORTED_LENGTH: Final = 1 << 14
# Half-rounds, left and right in turn. Fewer leave visible structure between neighbouring positions; more only cost time.
_ROUNDS: Final = 6


class _Mixer(NamedTuple):
    """Two odd multipliers and a fold between them, in the narrowest type that holds an index: half as wide is twice as fast."""

    dtype: type[np.uint32] | type[np.uint64]
    first: int
    fold: int
    second: int


_MIX_32: Final = _Mixer(np.uint32, 0x85EBCA6B, 13, 0xC2B2AE35)
_MIX_64: Final = _Mixer(np.uint64, 0xBF58476D1CE4E5B9, 29, 0x94D049BB133111EB)

# Keeps what is drawn for a position apart from the seed of a grain that begins there, which comes from the same numbers.
_DRAWS: Final = 0x44524157

# Positions worked out at once. Few cost more each, because the last walks cost as much for ten as for a thousand; many, 0.7 ms
# of work, would be felt before the first batch. So the first block is short, and those that follow are as long as fit
# into a processor's cache.
_FIRST_BLOCK: Final = 1 << 15
_BLOCK: Final = 1 << 16


def plain_indices(indices: Indices | list[Any]) -> list[Any]:
    """As Python integers: what datasets get, as from any sampler, and what messages show."""
    plain: list[Any] = indices.tolist() if isinstance(indices, np.ndarray) else indices
    return plain


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

    def __init__(self, length: int, *, seed: int, epoch: int, count: int | None = None) -> None:
        """``count`` ends the epoch early: that many of the samples, others in every epoch."""
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
            # `bits` bits that depend on all of `source` and of the key. In place: allocation would be half the cost.
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
    """Every position draws from all of ``range(length)``, so that an index may come again.

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
    """Every position draws an index with a probability that is its weight's share of all weights."""

    def __init__(self, ladder: npt.NDArray[np.float64], count: int, *, seed: int, epoch: int) -> None:
        """``ladder`` is what ``weight_ladder`` made of the weights; it is the only memory that this takes."""
        self.length = count
        self._ladder = ladder
        self._key = derive(seed, epoch, _DRAWS)

    def take(self, start: int, stop: int) -> Indices:
        # The upper 53 bits are what a float holds: evenly spaced in [0, 1).
        heights = (_hashes(self._key, start, stop) >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._ladder[-1]
        found: Indices = np.searchsorted(self._ladder, heights, side="right").astype(np.int64)
        np.minimum(found, len(self._ladder) - 1, out=found)  # a height may be rounded up to the very end
        return found


def weight_ladder(weights: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Running sums of the weights. A height between two of them falls on one index; a weight of zero is never fallen on."""
    ladder = np.cumsum(weights, dtype=np.float64)
    # Weights of zero at the end are left out: nothing may fall beyond the last real one.
    return ladder[: int(np.searchsorted(ladder, ladder[-1], side="left")) + 1]


def _hashes(key: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
    return mix_array(np.arange(start, stop, dtype=np.uint64) ^ np.uint64(key))


def _scaled(hashes: npt.NDArray[np.uint64], limit: int) -> npt.NDArray[np.uint64]:
    """The upper half of the 128-bit product with ``limit``: 64 random bits made a number below it, with no visible bias."""
    low_half, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    high, low = hashes >> shift, hashes & low_half
    limit_high, limit_low = np.uint64(limit >> 32), np.uint64(limit & 0xFFFFFFFF)
    middle = high * limit_low + ((low * limit_low) >> shift)
    scaled: npt.NDArray[np.uint64] = high * limit_high + (middle >> shift) + ((low * limit_high + (middle & low_half)) >> shift)
    return scaled
