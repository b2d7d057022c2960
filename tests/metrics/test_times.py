"""How time is attributed to loop, workers and start-up; figures do not change when nothing happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.engine.engine import Engine
from infeed.metrics.charts import rate_figure, worker_figure
from infeed.scheduler.messages import WorkerId
from infeed.workers.process import ProcessPool
from tests.helpers import Squares, Tree, engine_of, kill_process, session_of, wait_until

NAP_S = 0.02


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "worker": "thread"}], ids=["inline", "thread"])
def test_points_continue_after_a_change_of_engine(workers: dict[str, Any]) -> None:
    """Differences between points are never negative."""
    with infeed.DataLoader(Squares(32), 4, **workers) as loader:
        for _ in range(4):
            list(loader)
            session_of(loader).engine_cache.clear()
        points = session_of(loader).trace().points
        known = loader.statistics()
    sums = [(one.batch_count, one.sample_count, one.byte_count, one.waited_ns, one.away_ns, one.busy_ns) for one in points]
    assert all(a <= b for before, after in pairwise(sums) for a, b in zip(before, after, strict=True))
    assert points[-1].batch_count > 3 * 8
    assert points[-1].sample_count <= known.sample_count
    assert max(one.worker_count for one in points) <= 2
    for figure in (rate_figure(points, ()), worker_figure(points)):
        assert all(value >= 0 for line in figure["data"] for value in line["y"])


def test_points_count_concurrent_loops() -> None:
    with infeed.DataLoader(Squares(32), 4) as loader:
        for _ in loader:
            list(loader)
        points = session_of(loader).trace().points
    assert [one.batch_count for one in points[:2]] == [1, 2]


def test_starting_and_stopping_workers_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for the first start, as a stopwatch would measure."""
    build, close = infeed.engine.session.build_engine, Engine.close

    def build_slowly(*given: Any, **options: Any) -> Engine:
        time.sleep(NAP_S)
        return build(*given, **options)

    def close_slowly(engine: Engine, **options: Any) -> None:
        time.sleep(NAP_S)
        close(engine, **options)

    monkeypatch.setattr("infeed.engine.session.build_engine", build_slowly)
    monkeypatch.setattr(Engine, "close", close_slowly)
    with infeed.DataLoader(Squares(16), 4) as loader:
        session_of(loader).engine_cache.configure(is_keeping=False)
        began = time.perf_counter()
        for _ in range(3):
            list(loader)
        took_s = time.perf_counter() - began
        known = loader.statistics()
    assert known.started_s >= NAP_S
    assert known.waited_s >= known.changeover_s >= 5 * NAP_S
    assert 6 * NAP_S <= known.started_s + known.waited_s + known.away_s <= took_s
    assert known.deliver_s <= known.started_s + known.waited_s - 6 * NAP_S
    assert not known.keeps_workers


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}], ids=["host", "device"])
def test_the_last_step_of_an_epoch_counts(options: dict[str, Any]) -> None:
    if options:
        pytest.importorskip("torch")
    with infeed.DataLoader(Squares(4), 4, **options) as loader:
        for _ in range(3):
            for _batch in loader:
                time.sleep(NAP_S)
        known = loader.statistics()
        spans = session_of(loader).trace().spans
    assert known.away_s >= 3 * NAP_S
    assert sum(span.seconds for span in spans if span.kind == "away") >= 3 * NAP_S


def test_the_last_step_of_an_abandoned_loop_is_not_counted() -> None:
    with infeed.DataLoader(Squares(8), 4) as loader:
        for _ in loader:
            time.sleep(NAP_S)
            break
        assert loader.statistics().away_s == 0


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "worker": "thread"}, {"device": "cpu"}], ids=["inline", "thread", "device"]
)
def test_an_unfinished_step_counts_as_work_so_far(options: dict[str, Any]) -> None:
    """In the middle of the step; no figure decreases if the training loop is left then."""
    if "device" in options:
        pytest.importorskip("torch")
    with infeed.DataLoader(Squares(64), 4, **options) as loader:
        for _ in loader:
            before = loader.statistics()
            time.sleep(NAP_S)
            known = loader.statistics()
            assert known.away_s - before.away_s >= NAP_S
            assert known.waited_s == before.waited_s
            assert known.recent is not None
            assert known.recent.amounts.away_ns >= NAP_S * 1e9
            break
        assert loader.statistics().away_s >= known.away_s
        assert loader.statistics() == loader.statistics()


class Stopping:
    """Its sample 8 blocks until it is released, and may raise then."""

    def __init__(self, raises: bool = False) -> None:
        self.gate, self.raises = threading.Event(), raises

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> np.ndarray:
        if index == 8:
            self.gate.wait()
            if self.raises:
                raise ValueError("broken")
        return np.full(10, index)


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}], ids=["host", "device"])
def test_an_unfinished_wait_counts(options: dict[str, Any]) -> None:
    """Another thread or a signal handler reads it, with what each worker is doing."""
    if options:
        pytest.importorskip("torch")
    dataset = Stopping()
    with infeed.DataLoader(dataset, 1, num_workers=1, worker="thread", **options) as loader:
        loop = threading.Thread(target=lambda: list(loader))
        loop.start()
        try:
            wait_until(lambda: loader.statistics().finding.bottleneck == "pending-sample", "the loop to wait for it")
            known = loader.statistics()
            assert known.waited_s >= known.waiting_s > known.waited_s / 2
            assert known.workers[0].pending_s > known.waited_s / 2
            assert known.deliver_s <= known.started_s + known.waited_s - known.waiting_s + 1e-6  # It is no work of infeed.
        finally:
            dataset.gate.set()
            loop.join()
        after = loader.statistics()
    assert after.waited_s >= known.waited_s
    assert (after.waiting_s, after.workers[0].pending_s) == (0, 0)


