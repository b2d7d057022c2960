"""HTML pages of a run: the report (diagnosis, charts, timeline, slowest samples, settings, machine), and only the timeline."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from infeed.autotune.capacity import State, state_of
from infeed.errors import ConfigError
from infeed.formatting import format_bytes, format_count, format_rate, format_seconds, format_workers
from infeed.metrics import charts as measures
from infeed.metrics.charts import timeline_section
from infeed.metrics.lanes import FAULTS, foremost, lane_names
from infeed.metrics.page import Html, Tone, bars, chart, diagnosis, facts, label, page, paragraph, row, section, table, tiles
from infeed.metrics.statistics import Mark, Statistics, Trace, WorkerStatistics, fault_counts

__all__ = ["report_page", "timeline_page", "write_report"]

_MOST_PIECES: Final = 4000
_MOST_TIMELINE_PIECES: Final = 6000
_MOST_MARKS: Final = 60


def write_report(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the report of a run as one HTML file that needs no network.

    Raises:
        ConfigError: The path does not end in ``.html``, or plotly is not installed.
    """
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"path={os.fspath(path)!r} is not an HTML file; use the extension .html")
    # A path in a setting may contain bytes that are not valid UTF-8.
    target.write_text(report_page(trace), encoding="utf-8", errors="backslashreplace")


def report_page(trace: Trace) -> str:
    """Return the report as HTML."""
    began = datetime.fromtimestamp(trace.began, UTC).strftime("%Y-%m-%d %H:%M UTC")
    length_s = max((point.at_ns for point in trace.points), default=0) / 1e9
    subtitle = f"started {began}" + (f", duration {format_seconds(length_s)}" if length_s else "")
    return page("infeed report", _blocks(trace), subtitle=subtitle)


def timeline_page(trace: Trace) -> str:
    """Return an HTML page that contains only the timeline, below a summary."""
    timeline = timeline_section(trace, most=_MOST_TIMELINE_PIECES)
    if timeline is None:
        timeline = paragraph("No timeline: no batch was requested, or observe is not 'timeline'.")
    return page("infeed timeline", [*_summary(trace), timeline])


def _blocks(trace: Trace) -> Iterator[Html]:
    statistics = trace.statistics
    yield from _summary(trace)
    if not statistics.batch_count and not statistics.ended_count:
        yield paragraph("No batch was delivered yet. Iterate over the loader, then write the report again.")
    yield from _over_time(trace)
    timeline = timeline_section(trace, most=_MOST_PIECES)
    if timeline is not None:
        yield timeline
    elif statistics.batch_count:
        yield section("Timeline", paragraph("No timeline: observe is not 'timeline'."))
    yield from _samples(statistics)
    yield from _workers(statistics)
    if trace.marks:
        yield section("Events", *_events(trace))
    tables = [
        section(title, facts(values)) for title, values in (("Settings", trace.settings), ("Machine", trace.machine)) if values
    ]
    if tables:
        yield row(*tables)


def _summary(trace: Trace) -> Iterator[Html]:
    yield diagnosis(trace.statistics.diagnosis or "No diagnosis yet.", _tone(trace))
    if trace.statistics.batch_count:
        yield tiles(_tiles(trace.statistics))


def _tone(trace: Trace) -> Tone:
    statistics = trace.statistics
    if not statistics.elapsed_s:
        return "plain"
    tones: dict[State, Tone] = {"compute-bound": "good", "balanced": "fair", "data-bound": "bad"}
    return tones.get(state_of(statistics.recent_wait_share), "plain")


def _tiles(statistics: Statistics) -> Iterator[tuple[str, str, str]]:
    if statistics.elapsed_s:
        per_s = f"{format_bytes(statistics.byte_count / statistics.elapsed_s)}/s" if statistics.byte_count else ""
        yield "Throughput", format_rate(statistics.samples_per_s), per_s
        waited = f"{format_seconds(statistics.waited_s)} of {format_seconds(statistics.elapsed_s)}"
        yield "Waiting for data", f"{statistics.wait_share:.0%}", waited
    yield "Delivered", format_count(statistics.batch_count, "batch", "batches"), format_count(statistics.sample_count, "sample")
    if statistics.kind == "inline":
        yield "Workers", "none", "loading in the main process"
    else:
        decided = ", auto" if statistics.is_auto else ""
        workers = format_workers(statistics.worker_count, statistics.kind)
        yield "Workers", workers, f"{statistics.busy_share:.0%} busy{decided}"
    if statistics.sample_times:
        slowest = f"slowest {format_seconds(statistics.sample_times['max'])}" if "max" in statistics.sample_times else ""
        yield (
            "Time per sample",
            format_seconds(statistics.sample_times.get("median", 0.0)),
            f"median; {slowest}" if slowest else "median",
        )
    if statistics.memory_bytes:
        limit = f"in flight {format_bytes(statistics.bytes_in_flight)} of {format_bytes(statistics.memory_limit)}"
        yield "Worker memory", format_bytes(statistics.memory_bytes), limit
    if statistics.started_s:
        yield "Worker start-up", format_seconds(statistics.started_s), "until the first batch, not in the throughput"
    faults = fault_counts(statistics)
    if faults:
        yield "Faults", f"{sum(faults.values()):,}", ", ".join(f"{count:,} {name}" for name, count in faults.items())


