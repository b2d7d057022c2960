"""The public names of the package."""

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
    """Changing this list changes the API, and needs a line in the changelog."""
    assert sorted([*infeed.__all__, "open"]) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_belongs_to_the_package(name: str) -> None:
    """Users see infeed.DataLoader in messages and pickles, not the module that defines it."""
    value: Any = getattr(infeed, name)

    assert value.__module__ == "infeed"
    assert value.__qualname__ == name


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_pickled_by_reference(name: str) -> None:
    """Old pickles work after its definition moves to another module."""
    assert pickle.loads(pickle.dumps(getattr(infeed, name))) is getattr(infeed, name)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_docstring(name: str) -> None:
    """It is the text of help()."""
    assert getattr(infeed, name).__doc__


def test_public_names_are_listed_by_dir() -> None:
    """Shells can complete them before their first use."""
    assert set(PUBLIC) <= set(dir(infeed))


def test_an_unknown_name_raises_with_the_list_of_names() -> None:
    """A typing error gets the list."""
    with pytest.raises(
        AttributeError, match=r"module 'infeed' has no attribute 'Dataloader'; its public names are .*DataLoader"
    ):
        infeed.Dataloader  # noqa: B018


@pytest.mark.process
def test_star_import_imports_the_public_names() -> None:
    """In a new interpreter, where nothing has been used yet."""
    code = """
        from infeed import *
        print(sorted(name for name in dir() if not name.startswith("__")))
    """
    assert run_fresh(code) == str([name for name in PUBLIC if name != "open"])  # The built-in function stays.


def test_names_whose_module_is_the_package_are_found_there() -> None:
    """A class whose __module__ is infeed is pickled under that name, so it must exist."""
    claimed = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(line) == "__module__ = 'infeed'" for line in node.body):
                claimed.append(node.name)

    assert claimed
    assert [name for name in claimed if name not in PUBLIC] == []
