"""A run as a timeline: for Perfetto and chrome://tracing, as a picture, or as a page to look around in.

The first is the Trace Event Format: complete events for spans, instants for marks, counters for what was measured from time
to time. Times in it are microseconds since the run began. Workers and the loop are processes there, so that each group
folds; a worker is a thread of the first. A thread's events must lie within each other or apart; where short spans were put
together they may cross, and then a worker has a second row.
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
_LOOP: Final = 2
_LOOP_ROW: Final = 1
_DELIVERY_ROW: Final = 2
# A worker's rows: its first, and room for more below it.
_ROWS_PER_WORKER: Final = 8
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
    yield from _names(_LOOP, 0, "process", "infeed: your loop")
    yield from _names(_LOOP, _LOOP_ROW, "thread", names[LOOP])
    yield from _names(_LOOP, _DELIVERY_ROW, "thread", "delivery")
    for lane, name in names.items():
        if lane != LOOP:
            yield from _names(_WORKERS, _worker_row(lane), "thread", name)
    lanes: dict[int, list[Span]] = {lane: [] for lane in names}
    for span in trace.spans:
        lanes[span.lane].append(span)
    for lane, spans in lanes.items():
        yield from _loop_events(spans) if lane == LOOP else _worker_events(lane, names[lane], spans)
    yield from _mark_events(trace)
    yield from _counter_events(trace)


def _worker_row(lane: int) -> int:
    return lane * _ROWS_PER_WORKER + 1


def _names(process: int, thread: int, what: str, name: str) -> Iterator[Event]:
    place = {"ph": "M", "ts": 0, "pid": process, "tid": thread}
    yield {**place, "name": f"{what}_name", "args": {"name": name}}
    yield {**place, "name": f"{what}_sort_index", "args": {"sort_index": thread or process}}


def _loop_events(spans: list[Span]) -> Iterator[Event]:
    for row, is_delivery in ((_LOOP_ROW, False), (_DELIVERY_ROW, True)):
        for span in sorted(spans, key=_outer_first):
            if (span.kind == "deliver") is is_delivery:
                args = {"epoch": span.epoch, "batch": span.position, "batches": span.size}
                yield _complete(span, _LOOP, row, "loop", args)


def _worker_events(lane: int, name: str, spans: list[Span]) -> Iterator[Event]:
    rows: list[list[int]] = []  # of each row, the ends of the spans that are still open, the innermost last
    for span in sorted(spans, key=_outer_first):
        row = _fit(rows, span)
        if row == len(rows):
            rows.append([])
            if row:
                yield from _names(_WORKERS, _worker_row(lane) + row, "thread", f"{name} ({row + 1})")
        rows[row].append(span.end_ns)
        args: Event = {"epoch": span.epoch, "position": span.position, "samples": span.size}
        if span.first_index is not None:
            args["index"] = span.first_index
        yield _complete(span, _WORKERS, _worker_row(lane) + row, "worker", args)


def _outer_first(span: Span) -> tuple[int, int]:
    return span.begin_ns, -span.end_ns


def _fit(rows: list[list[int]], span: Span) -> int:
    """The first row in which the span lies within another or apart from all."""
    for row, open_ends in enumerate(rows):
        while open_ends and open_ends[-1] <= span.begin_ns:
            open_ends.pop()
        if not open_ends or span.end_ns <= open_ends[-1] or row == _ROWS_PER_WORKER - 1:
            return row
    return len(rows)


def _complete(span: Span, process: int, thread: int, category: str, args: Event) -> Event:
    return {
        "ph": "X",
        "name": span.kind,
        "cat": category,
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
        # A mark of the loop's concerns everything, so it is drawn across all lanes.
        scope = "g" if mark.lane == LOOP else "t"
        yield {
            "ph": "i",
            "name": mark.kind,
            "cat": "mark",
            "ts": mark.at_ns / 1000,
            **place,
            "s": scope,
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
