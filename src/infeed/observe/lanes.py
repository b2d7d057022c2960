"""What a picture of a run shows: lanes, a part of the time, and pieces that can be seen.

Only numbers here, no drawing; the picture and the interactive page show the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from infeed.observe.records import LOOP, Mark, Span, SpanKind, Trace

# Of a run with more batches than this, a part is shown: its beginning, and a part of it when it runs steadily.
_WHOLE_BATCH_COUNT: Final = 48
_BEGINNING_BATCH_COUNT: Final = 8
_STEADY_BATCH_COUNT: Final = 16
# Of the loop's time, how much of what was before it is shown.
_MOST_BEFORE: Final = 0.2
# Pieces that are shorter than this part of the width cannot be seen on their own.
_FINEST_SHARE: Final = 1 / 1500
# Short pieces are put together, but not all of them into one: how dense they are may change.
_MERGED_LENGTH: Final = 12

WORDS: Final[dict[SpanKind, str]] = {
    "start": "starting",
    "load": "loading samples",
    "collate": "collating",
    "write": "writing to memory",
    "wait": "waiting for a batch",
    "deliver": "delivering",
    "away": "your code",
}
# Of a lane's height: from where, and how much. What comes between samples lies below, so that it is seen beside them.
EXTENT: Final[dict[SpanKind, tuple[float, float]]] = {
    "start": (0.25, 0.5),
    "load": (0.1, 0.8),
    "collate": (0.62, 0.28),
    "write": (0.62, 0.28),
    "wait": (0.1, 0.8),
    "deliver": (0.62, 0.28),
    "away": (0.1, 0.8),
}
# Room between the work in a row and the lanes, where the picture says how much longer it takes; and above the loop's lane.
_SERIAL_GAP: Final = 0.9
_LOOP_GAP: Final = 0.3

FAULTS: Final = frozenset({"death", "restart", "bad sample", "failure", "hang"})


class Piece(NamedTuple):
    """A span as it is drawn: one, or several short ones of a kind that lie close together."""

    lane: int
    kind: SpanKind
    begin_ns: int
    end_ns: int
    busy_ns: int  # as long as the piece, or less where there were gaps
    epoch: int
    position: int
    first_index: int | None
    size: int
    span_count: int

    @property
    def density(self) -> float:
        return min(1.0, self.busy_ns / (self.end_ns - self.begin_ns)) if self.end_ns > self.begin_ns else 1.0


class Window(NamedTuple):
    """A part of the run's time."""

    begin_ns: int
    end_ns: int
    title: str

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    def has(self, at_ns: int) -> bool:
        return self.begin_ns <= at_ns <= self.end_ns


class Cycle(NamedTuple):
    """A round of the loop: it waits for a batch and works on one. Short rounds are one, of several batches."""

    begin_ns: int
    end_ns: int
    epoch: int
    position: int  # the first batch's number in its epoch
    size: int
    away_ns: int  # what of it was the loop's own work
    is_away_first: bool  # the work was on the batch before


def lane_names(trace: Trace) -> dict[int, str]:
    """All lanes from top to bottom: workers by number, then the loop."""
    workers = {span.lane for span in trace.spans if span.lane != LOOP} | {mark.lane for mark in trace.marks if mark.lane >= 0}
    is_inline = trace.statistics.kind == "inline"
    names = {lane: "loading" if is_inline else f"worker {lane}" for lane in sorted(workers)}
    return {**names, LOOP: "your loop"}


def lane_tops(trace: Trace, *, has_serial: bool) -> dict[int, float]:
    """Where each lane begins, from the top, in lanes. With ``has_serial`` the work in a row comes first, at 0."""
    first = 1 + _SERIAL_GAP if has_serial else 0.0
    return {lane: first + row + (_LOOP_GAP if lane == LOOP else 0) for row, lane in enumerate(lane_names(trace))}


def whole(trace: Trace) -> Window | None:
    """From the first thing that is known to the last; ``None`` if nothing is known."""
    if not trace.spans:
        return None
    begin_ns = min(span.begin_ns for span in trace.spans)
    end_ns = max(span.end_ns for span in trace.spans)
    return Window(begin_ns, max(end_ns, begin_ns + 1), "the whole run")