@pytest.mark.parametrize("ends", ["time-out", "error", "close"])
def test_a_reported_wait_or_step_is_kept(ends: str) -> None:
    """Although no batch follows."""
    dataset = Stopping(ends == "error")
    with infeed.DataLoader(dataset, 1, num_workers=1, worker="thread", timeout=0.2 if ends == "time-out" else 0) as loader:
        batches = iter(loader)
        if ends == "close":
            next(batches)
            time.sleep(NAP_S)
            before = loader.statistics()
            loader.close()
        else:
            loop = threading.Thread(target=lambda: list(batches))
            with raised_in_threads() as errors:
                loop.start()
                wait_until(lambda: loader.statistics().waiting_s > NAP_S, "the loop to wait")
                before = loader.statistics()
                if ends == "error":
                    dataset.gate.set()
                loop.join()
            assert len(errors) == 1
        after = loader.statistics()
        dataset.gate.set()
    assert (after.waited_s >= before.waited_s, after.away_s >= before.away_s) == (True, True)
    assert before.waited_s + before.away_s >= NAP_S


@contextmanager
def raised_in_threads() -> Iterator[list[BaseException | None]]:
    """Collects exceptions of threads instead of printing them."""
    errors: list[BaseException | None] = []
    before, threading.excepthook = threading.excepthook, lambda failure: errors.append(failure.exc_value)
    try:
        yield errors
    finally:
        threading.excepthook = before


class Gated:
    """Blocks after its first epoch until it is released."""

    def __init__(self) -> None:
        self.count = 0
        self.gate = threading.Event()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> np.ndarray:
        if self.count >= 24:
            self.gate.wait()
        time.sleep(0.002)
        self.count += 1
        return np.full(10, index)


def test_figures_do_not_change_while_workers_load_ahead() -> None:
    """Work for the next epoch counts when that starts, and no worker is busy for longer than it exists."""
    data = Gated()
    with infeed.DataLoader(data, 4, num_workers=1, worker="thread") as loader:
        list(loader)
        before = loader.statistics()
        assert sum(one.sample_count for one in before.workers) == 24
        data.gate.set()
        while data.count < 24 + 5:  # A task is done, and another has started.
            time.sleep(0.001)
        after = loader.statistics()
        assert (before.workers, before.histogram, before.diagnosis) == (after.workers, after.histogram, after.diagnosis)
        list(loader)
        known = loader.statistics()
    assert sum(one.sample_count for one in known.workers) >= 48
    assert all(one.busy_s <= one.alive_s for one in known.workers)
    assert loader.statistics().histogram == known.histogram


@pytest.mark.parametrize("observe", ["timeline", "off"])
def test_the_memory_limit_is_the_effective_one(observe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much memory others take meanwhile, and also after close."""
    free = iter(range(1 << 40, 1 << 41, 1 << 30))
    monkeypatch.setattr("infeed.engine.session.available_bytes", lambda: next(free))
    monkeypatch.setattr("infeed.engine.build.available_bytes", lambda: 1 << 30)
    with infeed.DataLoader(Squares(8), 4, observe=observe) as loader:
        list(loader)
        assert loader.statistics().memory_limit == 1 << 29
    assert loader.statistics().memory_limit == 1 << 29


def test_only_existing_batches_are_in_flight() -> None:
    """Free slots do not count, whatever is reserved for the next batch."""
    with infeed.DataLoader(np.zeros((8, 1000)), 4) as loader:
        kept = list(loader)
        assert 2 * 32_000 <= loader.statistics().bytes_in_flight < 1 << 20
        del kept
        assert loader.statistics().bytes_in_flight == 0


@pytest.mark.process
@pytest.mark.parametrize("how", ["replaced", "added"])
def test_start_up_time_of_workers_is_counted_separately(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training loop waits while a replacement or an additional worker starts: that is no work on batches."""
    started: list[int] = []
    start = ProcessPool.start

    def slowly(self: ProcessPool, worker: WorkerId) -> None:
        start(self, worker)
        time.sleep(NAP_S)  # The duration of the start.
        started.append(worker)

    with infeed.DataLoader(range(1_000_000), 4, num_workers=2) as loader:
        batches = iter(loader)
        next(batches)
        engine = engine_of(loader)
        if how == "added":
            engine.scaling.aim(1)
            next(batches)
        before = loader.statistics()
        monkeypatch.setattr(ProcessPool, "start", slowly)
        if how == "added":
            engine.scaling.aim(2)  # Like the tuner, while the training loop waits.
        else:
            kill_process(engine.worker_processes()[0].pid)
        wait_until(lambda: next(batches) is not None and started, "another worker")
        known = loader.statistics()
    assert len(started) == 1
    took_s = known.changeover_s - before.changeover_s
    assert took_s >= NAP_S
    assert known.deliver_s - before.deliver_s <= known.waited_s - before.waited_s - took_s + 1e-6


LARGE = np.zeros(1 << 22)


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.process)])
def test_writing_to_a_slot_is_not_counted_as_loading(kind: Any) -> None:
    """Samples of 32 MiB each have been loaded; slots for them are allocated afterwards."""
    with infeed.DataLoader(Tree(8, lambda index: LARGE), 1, num_workers=1, worker=kind, prefetch=4) as loader:
        for _ in loader:
            pass
        (worker,) = loader.statistics().workers
    assert worker.load_s < worker.write_s
