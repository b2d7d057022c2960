"""The share of time that the GIL is held. The bounds are wide: only a rough classification matters."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable

import pytest

from infeed.workers.gil import GilShare

pytestmark = pytest.mark.linux("elsewhere a busy machine looks like a GIL that is held")

LARGE = bytes(8 << 20)


def compute() -> None:
    """Runs plain Python for some milliseconds."""
    total = 0
    for number in range(60_000):
        total += number * number


def rest() -> None:
    time.sleep(0.005)


def digest() -> None:
    """Releases the GIL, because the buffer is large."""
    hashlib.sha256(LARGE).digest()


def share_of(*work: Callable[[], None]) -> float:
    """Returns the share of time that the GIL is held while these functions alternate, until enough was measured."""
    probe = GilShare()
    probe.start()
    try:
        while len(probe._ticks) < 150:
            for one in work:
                one()
    finally:
        share = probe.stop()
    assert share is not None
    return share


def test_python_code_holds_the_gil() -> None:
    """Threads would gain nothing."""
    assert any(share_of(compute) > 0.6 for _ in range(4))


@pytest.mark.parametrize("work", [rest, digest], ids=["waiting", "hashing"])
def test_code_that_releases_the_gil_does_not_hold_it(work: Callable[[], None]) -> None:
    """Sleep, and native code that releases it. A busy machine delays the probe too, so the minimum of a few attempts counts."""
    assert any(share_of(work) < 0.3 for _ in range(4))


def test_a_mixture_of_both_is_in_between() -> None:
    """A busy machine delays the probe too, so it may take a few attempts."""

    def is_in_between() -> bool:
        return share_of(rest) + 0.1 < share_of(compute, rest) < share_of(compute) - 0.1

    assert any(is_in_between() for _ in range(6))


def test_a_short_measurement_has_no_result() -> None:
    """A few ticks could be chance. A measurement that was not started has no result either."""
    probe = GilShare(least_ticks=1 << 30)  # However busy the machine is.
    assert probe.stop() is None
    probe.start()

    assert probe.stop() is None


def test_the_process_is_unchanged_afterwards() -> None:
    """The user's switch interval is restored, and no thread is left."""
    before = sys.getswitchinterval()
    probe = GilShare()
    probe.start()
    during = sys.getswitchinterval()
    probe.stop()

    assert during < before
    assert sys.getswitchinterval() == before


def test_it_can_measure_again() -> None:
    """Each measurement starts from zero."""
    probe = GilShare()
    shares = []
    for work in (compute, rest, rest, rest):
        probe.start()
        while len(probe._ticks) < 100:
            work()
        share = probe.stop()
        assert share is not None
        shares.append(share)
    assert min(shares[1:]) < 0.3  # A busy machine delays the probe too.
