"""Pinned batches and batches on a real device. Skipped without CUDA."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import infeed

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from infeed.torch import DataLoader  # noqa: E402  # needs torch

# Files that the driver opens on first use stay open: that is no leak of infeed.
torch.ones(8, pin_memory=True).cuda(non_blocking=True) @ torch.ones(8, device="cuda")
torch.cuda.synchronize()


class Coded:
    """Every number of sample ``i`` derives from ``i``, so reading it too late or too early is detected."""

    def __init__(self, length: int, size: int = 50_000) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(self.size, index, dtype=np.float32), "y": index, "name": f"sample {index}"}


def keep_busy() -> None:
    """Occupies the device for some milliseconds, so that work queued after it happens late."""
    big = torch.ones(2048, 2048, device="cuda")
    for _ in range(20):
        big = big @ big * 1e-4


def check(batch: Any, first: int) -> None:
    count = len(batch["name"])
    expected = torch.arange(first, first + count, dtype=torch.float32, device="cuda")
    assert torch.equal(batch["x"], expected[:, None].expand_as(batch["x"])), f"batch from {first} on"
    assert torch.equal(batch["y"], expected.long())
    assert batch["name"] == [f"sample {index}" for index in range(first, first + count)]


def mapping_of(pointer: int) -> str:
    """The line of ``/proc/self/maps`` about this address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= pointer < end:
            return line
    raise AssertionError(f"nothing is mapped at {pointer:#x}")


def test_pinned_batches_are_pinned_without_a_copy() -> None:
    loader = DataLoader(Coded(400), batch_size=8, num_workers=2, pin_memory=True, persistent_workers=True)
    for _ in range(2):
        batches = list(loader)
        assert all(batch["x"].is_pinned() for batch in batches)
    # The first ones are copied until their memory is registered.
    assert any("/memfd:infeed" in mapping_of(batch["x"].data_ptr()) for batch in batches)
    del batches


def test_a_slot_is_not_reused_while_the_device_reads_it() -> None:
    """The host's batch is dropped right after the copy was requested, and the device is late."""
    loader = DataLoader(Coded(1600), batch_size=8, num_workers=4, pin_memory=True, persistent_workers=True, prefetch_factor=1)
    rng = random.Random(0)
    for _ in range(3):
        first = 0
        kept: deque[tuple[int, Any]] = deque()
        for batch in loader:
            if rng.random() < 0.5:
                keep_busy()
            moved = {
                "x": batch["x"].to("cuda", non_blocking=True),
                "y": batch["y"].to("cuda", non_blocking=True),
                "name": batch["name"],
            }
            del batch
            kept.append((first, moved))
            first += 8
            while len(kept) > rng.randrange(1, 6):
                begin, done = kept.popleft()
                check(done, begin)
        for begin, done in kept:
            check(done, begin)


@pytest.mark.parametrize("make", [DataLoader, infeed.DataLoader])
@pytest.mark.parametrize("workers", [0, 4])
def test_batches_arrive_on_the_device_bit_identical(make: Any, workers: int) -> None:
    """The user's stream is busy, and batches are kept and dropped at random."""
    loader = make(Coded(1600), batch_size=8, num_workers=workers, device="cuda:0")
    rng = random.Random(1)
    for _ in range(2):
        first = 0
        kept: deque[tuple[int, Any]] = deque()
        for batch in loader:
            assert batch["x"].is_cuda
            if rng.random() < 0.5:
                keep_busy()
            kept.append((first, {**batch, "x": batch["x"] * 1}))
            del batch
            first += 8
            while len(kept) > rng.randrange(1, 6):
                begin, done = kept.popleft()
                check(done, begin)
        assert first == 1600
        for begin, done in kept:
            check(done, begin)


def test_convert_runs_on_the_device() -> None:
    def convert(batch: Any) -> Any:
        return {**batch, "x": batch["x"].to(torch.bfloat16)}

    loader = DataLoader(Coded(64), batch_size=8, num_workers=2, device=infeed.Device(torch.device("cuda", 0), convert=convert))
    assert {batch["x"].dtype for batch in loader} == {torch.bfloat16}


def test_states_count_only_delivered_batches() -> None:
    loader = infeed.DataLoader(Coded(64), batch_size=8, num_workers=2, device="cuda:0", seed=0)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert loader.state_dict()["step"] == 3
