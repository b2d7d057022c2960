"""What a picture of a run shows: lanes, a part of the time, pieces that can be seen, and the same work one after another.

Only numbers here, no drawing; the picture and the interactive page show the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from infeed.observe.records import LOOP, Mark, Span, SpanKind, Trace

# Of a run with more batches than this, a part is shown: its beginning, and a part of it when it runs steadily.
_WHOLE_BATCH_COUNT: Final = 48
_BEGINNING_BATCH_COUNT: Final = 8
_STEADY_BATCH_COUNT: Final = 16
# Pieces that are shorter than this part of the width cannot be seen on their own.
_FINEST_SHARE: Final = 1 / 1500
# Short pieces are put together, but not all of them into one: how dense they are may change.
_MERGED_LENGTH: Final = 12

WORDS: Final[dict[SpanKind, str]] = {
    "start": "starting",
    "load": "loading samples",
    "collate": "collating",
    "write": "writing into shared memory",
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


@final
@dataclass(frozen=True, slots=True)
class Serial:
    """The batches of a window as they would come one after another: loaded, worked on, loaded, worked on."""

    steps: tuple[tuple[SpanKind, int, int], ...]  # kind, begin and end, from the window's beginning on
    seconds: float
    factor: float  # how many times as long as the window

    @property
    def text(self) -> str:
        if self.factor < 1.05:
            return "no longer than with workers"
        return f"{self.factor:.1f} times as long \u25b8"


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

    The steady part is where something went wrong, if something did; else a little after the middle.
    """
    everything = whole(trace)
    if everything is None:
        return ()
    loop = _loop_cycles(trace)
    batches = sum(size for _, _, size in loop)
    if batches <= _WHOLE_BATCH_COUNT or len(loop) <= _BEGINNING_BATCH_COUNT + _STEADY_BATCH_COUNT:
        return (everything,)
    beginning = Window(everything.begin_ns, loop[_BEGINNING_BATCH_COUNT - 1][1], "the beginning")
    fault = next((mark for mark in trace.marks if mark.kind in FAULTS and mark.at_ns > beginning.end_ns), None)
    if fault is None:
        first = len(loop) * 3 // 5
    else:
        first = bisect_left([end for _, end, _ in loop], fault.at_ns) - _STEADY_BATCH_COUNT // 3
    first = max(_BEGINNING_BATCH_COUNT, min(first, len(loop) - _STEADY_BATCH_COUNT))
    begin_ns = loop[first][0]
    title = "later" if fault is None else f"later, with a fault ({fault.kind})"
    later = Window(begin_ns, max(loop[first + _STEADY_BATCH_COUNT - 1][1], begin_ns + 1), title)
    # Where older spans were not kept there is no beginning to be seen.
    return (later,) if trace.lost_span_count else (beginning, later)


def pieces(spans: Iterable[Span], window: Window, *, most: int = 6000) -> list[Piece]:
    """The spans of a window as they can be seen: cut at its ends, short neighbours of a kind put together.

    Never many more than ``most``: the more there are, the coarser they become.
    """
    rows: dict[tuple[int, SpanKind], list[Span]] = defaultdict(list)
    for span in spans:
        if span.begin_ns < window.end_ns and span.end_ns > window.begin_ns and span.end_ns > span.begin_ns:
            rows[span.lane, span.kind].append(span)
    for row in rows.values():
        row.sort(key=lambda span: span.begin_ns)
    finest_ns = (window.end_ns - window.begin_ns) * _FINEST_SHARE
    while True:
        found = [piece for row in rows.values() for piece in _merged(row, window, finest_ns)]
        if len(found) <= max(most, 4 * len(rows)):
            return found
        finest_ns *= 2


