"""Workers whose number and kind infeed chooses: whatever it chooses, batches are the same."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.tuning.readings import Change, Reading
from infeed.tuning.tuner import Tuner

pytestmark = pytest.mark.process


class Drawing:
    """Random in every way that a process can tell apart."""

    def __init__(self, length: int = 400) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        time.sleep(0.0005)
        return index, random.random(), float(np.random.rand()), float(infeed.get_rng().random())


class Waiting:
    """Leaves the GIL, and says in which process it was loaded."""

    def __init__(self, length: int, seconds: float = 0.002) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        time.sleep(self.seconds)
        return index, float(infeed.get_rng().random()), os.getpid()


class Computing(Waiting):
    """Holds it."""

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            pass
        return index, float(infeed.get_rng().random()), os.getpid()


def rows(loader: infeed.DataLoader, columns: tuple[int, ...] = (0, 1)) -> list[list[tuple[Any, ...]]]:
    """Some columns of an epoch's samples, batch by batch."""
    return [list(zip(*(batch[column].tolist() for column in columns), strict=True)) for batch in loader]


def test_whatever_the_tuner_does_batches_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is out of its mind."""
    asked: list[int] = []

    def consider(tuner: Tuner, reading: Reading) -> Change:
        asked.append(random.Random(len(asked)).randint(1, 6))
        return Change(asked[-1], "it likes to")

    monkeypatch.setattr(Tuner, "consider", consider)
    monkeypatch.setattr("infeed.observe.gauge._TICK_NS", 1_000_000)
    monkeypatch.setattr("infeed.observe.gauge._TICK_SHARE", 0)
    # Threads share the global generators: there only what infeed offers is the same.
    for worker, columns in (("process", (0, 1, 2, 3)), ("thread", (0, 3))):
        with infeed.DataLoader(Drawing(), 8, shuffle=True, seed=3) as loader:
            expected = [rows(loader, columns) for _ in range(2)]
        with infeed.DataLoader(Drawing(), 8, shuffle=True, seed=3, num_workers="auto", worker=worker) as loader:  # type: ignore[arg-type]
            assert [rows(loader, columns) for _ in range(2)] == expected
    assert len(asked) > 20


def test_a_dataset_that_waits_gets_threads_in_the_middle_of_an_epoch(caplog: pytest.LogCaptureFixture) -> None:
    with infeed.DataLoader(Waiting(3000), 8, shuffle=True, seed=3) as loader:
        plan = [loader.explain(step).indices for step in range(3)]
    caplog.set_level(logging.INFO, "infeed")
    with infeed.DataLoader(Waiting(3000), 8, shuffle=True, seed=3, num_workers="auto", worker="auto") as loader:
        pids: list[int] = []
        seen: list[int] = []
        firsts: list[list[int]] = []
        for batch in loader:
            firsts.append(batch[0].tolist())
            seen += batch[0].tolist()
            pids.append(int(batch[2][0]))
            if len(pids) > 20 and pids[-1] == os.getpid():
                break
        known = loader.statistics()
    assert firsts[:3] == [list(indices) for indices in plan]
    assert known.kind == "thread"
    assert pids[0] != os.getpid()
    assert len(seen) == len(set(seen))
    assert any(record.getMessage().startswith("threads: ") for record in caplog.records)


def test_the_change_of_kind_loses_and_doubles_nothing() -> None:
    with infeed.DataLoader(Waiting(1200, 0.001), 8, shuffle=True, seed=3) as loader:
        expected = rows(loader)
    with infeed.DataLoader(Waiting(1200, 0.001), 8, shuffle=True, seed=3, num_workers=2, worker="auto") as loader:
        assert rows(loader) == expected
        second = rows(loader)
        assert loader.statistics().kind == "thread"
        assert loader.statistics().sample_count == 2400
        assert sorted(second[0]) != sorted(expected[0])


def test_a_dataset_that_computes_keeps_processes() -> None:
    with infeed.DataLoader(Computing(600), 8, num_workers=2, worker="auto", seed=3) as loader:
        pids = {int(pid) for batch in loader for pid in batch[2]}
        known = loader.statistics()
    assert known.kind == "process"
    assert os.getpid() not in pids
    assert not loader._core.staff.is_open


def test_a_dataset_that_draws_keeps_processes(caplog: pytest.LogCaptureFixture) -> None:
    """However much it waits: threads would share the generators."""
    with infeed.DataLoader(Drawing(2000), 8, shuffle=True, seed=3) as loader:
        expected = rows(loader, (0, 1, 2, 3))
    caplog.set_level(logging.INFO, "infeed")
    with infeed.DataLoader(Drawing(2000), 8, shuffle=True, seed=3, num_workers=2, worker="auto") as loader:
        assert rows(loader, (0, 1, 2, 3)) == expected
        assert loader.statistics().kind == "process"
        assert not loader._core.staff.is_open
    assert "draws from global random generators" in caplog.text


def test_with_a_sampler_the_kind_changes_with_the_next_epoch() -> None:
    """It could not be asked again for what is left."""
    drawn = []

    class Once:
        def __iter__(self) -> Any:
            drawn.append(1)
            return iter(range(600))

    with infeed.DataLoader(Waiting(600), 8, sampler=Once(), num_workers=2, worker="auto") as loader:
        first = [batch[0].tolist() for batch in loader]
        assert loader.statistics().kind == "process"
        second = [batch[0].tolist() for batch in loader]
        assert loader.statistics().kind == "thread"
    assert first == second
    assert [index for batch in first for index in batch] == list(range(600))


def test_the_number_of_workers_grows_where_samples_wait() -> None:
    with infeed.DataLoader(Waiting(100_000, 0.004), 8, num_workers="auto") as loader:
        deadline = time.monotonic() + 30
        for _ in loader:
            if loader.statistics().worker_count > 2:
                break
            assert time.monotonic() < deadline
        assert loader.statistics().is_auto


def test_a_number_is_the_most_with_an_auto_kind() -> None:
    with infeed.DataLoader(Waiting(2000, 0.001), 8, num_workers=3, worker="auto") as loader:
        most = max(loader.statistics().worker_count for _ in loader)
    assert most <= 3


def test_a_stream_has_one_worker() -> None:
    with infeed.DataLoader((number for number in range(100)), 8, worker="thread", num_workers="auto") as loader:
        assert [number for batch in loader for number in batch] == list(range(100))
        assert loader.statistics().worker_count == 1


def test_nothing_is_left_of_workers_that_were_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard around every test looks for them."""
    counts = iter([4, 1, 3, 2] * 100)
    monkeypatch.setattr(Tuner, "consider", lambda tuner, reading: Change(next(counts), "told to"))
    monkeypatch.setattr("infeed.observe.gauge._TICK_NS", 1_000_000)
    with infeed.DataLoader(Waiting(400, 0.001), 4, num_workers=4, worker="auto") as loader:
        assert sorted(index for batch in loader for index in batch[0].tolist()) == list(range(400))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("infeed")]
