"""Draw the timeline with matplotlib: the spans of each worker and of the training loop, and the same work run serially.

Uses matplotlib's object interface and its default settings, so the picture neither depends on the user's backend and style
nor changes them.
"""

from __future__ import annotations

import re
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from infeed.errors import ConfigError
from infeed.formatting import format_count, format_seconds, shorten
from infeed.metrics.lanes import (
    EXTENT,
    FAULTS,
    WORDS,
    DrawnSpan,
    Serial,
    Window,
    lane_labels,
    lane_names,
    lane_tops,
    marks_in,
    pieces,
    serial,
    windows,
)
from infeed.metrics.statistics import LOOP, SpanKind, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_picture"]

COLOURS: Final[dict[SpanKind, str]] = {
    "start": "#c3c8ce",
    "load": "#3f7fdb",
    "collate": "#8a5cd1",
    "write": "#14a0a0",
    "wait": "#d93a2e",
    "deliver": "#e0a21b",
    "away": "#86c79b",
}
_INK: Final = "#1d2126"
_SOFT: Final = "#626a73"
_MOST_MARKS: Final = 8
_WIDTH_IN: Final = 12.0
_GAP_IN: Final = 0.01  # between pieces, so that they can be distinguished
_HEADLINE_SIZE: Final = 13
_HEADLINE_IN: Final = 0.26  # height of a line
_HEADLINE_LETTERS: Final = 104  # per line
_MOST_LETTERS: Final = 1000
_NOTE_LETTERS: Final = 160
_MOST_NOTE_LETTERS: Final = 400


