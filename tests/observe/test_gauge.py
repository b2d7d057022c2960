"""How often an engine's workers are looked at, by a clock that the test moves."""

from __future__ import annotations

import pytest

from infeed.observe.gauge import Gauge, Gauges
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
