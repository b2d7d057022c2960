"""The advice to share a dataset, with figures."""

import functools
import logging
import threading
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.formatting import format_bytes
from infeed.memory import search
from infeed.memory.search import advise, find_heavy


class Files:
    def __init__(self, count: int) -> None:
        self.samples = [f"train/image_{number:08d}.jpg" for number in range(count)]


class Wrapped:
    def __init__(self, inner: Any) -> None:
        self.parts = {"first": [inner]}


class Slotted:
    __slots__ = ("labels",)

    def __init__(self) -> None:
        self.labels = tuple(range(1000, 201_000))


def test_a_large_list_is_found_by_its_path() -> None:
    """Through attributes, dicts and lists."""
    heavy = find_heavy(Wrapped(Files(100_000)), "dataset")

    assert [(one.path, one.what) for one in heavy] == [("dataset.parts['first'][0].samples", "a list of 100,000 str")]
    assert 7e6 < heavy[0].size < 9e6


@pytest.mark.parametrize(
    ("dataset", "what"),
    [
        (Slotted(), "a tuple of 200,000 int"),
        ({str(number): number for number in range(100_000)}, "a dict of 100,000 items"),
        ([(str(number), number) for number in range(100_000)], "a list of 100,000 tuple"),
        ([str(number) if number % 2 else number for number in range(200_000)], "a list of 200,000 objects"),
        (np.zeros(5_000_000), "an array of float64"),
    ],
    ids=["slots", "dict", "tuples", "mixed", "array"],
)
def test_kinds_of_large_objects(dataset: Any, what: str) -> None:
    """Each has its description."""
    assert [one.what for one in find_heavy(dataset, "dataset")] == [what]


@pytest.mark.torch
def test_a_large_tensor_is_found(torch: Any) -> None:
    """Unless it is shared."""
    tensor = torch.zeros(10_000_000)

    assert [one.what for one in find_heavy([tensor], "dataset")] == ["a tensor of float32"]
    assert find_heavy([infeed.share(tensor), infeed.share(tensor)[1:]], "dataset") == []


class StaysHome(Files):
    def __getstate__(self) -> Any:
        return {}


@pytest.mark.parametrize(
    "dataset",
    [
        Files(1000),
        [functools] * 100_000,
        [threading.Lock] * 100_000,
        ["the same"] * 200_000,
        list(range(200)) * 1000,
        StaysHome(100_000),
        np.zeros(1000),
    ],
    ids=["small", "modules", "not plain", "one object", "cached ints", "left out", "small array"],
)
def test_small_or_unpicklable_objects_are_not_reported(dataset: Any) -> None:
    """A warning without gain is a nuisance. (A list of one object stores only pointers, eight bytes each.)"""
    assert find_heavy(dataset, "dataset") == []


def test_shared_objects_are_not_reported() -> None:
    """They need no advice."""
    dataset = Files(100_000)
    dataset.samples = infeed.share(dataset.samples)

    assert find_heavy([dataset, infeed.share(np.zeros(5_000_000)), infeed.share(np.zeros(5_000_000))[1:]], "dataset") == []


def test_the_search_is_bounded() -> None:
    """For any depth and width of a dataset, and if it contains itself."""
    loop: list[Any] = []
    loop.append(loop)
    wide = [[Files(0) for _ in range(60)] for _ in range(60)]
    deep: Any = Files(100_000)
    for _ in range(30):
        deep = [deep]

    for dataset in (loop, wide, deep):
        assert find_heavy(dataset, "dataset") == []


def logged(
    caplog: pytest.LogCaptureFixture, dataset: Any, workers: int, available: int, monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.setattr(search, "available_bytes", lambda: available)
    with caplog.at_level(logging.INFO, "infeed"):
        advise(dataset, [1 << 30], workers)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_the_message_for_a_list(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Path, type, cost, fix; a warning, because 4 times 80 MB is more than 5% of 2 GB."""
    size = find_heavy(Files(1_000_000), "dataset")[0].size

    assert logged(caplog, Files(1_000_000), 4, 2_000_000_000, monkeypatch) == [
        (
            "WARNING",
            f"dataset.samples is a list of 1,000,000 str, about {format_bytes(size)} in each of 4 workers; "
            "infeed.share(...) stores it once",
        )
    ]


def test_the_message_for_an_array(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers already share a copy, so it is only logged as info; the size of one copy counts."""
    assert logged(caplog, [np.zeros(5_000_000)], 4, 1 << 40, monkeypatch) == [
        ("INFO", "dataset[0] is an array of float64, 38.1 MiB, copied once for 4 workers; infeed.share(...) avoids the copy")
    ]
    caplog.clear()
    assert logged(caplog, [np.zeros(5_000_000)], 4, 1 << 28, monkeypatch)[0][0] == "WARNING"


@pytest.mark.parametrize(("workers", "level"), [(1, "INFO"), (40, "WARNING")])
def test_there_is_a_warning_only_if_much_is_lost(
    workers: int, level: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MB are logged as info; 40 times 8 MB are more than 256 MB."""
    ((found, message),) = logged(caplog, Files(100_000), workers, 1 << 40, monkeypatch)

    assert found == level
    assert f"in each of {workers} worker{'s' if workers > 1 else ''};" in message


def test_a_small_pickle_is_not_examined(caplog: pytest.LogCaptureFixture) -> None:
    """Most datasets are small: they pay nothing."""
    with caplog.at_level(logging.INFO, "infeed"):
        advise(Files(100_000), [1000, 1000], 4)

    assert not caplog.records
