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
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

from infeed.errors import ConfigError
from infeed.observe.lanes import lane_names
from infeed.observe.records import LOOP, Span, SpanKind, Trace

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
        "verdict": trace.statistics.verdict,
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
    from infeed.observe.picture import draw_picture

    draw_picture(trace, path)


def _write_page(trace: Trace, path: Path) -> None:
    from infeed.observe.figures import timeline_page

    # A path in a setting may hold bytes that are no text.
    path.write_text(timeline_page(trace), encoding="utf-8", errors="backslashreplace")