def serial(trace: Trace, window: Window) -> Serial | None:
    """What a loader without workers would make of the window's batches, if everything took as long as it did.

    ``None`` where that is what happened, or where too little is known.
    """
    if trace.statistics.kind == "inline":
        return None
    loads = _load_times(trace)
    if not loads:
        return None
    typical_ns = sum(loads.values()) / len(loads)
    at_ns: float = window.begin_ns
    steps: list[tuple[SpanKind, int, int]] = []
    for span in trace.spans:
        if span.lane != LOOP or span.kind != "away" or not (window.begin_ns <= span.begin_ns and span.end_ns <= window.end_ns):
            continue
        load_ns = sum(loads.get((span.epoch, span.position + number), typical_ns) for number in range(span.size))
        steps.append(("load", int(at_ns), int(at_ns + load_ns)))
        at_ns += load_ns
        steps.append(("away", int(at_ns), int(at_ns + span.end_ns - span.begin_ns)))
        at_ns += span.end_ns - span.begin_ns
    if not steps:
        return None
    seconds = (at_ns - window.begin_ns) / 1e9
    return Serial(tuple(steps), seconds, seconds / window.seconds)


def marks_in(trace: Trace, window: Window, *, most: int) -> tuple[list[Mark], int]:
    """What happened in a window, faults before all else if there is too much; and how much is left out."""
    inside = [mark for mark in trace.marks if window.has(mark.at_ns)]
    chosen = sorted(inside, key=lambda mark: (mark.kind not in FAULTS, mark.at_ns))[:most]
    return sorted(chosen, key=lambda mark: mark.at_ns), len(inside) - len(chosen)


def _merged(row: Sequence[Span], window: Window, finest_ns: float) -> Iterable[Piece]:
    piece: Piece | None = None
    for span in row:
        begin_ns, end_ns = max(span.begin_ns, window.begin_ns), min(span.end_ns, window.end_ns)
        one = Piece(
            span.lane, span.kind, begin_ns, end_ns, end_ns - begin_ns, span.epoch, span.position, span.first_index, span.size, 1
        )
        if piece is None:
            piece = one
        elif (
            begin_ns - piece.end_ns < finest_ns
            and min(one.busy_ns, piece.busy_ns / piece.span_count) < finest_ns
            and end_ns - piece.begin_ns < _MERGED_LENGTH * finest_ns
        ):
            piece = piece._replace(
                end_ns=max(piece.end_ns, end_ns),
                busy_ns=piece.busy_ns + one.busy_ns,
                size=piece.size + one.size,
                span_count=piece.span_count + 1,
            )
        else:
            yield piece
            piece = one
    if piece is not None:
        yield piece


def _loop_cycles(trace: Trace) -> list[tuple[int, int, int]]:
    """Of each piece of the loop's own work: since when it was waited for, when it ended, how many batches it was."""
    cycles = []
    begin_ns: int | None = None
    for span in trace.spans:
        if span.lane == LOOP:
            begin_ns = span.begin_ns if begin_ns is None else begin_ns
            if span.kind == "away":
                cycles.append((begin_ns, span.end_ns, span.size))
                begin_ns = None
    return cycles


def _load_times(trace: Trace) -> dict[tuple[int, int], float]:
    """How long workers took over each batch, by epoch and number: loading and collating, which a lone loader does too."""
    statistics = trace.statistics
    if not statistics.batch_count or not statistics.sample_count:
        return {}
    # The last batch of an epoch may be smaller than the others, so the true size is above the mean.
    batch_size = max(1, -(-statistics.sample_count // statistics.batch_count))
    loads: dict[tuple[int, int], float] = defaultdict(float)
    for span in trace.spans:
        if span.lane == LOOP or span.kind not in ("load", "collate"):
            continue
        size = max(1, span.size)
        each_ns = (span.end_ns - span.begin_ns) / size
        at, end = span.position, span.position + size
        while at < end:
            number = at // batch_size
            here = min(end, (number + 1) * batch_size) - at
            loads[span.epoch, number] += here * each_ns
            at += here
    return dict(loads)
