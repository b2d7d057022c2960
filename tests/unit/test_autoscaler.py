"""Automatic changes of an engine, with constructed readings."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from infeed.autotune.tuner import Change, Reading, Tuner, WorkerLimits
from infeed.engine.scaling import AutoScaler
from infeed.metrics.statistics import Point

SECOND = 1_000_000_000


class Bench:
    """The parts of an engine that the autoscaler uses."""

    def __init__(self, *, most: int = 64, tuner: Any = None, memory_budget: int | None = None) -> None:
        self.latest: Point | None = None
        self.tick_count = 0
        self.workers = self
        self.active_workers = (0, 1)
        self.window, self.most = 16, most
        self.windows: list[int] = []
        self.aims: list[int] = []
        self.marks: list[tuple[str, int, str]] = []
        part: Any = self
        self.autoscaler = AutoScaler(tuner, part, part, memory_budget)

    def usage(self, worker: int) -> Any:
        return type("Usage", (), {"private_bytes": 1000 * (worker + 1)})

    def mark(self, *what: Any) -> None:
        self.marks.append(what)

    def second(self, *, waited: float, busy: float, workers: int = 2) -> None:
        """Advances by one second, in which the training loop waited, and each worker was busy, for these shares."""
        last = self.latest or Point(0, 0, 0, 0, 0, 0, workers, 0, 0, 0, 0, 0)
        self.tick_count += 1
        self.latest = last._replace(
            at_ns=last.at_ns + SECOND,
            batch_count=last.batch_count + 10,
            sample_count=last.sample_count + 100,
            waited_ns=last.waited_ns + round(waited * SECOND),
            away_ns=last.away_ns + round((1 - waited) * SECOND),
            busy_ns=last.busy_ns + round(workers * busy * SECOND),
            cpu_ns=last.cpu_ns + round(workers * busy * SECOND / 2),
            queued_ns=last.queued_ns + round(workers * busy * SECOND / 4),
            worker_count=workers,
        )
        self.consider()

    def consider(self) -> None:
        """Calls the autoscaler like the engine does."""
        adjustment = self.autoscaler.consider()
        if adjustment.worker_count is not None:
            self.aims.append(adjustment.worker_count)
        if adjustment.is_narrow and self.window < self.most:
            self.window *= 2
            self.windows.append(self.window)


def test_a_waiting_loop_with_idle_workers_gets_a_larger_window() -> None:
    """After some readings, and repeatedly up to the limit."""
    bench = Bench(most=32)
    for _ in range(4):
        bench.second(waited=0.5, busy=0.4)
    assert bench.windows == [32]
    for _ in range(10):
        bench.second(waited=0.5, busy=0.4)
    assert bench.windows == [32]


@pytest.mark.parametrize(
    ("waited", "busy", "workers"),
    [(0.02, 0.1, 2), (0.9, 0.95, 2), (0.5, 0.4, 1)],
    ids=["does not wait", "workers are busy", "one worker"],
)
def test_otherwise_the_window_does_not_change(waited: float, busy: float, workers: int) -> None:
    bench = Bench()
    for _ in range(12):
        bench.second(waited=waited, busy=busy, workers=workers)
    assert bench.windows == []


def test_neither_one_reading_nor_occasional_ones_suffice() -> None:
    bench = Bench()
    for _ in range(6):
        bench.second(waited=0.5, busy=0.4)
        bench.second(waited=0.5, busy=0.4)
        bench.second(waited=0.0, busy=0.9)
    assert bench.windows == []


def test_a_reading_without_news_does_not_count() -> None:
    bench = Bench()
    bench.second(waited=0.5, busy=0.4)
    for _ in range(20):
        bench.consider()
    assert bench.windows == []


class FakeTuner:
    """Stands in for the tuner."""

    def __init__(self, *answers: Change | None) -> None:
        self.readings: list[Reading] = []
        self._answers = list(answers)
        self.reserve_bytes = 0
        self.bound = ""

    def begin(self) -> None:
        pass

    def consider(self, reading: Reading) -> Change | None:
        self.readings.append(reading)
        return self._answers.pop(0) if self._answers else None


def test_decisions_of_the_tuner_are_executed_logged_and_marked(caplog: pytest.LogCaptureFixture) -> None:
    tuner = FakeTuner(None, Change(5, "5 workers instead of 2: because"))
    bench = Bench(tuner=tuner)
    with caplog.at_level(logging.INFO, "infeed"):
        bench.second(waited=0.9, busy=0.95)
        bench.second(waited=0.9, busy=0.95)
    assert bench.aims == [5]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert caplog.records[0].getMessage() == bench.marks[0][2] == "5 workers instead of 2: because"
    first = tuner.readings[0]
    assert (first.worker_count, first.ready_count, first.worker_bytes) == (2, 2, 2000)
    assert first.free_bytes is not None
    assert first.free_bytes > 0


def test_waiting_for_a_core_counts_as_cpu_bound() -> None:
    """A busy machine is not a slow disk."""
    tuner = FakeTuner()
    Bench(tuner=tuner).second(waited=0.9, busy=1.0)
    assert tuner.readings[0].cpu_ns == round(0.75 * tuner.readings[0].busy_ns)


def test_a_memory_limit_covers_workers_and_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tuner keeps a reserve of the machine's memory, not of the user's limit."""
    monkeypatch.setattr("infeed.engine.scaling.available_bytes", lambda: 1 << 40)
    tuner = FakeTuner()
    tuner.reserve_bytes = 1 << 36
    bench = Bench(tuner=tuner, memory_budget=10_000)
    bench.latest = Point(0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, flight_bytes=400, slot_bytes=500)
    bench.second(waited=0.9, busy=1.0)
    free = tuner.readings[0].free_bytes
    assert free is not None
    # Two workers use 1000 and 2000 bytes, and batches have their slots.
    assert free - tuner.reserve_bytes == 10_000 - 3_000 - 500
    assert tuner.readings[0].is_budget
    monkeypatch.setattr("infeed.engine.scaling.available_bytes", lambda: 1 << 36)
    bench.second(waited=0.9, busy=1.0)
    assert not tuner.readings[1].is_budget


def test_reaching_the_limit_of_workers_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("infeed.engine.scaling.available_bytes", lambda: 1 << 40)
    bench = Bench(tuner=Tuner(WorkerLimits(cores=8, most_workers=8)), memory_budget=3_500)
    with caplog.at_level(logging.INFO, logger="infeed"):
        for _ in range(20):
            bench.second(waited=0.9, busy=1.0)
    assert [record.getMessage() for record in caplog.records] == ["staying at 2 workers: memory_limit allows no more"]
    assert not bench.aims


def test_short_epochs_are_measured_together() -> None:
    """One reading per epoch, and long pauses between them, in which the training loop's time does not advance."""
    bench = Bench(tuner=Tuner(WorkerLimits(cores=8, most_workers=8)))
    for _ in range(5):
        bench.second(waited=0.9, busy=1.0)
        bench.autoscaler.begin_epoch()
        assert bench.latest is not None
        bench.latest = bench.latest._replace(at_ns=bench.latest.at_ns + 100 * SECOND)
    assert bench.aims == [8]
