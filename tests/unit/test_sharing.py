"""A shared list, tuple or dict reads like the original."""

import copy
import math
import pickle
import re
from collections import OrderedDict, namedtuple
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from functools import partial
from operator import add, getitem
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import infeed
from infeed.errors import MemoryLimitError
from infeed.memory.share import stable_hash

Point = namedtuple("Point", "x y")


class Colour(Enum):
    RED = 1


class Level(IntEnum):
    HIGH = 3


TEXT = st.text(st.characters(exclude_categories=())) | st.sampled_from(["", "\ud800", "\udc00\ud800", "\0", "ä", "🐈"])
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    TEXT,
    st.binary(),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([Colour.RED, Level.HIGH, Point(1, "a"), Decimal("1.5"), Fraction(1, 3)]),
    st.sampled_from([-0.0, 1, True, 1.0, 2**63, -(2**63)]),
)
TREES = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
# One type for all elements, which has its own storage format, or any types.
ELEMENTS = [
    st.integers(-100, 100),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(2**63 - 2, 2**63 + 2),
    st.floats(),
    TEXT,
    st.text("abc"),
    st.binary(),
    TREES,
]
LISTS = st.one_of([st.lists(elements, max_size=30) for elements in ELEMENTS])
# NaN is found only by identity, also within a tuple, and a pickled key is another object.
_FINDABLE = ATOMS.filter(lambda key: key == key)
KEYS = st.one_of(_FINDABLE, st.tuples(_FINDABLE, TEXT), st.frozensets(st.integers() | TEXT, max_size=3))
DICTS = st.dictionaries(KEYS, TREES, max_size=20)


def exact(value: Any) -> Any:
    """Returns something that is equal for two values only if types, signs of zero and all else are equal."""
    if isinstance(value, list | tuple) and not isinstance(value, Point):
        return type(value), [exact(part) for part in value]
    if isinstance(value, dict):
        return dict, [(exact(key), exact(part)) for key, part in value.items()]
    if isinstance(value, float):
        return float, "nan" if math.isnan(value) else (value, math.copysign(1, value))
    return type(value), value if isinstance(value, frozenset) else repr(value)


def outcome(call: Any) -> Any:
    """Returns the result of a call, or the type of its exception."""
    try:
        return exact(call())
    except Exception as error:
        return type(error)


@given(LISTS)
def test_elements_keep_their_types_and_values(values: list[Any]) -> None:
    """1 is not True and not 1.0, minus zero keeps its sign, half a surrogate is a str."""
    shared = infeed.share(values)

    assert len(shared) == len(values)
    assert exact(list(shared)) == exact(values)
    assert exact([shared[index] for index in range(len(values))]) == exact(values)
    assert exact(list(reversed(shared))) == exact(values[::-1])


@given(LISTS, st.integers(-40, 40))
def test_an_index_returns_what_the_original_returns(values: list[Any], index: int) -> None:
    """From either end, with any kind of integer, or IndexError."""
    for original in (values, tuple(values)):
        shared = infeed.share(original)
        for one in (index, np.int64(index), np.int8(index)):
            assert outcome(partial(getitem, shared, one)) == outcome(partial(getitem, original, one))


@given(LISTS, st.slices(30), st.slices(30))
def test_a_slice_is_a_view_that_reads_like_the_slice(values: list[Any], first: slice, second: slice) -> None:
    """Also a slice of a slice."""
    shared = infeed.share(values)

    assert exact(list(shared[first][second])) == exact(values[first][second])
    assert type(shared[first]) is type(shared)
    assert exact(list(pickle.loads(pickle.dumps(shared[first])))) == exact(values[first])


@given(LISTS, st.data())
def test_searching_gives_the_same_results(values: list[Any], data: st.DataObject) -> None:
    """in, index, count."""
    values = [value for value in values if value == value]  # Copies of values that differ from themselves are never found.
    wanted = data.draw(st.sampled_from(values)) if values and data.draw(st.booleans()) else data.draw(ATOMS)
    shared = infeed.share(values)
    wanted = pickle.loads(pickle.dumps(wanted))

    assert (wanted in shared) is (wanted in values)
    assert shared.count(wanted) == values.count(wanted)
    assert outcome(lambda: shared.index(wanted)) == outcome(lambda: values.index(wanted))
    assert outcome(lambda: shared.index(wanted, 1, -1)) == outcome(lambda: values.index(wanted, 1, -1))


