"""Datasets that cannot be pickled run on torch's own workers, which are forked, as without infeed."""

from __future__ import annotations

import sqlite3
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import infeed
from tests.helpers import DEADLINE_S

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")
ours = pytest.importorskip("infeed.torch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.process,
    pytest.mark.linux("torch forks its workers there"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),  # Python's own, from 3.12 on.
]
OPTIONS: dict[str, Any] = {"batch_size": 2, "num_workers": 1, "timeout": DEADLINE_S}


class Holding:
    """Sample ``i`` is ``i``; it references an object."""

    def __init__(self, held: Any) -> None:
        self.inner = {"held": held}

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Lazy(Holding):
    """Opens something with the first sample."""

    def __init__(self) -> None:
        super().__init__(None)

    def __getitem__(self, index: int) -> int:
        if self.inner["held"] is None:
            self.inner["held"] = threading.Lock()
        return index


class Refusing:
    """Raises its own exception when it is pickled."""

    class Error(Exception):
        pass

    def __getstate__(self) -> Any:
        raise Refusing.Error("not today")


class Wrapping:
    """``__getattr__`` recurses endlessly while the object has no attributes yet, as during unpickling."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class Misreduced(Holding):
    def __reduce__(self) -> Any:
        return Misreduced, ()


def _of_a_module_that_workers_cannot_import(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("loaded_from_a_path")
    exec("class Numbers(list): pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.Numbers(range(4))


UNPICKLING: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "RecursionError": lambda _: Wrapping(range(4)),
    "TypeError": lambda _: Misreduced(None),
    "ModuleNotFoundError": _of_a_module_that_workers_cannot_import,
}


def _hdf5(folder: Path) -> Any:
    return pytest.importorskip("h5py").File(folder / "a.h5", "w")


def _lmdb(folder: Path) -> Any:
    return pytest.importorskip("lmdb").open(str(folder / "lmdb"))


MAKERS: dict[str, Callable[[Path], Any]] = {
    "lock": lambda _: threading.Lock(),
    "file": lambda folder: (folder / "a.txt").open("w"),
    "connection": lambda _: sqlite3.connect(":memory:"),
    "generator": lambda _: (number for number in range(3)),
    "pool": lambda _: ThreadPoolExecutor(1),
    "refusing": lambda _: Refusing(),
    "hdf5": _hdf5,
    "lmdb": _lmdb,
}


@pytest.fixture(params=MAKERS)
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = MAKERS[request.param](tmp_path)
    yield made
    for name in ("close", "shutdown"):
        if hasattr(made, name):
            getattr(made, name)()


def messages(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(entry.message) for entry in caught if "torch's own workers" in str(entry.message)]


def collected(loader: Any) -> tuple[list[Any], list[str]]:
    """Returns two epochs, and the warnings about torch's own workers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = [batch.tolist() for _ in range(2) for batch in loader]
    return batches, messages(caught)


def test_it_runs_on_torchs_workers_with_one_warning_with_the_attribute(held: Any) -> None:
    batches, words = collected(ours.DataLoader(Holding(held), **OPTIONS))

    assert batches == [[0, 1], [2, 3]] * 2
    assert len(words) == 1
    assert "dataset.inner['held']" in words[0]


def test_infeeds_own_loader_raises(held: Any) -> None:
    with (
        pytest.raises(infeed.WorkerStartError, match=r"dataset\.inner\['held'\]"),
        infeed.DataLoader(Holding(held), 2, num_workers=1) as loader,
    ):
        next(iter(loader))


@pytest.mark.parametrize("kind", UNPICKLING)
def test_a_dataset_that_workers_cannot_unpickle_runs_on_torchs_workers(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    dataset = UNPICKLING[kind](monkeypatch)
    batches, words = collected(ours.DataLoader(dataset, **OPTIONS))

    assert batches == [[0, 1], [2, 3]] * 2
    assert len(words) == 1
    assert f"cannot be unpickled in a worker: {kind}" in words[0]


def test_a_failed_start_takes_no_index_from_the_sampler() -> None:
    torch.manual_seed(5)
    loader = ours.DataLoader(Wrapping(range(4)), sampler=iter([3, 1, 2, 0]), **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = [batch.tolist() for batch in loader]
    drawn = torch.rand(())
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()  # The base seed.
    assert batches == [[3, 1], [2, 0]]
    assert drawn == torch.rand(())


@pytest.mark.filterwarnings("error")
def test_a_dataset_that_no_worker_can_unpickle_raises() -> None:
    loader = ours.DataLoader(Wrapping(range(4)), multiprocessing_context="spawn", **OPTIONS)
    with pytest.raises(infeed.WorkerStartError, match="RecursionError"):
        next(iter(loader))


def test_a_dataset_that_torch_could_not_run_raises() -> None:
    """torch's spawned workers need to pickle the dataset too."""
    loader = ours.DataLoader(Holding(threading.Lock()), multiprocessing_context="spawn", **OPTIONS)
    with pytest.raises(infeed.WorkerStartError, match=r"dataset\.inner\['held'\]"):
        iter(loader)


def test_a_handle_that_the_main_process_opened_later_is_treated_alike() -> None:
    dataset = Lazy()
    loader = ours.DataLoader(dataset, **OPTIONS)
    batches = [batch.tolist() for batch in loader]  # On infeed's workers, without a warning.
    assert batches == [[0, 1], [2, 3]]
    assert loader.statistics().batch_count == 2

    assert dataset[0] == 0
    batches, words = collected(loader)
    assert batches == [[0, 1], [2, 3]] * 2
    assert len(words) == 1
    assert loader.statistics().batch_count == 2


def test_the_order_is_that_of_torch() -> None:
    """The attempt with infeed's workers draws nothing."""
    orders = []
    for kind in (data.DataLoader, ours.DataLoader):
        torch.manual_seed(5)
        loader = kind(Holding(threading.Lock()), shuffle=True, **OPTIONS)
        orders.append((collected(loader)[0], torch.rand(()).item()))
    assert orders[0] == orders[1]


def test_options_that_only_infeed_supports_are_named_in_the_warning() -> None:
    loader = ours.DataLoader(Holding(threading.Lock()), on_error="skip", seed=3, **OPTIONS)
    _, (words,) = collected(loader)
    assert "seed and on_error have no effect" in words


def test_auto_does_not_start_the_maximum_number_of_workers() -> None:
    loader = ours.DataLoader(Holding(threading.Lock()), 2, num_workers="auto", cpu_limit=1)
    batches, _ = collected(loader)
    assert batches == [[0, 1], [2, 3]] * 2
    assert loader.num_workers == 1


def test_a_loader_on_torchs_workers_has_an_empty_state_with_a_warning() -> None:
    loader = ours.DataLoader(Holding(threading.Lock()), **OPTIONS)
    collected(loader)
    with pytest.warns(RuntimeWarning, match="state_dict"):
        state = loader.state_dict()
    assert state == {}
    loader.load_state_dict(state)


def test_a_state_that_torchs_workers_cannot_resume_is_named_in_the_warning() -> None:
    dataset = Lazy()
    loader = ours.DataLoader(dataset, **OPTIONS)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    del batches

    assert dataset[0] == 0
    resumed = ours.DataLoader(dataset, **OPTIONS)
    resumed.load_state_dict(state)
    _, (words,) = collected(resumed)
    assert "load_state_dict has no effect" in words
