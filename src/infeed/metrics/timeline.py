"""A run as a timeline: for Perfetto and chrome://tracing, as a picture, or as a page to look around in.

The first is the Trace Event Format: complete events for spans, instants for marks, counters for what was measured from time
to time. Times in it are microseconds since the run began. Workers, batches and the loop are processes there, so that each group
folds; a worker is a thread of the first. A thread's events must lie within each other or apart; where they cross, because
short spans were put together or because several workers collate at a time, they get a second row. What a worker does for a
batch is shown twice: in the worker's row, which would seem idle without it, and with the delivery of batches.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from infeed.errors import ConfigError
from infeed.metrics.statistics import LOOP, Mark, Span, SpanKind, Trace

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


__all__ = ["chrome_events", "write_timeline"]

Event: TypeAlias = dict[str, Any]

_WORKERS: Final = 1
_BATCHES: Final = 2
_LOOP: Final = 3
# No number of a row is one of a process: a viewer would take it for the process's main thread.
_LOOP_ROW: Final = 10
_DELIVERY_ROW: Final = 20
_COLLATION_ROW: Final = 21
_MOST_COLLATIONS: Final = 500  # rows, as many as workers that collate at a time
_WORKER_ROW: Final = 1000
# A worker's rows: its first, and room for more below it.
_ROWS_PER_WORKER: Final = 8
_CATEGORIES: Final = {_WORKERS: "worker", _BATCHES: "batch", _LOOP: "loop"}
_COLLATION: Final = frozenset({"collate", "write"})
# chrome://tracing knows colours by these names only; Perfetto chooses its own.
_COLOURS: Final[dict[SpanKind, str]] = {
    "start": "grey",
    "load": "thread_state_running",
    "collate": "rail_animation",
    "write": "thread_state_runnable",
    "wait": "terrible",
    "deliver": "yellow",
    "away": "good",
}


def write_timeline(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a run's timeline in the form that the path's ending names.

    Args:
        trace: What is known of the run.
        path: ``.json``: opens in Perfetto (ui.perfetto.dev) and chrome://tracing, with every span. ``.svg`` and ``.png``: a
            picture, beside it the same work one after another. ``.html``: a page to zoom and look around in.

    Raises:
        ConfigError: The ending is another, or what draws that form is not installed.
    """
    target = Path(path)
    writers: dict[str, Callable[[Trace, Path], None]] = {
        ".json": _write_json,
        ".svg": _write_picture,
        ".png": _write_picture,
        ".html": _write_page,
    }
    write = writers.get(target.suffix.lower())
    if write is None:
        raise ConfigError(
            f"path={os.fspath(path)!r} does not say in which form the timeline is wanted; "
            f"let it end in {', '.join([*writers][:-1])} or {[*writers][-1]}"
        )
    write(trace, target)


def chrome_events(trace: Trace) -> Iterator[Event]:
    """All events of the Trace Event Format: names first, then everything else by time within each kind."""
    names = lane_names(trace)
    yield from _names(_WORKERS, 0, "process", "infeed: workers")
    yield from _names(_BATCHES, 0, "process", "infeed: collation and delivery")
    yield from _names(_LOOP, 0, "process", "infeed: your loop")
    yield from _names(_LOOP, _LOOP_ROW, "thread", names[LOOP])
    yield from _names(_BATCHES, _DELIVERY_ROW, "thread", "delivery")
    lanes: dict[int, list[Span]] = {lane: [] for lane in names}
    for span in trace.spans:
        lanes[span.lane].append(span)
    own = lanes.pop(LOOP)
    for lane, spans in lanes.items():
        yield from _rows(spans, _WORKERS, _worker_row(lane), names[lane], _ROWS_PER_WORKER)
    collations = [span for spans in lanes.values() for span in spans if span.kind in _COLLATION]
    if collations:
        yield from _rows(collations, _BATCHES, _COLLATION_ROW, "collation", _MOST_COLLATIONS)
    for span in sorted(own, key=_outer_first):
        process, row = (_BATCHES, _DELIVERY_ROW) if span.kind == "deliver" else (_LOOP, _LOOP_ROW)
        yield _complete(span, process, row, {"epoch": span.epoch, "batch": span.position, "batches": span.size})
    yield from _mark_events(trace)
    yield from _counter_events(trace)


def _worker_row(lane: int) -> int:
    return _WORKER_ROW + lane * _ROWS_PER_WORKER


