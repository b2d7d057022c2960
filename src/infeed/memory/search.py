"""Search user objects: for what cannot be pickled, and for what uses memory again in every worker.

`walk` is the one search of user objects breadth first; `workers/epoch_hooks.py` and `doctor/probe.py` use it as well.
"""

from __future__ import annotations

import io
import itertools
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final, TypeAlias, final

import numpy as np

from infeed.formatting import format_bytes, format_count
from infeed.memory.limits import available_bytes
from infeed.memory.pickling import ByValuePickler, TensorReducer, scripts_by_value
from infeed.memory.shared_arrays import BINS, Shared, pointer_of

# Modules whose objects have no attributes of interest.
_OPAQUE_MODULES: Final = ("builtins", "_io", "numpy", "weakref")

# How to append a part to the path of its owner: a format, and its argument.
Step: TypeAlias = tuple[str, Any]
Steps: TypeAlias = tuple[Step, ...]


def parts(value: Any, *, most: int, has_functions: bool = False) -> Iterator[tuple[Step, Any]]:
    """Yield up to ``most`` elements of a container, or all attributes of another object, and how to reach each.

    Runs no code of the object: it asks for types and never calls ``isinstance``, and reads ``__dict__`` and slots directly.

    Args:
        has_functions: Also yield what a function refers to: closure, defaults and globals.
    """
    cls = type(value)
    if cls is MethodType:
        yield (".__self__", None), value.__self__
    elif cls is FunctionType:
        if has_functions:
            yield from _parts_of_function(value)
    elif issubclass(cls, dict):
        yield from ((("[{!r}]", key), part) for key, part in itertools.islice(dict.items(value), most))
    elif issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        yield from (((".{}", name), part) for name, part in zip(getattr(cls, "_fields", ()), value, strict=False))
    elif issubclass(cls, list | tuple | set | frozenset):
        yield from ((("[{}]", number), part) for number, part in enumerate(itertools.islice(value, most)))
    elif issubclass(cls, np.ndarray):
        if value.dtype.hasobject:
            for place in itertools.islice(np.ndindex(value.shape), most):
                yield ("[{}]", ", ".join(map(str, place))), value[place]
    elif not issubclass(cls, type) and cls.__module__.partition(".")[0] not in _OPAQUE_MODULES:
        yield from (((".{}", name), part) for name, part in attributes(value).items())


def walk(root: Any, visit: Callable[[Any, Steps], bool], *, looks: int, depth: int, most: int) -> None:
    """Visit ``root`` and what it refers to, breadth first, each object once.

    Args:
        visit: Called with an object and the steps to it. Returns whether to walk into its parts.
        looks: Maximum number of objects.
        depth: Maximum number of steps.
        most: Maximum number of elements per container.
    """
    todo: deque[tuple[Any, Steps]] = deque([(root, ())])
    seen: set[int] = set()
    for _ in range(looks):
        if not todo:
            return
        value, steps = todo.popleft()
        if id(value) not in seen:
            seen.add(id(value))
            if visit(value, steps) and len(steps) < depth:
                todo.extend((part, (*steps, step)) for step, part in parts(value, most=most))


def path_of(name: str, steps: Steps) -> str:
    """Return the path to an object as the user would write it, such as ``dataset.files[3]``."""
    return name + "".join(form.format(argument) for form, argument in steps)


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes in the object's ``__dict__`` and in its slots."""
    try:
        found = dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        found = {}
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if type(member) is MemberDescriptorType:
                try:
                    found.setdefault(name, member.__get__(value))
                except AttributeError:  # not set
                    continue
    return found


