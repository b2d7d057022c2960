"""Idle spawned workers serve the next loader: it starts at once and behaves as with new workers."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import infeed
from infeed.workers.launcher import IDLE_WORKERS
from tests.conftest import engine_params
from tests.helpers import Journal, Tree, assert_clean, flat, kill_process, plain, run_script, wait_until, worker_processes

pytestmark = pytest.mark.process


@pytest.fixture(params=engine_params("spawn", "portable"))
def spawned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options for spawned workers, which have time to drop their dataset; none is idle before and after the test."""
    monkeypatch.setattr("infeed.workers.process.RESET_S", 20.0)
    if request.param == "portable" and sys.platform == "linux":
        request.getfixturevalue("windows_stand_in")
    IDLE_WORKERS.clear()
    start_method = "spawn" if request.param == "spawn" else "auto"
    yield {"num_workers": 1, "start_method": start_method, "timeout": 30}
    IDLE_WORKERS.clear()


def pids_and_values(dataset: Any, **options: Any) -> tuple[set[int], list[Any]]:
    """Returns the workers and values of an epoch; the loader is garbage collected, not closed."""
    samples = flat([list(zip(*plain(batch), strict=True)) for batch in infeed.DataLoader(dataset, 4, **options)])
    gc.collect()
    return {pid for pid, _ in samples}, [value for _, value in samples]


def times(factor: int) -> Tree:
    return Tree(8, lambda index: (os.getpid(), factor * index))


def test_the_next_loader_reuses_the_worker_with_its_own_dataset(spawned: dict[str, Any]) -> None:
    first, values = pids_and_values(times(1), **spawned)
    second, others = pids_and_values(times(10), **spawned)

    assert first == second
    assert (values, others) == (list(range(8)), list(range(0, 80, 10)))


class Released:
    """Writes a line when a copy of it in another process is released."""

    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder / "released")
        self.pid = os.getpid()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        return os.getpid(), index

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            self.journal.write(os.getpid())


def test_an_idle_worker_has_released_its_dataset(spawned: dict[str, Any], tmp_path: Path) -> None:
    """Otherwise it keeps the memory, and LMDB refuses to open the same environment again for the next loader."""
    dataset = Released(tmp_path)
    pids, _ = pids_and_values(dataset, **spawned)

    wait_until(dataset.journal.lines, "the end of the worker's dataset")
    assert {int(line) for line in dataset.journal.lines()} == pids


@pytest.mark.torch
def test_an_idle_worker_of_torchs_loader_has_released_its_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.utils.data.get_worker_info` referenced it."""
    ours = pytest.importorskip("infeed.torch")
    monkeypatch.setattr("infeed.workers.process.RESET_S", 20.0)
    dataset = Released(tmp_path)
    pids = {
        pid
        for pids, _ in ours.DataLoader(dataset, 4, num_workers=1, multiprocessing_context="spawn", timeout=30)
        for pid in pids.tolist()
    }
    gc.collect()

    wait_until(dataset.journal.lines, "the end of the worker's dataset")
    assert {int(line) for line in dataset.journal.lines()} == pids


class Hesitant:
    """One of several workers builds the dataset at once, the others when a file exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = Journal(folder / "pids")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.journal.write(os.getpid())
        if self.journal.lines()[0] != str(os.getpid()):
            wait_until((self.folder / "go").exists, "the test's permission to go on")

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        return os.getpid(), index


@pytest.mark.linux("memory that has a name is gone before such a worker could map it")
def test_a_worker_that_is_still_starting_is_kept(tmp_path: Path) -> None:
    """Another worker finishes the epoch alone. The next loader gets both, each when it is ready."""
    IDLE_WORKERS.clear()
    spawned: dict[str, Any] = {"num_workers": 1, "start_method": "spawn", "timeout": 30}
    dataset = Hesitant(tmp_path)
    first, values = pids_and_values(dataset, **{**spawned, "num_workers": 2})
    wait_until(lambda: len(dataset.journal.lines()) == 2, "the second worker")
    (starting,) = {int(line) for line in dataset.journal.lines()} - first
    for pid in first:
        with suppress(OSError):  # It was not kept because it took too long to drop the dataset.
            kill_process(pid)
    (tmp_path / "go").touch()
    second, others = pids_and_values(times(10), **spawned)

    assert (values, others) == (list(range(8)), list(range(0, 80, 10)))
    assert second == {starting}


def test_close_ends_workers(spawned: dict[str, Any]) -> None:
    with infeed.DataLoader(times(1), 4, **spawned) as loader:
        list(loader)
    assert worker_processes() == []


def test_an_idle_worker_that_was_killed_is_replaced(spawned: dict[str, Any]) -> None:
    first, _ = pids_and_values(times(1), **spawned)
    for pid in first:
        kill_process(pid)
    wait_until(lambda: not worker_processes(), "the end of the worker")

    second, values = pids_and_values(times(1), **spawned)
    assert values == list(range(8))
    assert first.isdisjoint(second)


def test_another_worker_init_fn_gets_another_process(spawned: dict[str, Any]) -> None:
    """The changes of one worker_init_fn to a process must not affect another."""

    def init(worker: int) -> None:
        os.environ["INFEED_TEST_INIT"] = str(worker)

    first, _ = pids_and_values(times(1), worker_init_fn=init, **spawned)
    again, _ = pids_and_values(times(1), worker_init_fn=init, **spawned)
    other, _ = pids_and_values(times(1), **spawned)

    assert first == again
    assert first.isdisjoint(other)


def test_another_environment_gets_another_process(spawned: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries read the environment when they are loaded."""
    first, _ = pids_and_values(times(1), **spawned)
    monkeypatch.setenv("INFEED_TEST_SETTING", "1")
    other, _ = pids_and_values(times(1), **spawned)

    assert first.isdisjoint(other)


def test_a_worker_that_started_a_thread_is_not_reused(spawned: dict[str, Any]) -> None:
    def load(index: int) -> tuple[int, int]:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return os.getpid(), index

    first, _ = pids_and_values(Tree(8, load), **spawned)
    other, _ = pids_and_values(times(1), **spawned)

    assert first.isdisjoint(other)


def test_an_edited_module_is_imported_again(spawned: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    """As in a notebook: a worker with the old code is not reused."""
    module = tmp_path / "edited_module.py"
    module.write_text("factor = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(index: int) -> tuple[int, int]:
        import edited_module  # type: ignore[import-not-found]

        return os.getpid(), edited_module.factor * index

    _, values = pids_and_values(Tree(8, load), **spawned)
    module.write_text("factor = 1000\n", encoding="utf-8")
    later = time.time() + 10
    os.utime(module, (later, later))
    _, others = pids_and_values(Tree(8, load), **spawned)

    assert (values[1], others[1]) == (1, 1000)


def test_idle_workers_end_with_the_program(tmp_path: Path) -> None:
    """They end without output."""
    journal = Journal(tmp_path / "journal")
    code = """
    import os, sys
    import infeed
    from pathlib import Path
    from tests.helpers import Journal
    class Data:
        def __len__(self): return 4
        def __getitem__(self, index): return os.getpid()
    for _ in range(4):  # on a busy machine one may take too long to be kept
        (pids,) = infeed.DataLoader(Data(), 4, num_workers=1, start_method="spawn", timeout=30)
        Journal(Path(sys.argv[1])).write(int(pids[0]))
    """
    assert_clean(run_script(tmp_path, dedent(code), str(journal.path)))
    assert len(set(journal.lines())) < 4
