"""The charts of the report and the zoomable timeline as plotly.js figures."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Any, Final

from infeed.formatting import format_count, format_seconds, shorten
from infeed.metrics.lanes import (
    EXTENT,
    FAULTS,
    WORDS,
    DrawnSpan,
    Serial,
    Window,
    foremost,
    lane_labels,
    lane_tops,
    marks_in,
    pieces,
    serial,
    whole,
    windows,
)
from infeed.metrics.page import Figure, Html, chart, hint, section
from infeed.metrics.statistics import LOOP, Mark, Point, SpanKind, Statistics, Trace

_MOST_POINTS: Final = 120
_MOST_MARKS_SHOWN: Final = 100
# Texts on hover: characters in all, and per line.
_MOST_TEXT: Final = 300
_WIDTH: Final = 60
_GIB: Final = 2**30


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most ``_MOST_POINTS`` points, about evenly spaced in time, with the first and the last.

    Points hold cumulative sums, so dropping some loses nothing from the totals.
    """
    # Drop points with equal times: callers divide by the time between points.
    rising = [*points[:1], *(after for before, after in pairwise(points) if after.at_ns > before.at_ns)]
    if len(rising) <= _MOST_POINTS:
        return rising
    times = [point.at_ns for point in rising]
    length_ns = times[-1] - times[0]
    wanted = {bisect_left(times, times[0] + length_ns * step // (_MOST_POINTS - 1)) for step in range(_MOST_POINTS)}
    return [rising[at] for at in sorted(wanted)]


def rate_figure(points: Sequence[Point], marks: Iterable[Mark]) -> Figure:
    """Return the chart of samples per second between points, with events as markers."""
    few = thinned(points)
    rates = _between(few, lambda before, after: (after.sample_count - before.sample_count) / _ns(before, after) * 1e9)
    data = [_line("rate", _middles(few), rates, "var(--load)", "%{y:,.4~g} samples/s", fill="tozeroy")]
    shown = foremost(marks, _MOST_MARKS_SHOWN)
    if shown:
        # Markers at the bottom cover no data.
        data.append({**_markers("events", shown, [0] * len(shown), "diamond", size=9), "cliponaxis": False})
    return {"data": data, "layout": _layout("samples/s", few, showlegend=bool(shown))}


def wait_figure(points: Sequence[Point]) -> Figure:
    """Return the chart of the training loop's time between points: share spent waiting for data, and in user code."""

    def share(before: Point, after: Point) -> float:
        waited, away = after.waited_ns - before.waited_ns, after.away_ns - before.away_ns
        return 100 * waited / (waited + away) if waited + away > 0 else 0.0

    few = thinned(points)
    shares = _between(few, share)
    data = [
        _line(name, _middles(few), values, colour, "%{y:.1f} %", width=0, stackgroup="loop", fillcolor=colour)
        for name, values, colour in (
            ("waiting for data", shares, "var(--wait)"),
            ("training step", [100 - value for value in shares], "var(--away)"),
        )
    ]
    layout = _layout("", few, showlegend=True)
    layout["yaxis"].update(range=[0, 100], ticksuffix=" %")
    return {"data": data, "layout": layout}


def worker_figure(points: Sequence[Point]) -> Figure:
    """Return the chart of the number of workers, of busy workers, and of CPU cores they used."""
    few = thinned(points)
    counts = [point.worker_count for point in few]
    # Work is counted when a task ends, so a short interval may show more busy time than its workers could spend.
    busy = _between(few, lambda before, after: min(after.worker_count, (after.busy_ns - before.busy_ns) / _ns(before, after)))
    cores = _between(few, lambda before, after: (after.cpu_ns - before.cpu_ns) / _ns(before, after))
    data = [
        _line("busy", _middles(few), busy, "var(--load)", "%{y:.2f} workers", width=1.5, fill="tozeroy"),
        _line("workers", _times(few), counts, "var(--text)", "%{y} workers", shape="hv"),
    ]
    if any(cores):
        data.append(_line("CPU cores used", _middles(few), cores, "var(--deliver)", "%{y:.2f} cores", width=1.5, dash="dot"))
    return {"data": data, "layout": _layout("workers, cores", few, showlegend=True)}


def memory_figure(points: Sequence[Point]) -> Figure:
    """Return the chart of memory used by workers, and by batches that are loaded, being loaded or held by user code."""
    few = thinned(points)
    largest = max((max(point.memory_bytes, point.flight_bytes) for point in few), default=0)
    unit, size = ("GiB", _GIB) if largest >= _GIB else ("MiB", 2**20)
    data = [
        _line(name, _times(few), [value / size for value in values], colour, f"%{{y:,.3~f}} {unit}")
        for name, colour, values in (
            ("worker processes", "var(--load)", [point.memory_bytes for point in few]),
            ("batches in flight", "var(--deliver)", [point.flight_bytes for point in few]),
        )
        if any(values)
    ]
    return {"data": data, "layout": _layout(unit, few, showlegend=True)}


def sample_time_figure(statistics: Statistics) -> Figure:
    """Return the histogram of sample times, without the empty buckets at both ends."""
    filled = [at for at, (_, count) in enumerate(statistics.histogram) if count]
    shown = statistics.histogram[filled[0] : filled[-1] + 1]
    bounds = [0.0, *(upper for upper, _ in statistics.histogram)][filled[0] :]
    names = [f"{format_seconds(lower)} to {format_seconds(upper)}" for lower, (upper, _) in zip(bounds, shown, strict=False)]
    counts = [count for _, count in shown]
    # With a log scale one sample in a thousand stays visible: it may be the bottleneck.
    is_wide = max(counts) > 200
    axis: dict[str, Any] = {"title": {"text": "samples" + (" (log scale)" if is_wide else "")}}
    if is_wide:
        axis.update(type="log", dtick=1, tickformat=",d", range=[-0.3, len(str(max(counts))) - 0.3 + 0.4])
    step = max(1, -(-len(shown) // 5))
    ticks = list(range(0, len(shown), step))
    return {
        "data": [
            {
                "type": "bar",
                "x": list(range(len(shown))),
                "y": counts,
                "text": names,
                "textposition": "none",
                "marker": {"color": "var(--load)"},
                "hovertemplate": "%{text}<br><b>%{y:,} samples</b><extra></extra>",
            }
        ],
        "layout": {
            "showlegend": False,
            "xaxis": {
                # The boundary between two bars.
                "tickvals": [at + 0.5 for at in ticks],
                "ticktext": [format_seconds(shown[at][0]) for at in ticks],
                "title": {"text": "time for one sample"},
                "showgrid": False,
                "fixedrange": True,
            },
            "yaxis": {**axis, "fixedrange": True},
        },
    }


def _between(points: Sequence[Point], value: Callable[[Point, Point], float]) -> list[float]:
    return [round(value(before, after), 4) for before, after in pairwise(points)]


def _ns(before: Point, after: Point) -> int:
    return after.at_ns - before.at_ns


def _times(points: Sequence[Point]) -> list[float]:
    return [point.at_ns / 1e9 for point in points]


def _middles(points: Sequence[Point]) -> list[float]:
    """Return the times in the middle between neighbouring points."""
    return [round((before.at_ns + after.at_ns) / 2e9, 4) for before, after in pairwise(points)]


def _line(
    name: str,
    x: Sequence[float],
    y: Sequence[float],
    colour: str,
    hover: str,
    *,
    width: float = 2,
    dash: str = "solid",
    shape: str = "linear",
    **style: str,
) -> dict[str, Any]:
    line = {"color": colour, "width": width, "dash": dash, "shape": shape}
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": line, "hovertemplate": hover, **style}


def _markers(name: str, marks: Sequence[Mark], y: Sequence[float], symbol: str, *, size: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [mark.at_ns / 1e9 for mark in marks],
        "y": y,
        "text": [f"<b>{mark.kind}</b><br>{wrapped(mark.text)}" for mark in marks],
        "hovertemplate": "%{text}<br>at %{x:.3f} s<extra></extra>",
        "marker": {"symbol": symbol, "size": size, "color": "var(--text)", "line": {"width": 1, "color": "var(--card)"}},
    }


def _layout(unit: str, points: Sequence[Point], *, showlegend: bool) -> dict[str, Any]:
    return {
        "hovermode": "x unified",
        "showlegend": showlegend,
        "xaxis": {
            "range": [points[0].at_ns / 1e9, points[-1].at_ns / 1e9],
            "ticksuffix": " s",
            "hoverformat": ".2f",
            "nticks": 7,
            "showgrid": False,
        },
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero", "fixedrange": True},
    }


_LANE_PX: Final = 34
_LEAST_LANE_PX: Final = 12
_MOST_HEIGHT_PX: Final = 900
_AROUND_PX: Final = 96  # legend above, times below
_MOST_MARKS: Final = 200


def timeline_section(trace: Trace, *, most: int) -> Html | None:
    """Return the timeline with instructions for zooming and a note on missing spans; ``None`` if there are no spans.

    Args:
        trace: The recorded data of the run.
        most: About the maximum number of pieces to draw.
    """
    window = whole(trace)
    if window is None:
        return None
    shown = windows(trace)[-1]
    lane_count = lane_tops(trace, has_serial=serial(trace, shown) is not None)[LOOP] + 1
    lane_px = max(_LEAST_LANE_PX, min(_LANE_PX, _MOST_HEIGHT_PX / lane_count))
    picture = chart(timeline_figure(trace, window, shown, most=most), height_px=round(_AROUND_PX + lane_px * lane_count))
    how = hint("Drag to zoom in; double-click to reset; double-click again to show the whole run.")
    return section("Timeline", how, picture, note=_note(trace))


def _note(trace: Trace) -> str:
    parts = []
    shown = windows(trace)
    in_a_row = serial(trace, shown[-1]) if shown else None
    if in_a_row is not None:
        parts.append(
            f"Top lane: the same work without workers, estimated from the measured times: "
            f"{format_seconds(in_a_row.seconds)} instead of {format_seconds(in_a_row.loop_s)}."
        )
    if len(shown) > 1 or (shown and trace.lost_span_count):
        parts.append(f"Initially shown: {shown[-1].title}, {format_seconds(shown[-1].seconds)}.")
    if trace.lost_span_count:
        parts.append(f"{format_count(trace.lost_span_count, 'older span')} dropped.")
    return " ".join(parts)


def timeline_figure(trace: Trace, window: Window, shown: Window, *, most: int) -> Figure:
    """Return the chart of ``window``, initially zoomed to ``shown``, which is finer: it gets half of the pieces."""
    in_a_row = serial(trace, shown)
    tops = lane_tops(trace, has_serial=in_a_row is not None)
    labels = lane_labels(trace, has_serial=in_a_row is not None)
    found = _pieces(trace, window, shown, most)
    data = [_bars(kind, found[kind], tops) for kind in WORDS if found[kind]]
    if in_a_row is not None:
        data += _serial_bars(in_a_row, {kind for kind in WORDS if found[kind]})
    data += _mark_points(trace, window, tops)
    return {
        "data": data,
        "layout": {
            "barmode": "overlay",
            "xaxis": {"range": [shown.begin_ns / 1e9, shown.end_ns / 1e9], "ticksuffix": " s", "nticks": 7},
            "yaxis": {
                "range": [tops[LOOP] + 1.05, -0.05],
                "tickvals": [*labels],
                "ticktext": [label.replace("without ", "without<br>") for label in labels.values()],
                "showgrid": False,
                "zeroline": False,
                "fixedrange": True,
            },
            "annotations": [] if in_a_row is None else [_serial_note(in_a_row)],
        },
    }


def _pieces(trace: Trace, window: Window, shown: Window, most: int) -> dict[SpanKind, list[DrawnSpan]]:
    """Return pieces by kind: fine within ``shown``, coarse before and after it, without duplicates."""
    parts = [(shown, most // 2)]
    if window.begin_ns < shown.begin_ns:
        parts.append((Window(window.begin_ns, shown.begin_ns, ""), most // 4))
    if shown.end_ns < window.end_ns:
        parts.append((Window(shown.end_ns, window.end_ns, ""), most // 4))
    found: dict[SpanKind, list[DrawnSpan]] = defaultdict(list)
    for part, share in parts:
        for piece in pieces(trace.spans, part, most=share):
            found[piece.kind].append(piece)
    return found


def _bars(kind: SpanKind, found: list[DrawnSpan], tops: dict[int, float]) -> dict[str, Any]:
    is_loop = kind in ("wait", "deliver", "away")
    what = "batch %{customdata[1]}" if is_loop else "position %{customdata[1]}%{customdata[2]}"
    many = "batches" if is_loop else "samples"
    return {
        **_lane_bars(kind, [(tops[piece.lane], piece.begin_ns, piece.end_ns) for piece in found]),
        "marker": {
            "color": f"var(--{kind})",
            "opacity": [round(0.25 + 0.75 * piece.density, 2) for piece in found],
            "line": {"width": 0},
        },
        "customdata": [
            [piece.epoch, piece.position, "" if piece.first_index is None else f", index {piece.first_index}", piece.size]
            for piece in found
        ],
        "hovertemplate": f"<b>{WORDS[kind]}</b>, %{{x:.3s}}s<br>epoch %{{customdata[0]}}, {what}<br>"
        f"%{{customdata[3]}} {many}, at %{{base:.4f}} s<extra></extra>",
    }


def _serial_bars(in_a_row: Serial, known: set[SpanKind]) -> list[dict[str, Any]]:
    kinds: tuple[SpanKind, ...] = ("load", "away")
    return [
        {
            **_lane_bars(kind, [(0, begin_ns, end_ns) for one, begin_ns, end_ns in in_a_row.steps if one == kind]),
            "showlegend": kind not in known,
            "marker": {"color": f"var(--{kind})", "line": {"width": 1, "color": "var(--card)"}},
            "hovertemplate": f"<b>{WORDS[kind]}</b>, without workers, %{{x:.3s}}s<extra></extra>",
        }
        for kind in kinds
    ]


def _lane_bars(kind: SpanKind, found: list[tuple[float, int, int]]) -> dict[str, Any]:
    """Return bars of one kind, each given by the top of its lane, its begin and its end."""
    offset, height = EXTENT[kind]
    return {
        "type": "bar",
        "orientation": "h",
        "name": WORDS[kind],
        "legendgroup": kind,
        "base": [round(begin_ns / 1e9, 7) for _, begin_ns, _ in found],
        "x": [round((end_ns - begin_ns) / 1e9, 7) for _, begin_ns, end_ns in found],
        "y": [round(top + offset, 3) for top, _, _ in found],
        "width": height,
        "offset": 0,
    }


def _serial_note(in_a_row: Serial) -> dict[str, Any]:
    return {
        "text": f"<b>{in_a_row.text}</b>",
        "font": {"color": "var(--text)"},
        "showarrow": False,
        "xref": "paper",
        "x": 1,
        "xanchor": "right",
        "y": 1.35,
        "yanchor": "middle",
    }


def _mark_points(trace: Trace, window: Window, tops: dict[int, float]) -> list[dict[str, Any]]:
    data = []
    marks, _ = marks_in(trace, window, most=_MOST_MARKS)
    for name, is_fault, symbol in (("faults", True, "x"), ("events", False, "diamond-tall")):
        chosen = [mark for mark in marks if (mark.kind in FAULTS) is is_fault]
        if chosen:
            data.append(_markers(name, chosen, [tops.get(mark.lane, tops[LOOP]) + 0.5 for mark in chosen], symbol, size=12))
    return data


def wrapped(text: str) -> str:
    """Escape untrusted text for a chart, break it into lines, and truncate it."""
    line = shorten(text, _MOST_TEXT)
    return "<br>".join(escape(line[at : at + _WIDTH], quote=False) for at in range(0, len(line), _WIDTH))
