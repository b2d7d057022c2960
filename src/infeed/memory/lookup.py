"""Hash table for keys in shared memory, with a hash that is the same in every process.

Python randomizes the hash of text in each process. ``stable_hash`` returns equal hashes for keys that a dict treats as equal.
It supports text, bytes, numbers, None, and tuples and frozensets of these, but no other keys.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import numpy as np

_MASK: Final = (1 << 64) - 1
_MIX: Final = 0x9E3779B97F4A7C15  # odd, with random-looking bits
# Types that use Python's numeric hash: equal for equal numbers, and the same in every process.
_NUMBERS: Final = (int, float, complex, Decimal, Fraction, np.number, np.bool_)


def stable_hash(key: Any) -> int | None:
    """Return a hash of 32 to 64 bits, or ``None`` if the key type is not supported.

    >>> stable_hash(1) == stable_hash(True) == stable_hash(1.0) != stable_hash("1")
    True

    Raises:
        TypeError: The key is not hashable.
    """
    if type(key) is str:  # by far the most common type
        return zlib.crc32(key.encode("utf-8", "surrogatepass"))
    own = hash(key)
    # Treat a subclass as its base type only if both hash alike: only then can a dict look up one with the other.
    if isinstance(key, str):
        return zlib.crc32(str.encode(key, "utf-8", "surrogatepass")) if own == str.__hash__(key) else None
    if isinstance(key, bytes):
        return zlib.crc32(key) if own == bytes.__hash__(key) else None
    if isinstance(key, _NUMBERS) and not isinstance(key, np.timedelta64):
        if key != key:
            return 0  # NaN equals no key, and its own hash depends on its address
        return own * _MIX & _MASK if not isinstance(key, int) or own == int.__hash__(key) else None
    if key is None:
        return 7
    if isinstance(key, tuple):
        return _combined(key, len(key)) if own == tuple.__hash__(key) else None
    if isinstance(key, frozenset):
        hashes = [stable_hash(part) for part in key]
        return None if own != frozenset.__hash__(key) or None in hashes else sum(filter(None, hashes)) & _MASK
    return None


def _combined(parts: Iterable[Any], total: int) -> int | None:
    for part in parts:
        one = stable_hash(part)
        if one is None:
            return None
        total = (total * 1_000_003 ^ one) * _MIX & _MASK
    return total


def build_table(hashes: list[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the begin of each bucket in the list of places, and that list. The upper bits of the mixed hash select the bucket.

    The number of buckets is the smallest power of two that is at least the number of keys.
    """
    bits = bucket_bits(len(hashes))
    mixed = np.array(hashes, np.uint64) * np.uint64(_MIX)
    buckets = (mixed >> np.uint64(64 - bits)).astype(np.int64) if bits else np.zeros(len(hashes), np.int64)
    code = "I" if len(hashes) < 1 << 32 else "Q"
    begins = np.zeros((1 << bits) + 1, code)
    np.cumsum(np.bincount(buckets, minlength=1 << bits), out=begins[1:], dtype=code)
    return begins, np.argsort(buckets, kind="stable").astype(code)


def bucket_bits(count: int) -> int:
    return max(0, count - 1).bit_length()


def bucket_of(key_hash: int, bits: int) -> int:
    return (key_hash * _MIX & _MASK) >> (64 - bits)
