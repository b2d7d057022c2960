"""Telling the dataset and its transforms which epoch it is."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from types import MethodType
from typing import Any, Final, final

# How deep into the dataset's attributes transforms are looked for: a dataset in a subset in a concatenation, its transform,
# the steps of that.
_DEPTH: Final = 6
# Containers with more than this hold data, not transforms; nor do more objects than that in all.
_MOST_ITEMS: Final = 64
_MOST_OBJECTS: Final = 5_000

# What each object was told last, by whichever iteration: inline and in threads several share it. With a weak reference, because
# a number is given to another object when its own is gone.
_TOLD: Final[dict[int, tuple[weakref.ref[Any], int]]] = {}


@final
class EpochHooks:
    """The objects with ``set_epoch`` among the roots and what they hold in attributes, lists, tuples and dicts."""

    def __init__(self, *roots: Any) -> None:
        self._found: list[Any] = []
        seen: set[int] = set()
        level = [root for root in roots if root is not None]
        for _ in range(_DEPTH):
            below: list[Any] = []
            for value in level:
                if id(value) in seen or len(seen) > _MOST_OBJECTS:
                    continue
                seen.add(id(value))
                if _hears(type(value)):
                    self._found.append(value)
                below.extend(_held_by(value))
            level = below

    def __bool__(self) -> bool:
        return bool(self._found)

    def untold(self, epoch: int) -> list[Any]:
        """Those that do not know yet that it is this epoch."""
        return [epoch_hook for epoch_hook in self._found if _told(epoch_hook) != epoch]

    @staticmethod
    def tell(epoch_hook: Any, epoch: int) -> None:
        _TOLD.pop(id(epoch_hook), None)  # if it raises, nobody knows
        epoch_hook.set_epoch(epoch)
        try:
            reference = weakref.ref(epoch_hook, functools.partial(_forget, id(epoch_hook)))
        except TypeError:  # cannot be referred to weakly: is told every time
            return
        _TOLD[id(epoch_hook)] = (reference, epoch)


@final
class Recalls:
    """Tasks of epochs that the user left while they waited to be loaded. Shared by workers that share one dataset.

    Without it a thread that comes to such a task would tell the dataset of its epoch when others load the next one.
    """

    def __init__(self) -> None:
        # Held while the dataset is told: who comes later tells of a later epoch, or finds a recall.
        self.lock = threading.Lock()
        self._tasks: set[int] = set()

    def recall(self, tasks: Iterable[int]) -> None:
        """From the user's thread, before any task of another epoch is sent; ``tasks`` are all that nobody wants."""
        self._tasks = set(tasks)

    def take(self, task: int) -> bool:
        """Whether a task was recalled. Each is asked for once."""
        if task not in self._tasks:
            return False
        self._tasks.discard(task)
        return True


def _forget(key: int, _reference: object) -> None:
    _TOLD.pop(key, None)


def _told(epoch_hook: Any) -> int | None:
    reference, epoch = _TOLD.get(id(epoch_hook), (None, None))
    return epoch if reference is not None and reference() is epoch_hook else None


def _hears(cls: type[Any]) -> bool:
    # A loader that the dataset holds is not told: it would begin the epoch again.
    return callable(getattr(cls, "set_epoch", None)) and not cls.__module__.startswith("infeed") and cls is not type


# By type and never by isinstance, which may run an object's own code: it was only found here, nobody asked for it.
def _held_by(value: Any) -> list[Any]:
    cls = type(value)
    if issubclass(cls, type):
        return []
    if issubclass(cls, list | tuple | set | frozenset | dict):
        if len(value) > _MOST_ITEMS:
            return []
        return list(value.values() if issubclass(cls, dict) else value)
    if cls is MethodType:
        return [value.__self__]
    if cls is functools.partial:
        return [value.func, *value.args, *value.keywords.values()]
    if cls.__module__.partition(".")[0] in ("builtins", "numpy", "weakref"):
        return []
    try:
        held = list(object.__getattribute__(value, "__dict__").values())
    except AttributeError:
        held = []
    return held + _slots(value)


def _slots(value: Any) -> list[Any]:
    held = []
    for cls in type(value).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            member: Any = cls.__dict__.get(name)
            if type(member).__name__ == "member_descriptor":
                try:
                    held.append(member.__get__(value))
                except AttributeError:  # not set
                    continue
    return held
