"""Memory that samples free stays with the worker, so that later samples cause no page faults."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
import pytest

import infeed
from tests.helpers import Tree

pytestmark = [
    pytest.mark.process,
    pytest.mark.linux("the heap is configured for glibc only"),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc"),
]


def decoded(_index: int) -> Any:
    """Like a decoder: frees a large buffer and returns a smaller one."""
    import resource  # Not on Windows.

    pixels = np.full((375, 500, 3), 7, np.uint8)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return pixels[:224, :224].copy(), faults, os.getpid()


def faults_per_sample(**options: Any) -> float:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    count = 0
    with infeed.DataLoader(Tree(1600, decoded), batch_size=16, num_workers=2, **options) as loader:
        for number, (_, faults, pids) in enumerate(loader):
            if number < 40:
                continue  # The workers touch their memory for the first time.
            for total, pid in zip(faults.tolist(), pids.tolist(), strict=True):
                first.setdefault(pid, total)
                last[pid] = total
                count += 1
    return sum(last[pid] - total for pid, total in first.items()) / count


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_worker_keeps_the_memory_that_samples_free(start_method: str) -> None:
    """Otherwise each sample would cause 137 page faults for its large buffer."""
    assert faults_per_sample(start_method=start_method) <= 10


def test_the_users_malloc_configuration_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers over 64 KiB are mapped for each sample, as the variable requests."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert faults_per_sample(start_method="spawn") > 100
