"""Finding the one thing deep inside a dataset that cannot be pickled."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, Final

import numpy as np

from infeed.memory.pickling import ByValuePickler
from infeed.memory.tensors import TensorReducer

# Objects looked at before giving up: enough for any dataset's attributes, not for each of a million elements.
_LOOKS: Final = 2000
_ELEMENTS: Final = 100


def find_culprit(root: Any, name: str) -> tuple[str, Any] | None:
    """The innermost part of ``root`` that does not pickle, with its path, such as ``dataset.cache.lock``."""
    if _pickles(root):
        return None
    path, culprit = name, root
    seen = {id(root)}
    for _ in range(_LOOKS):
        inner = next(((step, part) for step, part in _parts(culprit) if id(part) not in seen and not _pickles(part)), None)
        if inner is None:
            break
        step, culprit = inner
        seen.add(id(culprit))
        path += step
    return path, culprit


def _pickles(value: Any) -> bool:
    try:
        # Buffers are handed to a callback that keeps nothing: large arrays cost no time here.
        ByValuePickler(io.BytesIO(), lambda _buffer: None, set(), TensorReducer(keeps_shared=False)).dump(value)
    except Exception:  # whatever the user's __reduce__ raises: it does not pickle
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f" -> {name} (closed over)", _contents(cell)
        for number, default in enumerate(value.__defaults__ or ()):
            yield f" -> default {number}", default
        for name, default in (value.__kwdefaults__ or {}).items():
            yield f" -> default {name}", default
        for name in value.__code__.co_names:
            if name in value.__globals__:
                yield f" -> {name} (global)", value.__globals__[name]
    elif isinstance(value, dict):
        for key in list(value)[:_ELEMENTS]:
            yield f"[{key!r}]", value[key]
    elif isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple):
        for name in getattr(value, "_fields", ()):
            yield f".{name}", getattr(value, name)
    elif isinstance(value, np.ndarray):
        for place in list(np.ndindex(value.shape))[:_ELEMENTS]:
            yield f"[{', '.join(map(str, place))}]", value[place]
    elif isinstance(value, list | tuple | set | frozenset):
        for number, element in enumerate(list(value)[:_ELEMENTS]):
            yield f"[{number}]", element
    else:
        state = _state_of(value)
        for name, part in state.items():
            yield f".{name}", part
        for name in ("func", "args", "keywords"):  # functools.partial
            if hasattr(value, name) and type(value).__module__ == "functools":
                yield f".{name}", getattr(value, name)


def _state_of(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if callable(getattr(type(value), "__getstate__", None)) and "__getstate__" in {
        n for cls in type(value).__mro__[:-1] for n in vars(cls)
    }:
        try:
            state = value.__getstate__()
        except Exception:  # that is how a class says that it does not pickle: then it is the culprit itself
            return {}
        return state if isinstance(state, dict) else {}
    state = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                state[name] = getattr(value, name)
    return state


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
