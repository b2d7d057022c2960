"""Finds the nested object that cannot be pickled."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from infeed.memory.search import find_culprit

LOCK = threading.Lock()


class Plain:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def method(self) -> None: ...


class Slotted:
    __slots__ = ("fine", "lock")

    def __init__(self) -> None:
        self.fine, self.lock = 1, LOCK


class SlottedBelow(Slotted):
    __slots__ = ("more",)


@dataclass
class Record:
    lock: Any


@dataclass(frozen=True, slots=True)
class FrozenRecord:
    fine: int
    lock: Any


class WithState:
    """Its `__getstate__` returns something that cannot be pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": LOCK}


def closing_over() -> Callable[[], Any]:
    lock = LOCK
    return lambda: lock


def with_default(value: int = 3, lock: Any = LOCK) -> Any:
    return value, lock


def with_keyword_default(*, lock: Any = LOCK) -> Any:
    return lock


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function as if defined in a script, so that it is pickled by value."""
    function.__module__ = "__main__"
    return function


PATHS: dict[str, tuple[Callable[[], Any], str]] = {
    "itself": (lambda: LOCK, "dataset"),
    "attribute": (lambda: Plain(x=1, lock=LOCK), "dataset.lock"),
    "attribute of an attribute": (lambda: Plain(cache=Plain(lock=LOCK)), "dataset.cache.lock"),
    "dict": (lambda: {"fine": 1, "bad": LOCK}, "dataset['bad']"),
    "list": (lambda: [1, 2, LOCK], "dataset[2]"),
    "tuple": (lambda: (1, (LOCK,)), "dataset[1][0]"),
    "tree": (lambda: Plain(files={"a": [1, Plain(lock=LOCK)]}), "dataset.files['a'][1].lock"),
    "closure": (closing_over, "dataset -> lock (closed over)"),
    "default": (lambda: by_value(with_default), "dataset -> default 1"),
    "keyword default": (lambda: by_value(with_keyword_default), "dataset -> default lock"),
    "global": (lambda: by_value(lambda: LOCK), "dataset -> LOCK (global)"),
    "slots": (Slotted, "dataset.lock"),
    "slots of a base class": (SlottedBelow, "dataset.lock"),
    "dataclass": (lambda: Record(LOCK), "dataset.lock"),
    "frozen dataclass with slots": (lambda: FrozenRecord(1, LOCK), "dataset.lock"),
    "__getstate__": (WithState, "dataset.kept"),
    "partial, argument": (lambda: partial(print, 1, LOCK), "dataset.args[1]"),
    "partial, keyword": (lambda: partial(print, file=LOCK), "dataset.keywords['file']"),
    "partial, function": (lambda: partial(closing_over()), "dataset.func -> lock (closed over)"),
    "bound method": (lambda: Plain(lock=LOCK).method, "dataset.__self__.lock"),
    "array of objects": (lambda: np.array([1, LOCK], dtype=object), "dataset[1]"),
}


@pytest.mark.parametrize(("make", "path"), PATHS.values(), ids=PATHS)
def test_the_path_of_an_object_that_cannot_be_pickled_is_readable(make: Callable[[], Any], path: str) -> None:
    """It is a Python expression, or describes how the function references the object."""
    found = find_culprit(make(), "dataset")

    assert found is not None
    assert found == (path, LOCK)


def test_the_middle_of_a_long_path_is_omitted() -> None:
    nested: Any = LOCK
    for name in reversed("abcdefghijklmnopqrst"):
        nested = Plain(**{name: nested})
    assert find_culprit(nested, "dataset") == ("dataset.a.b.c.d … .q.r.s.t", LOCK)


def test_a_picklable_object_has_no_culprit() -> None:
    """Nothing is reported."""
    assert find_culprit({"a": [1, np.zeros(3), len]}, "dataset") is None


def test_a_cycle_does_not_lead_to_endless_recursion() -> None:
    """An object that references itself is visited once."""
    loop = Plain()
    loop.me = loop
    loop.again = {"loop": loop, "lock": LOCK}

    found = find_culprit(loop, "dataset")

    assert found is not None
    assert found[1] is LOCK


def test_a_large_list_is_not_searched_completely() -> None:
    """The list is reported, if not the element: an error must not take longer than the work."""
    found = find_culprit([0] * 5000 + [LOCK], "dataset")

    assert found is not None
    assert found[0] == "dataset"


def test_the_first_of_several_is_reported() -> None:
    """The next attempt finds the next one."""
    found = find_culprit(Plain(a=LOCK, b=LOCK), "dataset")

    assert found == ("dataset.a", LOCK)