@given(LISTS.filter(lambda values: values == pickle.loads(pickle.dumps(values))), LISTS)
def test_it_equals_everything_that_the_original_equals(values: list[Any], others: list[Any]) -> None:
    """Lists equal lists, tuples equal tuples, shared or not, from either side."""
    shared, shared_tuple = infeed.share(values), infeed.share(tuple(values))

    assert shared == values
    assert values == shared
    assert shared == infeed.share(list(values))
    assert shared_tuple == tuple(values)
    assert outcome(lambda: hash(shared_tuple)) == outcome(lambda: hash(tuple(values)))
    assert shared != shared_tuple
    assert (shared == others) is (values == others)
    assert (shared != others) is (values != others)


def test_results_of_operations_are_plain() -> None:
    """Addition, multiplication and copies return mutable lists."""
    shared = infeed.share([1, 2])

    for made, expected in (
        (add(shared, [3]), [1, 2, 3]),
        (add([0], shared), [0, 1, 2]),
        (shared * 2, [1, 2, 1, 2]),
        (2 * shared, [1, 2, 1, 2]),
        (shared + shared, [1, 2, 1, 2]),
        (shared.copy(), [1, 2]),
    ):
        assert type(made) is list
        assert made == expected
    assert type(add(infeed.share((1,)), (2,))) is tuple


@given(DICTS)
def test_a_dict_reads_like_the_original(values: dict[Any, Any]) -> None:
    """Order, keys, values, items, and every key is found."""
    shared = infeed.share(values)

    assert len(shared) == len(values)
    assert exact(list(shared)) == exact(list(values))
    assert exact(list(shared.keys())) == exact(list(values))
    assert exact(list(shared.values())) == exact(list(values.values()))
    assert exact(dict(shared.items())) == exact(values)
    assert exact(list(reversed(shared.items()))) == exact(list(reversed(values.items())))
    assert exact(list(reversed(shared.keys()))) == exact(list(reversed(values)))
    assert exact(list(reversed(shared.values()))) == exact(list(reversed(values.values())))
    for key, value in values.items():
        again = pickle.loads(pickle.dumps(key))
        assert exact(shared[again]) == exact(shared.get(again)) == exact(value)
        assert again in shared


@given(DICTS, KEYS | TREES)
def test_a_dict_finds_exactly_the_keys_of_the_original(values: dict[Any, Any], key: Any) -> None:
    """Including KeyError, and TypeError for a key that is not hashable."""
    shared = infeed.share(values)

    assert outcome(lambda: shared[key]) == outcome(lambda: values[key])
    assert outcome(lambda: shared.get(key, "default")) == outcome(lambda: values.get(key, "default"))
    assert outcome(lambda: key in shared) == outcome(lambda: key in values)


@given(st.dictionaries(TEXT | st.integers(), st.integers()), st.dictionaries(TEXT | st.integers(), st.integers()))
def test_a_dict_equals_everything_that_the_original_equals(values: dict[Any, Any], others: dict[Any, Any]) -> None:
    """In any order, from either side, shared or not."""
    shared = infeed.share(values)

    assert shared == values == dict(reversed(values.items()))
    assert values == shared
    assert infeed.share(dict(reversed(values.items()))) == shared
    assert (shared == others) is (values == others)
    assert shared | others == values | others
    assert others | shared == others | values
    assert type(shared.copy()) is dict


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        (1, True),
        (1, 1.0),
        (True, 1),
        (0.0, -0.0),
        (1 + 0j, 1),
        (2, np.int64(2)),
        (0.5, Fraction(1, 2)),
        (1, Decimal(1)),
        (3, Level.HIGH),
        ("a", np.str_("a")),
        ((1, "x"), (True, "x")),
        (Point(1, 2), (1, 2)),
        (frozenset([1, 2]), frozenset([2, True])),
        (Colour.RED, Colour.RED),
    ],
    ids=str,
)
def test_equal_keys_are_one_key(stored: Any, asked: Any) -> None:
    """As in a dict, although hashes differ between processes."""
    assert {stored: "found"}[asked] == "found"
    assert infeed.share({stored: "found"})[asked] == "found"


class Sly(str):
    """Equals its text, but has another hash: a dict does not find one by the other."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 5

    __eq__ = str.__eq__


def test_a_key_with_a_custom_hash_is_looked_up_as_in_python() -> None:
    """Its hash is unknown, so Python's own table is used."""
    assert stable_hash(Sly("a")) is None
    assert Sly("a") not in infeed.share({"a": 1})
    assert infeed.share({Sly("a"): 1, "b": 2})[Sly("a")] == 1
    assert infeed.share({Sly("a"): 1, "b": 2})["b"] == 2


