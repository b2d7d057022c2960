"""Python objects stored as columns of bytes: packed once, read one element at a time.

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
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, final

import numpy as np

from infeed.memory.chunks import Chunks, order_of
from infeed.memory.holding import Extent, Held
from infeed.memory.pickling import dump_by_value
from infeed.memory.sharedarrays import array_in, is_plain_tensor, tensor_in

_PROTOCOL: Final = 5
_TEXT_ERRORS: Final = "surrogatepass"  # a str may contain unpaired surrogates


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Type of a column, and the offsets of its data in the extent."""

    kind: str  # "int", "float", "str", "bytes" or "object"
    count: int
    begin: int
    code: str = ""  # type of the numbers or of the offsets, as a `struct` format character
    places: int = 0
    parts: tuple[int, int] | None = None  # offset and size of the pickled classes and functions
    has_beside: bool = False  # whether pickles refer to data outside them (arrays, tensors, classes)

    def open(self, extent: Extent) -> Column:
        column: Column = _COLUMNS[self.kind](self, extent)
        return column

    def numbers(self, extent: Extent) -> memoryview:
        """Return the data of a column of numbers."""
        return _cast(extent, self.begin, self.count, self.code)


class Column(ABC):
    """Reads elements by position. Positions are not checked; they must be in ``range(count)``."""

    __slots__ = ("count",)

    def __init__(self, layout: Layout) -> None:
        self.count = layout.count

    @abstractmethod
    def get(self, place: int) -> Any: ...


@final
class _Numbers(Column):
    __slots__ = ("_numbers",)

    def __init__(self, layout: Layout, extent: Extent) -> None:
        super().__init__(layout)
        self._numbers = layout.numbers(extent)

    def get(self, place: int) -> Any:
        return self._numbers[place]


class _Pieces(Column):
    """Elements of varying size."""

    __slots__ = ("_memory", "_places")

    def __init__(self, layout: Layout, extent: Extent) -> None:
        super().__init__(layout)
        self._memory = extent.memory
        self._places = _cast(extent, layout.places, layout.count + 1, layout.code)


@final
class _Bytes(_Pieces):
    __slots__ = ()

    def get(self, place: int) -> bytes:
        places = self._places
        return self._memory[places[place] : places[place + 1]]


@final
class _Texts(_Pieces):
    __slots__ = ()

    def get(self, place: int) -> str:
        places = self._places
        return self._memory[places[place] : places[place + 1]].decode("utf-8", _TEXT_ERRORS)


@final
class _Objects(_Pieces):
    __slots__ = ("_has_beside", "extent", "parts")

    def __init__(self, layout: Layout, extent: Extent) -> None:
        super().__init__(layout, extent)
        self.extent = extent
        self._has_beside = layout.has_beside
        self.parts: list[Any] = []
        if layout.parts is not None:
            begin, size = layout.parts
            self.parts = pickle.loads(extent.view()[begin : begin + size])

    def get(self, place: int) -> Any:
        places = self._places
        data = self._memory[places[place] : places[place + 1]]
        if not self._has_beside:
            return pickle.loads(data)
        before, _reading.column = _reading.column, self
        try:
            return pickle.loads(data)
        finally:
            _reading.column = before


_COLUMNS: Final[dict[str, Any]] = {"int": _Numbers, "float": _Numbers, "bytes": _Bytes, "str": _Texts, "object": _Objects}


@final
class _Reading(threading.local):
    column: _Objects | None = None


# The column whose element this thread is unpickling.
_reading: Final = _Reading()


def _cast(extent: Extent, begin: int, count: int, code: str) -> memoryview:
    size = count * np.dtype(code).itemsize
    return extent.view()[begin : begin + size].cast(code)  # type: ignore[call-overload, no-any-return]  # any format character


# --- packing


def pack(values: Sequence[Any], chunks: Chunks) -> Layout:
    """Add the elements to ``chunks`` and return the layout that reads them."""
    types = set(map(type, values))
    if types == {int}:
        try:
            return _pack_ints(values, chunks)
        except OverflowError:
            return _pack_objects(values, chunks)
    if types == {float}:
        return Layout("float", len(values), chunks.add(np.array(values, np.float64)), "d")
    if types == {str}:
        return _pack_texts(values, chunks)
    if types == {bytes}:
        return _pack_pieces("bytes", b"".join(values), list(map(len, values)), chunks)
    return _pack_objects(values, chunks)


