"""Tensors and arrays in shared memory stay shared between the main process and workers, in both directions."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed
from tests.helpers import DEADLINE_S, run_script

torch = pytest.importorskip("torch")
ours = pytest.importorskip("infeed.torch")

pytestmark = [pytest.mark.torch, pytest.mark.process]

# A spawned worker imports torch, which takes a while.
STARTS = pytest.mark.parametrize(("context", "count"), [("forkserver", 2), ("spawn", 1)])


class Cached:
    """Samples are the epoch and the value in the cache; loading fills the cache."""

    def __init__(self, length: int = 8) -> None:
        self.epoch = torch.tensor(0).share_memory_()
        self.cache = torch.full((length,), -1).share_memory_()
        self.half = self.cache[length // 2 :]
        self.weights = torch.nn.Linear(2, 2).share_memory()
        self.private = torch.zeros(1)
        self.empty = torch.empty(0).share_memory_()

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, index: int) -> Any:
        before = int(self.cache[index])
        self.cache[index] = index
        if index == len(self) - 1:
            assert self.half[-1] == index, "two views of one tensor became two tensors"
            with torch.no_grad():
                self.weights.weight[0, 0] = 42
        self.private += 1
        return int(self.epoch), before


def epochs_and_hits(loader: Any) -> tuple[list[int], list[int]]:
    batches = list(loader)
    return torch.cat([batch[0] for batch in batches]).tolist(), torch.cat([batch[1] for batch in batches]).tolist()


@STARTS
def test_writes_reach_workers_and_the_main_process(context: str, count: int) -> None:
    """In persistent, new and replaced workers; also if the dataset has changed since."""
    dataset = Cached()
    options: dict[str, Any] = {"num_workers": count, "persistent_workers": True, "multiprocessing_context": context}
    loader = ours.DataLoader(dataset, batch_size=2, timeout=DEADLINE_S, **options)

    assert epochs_and_hits(loader) == ([0] * 8, [-1] * 8)
    assert dataset.cache.tolist() == list(range(8))
    assert dataset.half.tolist() == [4, 5, 6, 7]
    assert dataset.weights.weight[0, 0] == 42
    assert dataset.private == 0

    dataset.epoch.fill_(1)
    assert epochs_and_hits(loader) == ([1] * 8, list(range(8)))

    shared, dataset.epoch = dataset.epoch, torch.tensor(9).share_memory_()
    shared.fill_(2)
    for worker in loader._iterator._workers:
        os.kill(worker.pid, signal.SIGKILL)
    assert epochs_and_hits(loader) == ([2] * 8, list(range(8)))
    loader.close()

    assert epochs_and_hits(loader) == ([9] * 8, list(range(8)))


class Many:
    """More tensors than descriptors fit into one message."""

    def __init__(self, count: int) -> None:
        self.cells = [torch.zeros(1).share_memory_() for _ in range(count)]

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, index: int) -> int:
        self.cells[index] += index
        return index


def test_many_shared_tensors_stay_shared() -> None:
    """Each has its own descriptor."""
    dataset = Many(230)
    for _ in ours.DataLoader(dataset, batch_size=50, num_workers=1, timeout=DEADLINE_S):
        pass
    assert [int(cell) for cell in dataset.cells] == list(range(230))


class Mapped:
    """Tensors over files."""

    def __init__(self, folder: Path) -> None:
        for name in ("shared", "private"):
            (folder / name).write_bytes(bytes(4))
        self.shared = torch.from_file(str(folder / "shared"), shared=True, size=4, dtype=torch.uint8)
        self.private = torch.from_file(str(folder / "private"), shared=False, size=4, dtype=torch.uint8)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.shared[index] = self.private[index] = index
        return index


def test_only_shared_mappings_are_shared(tmp_path: Path) -> None:
    """torch reports both as shared."""
    dataset = Mapped(tmp_path)
    assert len(list(ours.DataLoader(dataset, num_workers=1, timeout=DEADLINE_S))) == 4
    assert dataset.shared.tolist() == [0, 1, 2, 3]
    assert dataset.private.tolist() == [0, 0, 0, 0]


def test_batches_are_not_in_torchs_shared_memory() -> None:
    """As documented: torch does not know infeed's shared memory."""
    (batch,) = ours.DataLoader(range(2), batch_size=2, num_workers=1, timeout=DEADLINE_S)
    assert not batch.is_shared()


BY_NAME = """
import os, signal
import torch
from infeed.torch import DataLoader
torch.multiprocessing.set_sharing_strategy("file_system")

class Cells:
    def __init__(self):
        self.epoch, self.cells = torch.tensor(0).share_memory_(), torch.zeros(4).share_memory_()
    def __len__(self):
        return 4
    def __getitem__(self, index):
        self.cells[index] += 1
        return int(self.epoch)

dataset = Cells()
loader = DataLoader(dataset, num_workers=2, persistent_workers=True)
for epoch in range(2):
    dataset.epoch.fill_(epoch)
    assert [int(batch) for batch in loader] == [epoch] * 4
    for worker in loader._iterator._workers:
        os.kill(worker.pid, signal.SIGKILL)
loader.close()
assert dataset.cells.tolist() == [2.0] * 4, dataset.cells
"""


