"""How often the workers of an engine are measured, with a clock that the test controls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from infeed.metrics.collector import AllMetrics, EngineMetrics
from infeed.metrics.history import History
from infeed.metrics.process_time import Clock
from infeed.scheduler.messages import WorkerId
from infeed.workers.process_tools import MemoryUse
from infeed.workers.recorder import RecorderReader
from infeed.workers.status import StatusBoard

MS = 1_000_000


@pytest.mark.parametrize(("pause_ms", "epoch_count"), [(0, 50), (50, 50), (5000, 50)])
def test_measurements_are_due_by_the_loops_own_time(pause_ms: int, epoch_count: int) -> None:
    """Epochs of 10 ms: loaders that take turns do not delay each other's measurements."""
    now = 10**12
    clock = Clock(lambda: now)
    workers = (WorkerId(0),)
    metrics = EngineMetrics(History(), AllMetrics(), StatusBoard(workers, None), workers, "thread", "counters", 0, clock)
    for epoch in range(epoch_count):
        metrics.begin_epoch(epoch)
        for _ in range(10):
            metrics.delivered(now, now + MS)
            now += MS
        metrics.end_epoch(now)
        now += pause_ms * MS
    assert 4 <= metrics.tick_count <= 6


def test_a_measurement_reads_each_worker_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The point and the slice of a measurement have the same worker times, and the training loop pays for one reading."""
    now = 10**12
    workers = tuple(map(WorkerId, range(3)))
    board, history, reads = StatusBoard(workers, None), History(), Counter[str]()
    metrics = EngineMetrics(history, AllMetrics(), board, workers, "process", "counters", 0, Clock(lambda: now))
    for worker in workers:
        metrics.workers.started(worker, None)
        board.cell(worker).note_usage(MemoryUse(7, 7), cpu_ns=MS, queued_ns=2)
    for kind, name in ((StatusBoard, "doing"), (RecorderReader, "sums")):
        monkeypatch.setattr(kind, name, counting(getattr(kind, name), reads))
    metrics.begin_epoch(0)
    metrics.delivered(now, now + MS)
    assert reads == {"doing": 3, "sums": 3}
    (point,), (past,) = history.points, history.past.slices
    assert (point.memory_bytes, point.cpu_ns, past.amounts.cpu_ns) == (21, 3 * MS, 3 * MS)


def test_infeeds_work_before_the_first_batch_counts_as_start_up() -> None:
    """The time for delivery is then a part of the wait for data."""
    now = 10**12
    workers = (WorkerId(0),)
    metrics = EngineMetrics(
        History(), AllMetrics(), StatusBoard(workers, None), workers, "thread", "counters", 0, Clock(lambda: now)
    )
    metrics.workers.started(WorkerId(0), None)
    metrics.begin_epoch(0)
    for wait_ms, blocked_ms in ((100, 20), (5, 3)):
        metrics.asked(now)
        metrics.blocked(blocked_ms * MS, 0)
        metrics.delivered(now, now + wait_ms * MS)
        now += (wait_ms + 10) * MS
    amounts = metrics.amounts(is_exact=False)
    assert (amounts.started_ns, amounts.waited_ns) == (100 * MS, 5 * MS)
    assert amounts.waited_ns + amounts.started_ns - amounts.blocked_ns == 2 * MS


def counting(method: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        calls[method.__name__] += 1
        return method(*args)

    return counted


def test_unfinished_intervals_count_up_to_now() -> None:
    """Worker start-up, a step, then a wait of which 4 ms are already recorded as blocked; nothing between epochs."""
    now = 10**12
    clock = Clock(lambda: now)
    workers = (WorkerId(0),)
    metrics = EngineMetrics(History(), AllMetrics(), StatusBoard(workers, None), workers, "inline", "counters", 0, clock)

    def times() -> list[float]:
        return [one / MS for one in metrics.loop_times()]

    metrics.begin_epoch(0)
    metrics.asked(now)
    now += 5 * MS
    assert times() == [0, 0, 0, 0]  # The first start of workers.
    metrics.delivered(now - 5 * MS, now)
    now += 20 * MS
    assert times() == [0, 20, 5, 0]
    metrics.asked(now)
    now += 7 * MS
    metrics.blocked(4 * MS, 0)
    assert times() == [7, 20, 12, 7]
    metrics.blocked(2 * MS, 0)
    metrics.delivered(now - 7 * MS, now)
    assert times() == [7, 20, 11, 0]
    metrics.end_epoch(now)
    now += 50 * MS
    assert times() == [7, 20, 11, 0]
    metrics.begin_epoch(1)
    metrics.changed_over(now - 3 * MS, now)
    assert times() == [10, 20, 14, 0]
    metrics.asked(now)
    now += MS
    assert times() == [11, 20, 15, 1]
    metrics.stop_waiting()
    assert times() == [11, 20, 14, 0]


def test_only_one_loop_is_in_a_step() -> None:
    """An abandoned iterator, or an outer loop, is not in a step meanwhile."""
    now = 10**12
    clock = Clock(lambda: now)
    workers, all_metrics = (WorkerId(0),), AllMetrics()
    boards = [StatusBoard(workers, None) for _ in range(2)]
    first, second = (EngineMetrics(History(), all_metrics, one, workers, "inline", "counters", 0, clock) for one in boards)
    for metrics in (first, second):
        metrics.begin_epoch(0)
        metrics.delivered(now, now)
    now += 30 * MS

    assert (first.loop_times().away_ns, second.loop_times().away_ns) == (0, 30 * MS)
    first.delivered(now, now)
    now += MS
    assert (first.loop_times().away_ns, second.loop_times().away_ns) == (31 * MS, 30 * MS)  # As far as it was recorded.
    second.asked(now)
    now += 2 * MS
    assert second.loop_times().waiting_ns == 2 * MS  # The waiting loop, whichever was in a step before.


def test_closing_counts_unfinished_intervals_once() -> None:
    """A wait up to now, and a step as far as it was recorded, whatever is recorded later."""
    now = 10**12
    clock = Clock(lambda: now)
    workers = (WorkerId(0),)
    for is_waiting in (True, False):
        history = History()
        metrics = EngineMetrics(history, AllMetrics(), StatusBoard(workers, None), workers, "inline", "counters", 0, clock)
        metrics.begin_epoch(0)
        metrics.delivered(now, now)
        now += 5 * MS
        assert metrics.loop_times().away_ns == 5 * MS
        if is_waiting:
            metrics.asked(now)
        now += 7 * MS
        metrics.close()
        waited = 7 * MS if is_waiting else 0
        assert metrics.loop_times()[:2] == (waited, 5 * MS)
        recent = history.past.recent([])
        assert recent is not None
        assert (recent.amounts.waited_ns, recent.amounts.away_ns) == (waited, 5 * MS)
        metrics.end_epoch()
        assert metrics.loop_times()[:2] == (waited, 5 * MS)
