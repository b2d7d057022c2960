"""Call ``set_epoch`` of the dataset and its transforms when the epoch changes."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Final, final

from infeed.memory.search import Steps, walk

# Search depth for transforms in the dataset's attributes: a dataset in a subset in a concatenation, its transform, and the
# steps of that transform.
_DEPTH: Final = 6
# Larger containers hold data, not transforms. The search stops after _MOST_OBJECTS objects in total.
_MOST_ITEMS: Final = 64
_MOST_OBJECTS: Final = 5_000

# The last epoch set for each object, keyed by id. It is global, because with num_workers=0 and threads several iterators share
# an object. The weak reference detects a reused id.
_LAST_EPOCHS: Final[dict[int, tuple[weakref.ref[Any], int]]] = {}


@final
class EpochHooks:
    """Finds objects with ``set_epoch`` among the roots and, recursively, in their attributes and containers."""

    def __init__(self, *roots: Any) -> None:
        self._found: list[Any] = []
        walk(roots, self._visit, looks=_MOST_OBJECTS, depth=_DEPTH, most=_MOST_ITEMS)

    def _visit(self, value: Any, _steps: Steps) -> bool:
        if _is_epoch_hook(type(value)):
            self._found.append(value)
        return not (issubclass(type(value), list | tuple | set | frozenset | dict) and len(value) > _MOST_ITEMS)

    def __bool__(self) -> bool:
        return bool(self._found)

    def outdated(self, epoch: int) -> list[Any]:
        """Return the objects for which this epoch has not been set yet."""
        return [epoch_hook for epoch_hook in self._found if _last_epoch(epoch_hook) != epoch]

    @staticmethod
    def notify(epoch_hook: Any, epoch: int) -> None:
        _LAST_EPOCHS.pop(id(epoch_hook), None)  # if set_epoch raises, the epoch is unknown
        epoch_hook.set_epoch(epoch)
        try:
            reference = weakref.ref(epoch_hook, functools.partial(_forget, id(epoch_hook)))
        except TypeError:  # not weakly referenceable: set the epoch every time
            return
        _LAST_EPOCHS[id(epoch_hook)] = (reference, epoch)


@final
class Recalls:
    """Queued tasks of epochs that the training loop has left. Thread workers with the same dataset share it.

    Otherwise a thread that reaches such a task would set the old epoch while other threads load the next one.
    """

    def __init__(self) -> None:
        # Held during set_epoch: a thread that acquires it later sets a later epoch, or finds its task recalled.
        self.lock = threading.Lock()
        self._tasks: set[int] = set()

    def recall(self, tasks: Iterable[int]) -> None:
        """Set the recalled tasks. The training loop's thread calls it before it sends any task of another epoch."""
        self._tasks = set(tasks)

    def take(self, task: int) -> bool:
        """Return whether a task was recalled, and remove it. Called once per task."""
        if task not in self._tasks:
            return False
        self._tasks.discard(task)
        return True


def _forget(key: int, _reference: object) -> None:
    _LAST_EPOCHS.pop(key, None)


def _last_epoch(epoch_hook: Any) -> int | None:
    reference, epoch = _LAST_EPOCHS.get(id(epoch_hook), (None, None))
    return epoch if reference is not None and reference() is epoch_hook else None


def _is_epoch_hook(cls: type[Any]) -> bool:
    # Skip a loader inside the dataset: its set_epoch would restart the epoch.
    return callable(getattr(cls, "set_epoch", None)) and not cls.__module__.startswith("infeed") and cls is not type