class SlyNumber(float):
    """The same for a number."""

    __slots__ = ()

    def __hash__(self) -> int:
        return id(SlyNumber)  # Different in each process.

    __eq__ = float.__eq__


def test_a_number_with_a_custom_hash_is_looked_up_as_in_python() -> None:
    assert stable_hash(SlyNumber(2.5)) is None
    assert infeed.share({SlyNumber(2.5): 1})[SlyNumber(2.5)] == 1


def test_all_of_many_keys_are_found() -> None:
    """More keys than fit into one bucket; missing ones are not found."""
    values = {f"key {number}": number for number in range(5000)} | {number: str(number) for number in range(5000)}
    shared = infeed.share(values)

    assert all(shared[key] == value for key, value in values.items())
    assert not any(f"no {number}" in shared for number in range(5000))


def test_hashes_are_the_same_in_another_process() -> None:
    """Python's own hashes differ."""
    from tests.unit.fresh import run_fresh

    keys = ["text", b"bytes", 5, 2.5, None, ("a", 1), frozenset(["a", "b"])]
    code = f"from infeed.memory.share import stable_hash\nprint([stable_hash(key) for key in {keys!r}])"

    assert run_fresh(code) == str([stable_hash(key) for key in keys])


LIST_WRITES: dict[str, Any] = {
    "append": lambda x: x.append(1),
    "extend": lambda x: x.extend([1]),
    "insert": lambda x: x.insert(0, 1),
    "pop": lambda x: x.pop(),
    "remove": lambda x: x.remove(1),
    "clear": lambda x: x.clear(),
    "sort": lambda x: x.sort(key=None),
    "reverse": lambda x: x.reverse(),
    "__setitem__": lambda x: x.__setitem__(0, 1),
    "__delitem__": lambda x: x.__delitem__(0),
    "__iadd__": lambda x: x.__iadd__([1]),
    "__imul__": lambda x: x.__imul__(2),
}
DICT_WRITES: dict[str, Any] = {
    "update": lambda x: x.update({1: 2}),
    "pop": lambda x: x.pop(1),
    "popitem": lambda x: x.popitem(),
    "clear": lambda x: x.clear(),
    "setdefault": lambda x: x.setdefault(1, 2),
    "__setitem__": lambda x: x.__setitem__(1, 2),
    "__delitem__": lambda x: x.__delitem__(1),
    "__ior__": lambda x: x.__ior__({}),
}


@pytest.mark.parametrize("name", LIST_WRITES)
def test_a_list_cannot_be_changed(name: str) -> None:
    """The error has the fix."""
    shared = infeed.share([1, 2])

    with pytest.raises(
        TypeError,
        match=rf"^{name}: <shared list of 2 int, 64 B> is read-only; change the original before share\(\), or a copy: list\(",
    ):
        LIST_WRITES[name](shared)
    assert shared == [1, 2]


@pytest.mark.parametrize("name", DICT_WRITES)
def test_a_dict_cannot_be_changed(name: str) -> None:
    """The error has the fix."""
    shared = infeed.share({1: 2})

    with pytest.raises(
        TypeError,
        match=rf"^{name}: <shared dict of 1 items, .*> is read-only; change the original before share\(\), or a copy: dict\(",
    ):
        DICT_WRITES[name](shared)
    assert shared == {1: 2}


def test_a_tuple_cannot_be_changed() -> None:
    """TypeError, as for any tuple."""
    with pytest.raises(TypeError, match=r"is read-only; .* a copy: tuple\("):
        infeed.share((1, 2))[0] = 3


def test_all_mutating_methods_are_covered() -> None:
    """Methods that a shared list or dict lacks only compare lists or are constructors."""
    assert set(dir([])) - set(dir(infeed.share([]))) == {"__ge__", "__gt__", "__le__", "__lt__"} - set(dir(infeed.share([])))
    assert set(dir({})) - set(dir(infeed.share({}))) == {"fromkeys"}


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        (["a", "b"], "<shared list of 2 str, 128 B>"),
        ((1.5,), "<shared tuple of 1 float, 64 B>"),
        ([1, "a"], "<shared list of 2 objects, 128 B>"),
        ({"a": 1}, "<shared dict of 1 items, 320 B>"),
    ],
)
def test_the_repr_is_short_and_descriptive(obj: Any, text: str) -> None:
    """It does not print two million strings."""
    assert repr(infeed.share(obj)) == text


