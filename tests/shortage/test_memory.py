"""Memory: available memory in a container, and that batches in flight stay below ``memory_limit`` (P6)."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import infeed
from infeed.memory import limits as budget
from infeed.memory.limits import available_bytes
from infeed.workers.launcher import IDLE_WORKERS
from tests.helpers import Tree, wait_until, worker_processes

MIB = 1 << 20


def write_group(folder: Path, limit: str, usage: int, cache: int, *, is_old: bool) -> None:
    """Writes the files of a group, as the kernel shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_old else ("memory.max", "memory.current")
    prefix = "total_" if is_old else ""
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(
        f"anon 1\n{prefix}inactive_file {cache // 2}\n{prefix}active_file {cache // 2}\nshmem 7\n"
    )


@pytest.fixture(params=[False, True], ids=["version 2", "version 1"])
def groups(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Constructed control groups: ``groups(path, limit, usage, cache)``; this process is in ``/job/step``."""
    is_old: bool = request.param
    root = tmp_path / ("cgroup/memory" if is_old else "cgroup")
    (tmp_path / "self").write_text("3:cpu,memory:/job/step\n" if is_old else "1:name=systemd:/elsewhere\n0::/job/step\n")
    monkeypatch.setattr(budget, "ROOT", str(tmp_path / "cgroup"))
    monkeypatch.setattr(budget, "OWN", str(tmp_path / "self"))
    return lambda path, limit, usage, cache=0: write_group(root / path, limit, usage, cache, is_old=is_old)


def test_a_container_s_limit_counts(groups: Any) -> None:
    """In a container its own group is the root: available memory is limit minus usage."""
    groups("", str(100 * MIB), 60 * MIB)
    assert available_bytes() == 40 * MIB


def test_the_limit_of_a_nested_group_counts(groups: Any) -> None:
    """A batch system puts a job into a nested group without a namespace; the tightest limit above it counts."""
    groups("", "max", 500 * MIB)
    groups("job", str(300 * MIB), 250 * MIB)
    groups("job/step", str(200 * MIB), 20 * MIB)
    assert available_bytes() == 50 * MIB


def test_the_page_cache_counts_as_available(groups: Any) -> None:
    """A process that has read a large dataset has a group full of cache, which the kernel frees on demand."""
    groups("job/step", str(200 * MIB), 199 * MIB, 150 * MIB)
    assert available_bytes() == 151 * MIB


def test_no_limit_is_no_limit(groups: Any) -> None:
    """ "max", missing files and invalid files leave the machine's own memory."""
    groups("job", "max", 1)
    groups("job/step", "what", 1)
    assert 100 * MIB < available_bytes() <= psutil.virtual_memory().total


def test_a_container_too_small_for_a_batch_raises(groups: Any, light_engine: dict[str, Any]) -> None:
    """The error comes before the OOM killer: the request, the available memory, the fix."""
    groups("job/step", str(64 * MIB), 60 * MIB)
    with (
        infeed.DataLoader(Tree(4, lambda i: np.zeros(8 * MIB, np.uint8)), memory_limit="1GiB", **light_engine) as loader,
        pytest.raises(
            infeed.MemoryLimitError, match=r"cannot allocate 8\.0 MiB of shared memory: 4\.0 MiB is available; lower batch_size"
        ),
    ):
        next(iter(loader))


def test_an_unreferenced_loader_ends_after_a_shortage(engine: dict[str, Any]) -> None:
    """What the engine stores about the shortage does not keep the loader alive: close() is not needed."""

    def load() -> None:
        loader = infeed.DataLoader(Tree(4, lambda i: np.zeros(8 * MIB, np.uint8)), memory_limit="1MiB", **engine)
        with pytest.raises(infeed.MemoryLimitError):
            next(iter(loader))

    load()
    gc.collect()
    IDLE_WORKERS.clear()  # Spawned workers stay idle for a minute, for the next loader.
    wait_until(lambda: not worker_processes(), "the end of the workers")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("infeed")]


def memory_in_use() -> int:
    """Returns the bytes of infeed's memory in this process, as the kernel counts them."""
    inodes: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        try:
            if "memfd:infeed" in os.readlink(path):
                status = os.stat(path)
                inodes[status.st_ino] = status.st_blocks * 512
        except OSError:  # The descriptor that listed the folder.
            continue
    return sum(inodes.values())


@pytest.mark.process
@pytest.mark.linux("reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("collate_fn", [None, np.stack], ids=["rows", "collated"])
def test_memory_stays_below_the_limit_whatever_is_kept(forkserver: dict[str, Any], collate_fn: Any) -> None:
    """Large batches of many sizes are kept up to the limit and released, repeatedly: the peak is the limit (P6)."""
    limit = 48 * MIB
    sizes = [(1 + 7 * i % 13) * MIB // 4 for i in range(60)]
    kept: list[Any] = []
    peak = errors = 0
    seen = []
    dataset = Tree(120, lambda i: np.full(sizes[i // 2], i, np.uint8))
    with infeed.DataLoader(dataset, batch_size=2, memory_limit=limit, collate_fn=collate_fn, **forkserver) as loader:
        batches = iter(loader)
        while True:
            try:
                kept.append(next(batches))
                seen.append(int(kept[-1][0, 0]))
            except StopIteration:
                break
            except infeed.MemoryLimitError:
                errors += 1
                assert errors < 50
                kept.clear()
            peak = max(peak, memory_in_use())
    assert seen == list(range(0, 120, 2))
    assert errors > 1
    serialized = MIB  # The dataset itself.
    assert limit // 2 < peak <= limit + serialized
