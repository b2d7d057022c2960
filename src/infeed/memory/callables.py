"""Callables of ``functools`` that are pickled by value, because the script that made them is not importable in a worker.

cloudpickle pickles plain functions by value. These it pickles by name, or not at all, though they are as common in scripts.
"""

from __future__ import annotations

import copyreg
import functools
import threading
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Final

import cloudpickle
from cloudpickle.cloudpickle import _lookup_module_and_qualname

_DISPATCHER: Final[CodeType] = functools.singledispatch(lambda _: None).__code__  # type: ignore[attr-defined]


def reduce_callable(obj: Any) -> Any:
    """Reduction by value of a cached function, a cached property or a generic function, or ``NotImplemented``."""
    if isinstance(obj, functools._lru_cache_wrapper):
        return NotImplemented if _is_importable(obj) else _reduce_cached(obj)
    if isinstance(obj, functools.cached_property):
        state = {name: value for name, value in vars(obj).items() if name != "lock"}
        return copyreg.__newobj__, (type(obj),), (state, "lock" in vars(obj)), None, None, _set_cached_property  # type: ignore[attr-defined]
    if isinstance(obj, FunctionType) and obj.__code__ is _DISPATCHER and not _is_importable(obj):
        return _reduce_generic(obj)
    return NotImplemented


def _is_importable(obj: Any) -> bool:
    if obj.__module__ in cloudpickle.list_registry_pickle_by_value():
        return False
    return _lookup_module_and_qualname(obj) is not None


def _reduce_cached(obj: Any) -> Any:
    parameters = obj.cache_parameters()
    return _rebuild_cached, (obj.__wrapped__, parameters["maxsize"], parameters["typed"]), vars(obj)


def _rebuild_cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _set_cached_property(obj: Any, state: tuple[dict[str, Any], bool]) -> None:
    attributes, has_lock = state
    vars(obj).update(attributes)
    if has_lock:  # Python 3.11 has one, and it cannot be pickled
        obj.lock = threading.RLock()


def _reduce_generic(obj: Any) -> Any:
    registry = obj.registry
    others = {cls: function for cls, function in registry.items() if cls is not object}
    return functools.singledispatch, (registry[object],), others, None, None, _register


def _register(generic: Any, functions: dict[type, Callable[..., Any]]) -> None:
    for cls, function in functions.items():
        generic.register(cls, function)