def test_error_messages_are_those_of_the_original() -> None:
    """The type is called list."""
    for original in ([1], (1,)):
        shared, name = infeed.share(original), type(original).__name__
        with pytest.raises(IndexError, match=f"^{name} index out of range$"):
            shared[5]
        with pytest.raises(TypeError, match=f"^{name} indices must be integers or slices, not str$"):
            shared["a"]
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        infeed.share({1: 2})[[]]


@pytest.mark.parametrize("obj", [[1, 2], (1, "a"), {"a": [1]}], ids=repr)
def test_copies_are_the_same_object(obj: Any) -> None:
    """It is immutable. Sharing it again returns it."""
    shared = infeed.share(obj)

    assert copy.copy(shared) is shared
    assert copy.deepcopy(shared) is shared
    assert infeed.share(shared) is shared


@pytest.mark.parametrize(
    "obj", [["a"] * 5000, tuple(range(5000)), {str(n): n for n in range(5000)}], ids=["list", "tuple", "dict"]
)
def test_a_pickle_is_a_reference(obj: Any) -> None:
    """For any size; the restored object is equal."""
    shared = infeed.share(obj)
    pickled = pickle.dumps(shared)

    assert len(pickled) < 500
    assert pickle.loads(pickled) == obj
    assert type(pickle.loads(pickled)) is type(shared)


def test_each_access_returns_a_copy_of_an_element() -> None:
    """Changing it does not change the shared object."""
    shared = infeed.share([[1], [2]])
    shared[0].append(5)

    assert shared[0] == [1]


def test_a_local_class_is_kept() -> None:
    """Objects of classes that no other process could import keep their class."""

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    shared = infeed.share([Local(1), Local(2)])
    again = pickle.loads(pickle.dumps(shared))

    assert [type(element) is Local for element in [*shared, *again]] == [True] * 4
    assert [element.value for element in again] == [1, 2]


def test_a_shared_object_keeps_nested_shared_objects_alive() -> None:
    """The inner one has no other reference."""
    long = "x" * 8_000_000  # It has its own memory, which nothing else references.
    shared = infeed.share([infeed.share([long]), infeed.share({"a": 1}), infeed.share(np.arange(3))])

    assert list(shared[0]) == [long]
    assert shared[1] == {"a": 1}
    assert shared[2].tolist() == [0, 1, 2]


def test_nested_reads_do_not_interfere() -> None:
    """An object that reads another shared one while it is built does not disturb the first."""
    shared = infeed.share([(np.arange(2), Reader(infeed.share([np.arange(3)])), np.arange(4))])
    first, middle, last = shared[0]

    assert (first.tolist(), middle.seen, last.tolist()) == ([0, 1], [0, 1, 2], [0, 1, 2, 3])


class Reader:
    def __init__(self, source: Any) -> None:
        self.source = source
        self.seen: list[int] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.source = state["source"]
        self.seen = self.source[0].tolist()


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        ("text", "not str; share the large lists and arrays"),
        ({1, 2}, "not set; share the large lists"),
        (OrderedDict(a=1), "not collections.OrderedDict; the copy would lose the type, so pass dict(...)"),
        (Point(1, 2), "Point; the copy would lose the type, so pass tuple(...)"),
        (np.array([None]), "not an array of objects; pass array.tolist()"),
    ],
    ids=["str", "set", "OrderedDict", "named tuple", "object array"],
)
def test_unsupported_objects_are_rejected_with_a_fix(obj: Any, text: str) -> None:
    """The rule first, then the value, then the fix."""
    rule = "share() accepts a list, tuple, dict, NumPy array or CPU tensor, "

    with pytest.raises(TypeError, match="^" + re.escape(rule) + ".*" + re.escape(text)):
        infeed.share(obj)


def test_an_element_that_cannot_be_pickled_is_an_error_at_once() -> None:
    """Not when a worker reads it."""
    with pytest.raises(TypeError, match="cannot pickle 'generator' object"):
        infeed.share([(number for number in range(3))])


def test_a_memory_shortage_error_has_the_available_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is about sharing, not about batches."""
    monkeypatch.setattr("infeed.memory.segments.available_bytes", lambda: 1000)

    with pytest.raises(
        MemoryLimitError,
        match=r"^cannot allocate 7\.[67] MiB of shared memory: 1000 B is available; release objects that you no longer need",
    ):
        infeed.share(np.zeros(1_000_000))
