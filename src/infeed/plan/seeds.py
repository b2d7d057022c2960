"""Seeds as a pure function of (seed, epoch, position): nothing else determines a grain's random numbers.

All mixing uses the splitmix64 finalizer, for Python integers and for NumPy arrays. Both produce the same numbers on every
platform and NumPy version; NumPy's ``Generator`` methods do not guarantee that.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB


def mix(value: int) -> int:
    """Hash a 64-bit integer; neighbouring inputs produce unrelated outputs.

    >>> mix(0) != mix(1) and 0 <= mix(1) < 2**64
    True
    """
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def mix_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply ``mix`` to each element of an array."""
    values = values + np.uint64(_GOLDEN)
    values ^= values >> np.uint64(30)
    values *= np.uint64(_MIX_1)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_MIX_2)
    values ^= values >> np.uint64(31)
    return values


def derive(seed: int, *path: int) -> int:
    """Derive a 64-bit seed from integers such as (epoch, position). Every element and their order matter."""
    state = mix(seed)
    for step in path:
        state = mix(state ^ (step & _MASK))
    return state
