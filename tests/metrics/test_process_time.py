"""CPU time of the user's process, with clocks that the test controls."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from infeed.metrics.process_time import Clock, ProcessTime

MS = 1_000_000


class Clocks:
    """Clocks that the test advances; reading the CPU clock takes ``read_ns``."""

    def __init__(self) -> None:
        self.now = self.cpu = self.queued = 1000 * MS
        self.reads = self.read_ns = 0
        self.clock = Clock(lambda: self.now, self._read, lambda: self.queued)

    def _read(self) -> int:
        self.reads += 1
        self.now += self.read_ns
        return self.cpu

    def go(self, ms: int, *, is_idle: bool = False) -> None:
        """Advances the clocks; the process computes for half of the time, and the loop waits for a core for a tenth."""
        self.now += ms * MS
        if is_idle:
            return
        self.cpu += ms * MS // 2
        self.queued += ms * MS // 10


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def test_time_between_epochs_does_not_count(clocks: Clocks) -> None:
    own = ProcessTime(clocks.clock)
    for _ in range(2):
        own.begin()
        clocks.go(100)
        assert own.end()
        clocks.go(1000)
    assert own.cpu_ns == 100 * MS
    assert own.queued_ns == 20 * MS


def test_epochs_in_progress_count_up_to_now(clocks: Clocks) -> None:
    own = ProcessTime(clocks.clock)
    own.begin()
    clocks.go(100)
    assert own.cpu_ns == 50 * MS
    own.count()
    clocks.go(100)
    assert own.cpu_ns == 100 * MS


def test_short_epochs_are_measured_together_and_rarely(clocks: Clocks) -> None:
    """Reading the clocks would take longer than the epochs."""
    own = ProcessTime(clocks.clock)
    for _ in range(1000):
        own.begin()
        clocks.go(1)
        own.end()
    own.begin()
    assert own.cpu_ns == 500 * MS
    assert clocks.reads < 15


def test_the_share_of_short_pauses_is_estimated(clocks: Clocks) -> None:
    """Two loaders take turns: the clocks need not be read in each of their epochs."""
    own = ProcessTime(clocks.clock)
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
    own = ProcessTime(clocks.clock)
    own.begin()
    clocks.go(1)
    assert not own.end()
    clocks.go(10_000)
    assert own.cpu_ns == 0
    own.begin()
    clocks.go(100)
    own.end()
    assert own.cpu_ns == 50 * MS


@pytest.mark.parametrize(("epoch_ms", "pause_ms"), [(90, 1000), (50, 90), (30, 95), (20, 20), (500, 10)])
def test_long_epochs_are_measured_exactly(clocks: Clocks, epoch_ms: int, pause_ms: int) -> None:
    """Whatever the process did in the pauses."""
    own = ProcessTime(clocks.clock)
    for number in range(50):
        own.begin()
        clocks.go(epoch_ms)
        own.end()
        clocks.go(pause_ms, is_idle=number % 2 == 0)
    exact = 50 * epoch_ms * MS // 2
    assert own.cpu_ns == (exact if pause_ms >= 20 else pytest.approx(exact, rel=0.03))


def test_expensive_clocks_are_read_rarely(clocks: Clocks) -> None:
    clocks.read_ns = MS // 10
    own = ProcessTime(clocks.clock)
    for _ in range(100):
        own.begin()
        clocks.go(30)
        own.end()
        clocks.go(30)
    assert clocks.reads <= 6000 // 100 + 1
    assert own.cpu_ns == pytest.approx(1500 * MS, rel=0.1)


def test_measuring_from_another_thread_does_not_use_that_threads_wait(clocks: Clocks) -> None:
    own = ProcessTime(clocks.clock)
    own.begin()
    clocks.go(200)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(own.count).result()
    assert (own.cpu_ns, own.queued_ns) == (100 * MS, 0)
    clocks.go(200)
    own.end()
    assert (own.cpu_ns, own.queued_ns) == (200 * MS, 40 * MS)


def test_one_slow_read_of_a_clock_does_not_end_measuring(clocks: Clocks) -> None:
    own = ProcessTime(clocks.clock)
    clocks.read_ns = 50 * MS  # Other processes used the core.
    own.begin()
    clocks.go(100)
    assert own.end()
    assert own.counted_ns == 50 * MS
    own.begin()
    clocks.go(1100)
    assert own.end()
    assert own.counted_ns == 600 * MS
