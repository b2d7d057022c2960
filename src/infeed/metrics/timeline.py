"""Write the timeline of a run: as JSON for Perfetto and chrome://tracing, as a picture, or as a zoomable page.

The JSON is in the Trace Event Format, with times in microseconds since the run began. Spans are complete events, marks are
instant events, and periodic measurements are counters. Workers, batches and the training loop appear as processes, so that
each group can be collapsed; each worker is a thread of the first.

Events of one thread must be nested or disjoint. Events overlap if short spans were merged or several workers collate at the
same time; overlapping events get an additional row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

from infeed.errors import ConfigError
from infeed.metrics.lanes import lane_names
from infeed.metrics.statistics import LOOP, Span, SpanKind, Trace

__all__ = ["chrome_events", "write_timeline"]

Event: TypeAlias = dict[str, Any]

_WORKERS: Final = 1
_BATCHES: Final = 2
_LOOP: Final = 3
# Row numbers must differ from process numbers: a viewer takes an equal number for the process's main thread.
_LOOP_ROW: Final = 10
_DELIVERY_ROW: Final = 20
_WORKER_ROW: Final = 1000
# Row numbers reserved per worker: its first row, and rows for overlapping spans.
_ROWS_PER_WORKER: Final = 8
_CATEGORIES: Final = {_WORKERS: "worker", _BATCHES: "batch", _LOOP: "loop"}
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
    yield from _names(_BATCHES, 0, "process", "infeed: delivery")
    yield from _names(_LOOP, 0, "process", "infeed: training loop")
    yield from _names(_LOOP, _LOOP_ROW, "thread", names[LOOP])
    yield from _names(_BATCHES, _DELIVERY_ROW, "thread", "delivery")
    lanes: dict[int, list[Span]] = {lane: [] for lane in names}
    for span in trace.spans:
        lanes[span.lane].append(span)
    own = lanes.pop(LOOP)
    for lane, spans in lanes.items():
        yield from _rows(spans, _worker_row(lane), names[lane])
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


def _rows(spans: list[Span], first_row: int, name: str) -> Iterator[Event]:
    """Yield the events of a worker in as many rows as needed to avoid overlaps, at most ``_ROWS_PER_WORKER``."""
    yield from _names(_WORKERS, first_row, "thread", name)
    rows: list[list[int]] = [[]]  # for each row, the ends of the open spans, innermost last
    for span in sorted(spans, key=_outer_first):
        row = _fit(rows, span)
        if row == len(rows):
            rows.append([])
            yield from _names(_WORKERS, first_row + row, "thread", f"{name} ({row + 1})")
        rows[row].append(span.end_ns)
        args: Event = {"epoch": span.epoch, "position": span.position, "samples": span.size}
        if span.first_index is not None:
            args["index"] = span.first_index
        yield _complete(span, _WORKERS, first_row + row, args)


def _outer_first(span: Span) -> tuple[int, int]:
    return span.begin_ns, -span.end_ns


def _fit(rows: list[list[int]], span: Span) -> int:
    """Return the first row in which the span is nested in another span or overlaps none; the last row takes any span."""
    for row, open_ends in enumerate(rows):
        while open_ends and open_ends[-1] <= span.begin_ns:
            open_ends.pop()
        if not open_ends or span.end_ns <= open_ends[-1] or row == _ROWS_PER_WORKER - 1:
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
    from infeed.metrics.run_report import timeline_page

    # A path in a setting may contain bytes that are not valid UTF-8.
    path.write_text(timeline_page(trace), encoding="utf-8", errors="backslashreplace")