def _parts_of_function(function: FunctionType) -> Iterator[tuple[Step, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield (" -> {} (closed over)", name), _contents(cell)
    for number, default in enumerate(function.__defaults__ or ()):
        yield (" -> default {}", number), default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield (" -> default {}", name), default
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield (" -> {} (global)", name), function.__globals__[name]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None


# --- what cannot be pickled

# Maximum number of objects inspected: enough for the attributes of any dataset, but not for a million elements.
_CULPRIT_LOOKS: Final = 2000
_CULPRIT_ELEMENTS: Final = 100
# Steps of a long path that are shown at either end.
_SHOWN_STEPS: Final = 4


@scripts_by_value()
def find_culprit(root: Any, name: str, *, keeps_shared: bool = False) -> tuple[str, Any] | None:
    """Return the innermost part of ``root`` that cannot be pickled, with its path, such as ``dataset.cache.lock``.

    Args:
        keeps_shared: As for ``dump_by_value``.
    """
    if _pickles(root, keeps_shared):
        return None
    culprit, steps = root, []
    seen = {id(root)}
    for _ in range(_CULPRIT_LOOKS):
        inside = _pickled_parts(culprit)
        inner = next(((step, part) for step, part in inside if id(part) not in seen and not _pickles(part, keeps_shared)), None)
        if inner is None:
            break
        step, culprit = inner
        steps.append(step)
        seen.add(id(culprit))
    return _short_path(name, steps), culprit


def _short_path(name: str, steps: list[Step]) -> str:
    """Return the path with the middle of long ones left out, as in ``dataset.a.b.c … .x.y.z``."""
    if len(steps) <= 2 * _SHOWN_STEPS + 1:
        return path_of(name, tuple(steps))
    return f"{path_of(name, tuple(steps[:_SHOWN_STEPS]))} … {path_of('', tuple(steps[-_SHOWN_STEPS:])).lstrip()}"


def _pickles(value: Any, keeps_shared: bool) -> bool:
    try:
        # The callback discards buffers, so that large arrays take no time here.
        ByValuePickler(io.BytesIO(), lambda _buffer: None, set(), TensorReducer(keeps_shared=keeps_shared)).dump(value)
    except Exception:  # a user-defined __reduce__ may raise anything
        return False
    return True


def _pickled_parts(value: Any) -> Iterator[tuple[Step, Any]]:
    """Yield the parts of the state that is pickled if the class defines one, otherwise all parts."""
    if any("__getstate__" in vars(cls) for cls in type(value).__mro__[:-1]):
        try:
            state = value.__getstate__()
        except Exception:  # a class may raise here to forbid pickling: then it is the culprit itself
            return iter(())
        if isinstance(state, dict):
            return (((".{}", name), part) for name, part in state.items())
    return parts(value, most=_CULPRIT_ELEMENTS, has_functions=True)


# --- what uses memory again in every worker

# Search limits, so that the search takes 1 to 2 ms for any dataset.
_LOOKS: Final = 1000
_DEPTH: Final = 5
_INSIDE: Final = 64  # elements of a container that are searched
_SAMPLE: Final = 200  # elements sampled to estimate the size of a large container
_PARTS: Final = 20
# Reporting thresholds.
_LEAST_ELEMENTS: Final = 10_000
_LEAST_BYTES: Final = 4 << 20
_LEAST_ARRAY: Final = 32 << 20

# Search a dataset only if its pickle is at least this large, or its arrays at least _LEAST_ARRAY.
_LEAST_PICKLE: Final = 4 << 20
# Warn if the extra memory in workers exceeds this many bytes, or this fraction of the available memory.
_MUCH_BYTES: Final = 256_000_000
_MUCH_OF_AVAILABLE: Final = 0.05
_MOST_LINES: Final = 3

_LOG: Final = logging.getLogger("infeed")
_ATOMS: Final = (str, bytes, int, float, complex, bool, type(None))


@final
@dataclass(frozen=True, slots=True)
class Heavy:
    """A large object, with its path as the user would write it."""

    path: str
    what: str  # for example "a list of 2,000,000 str"
    size: int
    is_array: bool  # if so, workers share one copy; otherwise each has a copy

    def cost(self, worker_count: int) -> int:
        return self.size if self.is_array else self.size * worker_count

    def describe(self, worker_count: int) -> str:
        workers = format_count(worker_count, "worker")
        size = format_bytes(self.size)
        if self.is_array:
            return f"{self.path} is {self.what}, {size}, copied once for {workers}; infeed.share(...) avoids the copy"
        return f"{self.path} is {self.what}, about {size} in each of {workers}; infeed.share(...) stores it once"


def advise(dataset: Any, sizes: Sequence[int], worker_count: int) -> None:
    """Log large objects of a dataset that is sent to workers, if ``infeed.share`` could store them once.

    Args:
        sizes: Sizes of the dataset's pickle and of its buffers.
    """
    if sizes[0] < _LEAST_PICKLE and sum(sizes[1:]) < _LEAST_ARRAY:
        return
    heavy = find_heavy(dataset, "dataset")
    if not heavy:
        return
    cost = sum(one.cost(worker_count) for one in heavy)
    # The second copy of an array does not grow with the number of workers: it matters only if memory is short.
    growing = sum(one.cost(worker_count) for one in heavy if not one.is_array)
    is_much = growing > _MUCH_BYTES or cost > _MUCH_OF_AVAILABLE * available_bytes()
    lines = [one.describe(worker_count) for one in heavy[:_MOST_LINES]]
    _LOG.log(logging.WARNING if is_much else logging.INFO, "%s", "\n".join(lines))


def find_heavy(root: Any, name: str) -> list[Heavy]:
    """Return the large arrays and the large lists, tuples and dicts of plain objects in ``root``, largest first."""
    found: list[Heavy] = []

    def visit(value: Any, steps: Steps) -> bool:
        if isinstance(value, (*_ATOMS, Shared, type, ModuleType)):
            return False
        weighed = _weigh(value)
        if weighed is not None:
            found.append(Heavy(path_of(name, steps), *weighed))
            return False
        return isinstance(value, dict | list | tuple) or not _has_own_state(type(value))

    walk(root, visit, looks=_LOOKS, depth=_DEPTH, most=_INSIDE)
    return sorted(found, key=lambda heavy: -heavy.size)


def _weigh(value: Any) -> tuple[str, int, bool] | None:
    """Return the fields of ``Heavy`` that follow the path, if the object is large."""
    if type(value) is np.ndarray:
        is_large = value.nbytes >= _LEAST_ARRAY and not value.dtype.hasobject and BINS.locate(pointer_of(value)) is None
        return (f"an array of {value.dtype}", value.nbytes, True) if is_large else None
    torch = sys.modules.get("torch")
    if torch is not None and type(value) is torch.Tensor:
        size = value.numel() * value.element_size()
        is_large = size >= _LEAST_ARRAY and value.device.type == "cpu" and value.layout is torch.strided
        if not is_large or BINS.locate(value.data_ptr()) is not None:
            return None
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}", size, True
    if type(value) in (list, tuple, dict) and len(value) >= _LEAST_ELEMENTS:
        return _weigh_elements(value)
    return None


def _weigh_elements(value: Any) -> tuple[str, int, bool] | None:
    sample: Sequence[Any]
    if type(value) is dict:
        sample = [part for item in itertools.islice(value.items(), _SAMPLE) for part in item]
        count = 2 * len(value)
    else:
        sample = value[:: len(value) // _SAMPLE | 1]  # odd step, because elements often alternate between two kinds
        count = len(value)
    if not all(_is_plain_tree(element) for element in sample):
        return None
    # Count repeated objects once: a process holds a single copy of each.
    once = {id(element): element for element in sample}
    size = int(sys.getsizeof(value) + sum(map(_size, once.values())) / len(sample) * count)
    if size < _LEAST_BYTES:
        return None
    if type(value) is dict:
        what = f"a dict of {len(value):,} items"
    else:
        types = {type(element).__name__ for element in sample}
        what = f"a {type(value).__name__} of {len(value):,} {types.pop() if len(types) == 1 else 'objects'}"
    return what, size, False


def _is_plain_tree(value: Any, depth: int = 0) -> bool:
    if isinstance(value, _ATOMS):
        return True
    if depth == _DEPTH:
        return False
    if isinstance(value, list | tuple):
        return all(_is_plain_tree(part, depth + 1) for part in value[:_PARTS])
    if isinstance(value, dict):
        return all(_is_plain_tree(part, depth + 1) for item in itertools.islice(value.items(), _PARTS) for part in item)
    return False


def _size(value: Any) -> float:
    """Return the bytes of a plain object and its contents, estimated from its first elements if it is long."""
    if value is None or isinstance(value, bool) or (type(value) is int and -5 <= value <= 256):
        return 0  # one instance per process
    size: float = sys.getsizeof(value)
    if isinstance(value, list | tuple | dict) and value:
        parts = list(itertools.islice(value.values() if isinstance(value, dict) else value, _PARTS))
        size += sum(map(_size, parts)) / len(parts) * len(value)
    return size


def _has_own_state(cls: type[Any]) -> bool:
    """Whether the class defines what is pickled: then some attributes may never be sent to workers."""
    names = ("__reduce_ex__", "__reduce__", "__getstate__")
    return any(getattr(cls, name, None) is not getattr(object, name, None) for name in names)