def _over_time(trace: Trace) -> Iterator[Html]:
    points = measures.thinned(trace.points)
    if len(points) < 3:
        if trace.statistics.batch_count:
            yield section("Over time", paragraph("The run was too short for charts over time."))
        return
    yield section("Throughput", chart(measures.rate_figure(points, trace.marks)))
    yield row(
        section("Training loop", chart(measures.wait_figure(points)), note="Red: waiting for data."),
        section("Workers", chart(measures.worker_figure(points)), note="Number of workers, and how many were busy.")
        if any(point.worker_count for point in points)
        else section("Workers", paragraph("None: loading runs in the main process while the training loop waits.")),
    )
    if any(point.memory_bytes or point.flight_bytes for point in points):
        note = "Shared memory counts in each process. In flight: loaded, loading, or referenced by your code."
        yield section("Memory", chart(measures.memory_figure(points), height_px=220), note=note)


def _samples(statistics: Statistics) -> Iterator[Html]:
    blocks = []
    if any(count for _, count in statistics.histogram):
        times = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in statistics.sample_times.items())
        blocks.append(section("Time per sample", chart(measures.sample_time_figure(statistics), height_px=340), note=times))
    if statistics.slowest:
        note = "Check these first if a few samples delay the others."
        blocks.append(section("Slowest samples", _slowest(statistics), note=note))
    if blocks:
        yield row(*blocks)
    elif statistics.batch_count:
        yield section("Time per sample", paragraph("Samples were not timed individually in this run."))


def _slowest(statistics: Statistics) -> Html:
    longest = max(one.seconds for one in statistics.slowest) or 1.0
    median = statistics.sample_times.get("median", 0.0)
    rows: list[list[str | Html]] = [
        [
            "" if one.index is None else str(one.index),
            format_seconds(one.seconds),
            f"{one.seconds / median:.1f} \u00d7" if median else "",
            bars(one.seconds / longest),
            f"{one.position:,}",
            str(one.epoch),
        ]
        for one in statistics.slowest
    ]
    return table(["index", "time", "vs. median" if median else "", "", "position", "epoch"], rows, numbers=(0, 1, 2, 4, 5))


def _workers(statistics: Statistics) -> Iterator[Html]:
    if statistics.workers:
        head = ["worker", "", "samples", "busy", "", "loading", "collating", "writing", "CPU", "memory", "restarts"]
        rows = [_worker_row(one) for one in statistics.workers]
        yield section("Workers", table(head, rows, numbers=(2, 3, 5, 6, 7, 8, 9, 10)))


def _worker_row(one: WorkerStatistics) -> list[str | Html]:
    name = f"{one.worker}" if one.pid is None else f"{one.worker} (pid {one.pid})"
    return [
        name,
        label("alive", "good") if one.is_alive else label("ended"),
        f"{one.sample_count:,}",
        f"{one.busy_share:.0%}",
        bars(one.busy_share),
        format_seconds(one.load_s),
        format_seconds(one.collate_s),
        format_seconds(one.write_s),
        format_seconds(one.cpu_s),
        format_bytes(one.memory_bytes),
        str(one.restart_count),
    ]


def _events(trace: Trace) -> Iterator[Html]:
    names = lane_names(trace)
    chosen = foremost(trace.marks, _MOST_MARKS)

    def cells(mark: Mark) -> list[str | Html]:
        tone: Tone = "bad" if mark.kind in FAULTS - {"restart"} else "plain"
        return [format_seconds(mark.at_ns / 1e9), names.get(mark.lane, ""), label(mark.kind, tone), mark.text]

    yield table(["time", "source", "event", ""], map(cells, chosen), numbers=[0])
    if len(trace.marks) > len(chosen):
        yield paragraph(f"And {len(trace.marks) - len(chosen):,} more.")
