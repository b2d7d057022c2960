"""Telling the dataset and its transforms which epoch it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

# How deep into the dataset's attributes transforms are looked for: a dataset in a subset in a concatenation, its transform,
# the steps of that.
_DEPTH: Final = 6
# Containers with more than this hold data, not transforms.
_MOST_ITEMS: Final = 64


def epoch_hearers(*roots: Any) -> list[Callable[[int], Any]]:
    """The ``set_epoch`` methods of objects, and of what they hold in attributes, lists, tuples and dicts."""
    found: list[Callable[[int], Any]] = []
    seen: set[int] = set()
    level = [root for root in roots if root is not None]
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            if id(value) in seen or isinstance(value, type):
                continue
            seen.add(id(value))
            if callable(getattr(type(value), "set_epoch", None)):
                found.append(value.set_epoch)
            below.extend(_held_by(value))
        level = below
    return found


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, list | tuple | set | frozenset):
        return list(value) if len(value) <= _MOST_ITEMS else []
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _MOST_ITEMS else []
    held: list[Any] = []
    if type(value).__module__.partition(".")[0] not in ("builtins", "numpy"):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            held.extend(attributes.values())
    owner = getattr(value, "__self__", None)  # a bound method, such as a collate_fn
    if owner is not None:
        held.append(owner)
    return held
