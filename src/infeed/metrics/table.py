"""Estimate how the same work would run serially, in a loader without workers. Timelines compare the run with it.

The comparison covers the training loop's time from its first request to its last batch. It excludes user code between epochs
and loading ahead outside epochs, so the result does not depend on when it is computed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final, final

from infeed.metrics.statistics import SpanKind, Trace
from infeed.metrics.timeline import Cycle, Window, loop_cycles

__all__ = ["Serial", "serial"]

# The span kinds of a loader without workers, which writes nothing into shared memory.
_LOADING: Final = frozenset({"load", "collate"})


@final
@dataclass(frozen=True, slots=True)
class Serial:
    """The batches of a window, loaded and processed serially."""

    steps: tuple[tuple[SpanKind, int, int], ...]  # kind, begin, end; starts at the training loop's first request in the window
    seconds: float
    loop_s: float  # measured time of the training loop

    @property
    def factor(self) -> float:
        """Return the serial time divided by the measured time."""
        return self.seconds / self.loop_s

    @property
    def text(self) -> str:
        if self.factor < 1.05:
            return "as fast as with workers"
        return f"{self.factor:.1f} times slower \u25b8"


def serial(trace: Trace, window: Window) -> Serial | None:
    """Return the serial schedule of the window's batches, with the measured times of each step.

    Returns ``None`` if the run used no workers, or if too little was recorded.
    """
    cycles = [cycle for cycle in loop_cycles(trace) if window.begin_ns <= cycle.begin_ns and cycle.end_ns <= window.end_ns]
    if trace.statistics.kind == "inline" or not cycles:
        return None
    batch_size = _batch_size(trace)
    loads = _load_times(trace, batch_size)
    typical_ns = batch_size * _sample_time(trace, window)
    if not typical_ns:  # no sample was loaded within the window
        known = [loads[batch] for cycle in cycles for batch in _batches(cycle) if batch in loads]
        if not known:
            return None
        typical_ns = sum(known) / len(known)
    steps: list[tuple[SpanKind, int, int]] = []
    at_ns: float = cycles[0].begin_ns
    between_ns = 0  # total time between epochs
    before = cycles[0]
    for cycle in cycles:
        if cycle.epoch != before.epoch:
            between_ns += cycle.begin_ns - before.end_ns
            at_ns += cycle.begin_ns - before.end_ns
        before = cycle
        load: tuple[SpanKind, float] = ("load", sum(loads.get(batch, typical_ns) for batch in _batches(cycle)))
        away: tuple[SpanKind, float] = ("away", cycle.away_ns)
        for kind, length_ns in (away, load) if cycle.is_away_first else (load, away):
            if length_ns:
                steps.append((kind, int(at_ns), int(at_ns + length_ns)))
                at_ns += length_ns
    begin_ns, end_ns = cycles[0].begin_ns, cycles[-1].end_ns
    return Serial(tuple(steps), (at_ns - begin_ns - between_ns) / 1e9, max(1, end_ns - begin_ns - between_ns) / 1e9)


def _batches(cycle: Cycle) -> list[tuple[int, int]]:
    return [(cycle.epoch, cycle.position + number) for number in range(cycle.size)]


def _batch_size(trace: Trace) -> int:
    statistics = trace.statistics
    # The last batch of an epoch may be smaller, so round the mean up.
    return -(-statistics.sample_count // statistics.batch_count) if statistics.batch_count else 0


def _sample_time(trace: Trace, window: Window) -> float:
    """Return the mean worker time per sample within a window, in nanoseconds; 0 if no sample was loaded."""
    took_ns = count = 0
    for span in trace.spans:
        if span.kind in _LOADING and span.begin_ns < window.end_ns and span.end_ns > window.begin_ns:
            took_ns += span.end_ns - span.begin_ns
            count += span.size if span.kind == "load" else 0
    return took_ns / count if count else 0.0


def _load_times(trace: Trace, batch_size: int) -> dict[tuple[int, int], float]:
    """Return the workers' time for each batch, by epoch and batch number.

    Includes only batches in which every sample was recorded exactly once. Other batches lost spans or were loaded again.
    In iterable datasets, each stream counts its own positions, so positions do not identify samples.
    """
    if not batch_size:
        return {}
    loads: dict[tuple[int, int], float] = defaultdict(float)
    counts: dict[tuple[int, int], int] = defaultdict(int)
    last: dict[int, int] = defaultdict(int)  # highest batch number of each epoch
    for span in trace.spans:
        if span.kind not in _LOADING:
            continue
        size = max(1, span.size)
        each_ns = (span.end_ns - span.begin_ns) / size
        at, end = span.position, span.position + size
        while at < end:
            number = at // batch_size
            here = min(end, (number + 1) * batch_size) - at
            loads[span.epoch, number] += here * each_ns
            counts[span.epoch, number] += here if span.kind == "load" else 0
            last[span.epoch] = max(last[span.epoch], number)
            at += here

    def is_known(epoch: int, number: int) -> bool:
        count = counts[epoch, number]
        return count == batch_size or (count < batch_size and number == last[epoch])

    return {batch: load_ns for batch, load_ns in loads.items() if is_known(*batch)}