def _pack_ints(values: Sequence[int], chunks: Chunks) -> Layout:
    numbers = np.array(values, np.int64)
    least, most = numbers.min(), numbers.max()
    code = next(code for code in "bhiq" if np.iinfo(code).min <= least and most <= np.iinfo(code).max)
    return Layout("int", len(values), chunks.add(numbers.astype(code)), code)


def _pack_texts(values: Sequence[str], chunks: Chunks) -> Layout:
    text = "".join(values)
    if text.isascii():
        return _pack_pieces("str", text.encode("ascii"), list(map(len, values)), chunks)
    pieces = [value.encode("utf-8", _TEXT_ERRORS) for value in values]
    return _pack_pieces("str", b"".join(pieces), list(map(len, pieces)), chunks)


def _pack_pieces(kind: str, data: bytes, sizes: list[int], chunks: Chunks) -> Layout:
    begin = chunks.add(data)
    # Use half the range of uint32: `Chunks.held` later adds the offset of the extent in its bin.
    code = "I" if begin + len(data) < 1 << 31 else "Q"
    places = np.zeros(len(sizes) + 1, code)
    np.cumsum(sizes, out=places[1:], dtype=code)
    places += places.dtype.type(begin)
    return Layout(kind, len(sizes), begin, code, chunks.add(places, are_places=True))


def _pack_objects(values: Sequence[Any], chunks: Chunks) -> Layout:
    stream = io.BytesIO()
    pickler = _ElementPickler(stream, chunks)
    ends = []
    for value in values:
        pickler.dump(value)
        pickler.clear_memo()  # each pickle must be readable without the others
        ends.append(stream.tell())
    layout = _pack_pieces("object", stream.getvalue(), np.diff(ends, prepend=0).tolist(), chunks)
    parts = None
    if pickler.parts:
        data, buffers = dump_by_value(pickler.parts, set())
        assert not buffers
        parts = chunks.add(data), len(data)
    return Layout(layout.kind, layout.count, layout.begin, layout.code, layout.places, parts, pickler.has_beside)


@final
class _ElementPickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, chunks: Chunks) -> None:
        super().__init__(stream, _PROTOCOL)
        self.parts: list[Any] = []
        self.has_beside = False
        self._chunks = chunks
        self._numbers: dict[int, int] = {}  # index in parts, by id

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType):
            return NotImplemented if _is_importable(obj) else self._keep_beside(_part, self._number_of(obj))
        if isinstance(obj, Held) and not isinstance(obj, np.ndarray):
            self._chunks.keeps.append(obj)
            return NotImplemented
        if isinstance(obj, np.ndarray):
            return self._reduce_array(obj)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and is_plain_tensor(torch, obj):
            raw = obj.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            name = str(obj.dtype).removeprefix("torch.")
            return self._keep_beside(_tensor, self._chunks.add(raw), name, tuple(obj.shape))
        return NotImplemented

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        if array.dtype.hasobject or (not isinstance(array, Held) and type(array) not in (np.ndarray, np.memmap)):
            return NotImplemented
        array = np.asarray(array)
        dtype = array.dtype if array.dtype.names or array.dtype.metadata else array.dtype.str
        return self._keep_beside(_array, self._chunks.add(array), dtype, array.shape, order_of(array))

    def _keep_beside(self, function: Any, *arguments: Any) -> Any:
        self.has_beside = True
        return function, arguments

    def _number_of(self, obj: Any) -> int:
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.parts)
            self.parts.append(obj)
        return self._numbers[id(obj)]


def _is_importable(obj: Any) -> bool:
    """Whether another process can import this class or function by name."""
    if obj.__module__ in ("__main__", "__mp_main__"):
        return False
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


# --- functions that the pickles of elements call


def _part(number: int) -> Any:
    assert _reading.column is not None
    return _reading.column.parts[number]


def _array(begin: int, dtype: Any, shape: tuple[int, ...], order: Any) -> Any:
    assert _reading.column is not None
    return array_in(_reading.column.extent, begin, dtype, shape, order)


def _tensor(begin: int, dtype_name: str, shape: tuple[int, ...]) -> Any:
    assert _reading.column is not None
    return tensor_in(_reading.column.extent, begin, dtype_name, shape)
