"""Soak: after many batches, neither a loader nor its workers hold more resources than after the first ones (P5)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import psutil
import pytest

import infeed
from tests.helpers import worker_processes

pytestmark = [pytest.mark.process, pytest.mark.linux("reads /proc")]

BATCHES: Final = 20_000  # In each case.
LONG_BATCHES: Final = 1_000_000  # In all cases together.
_LENGTH: Final = 2000  # Batches of an epoch: the end of an epoch is part of the soak.
_WARM_SHARE: Final = 4  # Of all batches, before the first measurement.
# Noise of the allocator and the page cache. A leak of 100 bytes per batch is more.
_NOISE_BYTES: Final = 512 << 10


class Burden(NamedTuple):
    """Resources of a process that may grow."""

    rss: int
    descriptors: int
    threads: int

    @staticmethod
    def of(process: psutil.Process) -> Burden:
        with process.oneshot():
            return Burden(process.memory_info().rss, process.num_fds(), process.num_threads())


class Samples:
    """An array and a text; some samples raise if requested."""

    def __init__(self, bad_every: int = 0) -> None:
        self.bad_every = bad_every

    def __len__(self) -> int:
        return 2 * _LENGTH

    def __getitem__(self, index: int) -> tuple[np.ndarray, str]:
        if self.bad_every and index % self.bad_every == self.bad_every - 1:
            raise ValueError(index)
        return np.full(16, index, dtype=np.float32), str(index)


class Elements:
    """The same as an iterable dataset."""

    def __iter__(self) -> Iterator[tuple[np.ndarray, str]]:
        return map(Samples().__getitem__, range(2 * _LENGTH))


CASES: Final[dict[str, Callable[..., Any]]] = {
    "rows": lambda **options: infeed.DataLoader(Samples(), shuffle=True, **options),
    "collated": lambda **options: infeed.DataLoader(Samples(), collate_fn=list, **options),
    "stream": lambda **options: infeed.DataLoader(Elements(), **options),
    "bad samples": lambda **options: infeed.DataLoader(Samples(bad_every=50), on_error="skip", **options),
}


def batches_of(loader: Any) -> Iterator[Any]:
    """Yields the batches of one epoch after another."""
    while True:
        yield from loader


def burdens() -> dict[str, Burden]:
    """Returns the resources of this process and of its workers, by kind."""
    gc.collect()
    workers = sorted(worker_processes(), key=lambda process: process.pid)
    named = {f"worker {number}": process for number, process in enumerate(workers)}
    return {name: Burden.of(process) for name, process in ({"this process": psutil.Process()} | named).items()}


def check_soak(case: str, count: int) -> None:
    # Without a timeline, whose memory grows to a fixed size with the number of events.
    with CASES[case](batch_size=2, num_workers=2, seed=0, timeout=60, observe="counters") as loader:
        batches = batches_of(loader)
        for _ in range(count // _WARM_SHARE):
            next(batches)
        before = burdens()
        for _ in range(count - count // _WARM_SHARE):
            next(batches)
        after = burdens()
        batches.close()
    assert list(after) == list(before)
    for name in before:
        assert after[name].rss < before[name].rss + _NOISE_BYTES, f"{name}: {before[name]} became {after[name]}"
        assert after[name][1:] == before[name][1:], f"{name}: {before[name]} became {after[name]}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_twenty_thousand_batches_leak_nothing(case: str) -> None:
    check_soak(case, BATCHES)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_million_batches_leak_nothing(case: str) -> None:
    check_soak(case, LONG_BATCHES // len(CASES))
