"""Transfer of the dataset to workers: pickled once into one segment, which every worker maps.

Workers map the segment copy-on-write. They share the bytes of arrays and tensors until a worker writes to them, which
only that worker sees. Every worker re-creates plain Python objects.

If pickling fails, ``find_culprit`` locates the object that cannot be pickled.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any, Final, final

import numpy as np

from infeed.errors import WorkerStartError
from infeed.memory.inheriting import starting, tracker_fd
from infeed.memory.pickling import ByValuePickler, TensorReducer, dump_by_value, load, spans
from infeed.memory.segments import SegmentHandle, SegmentReader, SegmentStore

# Maximum number of objects inspected: enough for the attributes of any dataset, but not for a million elements.
_LOOKS: Final = 2000
_ELEMENTS: Final = 100


def find_culprit(root: Any, name: str) -> tuple[str, Any] | None:
    """Return the innermost part of ``root`` that cannot be pickled, with its path, such as ``dataset.cache.lock``."""
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
        # The callback discards buffers, so that large arrays take no time here.
        ByValuePickler(io.BytesIO(), lambda _buffer: None, set(), TensorReducer(keeps_shared=False)).dump(value)
    except Exception:  # a user-defined __reduce__ may raise anything
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
        except Exception:  # a class may raise here to forbid pickling: then it is the culprit itself
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
    except ValueError:  # the cell is still empty
        return None


_FIX: Final = "let the dataset map its files instead of holding them (workers are sent all of it), or use worker='thread'"


@final
@dataclass(frozen=True, slots=True)
class SerializedDataset:
    """Location of the pickle and its buffers, and the modules that it needs."""

    handle: SegmentHandle
    offsets: list[int]
    sizes: list[int]
    modules: frozenset[str]
    fds: tuple[int, ...] = ()  # of the main process; workers must inherit them to unpickle the dataset
    has_tracker: bool = False  # the last descriptor is that of the resource tracker


def send(named: dict[str, Any], obj: object, store: SegmentStore) -> SerializedDataset:
    """Pickle ``obj`` into a segment of ``store``.

    Args:
        named: User arguments by parameter name; searched for the culprit if ``obj`` cannot be pickled.

    Raises:
        WorkerStartError: Something in it cannot be pickled; the message names the object and its path.
    """
    modules: set[str] = set()
    try:
        with starting() as fds:
            data, buffers = dump_by_value(obj, modules, keeps_shared=True)
    except MemoryError:
        raise
    except Exception as error:  # a user-defined __getstate__ or __reduce__ may raise anything
        raise _explained(named, error) from error
    chunks: list[Any] = [data, *buffers]
    sizes = [memoryview(chunk).nbytes for chunk in chunks]
    offsets, total = spans(sizes)
    segment = store.create(total, fix=_FIX)
    with memoryview(segment.memory) as view:
        for chunk, offset, size in zip(chunks, offsets, sizes, strict=True):
            view[offset : offset + size] = memoryview(chunk).cast("B") if size else b""
    tracker = tracker_fd()
    if tracker is not None:
        fds = [*fds, tracker]
    return SerializedDataset(segment.handle, offsets, sizes, frozenset(modules), tuple(fds), tracker is not None)


def receive(serialized: SerializedDataset, reader: SegmentReader) -> Any:
    """Re-create the object in a worker, over a private mapping of the segment."""
    view = memoryview(reader.attach(serialized.handle, private=True))
    chunks = [view[offset : offset + size] for offset, size in zip(serialized.offsets, serialized.sizes, strict=True)]
    return load(bytes(chunks[0]), chunks[1:])


def _explained(named: dict[str, Any], error: Exception) -> WorkerStartError:
    for name, value in named.items():
        culprit = find_culprit(value, name)
        if culprit is not None:
            path, found = culprit
            kind = f"{type(found).__module__}.{type(found).__qualname__}".removeprefix("builtins.")
            reason = f"{path} is a {kind}, which cannot be pickled"
            text = (
                f"{name} cannot be sent to workers: {reason}; open it where it is used (on first use, or in worker_init_fn), "
                f"leave it out with __getstate__, or use worker='thread'\n  the pickler says: {error}"
            )
            return _unpicklable(text, reason)
    text = f"dataset cannot be sent to workers: {error}; use worker='thread' if it must stay in this process"
    return _unpicklable(text, f"the dataset cannot be pickled: {error}")


def _unpicklable(text: str, reason: str) -> WorkerStartError:
    error = WorkerStartError(text)
    error.unpicklable = reason
    return error
