"""``infeed.share``: stores data once in shared memory, however many processes read it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from infeed.memory.holding import Held
from infeed.memory.shared import share_dict, share_sequence
from infeed.memory.sharedarrays import is_plain_tensor, share_array, share_tensor


def share(obj: Any) -> Any:
    """Copy ``obj`` into shared memory. The copy reads like ``obj``, is read-only, and its pickle contains only its location.

    Use it for large lists, tuples, dicts and arrays of a dataset: they are stored once, however many workers read them. You
    can send the copy to any process on this machine. The memory is freed when the last process releases it.

    Args:
        obj: A list, tuple or dict of anything that can be pickled, a NumPy array, or a CPU tensor of torch. Tensors stay
            writable, but only the process that writes sees the change.

    Raises:
        TypeError: ``obj`` has another type.
        MemoryLimitError: Not enough memory is available.

    >>> names = share(["cat", "dog", "bird"])
    >>> names[1], len(names), "dog" in names, list(names[1:])
    ('dog', 3, True, ['dog', 'bird'])
    """
    if isinstance(obj, Held):
        return obj
    if type(obj) is list or type(obj) is tuple:
        return share_sequence(obj)
    if type(obj) is dict:
        return share_dict(obj)
    if type(obj) in (np.ndarray, np.memmap) and not obj.dtype.hasobject:
        return share_array(obj)
    torch = sys.modules.get("torch")
    if torch is not None and type(obj) is torch.Tensor and is_plain_tensor(torch, obj):
        return share_tensor(obj)
    raise TypeError(_refusal(obj))


def _refusal(obj: Any) -> str:
    rule = "share() takes a list, tuple, dict, NumPy array or torch tensor of the CPU"
    name = f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")
    if isinstance(obj, np.ndarray) and obj.dtype.hasobject:
        return f"{rule}, not an array of objects; share(array.tolist()) holds them as a list"
    if isinstance(obj, list | tuple | dict):
        base = next(cls for cls in (list, tuple, dict) if isinstance(obj, cls)).__name__
        return f"{rule}, not {name}; a shared object has the plain type, so share({base}(...)) if that is what you want"
    return (
        f"{rule}, not {name}; share the large lists and arrays in it, each by itself, and put them in the place of the others"
    )


share.__module__ = "infeed"  # the public path, which pickles refer to
