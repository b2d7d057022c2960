"""Workers whose number and kind infeed chooses: batches do not depend on its choice."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from itertools import groupby
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.autotune.tuner import Change, Reading, Tuner
from tests.helpers import always_threads, session_of

pytestmark = pytest.mark.process


class Drawing:
    """Draws from every generator, and so shows in which process a sample was drawn."""

    def __init__(self, length: int = 400) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        time.sleep(0.0005)
        return index, random.random(), float(np.random.rand()), float(infeed.get_rng().random())


class Waiting:
    """I/O-bound: releases the GIL, and returns the process that loaded it."""

    def __init__(self, length: int, seconds: float = 0.002) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        time.sleep(self.seconds)
        return index, float(infeed.get_rng().random()), os.getpid()


class Computing(Waiting):
    """CPU-bound: holds the GIL."""

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            pass
        return index, float(infeed.get_rng().random()), os.getpid()


def rows(loader: infeed.DataLoader, columns: tuple[int, ...] = (0, 1)) -> list[list[tuple[Any, ...]]]:
    """Returns some columns of an epoch's samples, batch by batch."""
    return [list(zip(*(batch[column].tolist() for column in columns), strict=True)) for batch in loader]


def test_batches_do_not_depend_on_the_decisions_of_the_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner in this test decides at random."""
    asked: list[int] = []

    def consider(tuner: Tuner, reading: Reading) -> Change:
        asked.append(random.Random(len(asked)).randint(1, 6))
        return Change(asked[-1], "at random")

    monkeypatch.setattr(Tuner, "consider", consider)
    monkeypatch.setattr("infeed.metrics.collector.TICK_NS", 1_000_000)
    monkeypatch.setattr("infeed.metrics.collector.TICK_SHARE", 0)
    # Threads share the global generators: only `get_rng` gives the same numbers there.
    for worker, columns in (("process", (0, 1, 2, 3)), ("thread", (0, 3))):
        with infeed.DataLoader(Drawing(), 8, shuffle=True, seed=3) as loader:
            expected = [rows(loader, columns) for _ in range(2)]
        with infeed.DataLoader(Drawing(), 8, shuffle=True, seed=3, num_workers="auto", worker=worker) as loader:  # type: ignore[arg-type]
            assert [rows(loader, columns) for _ in range(2)] == expected
    assert len(asked) > 20


def test_threads_start_with_the_next_epoch(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "infeed")
    always_threads(monkeypatch)
    with infeed.DataLoader(Waiting(400), 8, shuffle=True, seed=3) as loader:
        expected = [rows(loader) for _ in range(2)]
    with infeed.DataLoader(Waiting(400), 8, shuffle=True, seed=3, num_workers=2, worker="auto") as loader:
        assert rows(loader) == expected[0]
        assert loader.statistics().kind == "process"
        assert rows(loader) == expected[1]
        assert loader.statistics().kind == "thread"
    assert any(record.getMessage().startswith("threads: ") for record in caplog.records)


@pytest.mark.parametrize("dataset", [Computing(300), Drawing(800)], ids=["computes", "draws"])
def test_a_dataset_that_computes_or_draws_keeps_processes(dataset: Any) -> None:
    """A dataset that draws keeps processes even if it is I/O-bound: threads would share the generators."""
    with infeed.DataLoader(dataset, 8, num_workers=2, worker="auto", seed=3) as loader:
        # On a busy machine it may take several epochs until enough was measured.
        for _ in range(10):
            list(loader)
            if not session_of(loader).worker_tuning.is_open:
                break
        assert loader.statistics().kind == "process"
        assert not session_of(loader).worker_tuning.is_open


class DrawsLate(Waiting):
    """Only its last samples draw random numbers."""

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        if index >= 350:
            random.random()
        return super().__getitem__(index)


def test_a_draw_at_the_end_of_an_epoch_is_detected() -> None:
    with infeed.DataLoader(DrawsLate(400), 8, num_workers=2, worker="auto", seed=3) as loader:
        for _ in range(3):
            list(loader)
            assert loader.statistics().kind == "process"
        assert not session_of(loader).worker_tuning.is_open


def test_threads_that_are_slower_are_never_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    always_threads(monkeypatch)
    monkeypatch.setattr("infeed.engine.scaling.WORSE", 0.0)
    monkeypatch.setattr("infeed.engine.scaling.LEAST_NS", 1)
    with infeed.DataLoader(Waiting(100), 8, num_workers=2, worker="auto") as loader:
        kinds = []
        # On a busy machine it may take several epochs until enough was measured.
        while session_of(loader).worker_tuning.is_open and len(kinds) < 10:
            list(loader)
            kinds.append(loader.statistics().kind)
        list(loader)
        kinds.append(loader.statistics().kind)
    assert [kind for kind, _ in groupby(kinds)] == ["process", "thread", "process"]


class OpensFile(Waiting):
    """Opens a file when it is used, as many datasets do."""

    file: Any = None

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        if self.file is None and index == 0:
            self.file = open(os.devnull, "rb")  # noqa: SIM115
        return super().__getitem__(index)


def test_threads_stay_if_the_dataset_can_no_longer_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """infeed cannot return to processes, and the training loop must not fail because of that."""
    always_threads(monkeypatch)
    monkeypatch.setattr("infeed.engine.scaling.WORSE", 0.0)
    monkeypatch.setattr("infeed.engine.scaling.LEAST_NS", 1)
    dataset = OpensFile(100)
    with infeed.DataLoader(dataset, 8, num_workers=2, worker="auto") as loader:
        for _ in range(4):
            assert len(list(loader)) == 13
        assert loader.statistics().kind == "thread"
    dataset.file.close()


@pytest.mark.parametrize(
    "options",
    [
        {"sample_timeout": 30},
        {"worker_init_fn": print},
        {"cpu_limit": 2},
        {"memory_limit": "1GiB"},
        {"on_error": infeed.ErrorPolicy("skip", retries=1, budget=5)},
        {"in_order": False},
        {"prefetch": 3},
        {"grain_size": 1},
        {"timeout": 60},
        {"start_method": "spawn"},
        {"device": "cpu"},
        {"observe": "counters"},
        {"hang_warning": 5, "threads_per_worker": 2},
        {"sampler": infeed.RandomSampler(replacement=True, num_samples=80)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_option_works_with_auto(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the kind of worker has changed."""
    if "device" in options:
        pytest.importorskip("torch")
    always_threads(monkeypatch)
    with infeed.DataLoader(Waiting(80, 0.001), 8, num_workers=2, worker="auto", seed=3, **options) as loader:
        for _ in range(3):
            assert sum(len(batch[0]) for batch in loader) == 80
        needs_processes = "sample_timeout" in options or "worker_init_fn" in options
        assert loader.statistics().kind == ("process" if needs_processes else "thread")


