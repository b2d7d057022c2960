"""Read-only lists, tuples and dicts in shared memory. They read like the originals."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any, Final, NoReturn, final

from infeed.formatting import format_bytes
from infeed.memory.chunks import Chunks
from infeed.memory.holding import Extent, Held, open_extent
from infeed.memory.lookup import bucket_bits, bucket_of, build_table, stable_hash
from infeed.memory.packed import Column, Layout, pack
from infeed.memory.segments import Address

_MISSING: Final = object()


def _refusal(name: str, cure: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_arguments: Any, **_options: Any) -> NoReturn:
        raise TypeError(f"{name}: {self!r} is shared and cannot be changed; {cure}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = "Raises TypeError: a shared object cannot be changed."
    return refuse


class _SharedSequence(Sequence[Any], Held):
    __slots__ = ("__weakref__", "_extent", "_get", "_keeps", "_layout", "_places")

    _original: type[Any]

    def __init__(self, extent: Extent, layout: Layout, places: range, keeps: tuple[Held, ...] = ()) -> None:
        self._extent = extent
        self._layout = layout
        self._places = places  # positions of the elements in the column: all of them, or a slice
        self._get: Callable[[int], Any] = layout.open(extent).get
        self._keeps = keeps

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
            return type(self)(self._extent, self._layout, place, self._keeps)
        return self._get(place)

    def __iter__(self) -> Iterator[Any]:
        return map(self._get, self._places)

    def __reversed__(self) -> Iterator[Any]:
        return map(self._get, reversed(self._places))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, self._original | type(self)):
            return NotImplemented
        if other is self:
            return True
        return len(self) == len(other) and all(map(_are_equal, self, other))

    def __add__(self, other: Any) -> Any:
        return self._original(self) + (self._original(other) if isinstance(other, type(self)) else other)

    def __radd__(self, other: Any) -> Any:
        return other + self._original(self)

    def __mul__(self, times: Any) -> Any:
        return self._original(self) * times

    __rmul__ = __mul__

    def __repr__(self) -> str:
        kind = self._layout.kind
        what = f"{self._original.__name__} of {len(self):,} {kind if kind != 'object' else 'objects'}"
        return f"<shared {what}, {format_bytes(self._extent.size)}>"

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        return _open_sequence, (type(self), self._extent.reference(), self._layout, self._places)


def _are_equal(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


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


def _open_sequence(cls: type[_SharedSequence], reference: tuple[Address, int, int], layout: Layout, places: range) -> Any:
    return cls(open_extent(*reference), layout, places)


def share_sequence(values: list[Any] | tuple[Any, ...]) -> SharedList | SharedTuple:
    """Pack a list or tuple into shared memory."""
    chunks = Chunks()
    layout = pack(values, chunks)
    extent = chunks.held()
    cls = SharedList if type(values) is list else SharedTuple
    return cls(extent, layout, range(len(values)), tuple(chunks.keeps))


@final
@dataclass(frozen=True, slots=True)
class _DictLayout:
    keys: Layout
    values: Layout
    table: tuple[Layout, Layout] | None  # None if only Python can hash some key


@final
class SharedDict(Mapping[Any, Any], Held):
    """A dict in shared memory."""

    __slots__ = ("__weakref__", "_bits", "_extent", "_keeps", "_keys", "_layout", "_local", "_table", "_values")

    def __init__(self, extent: Extent, layout: _DictLayout, keeps: tuple[Held, ...] = ()) -> None:
        self._extent = extent
        self._layout = layout
        self._keys = layout.keys.open(extent)
        self._values = layout.values.open(extent)
        self._table = None if layout.table is None else tuple(part.numbers(extent) for part in layout.table)
        self._bits = bucket_bits(self._keys.count)
        self._local: dict[Any, int] | None = None
        self._keeps = keeps

    def _find(self, key: Any) -> int | None:
        """Return the position of the key, or ``None``."""
        key_hash = stable_hash(key)
        if key_hash is None or self._table is None:
            # Only Python can hash this key, and the hash differs between processes, so each process builds a dict when needed.
            if self._local is None:
                self._local = {one: place for place, one in enumerate(self)}
            return self._local.get(key)
        begins, places = self._table
        bucket = bucket_of(key_hash, self._bits)
        for number in range(begins[bucket], begins[bucket + 1]):
            place: int = places[number]
            if _are_equal(self._keys.get(place), key):
                return place
        return None

    def __len__(self) -> int:
        return self._keys.count

    def __getitem__(self, key: Any) -> Any:
        place = self._find(key)
        if place is None:
            raise KeyError(key)
        return self._values.get(place)

    def __contains__(self, key: Any) -> bool:
        return self._find(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        place = self._find(key)
        return default if place is None else self._values.get(place)

    def __iter__(self) -> Iterator[Any]:
        return map(self._keys.get, range(self._keys.count))

    def __reversed__(self) -> Iterator[Any]:
        return map(self._keys.get, reversed(range(self._keys.count)))

    def keys(self) -> KeysView[Any]:
        return _Keys(self)

    def values(self) -> ValuesView[Any]:
        return _Values(self)

    def items(self) -> ItemsView[Any, Any]:
        return _Items(self)

    def column_of_values(self) -> Column:
        return self._values

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
        return f"<shared dict of {len(self):,} items, {format_bytes(self._extent.size)}>"

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        return _open_dict, (self._extent.reference(), self._layout)


@final
class _Keys(KeysView[Any]):
    __slots__ = ()
    _mapping: SharedDict

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self._mapping)


@final
class _Values(ValuesView[Any]):
    __slots__ = ()
    _mapping: SharedDict

    def __iter__(self) -> Iterator[Any]:
        return map(self._mapping.column_of_values().get, range(len(self)))

    def __reversed__(self) -> Iterator[Any]:
        return map(self._mapping.column_of_values().get, reversed(range(len(self))))

    def __contains__(self, value: object) -> bool:
        return any(_are_equal(one, value) for one in self)


@final
class _Items(ItemsView[Any, Any]):
    __slots__ = ()
    _mapping: SharedDict

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(self._mapping, self._mapping.values(), strict=True)

    def __reversed__(self) -> Iterator[tuple[Any, Any]]:
        return zip(reversed(self._mapping), reversed(_Values(self._mapping)), strict=True)


def _open_dict(reference: tuple[Address, int, int], layout: _DictLayout) -> SharedDict:
    return SharedDict(open_extent(*reference), layout)


def share_dict(values: dict[Any, Any]) -> SharedDict:
    """Pack a dict into shared memory."""
    chunks = Chunks()
    keys = list(values)
    hashes = list(map(stable_hash, keys))
    key_layout, value_layout = pack(keys, chunks), pack(list(values.values()), chunks)
    table = None
    if None not in hashes:
        begins, places = build_table([one for one in hashes if one is not None])
        table = (_table_layout(begins, chunks), _table_layout(places, chunks))
    return SharedDict(chunks.held(), _DictLayout(key_layout, value_layout, table), tuple(chunks.keeps))


def _table_layout(numbers: Any, chunks: Chunks) -> Layout:
    return Layout("int", len(numbers), chunks.add(numbers), numbers.dtype.char)


_LIST_CURE: Final = "change the list before it is shared, or change a copy, list(...)"
_DICT_CURE: Final = "change the dict before it is shared, or change a copy, dict(...)"
_LIST_WRITES: Final = "append clear extend insert pop remove reverse sort __setitem__ __delitem__ __iadd__ __imul__"
_DICT_WRITES: Final = "clear pop popitem setdefault update __setitem__ __delitem__ __ior__"
for _name in _LIST_WRITES.split():
    setattr(SharedList, _name, _refusal(_name, _LIST_CURE))
for _name in _DICT_WRITES.split():
    setattr(SharedDict, _name, _refusal(_name, _DICT_CURE))
for _name in ("__setitem__", "__delitem__"):
    setattr(SharedTuple, _name, _refusal(_name, "make another, tuple(...)"))