def _names(process: int, thread: int, what: str, name: str) -> Iterator[Event]:
    place = {"ph": "M", "ts": 0, "pid": process, "tid": thread}
    yield {**place, "name": f"{what}_name", "args": {"name": name}}
    yield {**place, "name": f"{what}_sort_index", "args": {"sort_index": thread or process}}


def _rows(spans: list[Span], process: int, first_row: int, name: str, most: int) -> Iterator[Event]:
    """What workers did, in as many rows as are needed so that nothing crosses, at most ``most``."""
    yield from _names(process, first_row, "thread", name)
    rows: list[list[int]] = [[]]  # of each row, the ends of the spans that are still open, the innermost last
    for span in sorted(spans, key=_outer_first):
        row = _fit(rows, span, most)
        if row == len(rows):
            rows.append([])
            yield from _names(process, first_row + row, "thread", f"{name} ({row + 1})")
        rows[row].append(span.end_ns)
        args: Event = {"epoch": span.epoch, "position": span.position, "samples": span.size}
        if span.first_index is not None:
            args["index"] = span.first_index
        if process != _WORKERS:
            args["worker"] = span.lane
        yield _complete(span, process, first_row + row, args)


def _outer_first(span: Span) -> tuple[int, int]:
    return span.begin_ns, -span.end_ns


def _fit(rows: list[list[int]], span: Span, most: int) -> int:
    """The first row in which the span lies within another or apart from all."""
    for row, open_ends in enumerate(rows):
        while open_ends and open_ends[-1] <= span.begin_ns:
            open_ends.pop()
        if not open_ends or span.end_ns <= open_ends[-1] or row == most - 1:
            return row
    return len(rows)


def _complete(span: Span, process: int, thread: int, args: Event) -> Event:
    return {
        "ph": "X",
        "name": span.kind,
        "cat": _CATEGORIES[process],
        "ts": span.begin_ns / 1000,
        "dur": max(0, span.end_ns - span.begin_ns) / 1000,
        "pid": process,
        "tid": thread,
        "cname": _COLOURS[span.kind],
        "args": args,
    }


def _mark_events(trace: Trace) -> Iterator[Event]:
    for mark in sorted(trace.marks, key=lambda mark: mark.at_ns):
        place = {"pid": _LOOP, "tid": _LOOP_ROW} if mark.lane == LOOP else {"pid": _WORKERS, "tid": _worker_row(mark.lane)}
        yield {
            "ph": "i",
            "name": mark.kind,
            "cat": "mark",
            "ts": mark.at_ns / 1000,
            **place,
            "s": "t",
            "args": {"text": mark.text},
        }


def _counter_events(trace: Trace) -> Iterator[Event]:
    for point in trace.points:
        yield _counter(point.at_ns, "workers", "workers", point.worker_count)
        yield _counter(point.at_ns, "in flight (MiB)", "MiB", point.flight_bytes / 2**20)
        yield _counter(point.at_ns, "memory (MiB)", "MiB", point.memory_bytes / 2**20)
    for before, after in pairwise(trace.points):
        passed_ns = after.waited_ns - before.waited_ns + after.away_ns - before.away_ns
        if passed_ns > 0:
            share = (after.waited_ns - before.waited_ns) / passed_ns
            yield _counter(before.at_ns, "waiting (% of the loop's time)", "%", 100 * share)


def _counter(at_ns: int, name: str, unit: str, value: float) -> Event:
    place = {"pid": _LOOP, "tid": 0}
    return {"ph": "C", "name": name, "cat": "counter", "ts": at_ns / 1000, **place, "args": {unit: round(value, 3)}}


def _write_json(trace: Trace, path: Path) -> None:
    about = {
        "diagnosis": trace.statistics.diagnosis,
        "spans that were not kept": str(trace.lost_span_count),
        **{f"setting {name}": value for name, value in trace.settings.items()},
        **{f"machine {name}": value for name, value in trace.machine.items()},
    }
    # One event a line: hundreds of thousands of them never stand in memory together, and people can read the file.
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[')
        separator = "\n"
        for event in chrome_events(trace):
            file.write(f"{separator}{json.dumps(event, separators=(',', ':'), allow_nan=False)}")
            separator = ",\n"
        file.write("\n]}\n")


def _write_picture(trace: Trace, path: Path) -> None:
    from infeed.metrics.picture import draw_picture

    draw_picture(trace, path)


def _write_page(trace: Trace, path: Path) -> None:
    from infeed.metrics.charts import timeline_page

    # A path in a setting may hold bytes that are no text.
    path.write_text(timeline_page(trace), encoding="utf-8", errors="backslashreplace")