def test_a_sampler_works_with_auto() -> None:
    with infeed.DataLoader(Waiting(300), 8, sampler=list(range(300)), num_workers=2, worker="auto") as loader:
        for _ in range(2):
            assert [index for batch in loader for index in batch[0].tolist()] == list(range(300))


def test_two_concurrent_loops_do_not_confuse_the_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner receives the readings of one loop only."""
    readings: list[Reading] = []
    monkeypatch.setattr(Tuner, "consider", lambda tuner, reading: readings.append(reading))
    monkeypatch.setattr("infeed.metrics.collector.TICK_NS", 1_000_000)
    monkeypatch.setattr("infeed.metrics.collector.TICK_SHARE", 0)
    with infeed.DataLoader(Waiting(200, 0.001), 4, num_workers="auto") as loader:
        for _ in zip(loader, loader, strict=True):
            pass
    counts = [reading.batch_count for reading in readings]
    assert counts == sorted(counts)
    assert len(counts) > 2


def test_auto_needs_counters() -> None:
    for options in ({"num_workers": "auto"}, {"num_workers": 2, "worker": "auto"}):
        with pytest.raises(infeed.ConfigError, match="which needs counters"):
            infeed.DataLoader(Waiting(10), observe="off", **options)  # type: ignore[arg-type]


def test_the_number_of_workers_grows_for_io_bound_samples() -> None:
    with infeed.DataLoader(Waiting(100_000, 0.004), 8, num_workers="auto") as loader:
        deadline = time.monotonic() + 30
        for _ in loader:
            known = loader.statistics()
            # On a busy machine the training loop waits mostly for workers to start, and the diagnosis reports that first.
            if known.worker_count > 2 and known.finding.action == "wait-for-tuner":
                break
            assert time.monotonic() < deadline
    assert known.is_auto
    assert not known.is_settled


def test_an_explicit_number_is_the_maximum_for_an_auto_kind() -> None:
    with infeed.DataLoader(Waiting(2000, 0.001), 8, num_workers=3, worker="auto") as loader:
        most = max(loader.statistics().worker_count for _ in loader)
    assert most <= 3


def test_an_iterable_dataset_has_one_worker() -> None:
    with infeed.DataLoader((number for number in range(100)), 8, worker="thread", num_workers="auto") as loader:
        assert [number for batch in loader for number in batch] == list(range(100))
        assert loader.statistics().worker_count == 1
        assert loader.statistics().finding.action != "wait-for-tuner"


def test_nothing_is_left_of_stopped_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leak guard of every test looks for them."""
    counts = iter([4, 1, 3, 2] * 100)
    monkeypatch.setattr(Tuner, "consider", lambda tuner, reading: Change(next(counts), "forced"))
    monkeypatch.setattr("infeed.metrics.collector.TICK_NS", 1_000_000)
    with infeed.DataLoader(Waiting(400, 0.001), 4, num_workers=4, worker="auto") as loader:
        assert sorted(index for batch in loader for index in batch[0].tolist()) == list(range(400))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("infeed")]
