"""What is public: these names, under this module, and no other."""

import ast
import pickle
from typing import Any

import pytest

import infeed
from tests.unit.fresh import SOURCE, run_fresh

PUBLIC = [
    "BadSample",
    "CollateError",
    "ConfigError",
    "DataLoader",
    "Device",
    "Diagnosis",
    "ErrorPolicy",
    "InfeedError",
    "InternalError",
    "Lineage",
    "LoadTimeoutError",
    "LoaderClosedError",
    "MemoryLimitError",
    "RandomSampler",
    "RayWorkers",
    "SampleError",
    "ShardError",
    "SlowSample",
    "StateError",
    "Statistics",
    "StatisticsCallback",
    "StorageError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerInfo",
    "WorkerStartError",
    "WorkerStatistics",
    "get_rng",
    "get_worker_info",
    "open",
    "share",
]


def test_these_names_are_public() -> None:
    """A change of this list is a change of the interface, and needs a line in the changelog."""
    assert sorted([*infeed.__all__, "open"]) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_of_the_package_itself(name: str) -> None:
    """Users see infeed.DataLoader in messages and pickles, not the module it happens to be written in."""
    value: Any = getattr(infeed, name)

    assert value.__module__ == "infeed"
    assert value.__qualname__ == name


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_pickled_by_reference(name: str) -> None:
    """Wherever the module it is written in moves to, old pickles still find it."""
    assert pickle.loads(pickle.dumps(getattr(infeed, name))) is getattr(infeed, name)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_docstring(name: str) -> None:
    """help() says what it is."""
    assert getattr(infeed, name).__doc__


def test_public_names_are_listed_by_dir() -> None:
    """Completion in a shell finds them before they are first used."""
    assert set(PUBLIC) <= set(dir(infeed))


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    """A typing error is answered with the list."""
    with pytest.raises(
        AttributeError, match=r"module 'infeed' has no attribute 'Dataloader'; its public names are .*DataLoader"
    ):
        infeed.Dataloader  # noqa: B018


@pytest.mark.process
def test_star_import_gives_the_public_names() -> None:
    """In a fresh interpreter, where nothing has been used yet."""
    code = """
        from infeed import *
        print(sorted(name for name in dir() if not name.startswith("__")))
    """
    assert run_fresh(code) == str([name for name in PUBLIC if name != "open"])  # the built-in function stays


def test_what_says_that_it_is_of_the_package_is_found_there() -> None:
    """A class whose __module__ is infeed is pickled under that name, so it must be there."""
    claimed = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(line) == "__module__ = 'infeed'" for line in node.body):
                claimed.append(node.name)

    assert claimed
    assert [name for name in claimed if name not in PUBLIC] == []
