"""The share of time that the GIL is held. The bounds are wide: what matters is which side a dataset is on."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable

import pytest

from infeed.workers.gil import GilShare

pytestmark = pytest.mark.linux("elsewhere a busy machine cannot be told from a GIL that is held")

LARGE = bytes(8 << 20)


def compute() -> None:
    """Some milliseconds of plain Python."""
    total = 0
    for number in range(60_000):
        total += number * number


def rest() -> None:
    time.sleep(0.005)


def digest() -> None:
    """Without the GIL, because the buffer is large."""
    hashlib.sha256(LARGE).digest()


def share_of(*work: Callable[[], None]) -> float:
    """How much of the time it is held while these are done in turn, until enough of it has been seen."""
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


def test_python_code_holds_it() -> None:
    """Threads would gain nothing."""
    assert any(share_of(compute) > 0.6 for _ in range(4))


@pytest.mark.parametrize("work", [rest, digest], ids=["waiting", "hashing"])
def test_what_lets_go_of_it_does_not_hold_it(work: Callable[[], None]) -> None:
    """Waiting, and native code that was written for it. A busy machine delays the probe too, so the least of a few counts."""
    assert any(share_of(work) < 0.3 for _ in range(4))


def test_half_of_each_is_in_between() -> None:
    """Some of the time. A busy machine delays the probe too, so it may take a few attempts."""

    def is_in_between() -> bool:
        return share_of(rest) + 0.1 < share_of(compute, rest) < share_of(compute) - 0.1

    assert any(is_in_between() for _ in range(6))


def test_a_short_look_says_nothing() -> None:
    """Some ticks could be chance. And one that was not begun says nothing either."""
    probe = GilShare(least_ticks=1 << 30)  # however busy the machine is
    assert probe.stop() is None
    probe.start()

    assert probe.stop() is None


def test_the_process_is_as_it_was() -> None:
    """The switch interval is the user's: it is put back, and no thread is left."""
    before = sys.getswitchinterval()
    probe = GilShare()
    probe.start()
    during = sys.getswitchinterval()
    probe.stop()

    assert during < before
    assert sys.getswitchinterval() == before


def test_it_can_look_again() -> None:
    """Of each look only that look counts."""
    probe = GilShare()
    shares = []
    for work in (compute, rest, rest, rest):
        probe.start()
        while len(probe._ticks) < 100:
            work()
        share = probe.stop()
        assert share is not None
        shares.append(share)
    assert min(shares[1:]) < 0.3  # a busy machine delays the probe too
