"""Tensors in shared memory stay shared between the training loop's process and workers, both ways."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import DEADLINE_S, run_script

torch = pytest.importorskip("torch")
ours = pytest.importorskip("infeed.torch")

pytestmark = [pytest.mark.torch, pytest.mark.process]

# A spawned worker imports torch, which takes a while.
STARTS = pytest.mark.parametrize(("context", "count"), [("forkserver", 2), ("spawn", 1)])


class Cached:
    """Samples are the epoch and what the cache had; loading fills the cache."""

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
def test_writes_reach_workers_and_come_back(context: str, count: int) -> None:
    """In persistent workers, in others, and in those that replace workers that died; also if the dataset has changed since."""
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
    """Each has a descriptor of its own."""
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


def test_only_what_is_mapped_as_shared_is_shared(tmp_path: Path) -> None:
    """torch says of both that they are."""
    dataset = Mapped(tmp_path)
    assert len(list(ours.DataLoader(dataset, num_workers=1, timeout=DEADLINE_S))) == 4
    assert dataset.shared.tolist() == [0, 1, 2, 3]
    assert dataset.private.tolist() == [0, 0, 0, 0]


def test_batches_are_not_in_torchs_shared_memory() -> None:
    """As the documentation says: torch does not know infeed's."""
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


def test_tensors_that_torch_shares_by_name_stay_shared(tmp_path: Path) -> None:
    """As on macOS and Windows; also where workers are replaced."""
    result = run_script(tmp_path, BY_NAME)
    assert result.code == 0, result.err
