"""Write the timeline of a run: as JSON for Perfetto and chrome://tracing, as a picture, or as a zoomable page.

The first part of the module selects the time windows to show and merges spans that are too short to see. Pictures and pages
share it.

The JSON is in the Trace Event Format, with times in microseconds since the run began. Spans are complete events, marks are
instant events, and periodic measurements are counters. Workers, batches and the training loop appear as processes, so that
each group can be collapsed; each worker is a thread of the first.

Events of one thread must be nested or disjoint. Events overlap if short spans were merged or several workers collate at the
same time; overlapping events get an additional row. Collating and writing appear twice: in the worker's row, which would
otherwise look idle, and next to the delivery of batches.
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

FAULTS: Final = frozenset({"death", "restart", "bad sample", "failure", "hang"})


class Piece(NamedTuple):
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
    the training loop ended, and times from which spans were dropped.
    """
    everything, cycles = whole(trace), loop_cycles(trace)
    if everything is None or not cycles:
        return () if everything is None else (everything,)
    is_cut = trace.lost_span_count > 0
    if is_cut:
        since_ns = _known_since(trace)
        known = [cycle for cycle in cycles if cycle.begin_ns >= since_ns]
        # A worker that was idle for long looks as if it had lost spans. Then use the latest cycles.
        cycles = known if len(known) >= _STEADY_BATCH_COUNT else cycles[-_STEADY_BATCH_COUNT:]
    begin_ns, end_ns = cycles[0].begin_ns, cycles[-1].end_ns
    if not is_cut:  # workers start before the training loop's first request
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
    title = ("late in the run" if is_cut else "steady state") + ("" if fault is None else f", with a fault ({fault.kind})")
    later_ns = cycles[first].begin_ns
    later = Window(later_ns, max(cycles[first + _STEADY_BATCH_COUNT - 1].end_ns, later_ns + 1), title)
    return (later,) if is_cut else (Window(begin_ns, cycles[beginning_count - 1].end_ns, "the beginning"), later)


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


def _known_since(trace: Trace) -> int:
    """Return the time from which the spans of all workers and the training loop are complete, after older ones were dropped."""
    first: dict[int, Span] = {}
    for span in trace.spans:
        first.setdefault(span.lane, span)
    workers = [span.begin_ns for lane, span in first.items() if lane != LOOP]
    # A lane whose first span is its start has lost no spans.
    kept = [span.begin_ns for span in first.values() if span.kind != "start"]
    return max([min(workers, default=0), *kept])


def pieces(spans: Iterable[Span], window: Window, *, most: int = 6000) -> list[Piece]:
    """Return the spans of a window as drawn: clipped to it, with short neighbours of one kind merged.

    The resolution is halved until there are at most ``most`` pieces, or four per lane and kind if that is more.
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
    """Return at most ``most`` marks of a window, faults preferred, and the number of marks left out."""
    inside = [mark for mark in trace.marks if window.has(mark.at_ns)]
    chosen = sorted(inside, key=lambda mark: (mark.kind not in FAULTS, mark.at_ns))[:most]
    return sorted(chosen, key=lambda mark: mark.at_ns), len(inside) - len(chosen)


def _merged(row: Sequence[Piece], finest_ns: float) -> list[Piece]:
    """Merge neighbours if one of them and the gap between them are too short to see."""
    merged: list[Piece] = []
    run: list[Piece] = []  # pieces to merge into one
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
# Row numbers must differ from process numbers: a viewer takes an equal number for the process's main thread.
_LOOP_ROW: Final = 10
_DELIVERY_ROW: Final = 20
_COLLATION_ROW: Final = 21
_MOST_COLLATIONS: Final = 500  # maximum number of rows; one per worker that collates at the same time
_WORKER_ROW: Final = 1000
# Row numbers reserved per worker: its first row, and rows for overlapping spans.
_ROWS_PER_WORKER: Final = 8
_CATEGORIES: Final = {_WORKERS: "worker", _BATCHES: "batch", _LOOP: "loop"}
_COLLATION: Final = frozenset({"collate", "write"})
# chrome://tracing accepts only these colour names; Perfetto chooses its own colours.
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
    """Write the timeline of a run in the format given by the file extension.

    Args:
        trace: The recorded data of the run.
        path: ``.json`` opens in Perfetto (ui.perfetto.dev) and chrome://tracing, and has every recorded span. ``.svg`` and
            ``.png`` are pictures that also show the same work run serially. ``.html`` is a zoomable page.

    Raises:
        ConfigError: The extension is not supported, or the package that draws the format is not installed.
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
            f"path={os.fspath(path)!r} has no known file extension; use {', '.join([*writers][:-1])} or {[*writers][-1]}"
        )
    write(trace, target)


def chrome_events(trace: Trace) -> Iterator[Event]:
    """Yield all events in the Trace Event Format, each group sorted by time."""
    names = lane_names(trace)
    yield from _names(_WORKERS, 0, "process", "infeed: workers")
    yield from _names(_BATCHES, 0, "process", "infeed: collation and delivery")
    yield from _names(_LOOP, 0, "process", "infeed: training loop")
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
    """Yield the events of workers in as many rows as needed to avoid overlaps, at most ``most``."""
    yield from _names(process, first_row, "thread", name)
    rows: list[list[int]] = [[]]  # for each row, the ends of the open spans, innermost last
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
    """Return the first row in which the span is nested in another span or overlaps none; the last row takes any span."""
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
            yield _counter(before.at_ns, "waiting for data (% of the time)", "%", 100 * share)


def _counter(at_ns: int, name: str, unit: str, value: float) -> Event:
    place = {"pid": _LOOP, "tid": 0}
    return {"ph": "C", "name": name, "cat": "counter", "ts": at_ns / 1000, **place, "args": {unit: round(value, 3)}}


def _write_json(trace: Trace, path: Path) -> None:
    about = {
        "diagnosis": trace.statistics.diagnosis,
        "dropped spans": str(trace.lost_span_count),
        **{f"setting {name}": value for name, value in trace.settings.items()},
        **{f"machine {name}": value for name, value in trace.machine.items()},
    }
    # Write one event per line: hundreds of thousands of events never are in memory together, and the file is readable.
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

    # A path in a setting may contain bytes that are not valid UTF-8.
    path.write_text(timeline_page(trace), encoding="utf-8", errors="backslashreplace")
