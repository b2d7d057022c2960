"""Find parts of a dataset that use memory again for every worker and would not with ``infeed.share``."""

from __future__ import annotations

import itertools
import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, final

import numpy as np

from infeed.memory.limits import available_bytes
from infeed.memory.shared_arrays import BINS, Shared, pointer_of

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

    def tell(self, worker_count: int) -> str:
        workers = "1 worker" if worker_count == 1 else f"{worker_count} workers"
        size = f"{self.size / 1e6:,.0f} MB"
        place = f"{size}, copied once for {workers}" if self.is_array else f"about {size} in each of {workers}"
        return f"{self.path} is {self.what}, {place}; infeed.share(...) holds it once"


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
    lines = [one.tell(worker_count) for one in heavy[:_MOST_LINES]]
    _LOG.log(logging.WARNING if is_much else logging.INFO, "%s", "\n".join(lines))


def find_heavy(root: Any, name: str) -> list[Heavy]:
    """Return the large arrays and the large lists, tuples and dicts of plain objects in ``root``, largest first."""
    found: list[Heavy] = []
    todo: deque[tuple[str, Any, int]] = deque([(name, root, 0)])
    seen: set[int] = set()
    for _ in range(_LOOKS):
        if not todo:
            break
        path, value, depth = todo.popleft()
        if isinstance(value, (*_ATOMS, Shared, type, ModuleType)) or id(value) in seen:
            continue
        seen.add(id(value))
        heavy = _weigh(path, value)
        if heavy is not None:
            found.append(heavy)
        elif depth < _DEPTH:
            todo.extend((path + step, part, depth + 1) for step, part in _parts(value))
    return sorted(found, key=lambda heavy: -heavy.size)


def _weigh(path: str, value: Any) -> Heavy | None:
    if type(value) is np.ndarray:
        is_large = value.nbytes >= _LEAST_ARRAY and not value.dtype.hasobject and BINS.locate(pointer_of(value)) is None
        return Heavy(path, f"an array of {value.dtype}", value.nbytes, is_array=True) if is_large else None
    torch = sys.modules.get("torch")
    if torch is not None and type(value) is torch.Tensor:
        size = value.numel() * value.element_size()
        is_large = size >= _LEAST_ARRAY and value.device.type == "cpu" and value.layout is torch.strided
        if not is_large or BINS.locate(value.data_ptr()) is not None:
            return None
        return Heavy(path, f"a tensor of {str(value.dtype).removeprefix('torch.')}", size, is_array=True)
    if type(value) in (list, tuple, dict) and len(value) >= _LEAST_ELEMENTS:
        return _weigh_elements(path, value)
    return None


def _weigh_elements(path: str, value: Any) -> Heavy | None:
    sample: Sequence[Any]
    if type(value) is dict:
        sample = [part for item in itertools.islice(value.items(), _SAMPLE) for part in item]
        count = 2 * len(value)
    else:
        sample = value[:: len(value) // _SAMPLE | 1]  # odd step, because elements often alternate between two kinds
        count = len(value)
    if not all(_is_plain(element) for element in sample):
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
    return Heavy(path, what, size, is_array=False)


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, _ATOMS):
        return True
    if depth == _DEPTH:
        return False
    if isinstance(value, list | tuple):
        return all(_is_plain(part, depth + 1) for part in value[:_PARTS])
    if isinstance(value, dict):
        return all(_is_plain(part, depth + 1) for item in itertools.islice(value.items(), _PARTS) for part in item)
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


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) is dict:
        for key, part in itertools.islice(value.items(), _INSIDE):
            yield f"[{key!r}]", part
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value[:_INSIDE]):
            yield f"[{number}]", part
    elif not _has_own_state(type(value)):
        for name, part in tuple(getattr(value, "__dict__", {}).items()):
            yield f".{name}", part
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield f".{name}", getattr(value, name)


def _has_own_state(cls: type[Any]) -> bool:
    """Whether the class defines what is pickled: then some attributes may never be sent to workers."""
    names = ("__reduce_ex__", "__reduce__", "__getstate__")
    return any(getattr(cls, name, None) is not getattr(object, name, None) for name in names)
