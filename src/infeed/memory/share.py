"""``infeed.share``: stores lists, tuples, dicts, arrays and tensors once in shared memory, however many processes read them.

A list is a column, and a dict is a column of keys, a column of values and a hash table:

| all elements are         | stored as                                           |
|--------------------------|-----------------------------------------------------|
| int of at most 64 bits   | the narrowest integer type that fits all of them    |
| float                    | float64                                             |
| str, bytes               | one byte string, and the offset of each element     |
| anything else            | one pickle per element, and the offset of each      |

Reading an element creates a new object with the original type and value. Arrays and tensors inside elements are stored
outside their pickles and are read as views. Classes and functions that another process cannot import (from ``__main__``, a
notebook or a local scope) are stored once, by value.
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from bisect import bisect_left
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import repeat
from types import FunctionType
from typing import Any, Final, NoReturn, final

import numpy as np

from infeed.formatting import format_bytes, type_name
from infeed.memory.pickling import dumps_by_value, is_importable
from infeed.memory.segments import round_up
from infeed.memory.shared_arrays import (
    ALIGN,
    Extent,
    Shared,
    SharedArray,
    allocate,
    copy_into,
    is_copying,
    is_plain_tensor,
    order_of,
    share_array,
    share_tensor,
    split_tensor,
    store,
    tensor_over,
)

_TEXT_ERRORS: Final = "surrogatepass"  # a str may contain unpaired surrogates
_MISSING: Final = object()


def share(obj: Any) -> Any:
    """Copy ``obj`` into shared memory. The copy reads like ``obj``, is read-only, and its pickle contains only its location.

    Use it for large lists, tuples, dicts and arrays of a dataset: they are stored once, however many workers read them. You
    can send the copy to any process on this machine. The memory is freed when the last process releases it.

    Args:
        obj: a list, tuple or dict of anything that can be pickled, a NumPy array, or a CPU tensor of torch. Tensors stay
            writable, but only the process that writes sees the change.

    Returns:
        The shared copy; ``obj`` itself if it is shared already.

    Raises:
        TypeError: ``obj`` has another type.
        MemoryLimitError: not enough memory is available.

    Examples:
        >>> import infeed
        >>> names = infeed.share(["cat", "dog", "bird"])
        >>> names[1], len(names), "dog" in names, list(names[1:])
        ('dog', 3, True, ['dog', 'bird'])
    """
    if isinstance(obj, Shared):
        return obj
    if type(obj) is list or type(obj) is tuple:
        return _share_sequence(SharedList if type(obj) is list else SharedTuple, obj)
    if type(obj) is dict:
        keys, values = _share_sequence(SharedTuple, list(obj)), _share_sequence(SharedTuple, list(obj.values()))
        return SharedDict(keys, values, _build_table(obj))
    if type(obj) in (np.ndarray, np.memmap) and not obj.dtype.hasobject:
        return share_array(obj)
    torch = sys.modules.get("torch")
    if torch is not None and type(obj) is torch.Tensor and is_plain_tensor(torch, obj):
        return share_tensor(obj)
    name = type_name(obj)
    base = next((cls.__name__ for cls in (list, tuple, dict) if isinstance(obj, cls)), None)
    if base is not None:
        fix = f"the copy would lose the type, so pass {base}(...) if that is acceptable"
    elif isinstance(obj, np.ndarray) and obj.dtype.hasobject:
        name, fix = "an array of objects", "pass array.tolist()"
    else:
        fix = "share the large lists and arrays that it contains instead"
    raise TypeError(f"share() accepts a list, tuple, dict, NumPy array or CPU tensor, not {name}; {fix}")


share.__module__ = "infeed"  # the public path, which pickles refer to


# --- columns


@final
class _Column:
    """The elements of a list, or the keys or values of a dict. ``get`` reads one; it does not check the position."""

    __slots__ = ("_keeps", "extents", "get", "kind")

    def __init__(self, kind: str, extents: tuple[Extent, ...], keeps: tuple[Shared, ...] = ()) -> None:
        self.kind = kind
        self.extents = extents
        self.get: Callable[[int], Any] = _READERS[kind](*extents)
        self._keeps = keeps  # shared objects inside elements: their pickles refer to them

    def __reduce__(self) -> Any:
        return _Column, (self.kind, self.extents)


def _read_numbers(numbers: Extent) -> Callable[[int], Any]:
    return numbers.view().__getitem__


def _read_bytes(data: Extent, places: Extent) -> Callable[[int], bytes]:
    memory, begins = data.memory, places.view()  # slicing the mapping is faster than slicing a view of it
    return lambda place: memory[begins[place] : begins[place + 1]]


def _read_texts(data: Extent, places: Extent) -> Callable[[int], str]:
    memory, begins = data.memory, places.view()
    return lambda place: memory[begins[place] : begins[place + 1]].decode("utf-8", _TEXT_ERRORS)


def _read_objects(data: Extent, places: Extent) -> Callable[[int], Any]:
    memory, begins, loads = data.memory, places.view(), pickle.loads
    return lambda place: loads(memory[begins[place] : begins[place + 1]])


def _read_objects_beside(data: Extent, places: Extent, beside: Extent) -> Callable[[int], Any]:
    memory, begins, loads = data.memory, places.view(), pickle.loads
    # All placeholders in the pickles stand for the same buffer.
    buffers: Any = repeat(beside.private_array() if beside.code == _TENSORS else beside.array())
    return lambda place: loads(memory[begins[place] : begins[place + 1]], buffers=buffers)


_READERS: Final[dict[str, Callable[..., Callable[[int], Any]]]] = {
    "int": _read_numbers,
    "float": _read_numbers,
    "bytes": _read_bytes,
    "str": _read_texts,
    "objects": _read_objects,
    "objects and arrays": _read_objects_beside,
}


def _pack(values: Sequence[Any]) -> _Column:
    types = set(map(type, values))
    if types == {int}:
        try:
            numbers = np.array(values, np.int64)
        except OverflowError:
            return _pack_objects(values)
        least, most = numbers.min(), numbers.max()
        code = next(code for code in "bhiq" if np.iinfo(code).min <= least and most <= np.iinfo(code).max)
        return _Column("int", (_store_numbers(numbers, code),))
    if types == {float}:
        return _Column("float", (_store_numbers(values, "d"),))
    if types == {bytes}:
        return _Column("bytes", _store_pieces(b"".join(values), map(len, values)))
    if types == {str}:
        text = "".join(values)
        if text.isascii():
            return _Column("str", _store_pieces(text.encode("ascii"), map(len, values)))
        pieces = [value.encode("utf-8", _TEXT_ERRORS) for value in values]
        return _Column("str", _store_pieces(b"".join(pieces), map(len, pieces)))
    return _pack_objects(values)


def _pack_objects(values: Sequence[Any]) -> _Column:
    stream = io.BytesIO()
    pickler = _ElementPickler(stream)
    ends = [0]
    for value in values:
        pickler.dump(value)
        pickler.clear_memo()  # each pickle must be readable without the others
        ends.append(stream.tell())
    extents = _store_pieces(stream.getbuffer(), np.diff(np.asarray(ends, np.int64)))
    keeps = tuple(pickler.keeps)
    if not pickler.beside:
        return _Column("objects", extents, keeps)
    beside = allocate(pickler.beside_size, _TENSORS if pickler.has_tensors else _ARRAYS)
    for begin, array in pickler.beside:
        copy_into(beside, begin, array)
    return _Column("objects and arrays", (*extents, beside), keeps)


def _store_numbers(numbers: Any, code: str) -> Extent:
    return store(np.asarray(numbers, code), code)


def _store_pieces(data: Any, sizes: Any) -> tuple[Extent, Extent]:
    """Store concatenated bytes, and the offset of each piece in the bin, so that readers need no addition."""
    extent = store(np.frombuffer(data, np.uint8))
    ends = np.cumsum([extent.begin, *sizes], dtype=np.int64)  # on Windows, NumPy 1 has integers of 32 bits
    return extent, _store_numbers(ends, "I" if ends[-1] < 1 << 32 else "Q")


# Codes of an extent with arrays: whether some are read as tensors, which need writable memory.
_ARRAYS: Final = "B"
_TENSORS: Final = "c"
# In pickles, a placeholder for this extent.
_BESIDE: Final = pickle.PickleBuffer(bytearray())


@final
class _ElementPickler(pickle.Pickler):
    """Pickles elements, and collects arrays, tensors and definitions that are stored beside the pickles."""

    def __init__(self, stream: io.BytesIO) -> None:
        # Pickle the buffers of other types in-band: their owners may expect writable copies.
        super().__init__(stream, 5, buffer_callback=lambda buffer: buffer is not _BESIDE)
        self.beside: list[tuple[int, np.ndarray[Any, Any]]] = []
        self.beside_size = 0
        self.has_tensors = False
        self.keeps: list[Shared] = []
        self._definitions: dict[Any, tuple[Any, ...]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType):
            if is_importable(obj):
                return NotImplemented
            if obj not in self._definitions:
                pickled = np.frombuffer(dumps_by_value(obj), np.uint8)
                self._definitions[obj] = self._add(pickled, len(pickled))
            return _load_definition, self._definitions[obj]
        if isinstance(obj, np.ndarray):
            if obj.dtype.hasobject or type(obj) not in (np.ndarray, np.memmap, SharedArray):
                return NotImplemented
            dtype = obj.dtype if obj.dtype.names or obj.dtype.metadata else obj.dtype.str
            return _load_array, self._add(np.asarray(obj), dtype, obj.shape, order_of(obj))
        if isinstance(obj, Shared):
            self.keeps.append(obj)
            return NotImplemented
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and is_plain_tensor(torch, obj):
            self.has_tensors = True
            return tensor_over, self._add(*split_tensor(obj))
        return NotImplemented

    def _add(self, array: np.ndarray[Any, Any], *arguments: Any) -> tuple[Any, ...]:
        begin = round_up(self.beside_size, ALIGN)
        self.beside.append((begin, array))
        self.beside_size = begin + array.nbytes
        return _BESIDE, begin, *arguments


def _load_array(beside: np.ndarray[Any, Any], begin: int, dtype: Any, shape: tuple[int, ...], order: Any) -> Any:
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, beside, begin, order=order)
    array.flags.writeable = False
    return array


def _load_definition(beside: np.ndarray[Any, Any], begin: int, size: int) -> Any:
    return _definition(bytes(beside[begin : begin + size]))


@lru_cache(maxsize=1024)
def _definition(pickled: bytes) -> Any:
    return pickle.loads(pickled)


# --- lists and tuples


class _SharedSequence(Sequence[Any], Shared):
    __slots__ = ("__weakref__", "_column", "_get", "_places")

    _original: type[Any]

    def __init__(self, column: _Column, places: range) -> None:
        self._column = column
        self._get = column.get
        self._places = places  # positions of the elements in the column: all of them, or a slice

    @property
    def extents(self) -> tuple[Extent, ...]:
        return self._column.extents

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        try:
            place = self._places[index]
        except IndexError:
            raise IndexError(f"{self._original.__name__} index out of range") from None
        except TypeError:
            name = self._original.__name__
            raise TypeError(f"{name} indices must be integers or slices, not {type(index).__name__}") from None
        if type(place) is range:
            return type(self)(self._column, place)
        return self._get(place)

    def __iter__(self) -> Iterator[Any]:
        return map(self._get, self._places)

    def __reversed__(self) -> Iterator[Any]:
        return map(self._get, reversed(self._places))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, self._original | type(self)):
            return NotImplemented
        return other is self or (len(self) == len(other) and all(map(_are_equal, self, other)))

    def __add__(self, other: Any) -> Any:
        return self._original(self) + (self._original(other) if isinstance(other, type(self)) else other)

    def __radd__(self, other: Any) -> Any:
        return other + self._original(self)

    def __mul__(self, times: Any) -> Any:
        return self._original(self) * times

    __rmul__ = __mul__

    def __repr__(self) -> str:
        kind = self._column.kind.removesuffix(" and arrays")
        return f"<shared {self._original.__name__} of {len(self):,} {kind}, {_format_size(self.extents)}>"

    def __reduce__(self) -> Any:
        return (share, (self._original(self),)) if is_copying() else (type(self), (self._column, self._places))


def _share_sequence(cls: Any, values: Sequence[Any]) -> Any:
    return cls(_pack(values), range(len(values)))


def _are_equal(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


def _format_size(extents: Sequence[Extent]) -> str:
    return format_bytes(sum(round_up(max(extent.size, 1), ALIGN) for extent in extents))


@final
class SharedList(_SharedSequence):
    """A list in shared memory."""

    __slots__ = ()
    _original = list
    __hash__: None = None  # type: ignore[assignment]

    def copy(self) -> list[Any]:
        """Return a regular, mutable list."""
        return list(self)


@final
class SharedTuple(_SharedSequence):
    """A tuple in shared memory."""

    __slots__ = ()
    _original = tuple

    def __hash__(self) -> int:
        return hash(tuple(self))


# --- dicts


@final
class SharedDict(Mapping[Any, Any], Shared):
    """A dict in shared memory."""

    __slots__ = ("__weakref__", "_hashes", "_key_at", "_keys", "_local", "_places", "_table", "_value_at", "_values")

    def __init__(self, keys: SharedTuple, values: SharedTuple, table: tuple[Extent, Extent] | None) -> None:
        self._keys = keys
        self._values = values
        self._key_at, self._value_at = keys._get, values._get  # positions found in the table need no check
        self._table = table  # None if only Python can hash some key
        hashes, places = table or (None, None)
        self._hashes = None if hashes is None else hashes.view()
        self._places = None if places is None else places.view()
        self._local: dict[Any, int] | None = None

    def _find(self, key: Any) -> int | None:
        """Return the position of the key, or ``None``."""
        key_hash = stable_hash(key)
        hashes, places = self._hashes, self._places
        if key_hash is None or hashes is None or places is None:
            # Only Python can hash this key, and the hash differs between processes, so each process builds a dict when needed.
            if self._local is None:
                self._local = {one: place for place, one in enumerate(self._keys)}
            return self._local.get(key)
        number = bisect_left(hashes, key_hash)
        while number < len(hashes) and hashes[number] == key_hash:
            place: int = places[number]
            if _are_equal(self._key_at(place), key):
                return place
            number += 1
        return None

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, key: Any) -> Any:
        place = self._find(key)
        if place is None:
            raise KeyError(key)
        return self._value_at(place)

    def __contains__(self, key: Any) -> bool:
        return self._find(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        place = self._find(key)
        return default if place is None else self._value_at(place)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self._keys)

    def keys(self) -> KeysView[Any]:
        return _Keys(self)

    def values(self) -> ValuesView[Any]:
        return _Values(self)

    def items(self) -> ItemsView[Any, Any]:
        return _Items(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dict | SharedDict):
            return NotImplemented
        if len(self) != len(other):
            return False
        return all(_are_equal(value, other.get(key, _MISSING)) for key, value in self.items())

    __hash__: None = None  # type: ignore[assignment]

    def __or__(self, other: Any) -> Any:
        return dict(self) | (dict(other) if isinstance(other, SharedDict) else other)

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def copy(self) -> dict[Any, Any]:
        """Return a regular, mutable dict."""
        return dict(self.items())

    def __repr__(self) -> str:
        extents = [*self._keys.extents, *self._values.extents, *(self._table or ())]
        return f"<shared dict of {len(self):,} items, {_format_size(extents)}>"

    def __reduce__(self) -> Any:
        return (share, (dict(self.items()),)) if is_copying() else (SharedDict, (self._keys, self._values, self._table))


class _Keys(KeysView[Any]):
    _mapping: SharedDict

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self._mapping)


class _Values(ValuesView[Any]):
    _mapping: SharedDict

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mapping._values)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self._mapping._values)

    def __contains__(self, value: object) -> bool:
        return value in self._mapping._values


class _Items(ItemsView[Any, Any]):
    _mapping: SharedDict

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(self._mapping, self._mapping.values(), strict=True)

    def __reversed__(self) -> Iterator[tuple[Any, Any]]:
        return zip(reversed(self._mapping), reversed(self._mapping._values), strict=True)


def _build_table(keys: Mapping[Any, Any]) -> tuple[Extent, Extent] | None:
    """Store the sorted hashes of the keys, and the position of each key. Return ``None`` if a key has no stable hash."""
    found = list(map(stable_hash, keys))
    if None in found:
        return None
    hashes = np.array(found, np.uint64)
    order = np.argsort(hashes, kind="stable")
    return _store_numbers(hashes[order], "Q"), _store_numbers(order, "I" if len(order) < 1 << 32 else "Q")


_MASK: Final = (1 << 64) - 1
# Types that use Python's numeric hash: equal for equal numbers, and the same in every process.
_PYTHON_NUMBERS: Final = (int, float, complex, Decimal, Fraction)
_PYTHON_KEYS: Final = (str, bytes, *_PYTHON_NUMBERS, tuple, frozenset)


def stable_hash(key: Any) -> int | None:
    """Return a hash of at most 64 bits that is the same in every process; ``None`` if the key type is not supported.

    Python randomizes the hash of text in each process. Keys that a dict treats as equal have equal stable hashes.

    >>> stable_hash(1) == stable_hash(True) == stable_hash(1.0) != stable_hash("1")
    True

    Raises:
        TypeError: The key is not hashable.
    """
    if type(key) is str:  # by far the most common type
        return zlib.crc32(key.encode("utf-8", _TEXT_ERRORS))
    own = hash(key)
    if type(key) is int:
        return own & _MASK
    # Treat a subclass as its base type only if both hash alike: only then can a dict look up one with the other.
    base = next((base for base in _PYTHON_KEYS if isinstance(key, base)), None)
    if base is not None and own != base.__hash__(key):
        return None
    if key is None:
        return 0
    if isinstance(key, str):
        return zlib.crc32(str.encode(key, "utf-8", _TEXT_ERRORS))
    if isinstance(key, bytes):
        return zlib.crc32(key)
    if isinstance(key, (*_PYTHON_NUMBERS, np.number, np.bool_)) and not isinstance(key, np.timedelta64):
        return own & _MASK if key == key else 0  # NaN equals no key, and its own hash depends on its address
    if isinstance(key, tuple | frozenset):
        parts = list(map(stable_hash, key))
        return None if None in parts else hash(tuple(parts) if isinstance(key, tuple) else frozenset(parts)) & _MASK
    return None


# --- writing is refused


def _refusal(name: str, fix: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_arguments: Any, **_options: Any) -> NoReturn:
        raise TypeError(f"{name}: {self!r} is read-only; {fix}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = "Raises TypeError: a shared object is read-only."
    return refuse


_WRITES: Final[dict[type[Any], str]] = {
    SharedList: "append clear extend insert pop remove reverse sort __setitem__ __delitem__ __iadd__ __imul__",
    SharedTuple: "__setitem__ __delitem__",
    SharedDict: "clear pop popitem setdefault update __setitem__ __delitem__ __ior__",
}
for _cls, _names in _WRITES.items():
    _original = _cls.__name__.removeprefix("Shared").lower()
    for _name in _names.split():
        setattr(_cls, _name, _refusal(_name, f"change the original before share(), or a copy: {_original}(...)"))
