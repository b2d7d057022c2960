"""How often an engine's workers are looked at, by a clock that the test moves."""

from __future__ import annotations

import pytest

from infeed.observe.gauge import Gauge
from infeed.observe.gauges import Gauges
from infeed.observe.history import History
from infeed.scheduler.messages import WorkerId
from infeed.workers.board import Board

MS = 1_000_000


@pytest.mark.parametrize(("pause_ms", "epoch_count"), [(0, 50), (50, 50), (5000, 50)])
def test_looks_are_due_by_the_loops_own_time(monkeypatch: pytest.MonkeyPatch, pause_ms: int, epoch_count: int) -> None:
    """Epochs of ten milliseconds: loaders that take turns do not pay for each other."""
    now = 10**12
    for module in ("gauge", "members", "owntime"):
        monkeypatch.setattr(f"infeed.observe.{module}.perf_counter_ns", lambda: now)
    workers = (WorkerId(0),)
    gauge = Gauge(History(), Gauges(), Board(workers, None), workers, "thread", "counters", 0)
    for epoch in range(epoch_count):
        gauge.begin_epoch(epoch)
        for _ in range(10):
            gauge.given(now, now + MS)
            now += MS
        gauge.end_epoch(now, now)
        now += pause_ms * MS
    assert 4 <= gauge.tick_count <= 6


def test_what_goes_on_is_counted_up_to_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step, then a wait of which 4 ms are noted as blocked already; nothing between epochs."""
    now = 10**12
    monkeypatch.setattr("infeed.observe.gauge.perf_counter_ns", lambda: now)
    workers = (WorkerId(0),)
    gauge = Gauge(History(), Gauges(), Board(workers, None), workers, "inline", "counters", 0)

    def times() -> list[float]:
        return [one / MS for one in gauge.loop_times()]

    gauge.begin_epoch(0)
    gauge.asked_ns = now
    now += 5 * MS
    assert times() == [0, 0, 0, 0]  # the very first start
    gauge.given(now - 5 * MS, now)
    now += 20 * MS
    assert times() == [0, 20, 0, 0]
    gauge.asked_ns, gauge.asked_blocked = now, gauge.blocked_ns
    now += 7 * MS
    gauge.blocked_ns += 4 * MS
    assert times() == [7, 20, 7, 7]
    gauge.blocked_ns += 2 * MS
    gauge.given(now - 7 * MS, now)
    assert times() == [7, 20, 6, 0]
    gauge.end_epoch(now, now)
    now += 50 * MS
    assert times() == [7, 20, 6, 0]
    gauge.begin_epoch(1)
    gauge.changed_over(now - 3 * MS, now)
    assert times() == [10, 20, 9, 0]
    gauge.asked_ns, gauge.asked_blocked = now, gauge.blocked_ns
    now += MS
    assert times() == [11, 20, 10, 1]
    gauge.stop_waiting()
    assert times() == [11, 20, 9, 0]


def test_only_one_loop_is_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iterator that was left lying, or the loop around this one, is not working meanwhile."""
    now = 10**12
    monkeypatch.setattr("infeed.observe.gauge.perf_counter_ns", lambda: now)
    workers, gauges = (WorkerId(0),), Gauges()
    first, second = (Gauge(History(), gauges, Board(workers, None), workers, "inline", "counters", 0) for _ in range(2))
    for gauge in (first, second):
        gauge.begin_epoch(0)
        gauge.given(now, now)
    now += 30 * MS

    assert (first.loop_times().away_ns, second.loop_times().away_ns) == (0, 30 * MS)
    first.given(now, now)
    now += MS
    assert (first.loop_times().away_ns, second.loop_times().away_ns) == (31 * MS, 30 * MS)  # as far as it was told
    second.asked_ns = now
    now += 2 * MS
    assert second.loop_times().waiting_ns == 2 * MS  # who waits does, whoever was last


def test_closing_counts_what_goes_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait up to now, and a step as far as it was told; whatever is heard of the loop later."""
    now = 10**12
    monkeypatch.setattr("infeed.observe.gauge.perf_counter_ns", lambda: now)
    workers = (WorkerId(0),)
    for is_waiting in (True, False):
        history = History()
        gauge = Gauge(history, Gauges(), Board(workers, None), workers, "inline", "counters", 0)
        gauge.begin_epoch(0)
        gauge.given(now, now)
        now += 5 * MS
        assert gauge.loop_times().away_ns == 5 * MS
        gauge.asked_ns = now if is_waiting else 0
        now += 7 * MS
        gauge.close()
        waited = 7 * MS if is_waiting else 0
        assert gauge.loop_times()[:2] == (waited, 5 * MS)
        recent = history.past.recent([])
        assert recent is not None
        assert (recent.amounts.waited_ns, recent.amounts.away_ns) == (waited, 5 * MS)
        gauge.end_epoch(now)
        assert gauge.loop_times()[:2] == (waited, 5 * MS)
