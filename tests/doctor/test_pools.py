"""How the doctor finds active threads in processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from infeed.doctor import thread_owners as pools
from infeed.doctor.evidence import Run
from infeed.doctor.thread_owners import PYTHON, Pools

OWNERS = {2: "OpenBLAS (numpy)", 3: "OpenBLAS (numpy)", 4: PYTHON}


class Worker:
    """A process as psutil shows it; its threads have used this many seconds each, the first is the main thread."""

    def __init__(self, pid: int, *seconds: float) -> None:
        self.pid, self.seconds = pid, seconds

    def threads(self) -> list[Any]:
        tids = [self.pid, 2, 3, 4, 5]
        return [SimpleNamespace(id=tid, user_time=used, system_time=0.0) for tid, used in zip(tids, self.seconds, strict=False)]


@pytest.fixture
def halted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes that were stopped to look up their threads."""
    pids: list[int] = []

    def find_owners(pid: int, *, halts: bool) -> dict[int, str]:
        assert halts
        pids.append(pid)
        return OWNERS

    monkeypatch.setattr(pools, "find_owners", find_owners)
    return pids


def new_run() -> Run:
    return Run(program="", has_own_loop=True, core_count=16, memory_bytes=0)


def test_processes_are_inspected_in_turn_and_stopped_once(halted: list[int]) -> None:
    """Inspecting sixteen at a time would take longer than a short run."""
    run, workers = new_run(), [Worker(pid, 1.0, 1.0) for pid in range(101, 106)]
    watched = Pools(run)
    for count in (2, 4, 5, 5):
        watched.look(workers)
        assert len(halted) == count
    assert sorted(halted) == [101, 102, 103, 104, 105]
    assert all(run.processes[pid].pools == {"OpenBLAS (numpy)": 1} for pid in halted)


def test_threads_count_from_their_first_activity(halted: list[int]) -> None:
    run, worker = new_run(), Worker(101, 1.0, 0.04, 0.04, 0.04)
    watched = Pools(run)
    watched.look([worker])
    assert (halted, run.processes[101].pools) == ([], {})
    worker.seconds = (4.0, 0.3, 0.1, 1.0)  # The second is nearly idle, next to the worker's own; the last belongs to Python.
    watched.look([worker])
    assert run.processes[101].pools == {"OpenBLAS (numpy)": 1}
    worker.seconds = (4.0, 0.5, 0.5, 1.0)
    watched.look([worker])
    assert run.processes[101].pools == {"OpenBLAS (numpy)": 2}
    assert halted == [101]


def test_an_unknown_thread_is_looked_up_again_and_not_counted(halted: list[int]) -> None:
    run, worker = new_run(), Worker(101, 1.0, 0.0, 0.0, 0.0, 1.0)
    watched = Pools(run)
    watched.look([worker])
    watched.look([worker])
    assert (halted, run.processes[101].pools) == ([101, 101], {})
