"""Whether the numbers that user code draws depend on which worker loads a batch, so that batches must be bound to workers."""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

import numpy as np

from infeed.memory.search import parts
from infeed.workers.preload import is_installed_file

# Functions with which code creates or seeds a generator per worker.
_SEEDING: Final = frozenset({"get_worker_info", "initial_seed", "manual_seed"})
_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState)
# Search limits, so that the search takes about 1 ms at most.
_LOOKS: Final = 500
_ELEMENTS: Final = 64  # of a container; larger ones hold data
# Built-in types that are searched; objects of other built-in types and of NumPy refer to no code.
_CONTAINERS: Final = {list, tuple, dict, set, frozenset}
_KINDS: Final = {FunctionType, MethodType, type} | _CONTAINERS
_LEAVES: Final = {"builtins", "numpy"}


def draws_per_worker(*roots: Any) -> bool:
    """Whether these objects hold a generator, or their code mentions a function that creates or seeds one per worker.

    Searches their classes, functions and attributes, and the user's functions and classes that these call by name.
    """
    todo = deque(roots)
    seen: dict[int, Any] = {}  # by id, which is not used again while the object is here
    for _ in range(_LOOKS):
        if not todo:
            return False
        value = todo.popleft()
        if _is_seeding(value) if type(value) is FunctionType else _is_generator(value):
            return True
        for part in _parts(value):
            if id(part) not in seen and _is_searched(part):
                seen[id(part)] = part
                todo.append(part)
    return False


def _is_searched(value: Any) -> bool:
    kind = type(value)
    if kind in _CONTAINERS:
        return len(value) <= _ELEMENTS
    return kind in _KINDS or kind.__module__ not in _LEAVES


def _parts(value: Any) -> Iterator[Any]:
    if type(value) is FunctionType:
        yield from vars(value).values()  # `__wrapped__` of a decorated function
        if not is_installed_file(value.__code__.co_filename):
            found = (part for _, part in parts(value, most=_ELEMENTS, has_functions=True))
            yield from (part for part in found if not (issubclass(type(part), type) and _is_installed(part)))
    elif issubclass(type(value), type):
        for cls in value.__mro__:
            if cls.__module__ not in _LEAVES and not _is_torchs(cls):
                yield from map(_function_of, list(vars(cls).values()))
    else:
        yield type(value)
        yield from (part for _, part in parts(value, most=_ELEMENTS))


def _function_of(member: Any) -> Any:
    kind = type(member)  # not isinstance, which reads `__class__`: a proxy may raise there
    if issubclass(kind, staticmethod | classmethod):
        return member.__func__
    if issubclass(kind, property):
        return member.fget
    return member.func if issubclass(kind, functools.cached_property) else member


def _is_generator(value: Any) -> bool:
    kind = type(value)
    if kind.__name__ == "Generator" and kind.__module__.partition(".")[0] == "torch":
        return True
    return issubclass(kind, _GENERATORS) and value is not random._inst  # `from random import choice`


def _is_seeding(function: FunctionType) -> bool:
    return function.__name__ in _SEEDING or (not _is_torchs(function) and _mentions(function.__code__))


def _mentions(code: CodeType) -> bool:
    return not _SEEDING.isdisjoint(code.co_names) or any(_mentions(one) for one in code.co_consts if isinstance(one, CodeType))


def _is_torchs(value: Any) -> bool:
    name = value.__globals__.get("__name__") if type(value) is FunctionType else value.__module__
    return isinstance(name, str) and name.partition(".")[0] == "torch"


def _is_installed(cls: type[Any]) -> bool:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return isinstance(file, str) and is_installed_file(file)
