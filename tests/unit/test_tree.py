"""Samples as trees: split into columns and rebuilt."""

from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from infeed.collate.tree import Column, StructureMismatch, structure_of


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    image: Any
    label: Any


@dataclass(frozen=True, slots=True)
class FrozenRecord:
    image: Any
    label: Any


@dataclass
class Computed:
    given: Any
    made: Any = field(init=False)

    def __post_init__(self) -> None:
        self.made = self.given * 2


class Params(UserDict[str, Any]):
    """A mapping that can be created from a dict."""


class Fussy(Mapping[str, Any]):
    """A mapping that cannot."""

    def __init__(self, a: Any, b: Any) -> None:
        self._items = {"a": a, "b": b}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class MyList(list[Any]):
    """A subclass is a user-defined type: a leaf."""


class MyTuple(tuple[Any, ...]):
    pass


TREES: dict[str, tuple[Callable[[Any, Any], Any], Any, list[str]]] = {
    "leaf": (lambda a, b: a, "01", [""]),
    "tuple": (lambda a, b: (a, b), ("01", "23"), ["[0]", "[1]"]),
    "list": (lambda a, b: [a, b], ["01", "23"], ["[0]", "[1]"]),
    "dict": (lambda a, b: {"x": a, 5: b}, {"x": "01", 5: "23"}, ["['x']", "[5]"]),
    "named tuple": (Pair, Pair("01", "23"), [".left", ".right"]),
    "dataclass": (Record, Record("01", "23"), [".image", ".label"]),
    "frozen dataclass with slots": (FrozenRecord, FrozenRecord("01", "23"), [".image", ".label"]),
    "OrderedDict": (lambda a, b: OrderedDict(b=b, a=a), OrderedDict(b="01", a="23"), ["['b']", "['a']"]),
    "mapping made of a dict": (lambda a, b: Params(a=a, b=b), Params(a="01", b="23"), ["['a']", "['b']"]),
    "mapping of its own kind": (Fussy, {"a": "01", "b": "23"}, ["['a']", "['b']"]),
    "mappingproxy": (lambda a, b: MappingProxyType({"a": a}), MappingProxyType({"a": "01"}), ["['a']"]),
    "defaultdict": (lambda a, b: defaultdict(list, a=a), {"a": "01"}, ["['a']"]),
    "nested": (
        lambda a, b: {"p": Pair([a], (b,)), "r": Record({}, ())},
        {"p": Pair(["01"], ("23",)), "r": Record({}, ())},
        ["['p'].left[0]", "['p'].right[0]"],
    ),
    "empty": (lambda a, b: (), (), []),
    "list subclass": (lambda a, b: MyList([a, b]), "01", [""]),
    "tuple subclass": (lambda a, b: MyTuple([a, b]), "01", [""]),
    "class": (lambda a, b: Record, "01", [""]),
}


def split(samples: list[Any]) -> list[Column]:
    columns: list[Column] = []
    structure_of(samples[0]).split(samples, columns)
    return columns


@pytest.mark.parametrize(("make", "joined", "paths"), TREES.values(), ids=TREES)
def test_a_tree_of_samples_becomes_a_tree_of_columns(make: Callable[[Any, Any], Any], joined: Any, paths: list[str]) -> None:
    """One column per leaf, left to right, and the batch has the containers of the samples."""
    samples = [make("a0", "b0"), make("a1", "b1"), make("a2", "b2")]
    node = structure_of(samples[0])
    columns = split(samples)
    names = iter(["01", "23", "45"])

    batch = node.join(names)

    assert node.paths() == paths
    assert len(columns) == len(paths)
    assert all(len(column) == 3 for column in columns)
    assert batch == joined
    assert type(batch) is type(joined)


def test_columns_keep_the_order_of_samples() -> None:
    """Leaf by leaf."""
    assert list(map(list, split([{"x": 1, "y": (2, 3)}, {"x": 4, "y": (5, 6)}]))) == [[1, 4], [2, 5], [3, 6]]


def test_keys_may_have_any_order() -> None:
    """Two dicts with the same keys have the same structure."""
    assert list(map(list, split([{"a": 1, "b": 2}, {"b": 4, "a": 3}]))) == [[1, 3], [2, 4]]


def test_a_dataclass_is_built_without_calling_its_constructor() -> None:
    """Attributes computed by __post_init__ are columns like the others."""
    samples = [Computed(1), Computed(5)]
    node = structure_of(samples[0])

    batch = node.join(iter(map(list, split(samples))))

    assert isinstance(batch, Computed)
    assert (batch.given, batch.made) == ([1, 5], [2, 10])


def test_equal_structures_are_equal_and_hash_alike() -> None:
    """Workers compare layouts by value."""
    one, other = structure_of({"a": (1, [2])}), structure_of({"a": ("x", [None])})

    assert one == other
    assert hash(one) == hash(other)
    assert one != structure_of({"a": [1, [2]]})


MISMATCHES: dict[str, tuple[list[Any], tuple[str, int, str, str]]] = {
    "length of a tuple": ([(1, 2), (1, 2), (1,)], ("", 2, "tuple of length 2", "tuple of length 1")),
    "tuple and list": ([(1, 2), [1, 2]], ("", 1, "tuple of length 2", "list of length 2")),
    "keys of a dict": ([{"a": 1}, {"b": 1}], ("", 1, "dict with keys ['a']", "dict with keys ['b']")),
    "number of keys": ([{"a": 1}, {"a": 1, "b": 2}], ("", 1, "dict with keys ['a']", "dict with keys ['a', 'b']")),
    "dict and list": ([{"a": 1}, [1]], ("", 1, "dict with keys ['a']", "list of length 1")),
    "container and leaf": ([(1,), 5], ("", 1, "tuple of length 1", "int")),
    "nested": ([{"a": [1]}, {"a": [1]}, {"a": [1, 2]}], ("['a']", 2, "list of length 1", "list of length 2")),
    "in a named tuple": ([Pair(1, (2,)), Pair(1, None)], (".right", 1, "tuple of length 1", "NoneType")),
    "dataclass and none": ([Record(1, 2), None], ("", 1, "Record", "NoneType")),
    "in a dataclass": ([Record(1, [2]), Record(1, 2)], (".label", 1, "list of length 1", "int")),
    "dict and OrderedDict": ([{"a": 1}, OrderedDict(a=1)], ("", 1, "dict with keys ['a']", "OrderedDict with keys ['a']")),
    "keys of a defaultdict": (
        [defaultdict(list, a=1), defaultdict(list, b=1)],
        ("", 1, "defaultdict with keys ['a']", "defaultdict with keys ['b']"),
    ),
    "keys of a Counter": ([Counter("a"), Counter("b")], ("", 1, "Counter with keys ['a']", "Counter with keys ['b']")),
}


@pytest.mark.parametrize(("samples", "expected"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_is_reported_with_path_row_and_both_sides(samples: list[Any], expected: tuple[str, int, str, str]) -> None:
    """The user sees the path in the sample, the sample, and the expected and actual structure."""
    with pytest.raises(StructureMismatch) as caught:
        split(samples)

    assert (caught.value.path, caught.value.row, caught.value.expected, caught.value.found) == expected


def test_splitting_samples_does_not_change_them() -> None:
    """A defaultdict gets no new keys."""
    sample: defaultdict[str, list[int]] = defaultdict(list, a=[1])
    with pytest.raises(StructureMismatch):
        split([defaultdict(list, b=[2]), sample])

    assert dict(sample) == {"a": [1]}
