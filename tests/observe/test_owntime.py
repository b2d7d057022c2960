"""What the user's own process used, by clocks that the test moves."""

from __future__ import annotations

import pytest

from infeed.observe import owntime
from infeed.observe.owntime import OwnTime

MS = 1_000_000


class Clocks:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.cpu = self.queued = 1000 * MS
        self.reads = 0
        monkeypatch.setattr(owntime, "perf_counter_ns", lambda: self.now)
        monkeypatch.setattr(owntime, "process_time_ns", self._read)
        monkeypatch.setattr(owntime, "queued_ns", lambda: self.queued)

    def _read(self) -> int:
        self.reads += 1
        return self.cpu

    def go(self, ms: int) -> None:
        """Time goes by; the process computes for half of it, and the loop waits for a core for a tenth."""
        self.now += ms * MS
        self.cpu += ms * MS // 2
        self.queued += ms * MS // 10


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def test_what_is_used_between_epochs_does_not_count(clocks: Clocks) -> None:
    own = OwnTime()
    for _ in range(2):
        own.begin()
        clocks.go(100)
        assert own.end()
        clocks.go(1000)
    assert own.cpu_ns == 100 * MS
    assert own.queued_ns == 20 * MS


def test_epochs_in_progress_count_up_to_now(clocks: Clocks) -> None:
    own = OwnTime()
    own.begin()
    clocks.go(100)
    assert own.cpu_ns == 50 * MS
    own.count()
    clocks.go(100)
    assert own.cpu_ns == 100 * MS


def test_short_epochs_are_counted_together_and_seldom(clocks: Clocks) -> None:
    """Looking at the clocks would take longer than they do."""
    own = OwnTime()
    for _ in range(1000):
        own.begin()
        clocks.go(1)
        own.end()
    own.begin()
    assert own.cpu_ns == 500 * MS
    assert clocks.reads < 15


def test_short_pauses_leave_their_share(clocks: Clocks) -> None:
    """Two loaders take turns: for neither do the clocks have to be read in each of its epochs."""
    own = OwnTime()
    for _ in range(100):
        own.begin()
        clocks.go(10)
        own.end()
        clocks.go(30)
    own.begin()
    assert own.cpu_ns == pytest.approx(500 * MS, rel=0.05)
    assert own.queued_ns == pytest.approx(100 * MS, rel=0.1)
    assert clocks.reads < 50


def test_a_long_pause_after_a_short_epoch_does_not_count(clocks: Clocks) -> None:
    """Neither while it lasts nor later."""
    own = OwnTime()
    own.begin()
    clocks.go(1)
    assert not own.end()
    clocks.go(10_000)
    assert own.cpu_ns == 0
    own.begin()
    clocks.go(100)
    own.end()
    assert own.cpu_ns == 50 * MS
