"""The counters of all engines of a loader, together."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, final

from infeed.observe.records import Point

if TYPE_CHECKING:
    from infeed.observe.gauge import Gauge


@final
class Gauges:
    """All of a loader, one for each of its engines; of those that are gone, one may stand for several."""

    def __init__(self) -> None:
        self.all: list[Gauge] = []
        # Held while they are added up. Reentrant, because a signal handler may ask for statistics in the middle of it.
        self.lock = threading.RLock()
        self.has_given = False  # whether the loop ever got a batch
        self.active: Gauge | None = None  # of the loop that began, or got one, last: others around it are in no step

    def total(self, gauge: Gauge, own: Point) -> Point:
        """How far the whole loader has come, when one engine has come so far. Sums only ever grow, whoever comes and goes."""
        with self.lock:
            others = [one.point(own.at_ns, is_own=False) for one in self.all if one is not gauge]
        return Point(own.at_ns, *(sum(column) for column in zip(*(point[1:] for point in (own, *others)), strict=True)))
