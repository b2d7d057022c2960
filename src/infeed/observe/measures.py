"""Charts of what was measured from time to time: rate, waiting, workers, memory; and of how long samples take."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

from infeed.observe.figures import wrapped
from infeed.observe.page import Figure
from infeed.observe.records import Mark, Point, Statistics
from infeed.units import format_seconds

__all__ = ["memory_figure", "rate_figure", "sample_time_figure", "thinned", "wait_figure", "worker_figure"]

_MOST_POINTS: Final = 120
_MOST_MARKS: Final = 100
_GIB: Final = 2**30


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """Points at about even distances in time, the first and the last among them. Sums lose nothing by that."""
    # Two at one time would be divided by nothing.
    rising = [*points[:1], *(after for before, after in pairwise(points) if after.at_ns > before.at_ns)]
    if len(rising) <= most:
        return rising
    times = [point.at_ns for point in rising]
    length_ns = times[-1] - times[0]
    wanted = {bisect_left(times, times[0] + length_ns * step // (most - 1)) for step in range(most)}
    return [rising[at] for at in sorted(wanted)]


def rate_figure(points: Sequence[Point], marks: Sequence[Mark]) -> Figure:
    """Samples a second, between each two points, and when something happened."""
    few = thinned(points)
    rates = _between(few, lambda before, after: (after.sample_count - before.sample_count) / _ns(before, after) * 1e9)
    area = {"fill": "tozeroy", "line": {"color": "var(--load)", "width": 2}, "hovertemplate": "%{y:,.4~g} samples/s"}
    data = [{**_line("rate", few, rates), **area}]
    if marks:
        # At the bottom, where they cover nothing.
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "events",
                "x": [mark.at_ns / 1e9 for mark in marks[:_MOST_MARKS]],
                "y": [0] * len(marks[:_MOST_MARKS]),
                "text": [f"<b>{mark.kind}</b><br>{wrapped(mark.text)}" for mark in marks[:_MOST_MARKS]],
                "hovertemplate": "%{text}<extra></extra>",
                "cliponaxis": False,
                "marker": {
                    "symbol": "diamond",
                    "size": 9,
                    "color": "var(--text)",
                    "line": {"width": 1, "color": "var(--card)"},
                },
            }
        )
    return {"data": data, "layout": _layout("samples/s", few, showlegend=bool(marks))}


def wait_figure(points: Sequence[Point]) -> Figure:
    """Of the loop's time between each two points, how much it waited and how much it did its own work."""

    def share(before: Point, after: Point) -> float:
        waited, away = after.waited_ns - before.waited_ns, after.away_ns - before.away_ns
        return 100 * waited / (waited + away) if waited + away > 0 else 0.0

    few = thinned(points)
    shares = _between(few, share)
    data = [
        {
            **_line(name, few, values),
            "stackgroup": "loop",
            "fillcolor": colour,
            "line": {"width": 0, "color": colour},
            "hovertemplate": "%{y:.1f} %",
        }
        for name, values, colour in (
            ("waiting for data", shares, "var(--wait)"),
            ("your code", [100 - value for value in shares], "var(--away)"),
        )
    ]
    layout = _layout("", few, showlegend=True)
    layout["yaxis"].update(range=[0, 100], ticksuffix=" %")
    return {"data": data, "layout": layout}


def worker_figure(points: Sequence[Point]) -> Figure:
    """How many workers there were, how many were busy, and how many cores they kept busy."""
    few = thinned(points)
    counts = {"x": [point.at_ns / 1e9 for point in few], "y": [point.worker_count for point in few]}
    # Work is counted when it is done, so a short while may seem to hold more of it than there were workers.
    busy = _between(few, lambda before, after: min(after.worker_count, (after.busy_ns - before.busy_ns) / _ns(before, after)))
    cores = _between(few, lambda before, after: (after.cpu_ns - before.cpu_ns) / _ns(before, after))
    data: list[dict[str, Any]] = [
        {
            **_line("busy", few, busy),
            "fill": "tozeroy",
            "line": {"color": "var(--load)", "width": 1.5},
            "hovertemplate": "%{y:.2f} workers",
        },
        {
            **_line("workers", few, []),
            **counts,
            "line": {"color": "var(--text)", "width": 2, "shape": "hv"},
            "hovertemplate": "%{y} workers",
        },
    ]
    if any(cores):
        style = {"line": {"color": "var(--deliver)", "width": 1.5, "dash": "dot"}, "hovertemplate": "%{y:.2f} cores"}
        data.append({**_line("processor cores used", few, cores), **style})
    layout = _layout("workers, cores", few, showlegend=True)
    layout["yaxis"].update(rangemode="tozero")
    return {"data": data, "layout": layout}


def memory_figure(points: Sequence[Point]) -> Figure:
    """Memory of the workers, and of batches that are loaded, being loaded or kept."""
    few = thinned(points)
    largest = max((max(point.memory_bytes, point.flight_bytes) for point in few), default=0)
    unit, size = ("GiB", _GIB) if largest >= _GIB else ("MiB", 2**20)
    data = []
    for name, colour, values in (
        ("processes", "var(--load)", [point.memory_bytes for point in few]),
        ("batches in flight", "var(--deliver)", [point.flight_bytes for point in few]),
    ):
        if any(values):
            style = {"line": {"color": colour, "width": 2}, "hovertemplate": f"%{{y:,.3~f}} {unit}"}
            line = {**_line(name, few, [value / size for value in values]), "x": [point.at_ns / 1e9 for point in few]}
            data.append({**line, **style})
    layout = _layout(unit, few, showlegend=True)
    layout["yaxis"].update(rangemode="tozero")
    return {"data": data, "layout": layout}


def sample_time_figure(statistics: Statistics) -> Figure:
    """How many samples took how long; empty ends are left out."""
    filled = [at for at, (_, count) in enumerate(statistics.histogram) if count]
    shown = statistics.histogram[filled[0] : filled[-1] + 1]
    bounds = [0.0, *(upper for upper, _ in statistics.histogram)][filled[0] :]
    names = [f"{format_seconds(lower)} to {format_seconds(upper)}" for lower, (upper, _) in zip(bounds, shown, strict=False)]
    counts = [count for _, count in shown]
    # One in a thousand must still be seen: it may be what holds everything up.
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
                # The end of each bar, where the next begins.
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


def _line(name: str, points: Sequence[Point], values: Sequence[float]) -> dict[str, Any]:
    """A line through the middles between points."""
    middles = [round((before.at_ns + after.at_ns) / 2e9, 4) for before, after in pairwise(points)]
    return {"type": "scatter", "mode": "lines", "name": name, "x": middles, "y": list(values)}


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
