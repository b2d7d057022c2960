"""Draws the chart of the README from a result file.

    python benchmarks/chart.py [benchmarks/results/2026-11-20-peers-2-cores.json] [docs/images/benchmarks.svg]

Bars show medians; thin lines show the smallest and the largest value. The colors are readable on light and dark pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "2026-11-20-peers-2-cores.json"
PICTURE = ROOT / "docs" / "images" / "benchmarks.svg"

LIBRARIES = {"infeed-torch": "infeed", "torch": "torch", "spdl": "SPDL", "grain": "Grain"}
OURS, OTHERS, TEXT = "#4f6bed", "#9aa4b2", "#7d8590"


class Panel(NamedTuple):
    case: str
    metric: str
    title: str
    unit: str
    format: Callable[[float], str]


PANELS = (
    Panel("tiny", "samples_per_s", "Tiny samples", "samples/s", lambda value: f"{value / 1000:,.0f}k"),
    Panel("big", "samples_per_s", "Float32 images", "images/s", lambda value: f"{value / 1000:,.1f}k"),
    Panel("arrays", "samples_per_s", "Arrays in memory", "samples/s", lambda value: f"{value / 1e6:,.2f}M"),
    Panel("jpeg", "samples_per_s", "JPEG decoding", "images/s", lambda value: f"{value:,.0f}"),
    Panel("uneven", "efficiency", "1 in 50 samples is slow", "share of the ideal", lambda value: f"{value:.2f}"),
)


def spread(results: dict[str, Any], panel: Panel, library: str) -> tuple[float, float, float]:
    """Return the smallest value, the median and the largest value of one bar.

    Raises:
        KeyError: the result file has no such measurement.
    """
    for case in results["summary"]:
        for row in case["metrics"]:
            if (row["case"], row["metric"], row["library"]) == (panel.case, panel.metric, library):
                return row["spread"]["least"], row["spread"]["median"], row["spread"]["most"]
    raise KeyError(f"{panel.case}, {panel.metric}, {library}")


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the chart of `results` to `path`: SVG or PNG, by its suffix."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text as paths renders the same without the font. The salt makes the output identical in every run.
    with rc_context({"font.size": 9, "svg.fonttype": "path", "svg.hashsalt": "infeed"}):
        figure = Figure(figsize=(10.4, 2.3), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
            spreads = [spread(results, panel, library) for library in LIBRARIES]
            names = [*LIBRARIES.values()]
            medians = [median for _, median, _ in spreads]
            around = [[median - least for least, median, _ in spreads], [most - median for _, median, most in spreads]]
            longest = max(most for _, _, most in spreads)
            axes.barh(
                names,
                medians,
                height=0.62,
                color=[OURS if name == "infeed" else OTHERS for name in names],
                xerr=around,
                error_kw={"ecolor": TEXT, "elinewidth": 0.8},
            )
            for position, (_, median, most) in enumerate(spreads):
                axes.text(most + 0.03 * longest, position, panel.format(median), va="center", color=TEXT, fontsize=9)
            axes.set_title(f"{panel.title}\n", color=TEXT, fontsize=9.5, fontweight="bold", loc="left", pad=2)
            axes.text(0, 1.03, panel.unit, transform=axes.transAxes, color=TEXT, fontsize=8.5)
            axes.set_xlim(0, longest * 1.32)
            axes.invert_yaxis()
            axes.spines[:].set_visible(False)
            axes.tick_params(
                length=0, labelcolor=TEXT, bottom=False, labelbottom=False, labelleft=axes.get_subplotspec().is_first_col()
            )
        figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: list[str]) -> None:
    results, picture = (*map(Path, arguments), *(RESULTS, PICTURE)[len(arguments) :])
    draw(json.loads(results.read_text(encoding="utf-8")), picture)
    print(picture)


if __name__ == "__main__":
    main(sys.argv[1:])
