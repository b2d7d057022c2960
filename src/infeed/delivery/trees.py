"""Map a function over the leaves of a nested batch."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

_leaf_types: Final[weakref.WeakSet[type]] = weakref.WeakSet()  # a cache, because isinstance(tree, Mapping) is slow


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same structure with the same types and every leaf changed. A container that cannot be rebuilt is a leaf.

    >>> map_leaves({"a": [1, (2, 3)]}, lambda leaf: leaf * 10)
    {'a': [10, (20, 30)]}
    """
    kind = type(tree)
    if kind in _leaf_types or isinstance(tree, str | bytes):
        return change(tree)
    if isinstance(tree, Mapping):
        changed = {key: map_leaves(value, change) for key, value in tree.items()}
        if type(tree) is dict:
            return changed
        return _rebuilt_mapping(tree, changed, change)
    if isinstance(tree, tuple):
        parts = [map_leaves(value, change) for value in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*parts)
        return tuple(parts) if type(tree) is tuple else _or_leaf(lambda: type(tree)(parts), tree, change)
    if isinstance(tree, list):
        parts = [map_leaves(value, change) for value in tree]
        return parts if type(tree) is list else _or_leaf(lambda: type(tree)(parts), tree, change)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree) if field.init}
        parts = {name: map_leaves(value, change) for name, value in fields.items()}  # type: ignore[assignment]
        return _or_leaf(lambda: dataclasses.replace(tree, **parts), tree, change)  # type: ignore[arg-type]
    if not isinstance(tree, type):
        _leaf_types.add(kind)
    return change(tree)


def _rebuilt_mapping(tree: Mapping[Any, Any], changed: dict[Any, Any], change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, MutableMapping):
        clone = copy.copy(tree)  # keeps attributes of a defaultdict or a user-defined type
        clone.update(changed)
        return clone
    return _or_leaf(lambda: type(tree)(changed), tree, change)  # type: ignore[call-arg]


def _or_leaf(build: Callable[[], Any], tree: Any, change: Callable[[Any], Any]) -> Any:
    try:
        return build()
    except Exception:  # a user-defined constructor with other arguments
        return change(tree)
