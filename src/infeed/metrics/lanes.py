"""The contents of timelines: lanes, the time windows of a run, and spans merged until they are long enough to see.

Also estimates how the same work would run serially, in a loader without workers, for comparison. The comparison covers the
training loop's time from its first request to its last batch. It excludes user code between epochs and loading ahead outside
epochs, so the result does not depend on when it is computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from infeed.metrics.statistics import LOOP, Mark, Span, SpanKind, Trace

# Of a run with more than 48 batches, show only the first 8 and 16 from the steady state.
_WHOLE_BATCH_COUNT: Final = 48
_BEGINNING_BATCH_COUNT: Final = 8
_STEADY_BATCH_COUNT: Final = 16
# Show at most this much time before the training loop's first request, as a share of the training loop's time.
_MOST_BEFORE: Final = 0.2
# Pieces shorter than this share of the width are too small to see.
_FINEST_SHARE: Final = 1 / 1500
# Longest merged piece, in units of the finest visible length. The limit keeps changes of density visible.
_MERGED_LENGTH: Final = 12

WORDS: Final[dict[SpanKind, str]] = {
    "start": "worker start-up",
    "load": "loading samples",
    "collate": "collating",
    "write": "writing to shared memory",
    "wait": "waiting for data",
    "deliver": "delivering",
    "away": "training step",
}
# Offset and height within a lane. Spans between samples are drawn lower, so that they stay visible next to them.
EXTENT: Final[dict[SpanKind, tuple[float, float]]] = {
    "start": (0.25, 0.5),
    "load": (0.1, 0.8),
    "collate": (0.62, 0.28),
    "write": (0.62, 0.28),
    "wait": (0.1, 0.8),
    "deliver": (0.62, 0.28),
    "away": (0.1, 0.8),
}
# Gap between the serial work and the lanes, which holds the text of the factor; and gap above the training loop's lane.
_SERIAL_GAP: Final = 0.9
_LOOP_GAP: Final = 0.3

_MOST_LABELS: Final = 24
FAULTS: Final = frozenset({"death", "restart", "bad sample", "failure", "hang"})


class DrawnSpan(NamedTuple):
    """A span as drawn: a single span, or several short neighbouring spans of one kind."""

    lane: int
    kind: SpanKind
    begin_ns: int
    end_ns: int
    busy_ns: int  # length of the piece without its gaps
    epoch: int
    position: int
    first_index: int | None
    size: int
    span_count: int

    @property
    def density(self) -> float:
        return min(1.0, self.busy_ns / (self.end_ns - self.begin_ns)) if self.end_ns > self.begin_ns else 1.0


class Window(NamedTuple):
    """A time window of the run."""

    begin_ns: int
    end_ns: int
    title: str

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    def has(self, at_ns: int) -> bool:
        return self.begin_ns <= at_ns <= self.end_ns


class Cycle(NamedTuple):
    """One iteration of the training loop: waiting for a batch and processing one. Short iterations are merged."""

    begin_ns: int
    end_ns: int
    epoch: int
    position: int  # number of the first batch in its epoch
    size: int
    away_ns: int  # time in user code
    is_away_first: bool  # user code came first, working on the previous batch


def lane_names(trace: Trace) -> dict[int, str]:
    """Return the names of all lanes from top to bottom: workers by number, then the training loop."""
    workers = {span.lane for span in trace.spans if span.lane != LOOP} | {mark.lane for mark in trace.marks if mark.lane >= 0}
    is_inline = trace.statistics.kind == "inline"
    names = {lane: "loading" if is_inline else f"worker {lane}" for lane in sorted(workers)}
    return {**names, LOOP: "training loop"}


def lane_tops(trace: Trace, *, has_serial: bool) -> dict[int, float]:
    """Return the top of each lane, in lane heights. With ``has_serial``, the serial work is at 0, above the lanes."""
    first = 1 + _SERIAL_GAP if has_serial else 0.0
    return {lane: first + row + (_LOOP_GAP if lane == LOOP else 0) for row, lane in enumerate(lane_names(trace))}


def lane_labels(trace: Trace, *, has_serial: bool) -> dict[float, str]:
    """Return the labels of lanes by the middle of their position; not of all if there are many, so that none overlap."""
    tops = lane_tops(trace, has_serial=has_serial)
    step = -(-len(tops) // _MOST_LABELS)
    names = {
        tops[lane] + 0.5: name for row, (lane, name) in enumerate(lane_names(trace).items()) if row % step == 0 or lane == LOOP
    }
    return {0.5: "without workers", **names} if has_serial else names


def whole(trace: Trace) -> Window | None:
    """Return the window from the first span to the last; ``None`` if there are no spans."""
    if not trace.spans:
        return None
    begin_ns = min(span.begin_ns for span in trace.spans)
    end_ns = max(span.end_ns for span in trace.spans)
    return Window(begin_ns, max(end_ns, begin_ns + 1), "the whole run")


def windows(trace: Trace) -> tuple[Window, ...]:
    """Return the windows to show: all of a short run; of a long run, the beginning and a steady part.

    The steady part contains the first later fault, or else starts 60% into the run. The windows exclude loading ahead after
    the training loop ended. If spans were dropped, show only the last iterations, which are complete.
    """
    everything, cycles = whole(trace), loop_cycles(trace)
    if everything is None or not cycles:
        return () if everything is None else (everything,)
    end_ns = cycles[-1].end_ns
    if trace.lost_span_count:
        begin_ns = cycles[-_STEADY_BATCH_COUNT:][0].begin_ns
        return (Window(begin_ns, max(end_ns, begin_ns + 1), "the end"),)
    # Workers start before the training loop's first request.
    begin_ns = max(everything.begin_ns, cycles[0].begin_ns - int((end_ns - cycles[0].begin_ns) * _MOST_BEFORE))
    if sum(cycle.size for cycle in cycles) <= _WHOLE_BATCH_COUNT or len(cycles) <= _BEGINNING_BATCH_COUNT + _STEADY_BATCH_COUNT:
        return (Window(begin_ns, max(end_ns, begin_ns + 1), everything.title),)
    later_ns = cycles[_BEGINNING_BATCH_COUNT].begin_ns
    fault = next((mark for mark in trace.marks if mark.kind in FAULTS and mark.at_ns >= later_ns), None)
    if fault is None:
        first = len(cycles) * 3 // 5
    else:
        first = bisect_left([cycle.end_ns for cycle in cycles], fault.at_ns) - _STEADY_BATCH_COUNT // 3
    first = max(_BEGINNING_BATCH_COUNT, min(first, len(cycles) - _STEADY_BATCH_COUNT))
    title = "steady state" + ("" if fault is None else f", with a fault ({fault.kind})")
    later_ns = cycles[first].begin_ns
    later = Window(later_ns, max(cycles[first + _STEADY_BATCH_COUNT - 1].end_ns, later_ns + 1), title)
    return Window(begin_ns, cycles[_BEGINNING_BATCH_COUNT - 1].end_ns, "the beginning"), later


def loop_cycles(trace: Trace) -> list[Cycle]:
    """Return the recorded iterations of the training loop."""
    cycles: list[Cycle] = []
    for span in trace.spans:
        if span.lane != LOOP:
            continue
        away_ns = span.end_ns - span.begin_ns if span.kind == "away" else 0
        last = cycles[-1] if cycles else None
        if last is not None and (last.epoch, last.position) == (span.epoch, span.position):
            size = max(last.size, span.size)
            cycles[-1] = last._replace(end_ns=span.end_ns, size=size, away_ns=last.away_ns + away_ns)
        else:
            is_away = span.kind == "away"
            cycles.append(Cycle(span.begin_ns, span.end_ns, span.epoch, span.position, span.size, away_ns, is_away))
    return cycles


def pieces(spans: Iterable[Span], window: Window, *, most: int = 6000) -> list[DrawnSpan]:
    """Return the spans of a window as drawn: clipped to it, with short neighbours of one kind merged.

    The resolution is halved until there are at most ``most`` pieces, or four per lane and kind if that is more.
    """
    rows: dict[tuple[int, SpanKind], list[DrawnSpan]] = defaultdict(list)
    for span in spans:
        lane, kind, begin_ns, end_ns, epoch, position, first_index, size = span
        if begin_ns < window.end_ns and end_ns > window.begin_ns and end_ns > begin_ns:
            begin_ns, end_ns = max(begin_ns, window.begin_ns), min(end_ns, window.end_ns)
            piece = DrawnSpan(lane, kind, begin_ns, end_ns, end_ns - begin_ns, epoch, position, first_index, size, 1)
            rows[lane, kind].append(piece)
    for row in rows.values():
        row.sort(key=lambda piece: piece.begin_ns)
    finest_ns = (window.end_ns - window.begin_ns) * _FINEST_SHARE
    while True:
        for place, row in rows.items():
            rows[place] = _merged(row, finest_ns)
        if sum(map(len, rows.values())) <= max(most, 4 * len(rows)):
            return [piece for row in rows.values() for piece in row]
        finest_ns *= 2


def marks_in(trace: Trace, window: Window, *, most: int) -> tuple[list[Mark], int]:
    """Return at most ``most`` marks of a window, faults preferred, and the number of marks left out."""
    inside = [mark for mark in trace.marks if window.has(mark.at_ns)]
    chosen = foremost(inside, most)
    return chosen, len(inside) - len(chosen)


def foremost(marks: Iterable[Mark], most: int) -> list[Mark]:
    """Return at most ``most`` marks in the order of time, faults preferred."""
    chosen = sorted(marks, key=lambda mark: (mark.kind not in FAULTS, mark.at_ns))[:most]
    return sorted(chosen, key=lambda mark: mark.at_ns)


def _merged(row: Sequence[DrawnSpan], finest_ns: float) -> list[DrawnSpan]:
    """Merge neighbours if one of them and the gap between them are too short to see."""
    merged: list[DrawnSpan] = []
    run: list[DrawnSpan] = []  # pieces to merge into one
    begin_ns = end_ns = 0
    shortest_ns = 0.0
    for piece in row:
        length_ns = piece.busy_ns / piece.span_count
        if (
            run
            and piece.begin_ns - end_ns < finest_ns
            and min(length_ns, shortest_ns) < finest_ns
            and piece.end_ns - begin_ns < _MERGED_LENGTH * finest_ns
        ):
            run.append(piece)
            end_ns = max(end_ns, piece.end_ns)
            shortest_ns = min(length_ns, shortest_ns)
        else:
            merged += _joined(run, end_ns)
            run, begin_ns, end_ns, shortest_ns = [piece], piece.begin_ns, piece.end_ns, length_ns
    return merged + _joined(run, end_ns)


def _joined(run: list[DrawnSpan], end_ns: int) -> list[DrawnSpan]:
    if len(run) < 2:
        return run
    busy_ns = sum(piece.busy_ns for piece in run)
    size = sum(piece.size for piece in run)
    span_count = sum(piece.span_count for piece in run)
    return [run[0]._replace(end_ns=end_ns, busy_ns=busy_ns, size=size, span_count=span_count)]


# --- the same work without workers

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