def test_tensors_shared_by_name_stay_shared(tmp_path: Path) -> None:
    """As on macOS and Windows; also if workers are replaced."""
    result = run_script(tmp_path, BY_NAME)
    assert result.code == 0, result.err


# --- arrays and tensors over memory that forked workers would share


@pytest.fixture(scope="module", autouse=True)
def _kept_by_multiprocessing() -> None:
    """The heap and the resource tracker of multiprocessing stay.

    They start before any test counts descriptors and processes.
    """
    multiprocessing.RawArray("b", 3 << 20)
    resource_tracker.ensure_running()


def raw_array() -> Any:
    return np.ctypeslib.as_array(multiprocessing.RawArray(ctypes.c_float, 24)).reshape(8, 3)


def wide_array() -> Any:
    return np.ctypeslib.as_array(multiprocessing.RawArray(ctypes.c_float, 8 * 30_000)).reshape(8, 30_000)


def mapped_file(folder: Path) -> Any:
    (folder / "file").write_bytes(bytes(5000))
    with (folder / "file").open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 5000), np.float32, 24, 100).reshape(8, 3)


def anonymous(_: Path) -> Any:
    return np.frombuffer(mmap.mmap(-1, 96), np.float32).reshape(8, 3)


SHARED: dict[str, Callable[[Path], Any]] = {
    "RawArray": lambda _: raw_array(),
    "Array with a lock": lambda _: np.ctypeslib.as_array(multiprocessing.Array("f", 24).get_obj()).reshape(8, 3),
    "tensor over an array": lambda _: torch.from_numpy(raw_array()),
    "columns": lambda _: torch.from_numpy(wide_array())[:, 7:10],
    "array of a shared tensor": lambda _: torch.zeros(8, 3).share_memory_().numpy(),
    "backwards": lambda _: raw_array()[::-1, ::-1],
    "recarray": lambda _: raw_array().view(np.recarray),
    "file": mapped_file,
}


class Caching:
    """Samples are the value in the cache; loading increments it."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.same = cache, cache[2:]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        before = float(self.cache[index][0])
        self.cache[index][0] += index + 1
        return before if self.cache[7][0] == self.same[5][0] else -1.0


@pytest.mark.linux("torch forks its workers there")
@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.filterwarnings("error")
def test_arrays_over_shared_memory_stay_shared(tmp_path: Path, kind: str) -> None:
    cache = SHARED[kind](tmp_path)
    loader = ours.DataLoader(Caching(cache), num_workers=1, persistent_workers=True, timeout=DEADLINE_S)
    assert torch.cat(list(loader)).tolist() == [0] * 8
    assert [float(row[0]) for row in cache] == list(range(1, 9))
    cache[0][0] = 50
    assert torch.cat(list(loader)).tolist() == [50, *range(2, 9)]
    loader.close()


@pytest.mark.linux("torch forks its workers there")
def test_an_array_over_named_shared_memory_stays_shared() -> None:
    memory = SharedMemory(create=True, size=96)
    try:
        dataset: Any = Caching(np.ndarray((8, 3), np.float32, memory.buf))
        assert len(list(ours.DataLoader(dataset, num_workers=1, timeout=DEADLINE_S))) == 8
        assert dataset.cache[:, 0].tolist() == list(range(1, 9))
        del dataset.cache, dataset.same
    finally:
        memory.close()
        memory.unlink()


@pytest.mark.linux("torch forks its workers there")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("convert", [lambda array: array, torch.from_numpy], ids=["array", "tensor"])
def test_memory_that_only_forked_workers_can_share_uses_torchs_workers(tmp_path: Path, convert: Callable[[Any], Any]) -> None:
    dataset = Caching(convert(anonymous(tmp_path)))
    with pytest.warns(RuntimeWarning, match=r"dataset\.cache is a .*anonymous shared memory.*RawArray"):
        assert len(list(ours.DataLoader(dataset, num_workers=1, timeout=DEADLINE_S))) == 8
    assert [float(row[0]) for row in dataset.cache] == list(range(1, 9))
    with infeed.DataLoader(dataset, num_workers=1) as loader, pytest.raises(infeed.WorkerStartError, match=r"dataset\.cache"):
        next(iter(loader))


def test_batches_in_a_dataset_are_copied() -> None:
    """Their memory belongs to infeed, which reuses it for later batches."""
    with infeed.DataLoader(np.zeros((8, 3), np.float32), 8, num_workers=1) as loader:
        (batch,) = list(loader)
    dataset = Caching(batch)
    assert len(list(ours.DataLoader(dataset, num_workers=1, timeout=DEADLINE_S))) == 8
    assert not np.asarray(dataset.cache).any()


def test_an_array_in_private_memory_is_copied(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(96))
    with (tmp_path / "file").open("rb") as file:
        private = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.float32).reshape(8, 3)
    dataset = Caching(private)
    assert len(list(ours.DataLoader(dataset, num_workers=1, timeout=DEADLINE_S))) == 8
    assert not private.any()