def windows(trace: Trace) -> tuple[Window, ...]:
    """The parts of a run that tell most: all of a short one; of a long one the beginning and a steady part.

    The steady part is where something went wrong, if something did; else a little after the middle. What workers load
    ahead when the loop is over is left out, and so is a time of which not all spans were kept.
    """
    everything, cycles = whole(trace), loop_cycles(trace)
    if everything is None or not cycles:
        return () if everything is None else (everything,)
    is_cut = trace.lost_span_count > 0
    if is_cut:
        since_ns = _known_since(trace)
        known = [cycle for cycle in cycles if cycle.begin_ns >= since_ns]
        # A worker that had nothing to do for long looks as if its spans were lost; then the latest are the best there is.
        cycles = known if len(known) >= _STEADY_BATCH_COUNT else cycles[-_STEADY_BATCH_COUNT:]
    begin_ns, end_ns = cycles[0].begin_ns, cycles[-1].end_ns
    if not is_cut:  # workers start before the loop first asks
        begin_ns = max(everything.begin_ns, begin_ns - int((end_ns - begin_ns) * _MOST_BEFORE))
    if sum(cycle.size for cycle in cycles) <= _WHOLE_BATCH_COUNT or len(cycles) <= _BEGINNING_BATCH_COUNT + _STEADY_BATCH_COUNT:
        return (Window(begin_ns, max(end_ns, begin_ns + 1), "the end" if is_cut else everything.title),)
    beginning_count = 0 if is_cut else _BEGINNING_BATCH_COUNT
    later_ns = cycles[beginning_count].begin_ns
    fault = next((mark for mark in trace.marks if mark.kind in FAULTS and mark.at_ns >= later_ns), None)
    if fault is None:
        first = len(cycles) * 3 // 5
    else:
        first = bisect_left([cycle.end_ns for cycle in cycles], fault.at_ns) - _STEADY_BATCH_COUNT // 3
    first = max(beginning_count, min(first, len(cycles) - _STEADY_BATCH_COUNT))
    title = ("late in the run" if is_cut else "later") + ("" if fault is None else f", with a fault ({fault.kind})")
    later_ns = cycles[first].begin_ns
    later = Window(later_ns, max(cycles[first + _STEADY_BATCH_COUNT - 1].end_ns, later_ns + 1), title)
    return (later,) if is_cut else (Window(begin_ns, cycles[beginning_count - 1].end_ns, "the beginning"), later)


def loop_cycles(trace: Trace) -> list[Cycle]:
    """What is known of the loop, round by round."""
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


def _known_since(trace: Trace) -> int:
    """Since when everything is known of all workers and of the loop, where older spans were not kept."""
    first: dict[int, Span] = {}
    for span in trace.spans:
        first.setdefault(span.lane, span)
    workers = [span.begin_ns for lane, span in first.items() if lane != LOOP]
    # Whose spans begin with its start was not there before, and nothing of it is missing.
    kept = [span.begin_ns for span in first.values() if span.kind != "start"]
    return max([min(workers, default=0), *kept])


def pieces(spans: Iterable[Span], window: Window, *, most: int = 6000) -> list[Piece]:
    """The spans of a window as they can be seen: cut at its ends, short neighbours of a kind put together.

    Never many more than ``most``: the more there are, the coarser they become.
    """
    rows: dict[tuple[int, SpanKind], list[Piece]] = defaultdict(list)
    for span in spans:
        lane, kind, begin_ns, end_ns, epoch, position, first_index, size = span
        if begin_ns < window.end_ns and end_ns > window.begin_ns and end_ns > begin_ns:
            begin_ns, end_ns = max(begin_ns, window.begin_ns), min(end_ns, window.end_ns)
            piece = Piece(lane, kind, begin_ns, end_ns, end_ns - begin_ns, epoch, position, first_index, size, 1)
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
    """What happened in a window, faults before all else if there is too much; and how much is left out."""
    inside = [mark for mark in trace.marks if window.has(mark.at_ns)]
    chosen = sorted(inside, key=lambda mark: (mark.kind not in FAULTS, mark.at_ns))[:most]
    return sorted(chosen, key=lambda mark: mark.at_ns), len(inside) - len(chosen)


def _merged(row: Sequence[Piece], finest_ns: float) -> list[Piece]:
    """Neighbours put together where one of them, and what is between them, is too short to be seen."""
    merged: list[Piece] = []
    run: list[Piece] = []  # what becomes one piece
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


def _joined(run: list[Piece], end_ns: int) -> list[Piece]:
    if len(run) < 2:
        return run
    busy_ns = sum(piece.busy_ns for piece in run)
    size = sum(piece.size for piece in run)
    span_count = sum(piece.span_count for piece in run)
    return [run[0]._replace(end_ns=end_ns, busy_ns=busy_ns, size=size, span_count=span_count)]