def draw_picture(trace: Trace, path: Path) -> None:
    """Draw the most informative part of a run (see ``lanes.windows``) into an ``.svg`` or ``.png`` file."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            'timeline pictures need matplotlib; install it with: pip install "infeed[report]", or write .json instead'
        ) from None
    is_svg = path.suffix.lower() == ".svg"
    default = {name: value for name, value in matplotlib.rcParamsDefault.items() if "backend" not in name}
    # A fixed salt makes the element ids reproducible: the same run gives the same file.
    with matplotlib.rc_context({**default, "svg.hashsalt": "infeed"}), warnings.catch_warnings():
        # matplotlib draws missing glyphs as boxes; a warning in the user's log would not help.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(facecolor="white")
        (FigureCanvasSVG if is_svg else FigureCanvasAgg)(figure)
        _draw(trace, figure)
        figure.savefig(path, dpi=150, metadata={"Date": None} if is_svg else None)


def _draw(trace: Trace, figure: Figure) -> None:
    shown = windows(trace)
    seen = [pieces(trace.spans, window) for window in shown]
    serials = [serial(trace, window) for window in shown]
    tops = lane_tops(trace, has_serial=any(serials))
    labels = lane_labels(trace, has_serial=any(serials))
    lane_count = tops[LOOP] + 1
    lane_in = max(0.1, min(0.34, 11 / lane_count))
    notes = _notes(trace, shown)
    headline = _headline(trace)
    # The diagnosis takes as many lines as it needs, and everything else is below it.
    head_in = 0.14 + _HEADLINE_IN * len(headline)
    height_in = head_in + 1.32 + lane_in * lane_count + 0.21 * len(notes)
    figure.set_size_inches(_WIDTH_IN, height_in)

    def below_top(inches: float) -> float:
        return 1 - inches / height_in

    for line, text in enumerate(headline):
        at = below_top(0.14 + _HEADLINE_IN * line)
        figure.text(0.02, at, text, size=_HEADLINE_SIZE, weight="bold", color=_INK, va="top", parse_math=False)
    figure.text(0.02, below_top(head_in + 0.06), _subline(trace, seen), size=9.5, color=_SOFT, va="top", parse_math=False)
    if not shown:
        return
    kinds: set[SpanKind] = set()
    number = 1
    bottom, top = (0.42 + 0.21 * len(notes)) / height_in, below_top(head_in + 0.84)
    ratios = [1.0] if len(shown) == 1 else [2.0, 3.0]
    grid = figure.add_gridspec(1, len(shown), left=0.13, right=0.975, bottom=bottom, top=top, width_ratios=ratios, wspace=0.05)
    for column, (window, in_a_row) in enumerate(zip(shown, serials, strict=True)):
        axes = figure.add_subplot(grid[0, column])
        kinds |= _draw_window(axes, window, seen[column], in_a_row, tops)
        number = _draw_marks(trace, axes, window, tops, number)
        _draw_axis(axes, window, tops, labels if column == 0 else {})
        if len(shown) > 1 or trace.lost_span_count:
            axes.set_title(f"{window.title}, {format_seconds(window.seconds)}", size=9.5, color=_SOFT, loc="left", pad=4)
    _legend(figure, kinds, below_top(head_in + 0.32))
    for below, note in zip(reversed(range(len(notes))), notes, strict=True):
        figure.text(0.02, (0.08 + 0.21 * below) / height_in, note, size=8.5, color=_SOFT, va="bottom", parse_math=False)


def _draw_window(
    axes: Axes, window: Window, seen: list[DrawnSpan], in_a_row: Serial | None, tops: dict[int, float]
) -> set[SpanKind]:
    """Draw the lanes and, above them, the serial work. Return the span kinds drawn."""
    bars: dict[tuple[float, SpanKind], list[tuple[float, float, float]]] = {}
    for piece in seen:
        one = (piece.begin_ns / 1e9, (piece.end_ns - piece.begin_ns) / 1e9, piece.density)
        bars.setdefault((tops[piece.lane], piece.kind), []).append(one)
    for kind, begin_ns, end_ns in () if in_a_row is None else in_a_row.steps:
        if begin_ns < window.end_ns:
            one = (begin_ns / 1e9, (min(end_ns, window.end_ns) - begin_ns) / 1e9, 1.0)
            bars.setdefault((0, kind), []).append(one)
    gap = window.seconds * _GAP_IN / (_WIDTH_IN * axes.get_position().width)
    # Draw in the order of COLOURS, so that thin bars end up on top.
    for (top, kind), found in sorted(bars.items(), key=lambda item: list(COLOURS).index(item[0][1])):
        offset, height = EXTENT[kind]
        axes.broken_barh(
            [(begin, length - gap if length > 4 * gap else length) for begin, length, _ in found],
            (top + offset, height),
            facecolors=[_pale(COLOURS[kind], density) for _, _, density in found],
            linewidths=0,
        )
    if in_a_row is not None:
        where: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
        axes.text(1.0, 1.3, in_a_row.text, size=9.5, weight="bold", color=_INK, **where)
    return {kind for _, kind in bars}


def _draw_marks(trace: Trace, axes: Axes, window: Window, tops: dict[int, float], number: int) -> int:
    """Draw faults as numbered points in their lanes and other marks as vertical lines. Return the next fault number."""
    for mark in marks_in(trace, window, most=_MOST_MARKS)[0]:
        at = mark.at_ns / 1e9
        if mark.kind in FAULTS:
            middle = tops.get(mark.lane, tops[LOOP]) + 0.5
            axes.plot([at], [middle], marker="o", markersize=10, color=_INK, markeredgecolor="white", clip_on=False, zorder=5)
            style: dict[str, Any] = {"size": 7, "weight": "bold", "color": "white", "ha": "center", "va": "center"}
            axes.text(at, middle + 0.02, str(number), zorder=6, **style)
            number += 1
        else:
            axes.axvline(at, color=_SOFT, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0.5)
    return number


def _draw_axis(axes: Axes, window: Window, tops: dict[int, float], labels: dict[float, str]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    unit, factor = ("ms", 1e3) if window.end_ns < 1e9 else ("s", 1.0)
    axes.set_xlim(window.begin_ns / 1e9, window.end_ns / 1e9)
    axes.set_ylim(tops[LOOP] + 1.1, -0.05)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * factor:.10g} {unit}"))
    axes.tick_params(axis="both", length=0, labelsize=9, colors=_SOFT)
    axes.grid(axis="x", color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_yticks([*labels], [*labels.values()])


def _legend(figure: Figure, kinds: set[SpanKind], top: float) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=COLOURS[kind], label=WORDS[kind]) for kind in COLOURS if kind in kinds]
    style: dict[str, Any] = {"frameon": False, "fontsize": 9, "labelcolor": _INK, "handlelength": 1.1, "handleheight": 0.9}
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.013, top), ncols=7, columnspacing=1.4, **style)


def _headline(trace: Trace) -> list[str]:
    """Return the diagnosis wrapped into lines, up to 1000 characters, because the advice is at its end."""
    text = re.sub(r"`(\w+)`", r"\1", trace.statistics.diagnosis)
    return textwrap.wrap(shorten(text, _MOST_LETTERS), _HEADLINE_LETTERS) or ["infeed"]


def _subline(trace: Trace, seen: list[list[DrawnSpan]]) -> str:
    statistics = trace.statistics
    if not seen:
        return "No timeline: no batch was requested, or observe is not 'timeline'."
    parts = [
        f"{format_count(statistics.batch_count, 'batch', 'batches')}, {format_count(statistics.sample_count, 'sample')}",
        f"{statistics.samples_per_s:,.0f} samples/s" if statistics.elapsed_s else "",
        f"the training loop waited for data {statistics.wait_share:.0%} of the time" if statistics.elapsed_s else "",
        "pale: gaps too short to show" if any(piece.density < 0.8 for part in seen for piece in part) else "",
        f"{format_count(trace.lost_span_count, 'older span')} dropped" if trace.lost_span_count else "",
    ]
    return " · ".join(part for part in parts if part)


def _notes(trace: Trace, shown: tuple[Window, ...]) -> list[str]:
    """Return the explanations of the numbered faults, in order, wrapped into lines."""
    faults, rest = [], 0
    for window in shown:
        inside, left_out = marks_in(trace, window, most=_MOST_MARKS)
        faults += [mark for mark in inside if mark.kind in FAULTS]
        rest += left_out
    lanes = lane_names(trace)
    notes = []
    for number, mark in enumerate(faults, 1):
        who = lanes.get(mark.lane, "training loop")
        note = f"{mark.kind} at {format_seconds(mark.at_ns / 1e9)} ({who}): {shorten(mark.text, _MOST_NOTE_LETTERS)}"
        first, *more = textwrap.wrap(note, _NOTE_LETTERS)
        notes += [f"{number}  {first}", *(f"    {line}" for line in more)]
    return [*notes, f"and {rest} more"] if rest else notes


def _pale(colour: str, density: float) -> tuple[float, float, float]:
    """Return the colour, mixed with white in proportion to the gaps."""
    share = 0.25 + 0.75 * density
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return 1 - share * (1 - red), 1 - share * (1 - green), 1 - share * (1 - blue)
