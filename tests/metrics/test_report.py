"""The report: what is in it, for all kinds of runs."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infeed import ConfigError
from infeed.metrics.charts import thinned
from infeed.metrics.page import page, plotly_source
from infeed.metrics.run_report import report_page, timeline_page, write_report
from infeed.metrics.statistics import Trace
from tests.metrics.traces import CASES, empty_trace, faulty_trace, make_trace, strange_trace, with_statistics

pytest.importorskip("plotly")

ALL_CASES = pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
HEADINGS = [
    "Throughput",
    "Training loop",
    "Workers",
    "Memory",
    "Timeline",
    "Time per sample",
    "Slowest samples",
    "Workers",
    "Events",
    "Settings",
    "Machine",
]


def headings_of(html: str) -> list[str]:
    return re.findall("<h2>(.*?)</h2>", html)


def figures_of(html: str) -> Iterator[dict[str, Any]]:
    for text in re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL):
        yield json.loads(text)


def test_a_report_has_all_sections() -> None:
    """In the order in which one asks: how fast, why, when, which samples, who, with what."""
    html = report_page(faulty_trace())

    assert headings_of(html) == HEADINGS
    assert len(list(figures_of(html))) == 6


@ALL_CASES
def test_every_chart_is_one_that_plotly_knows(make: Callable[[], Trace]) -> None:
    """The charts are plain data here; plotly's own classes check each name and value in them."""
    graphs = pytest.importorskip("plotly.graph_objects")
    for html in (report_page(make()), timeline_page(make())):
        for figure in figures_of(html):
            # Colours are names of the stylesheet until the page looks them up.
            plain = json.loads(re.sub(r"var\(--[a-z-]+\)", "#123456", json.dumps(figure)))
            assert graphs.Figure(plain).data


def test_text_of_others_is_no_markup_in_charts() -> None:
    """plotly interprets markup in text; a mark's text must not contain any."""
    for html in (report_page(strange_trace()), timeline_page(strange_trace())):
        texts = [text for figure in figures_of(html) for data in figure["data"] for text in data.get("text", [])]
        marks = [text for text in texts if "quoted" in text]

        assert marks
        assert all("&lt;b&gt;&amp;amp;" in text and "</script" not in text for text in marks)


@ALL_CASES
def test_every_colour_is_one_of_the_stylesheet(make: Callable[[], Trace]) -> None:
    """A name that is not there would be drawn as nothing, in light and in dark."""
    sheet = set(re.findall(r"(--[a-z-]+):", page("", [])))
    used = {name for figure in figures_of(report_page(make())) for name in re.findall(r"var\((.*?)\)", json.dumps(figure))}

    assert used <= sheet


def test_both_schemes_have_the_same_colours() -> None:
    """One that is missing in dark would stay as it is in light."""
    light, dark = re.findall(r":root \{(.*?)\}", page("", []), re.DOTALL)

    assert re.findall(r"(--[a-z-]+):", light) == re.findall(r"(--[a-z-]+):", dark)


@ALL_CASES
def test_the_data_of_a_page_is_small_beside_the_library(make: Callable[[], Trace]) -> None:
    """A page is opened on a phone, too."""
    library = len(re.search(r'id="library">(.*?)<', html)[1]) if 'id="library"' in (html := report_page(make())) else 0

    assert len(html) - library < 350_000
    assert library < len(plotly_source()) / 2


def test_a_long_run_makes_no_larger_page() -> None:
    """Ten times as many batches, as many points and pieces."""
    sizes = [
        len(report_page(make_trace(batches=batches, batch_size=32, grain=4, load_ms=0.05, away_ms=0.3)))
        for batches in (400, 4000)
    ]

    assert sizes[1] < sizes[0] * 1.1


def test_a_report_of_nothing_says_so() -> None:
    """What to do, and no empty sections."""
    html = report_page(empty_trace())

    assert "No batch was delivered yet" in html
    assert headings_of(html) == []
    assert list(figures_of(html)) == []


def test_the_hint_to_iterate_disappears_after_an_iteration() -> None:
    html = report_page(with_statistics(empty_trace(), ended_count=2))
    assert "iterate over the loader" not in html


def test_what_was_not_recorded_is_said() -> None:
    """One sees why a chart is not there."""
    html = report_page(CASES["untimed"]())

    assert "No timeline" in html
    assert "not timed individually" in html
    assert "too short for charts over time" in html


def test_a_run_without_workers_says_so() -> None:
    """Instead of a chart with a line at zero."""
    assert "None: loading runs in the main process" in report_page(make_trace(workers=0, kind="inline"))


@pytest.mark.parametrize(("waited_s", "tone"), [(0.1, "good"), (1.0, "fair"), (5.0, "bad"), (0.0, "good")])
def test_the_diagnosis_has_the_colour_of_the_wait(waited_s: float, tone: str) -> None:
    """Of ten seconds, or a little more."""
    assert f'class="diagnosis {tone}"' in report_page(with_statistics(make_trace(), waited_s=waited_s, away_s=10.0))


def test_the_slowest_samples_are_named_by_index() -> None:
    """That is how they are found again."""
    trace = make_trace()
    html = report_page(trace)

    for one in trace.statistics.slowest:
        assert f'<td class="number">{one.index}</td>' in html


def test_numbers_have_units() -> None:
    """On tiles, on axes of charts, and in tables."""
    html = report_page(faulty_trace())
    tiles = re.findall(r"<dd>(.*?)(?:<small>|</dd>)", html)

    assert len(tiles) >= 6
    assert all(re.search(r"[A-Za-z%]", tile) for tile in tiles)
    for figure in figures_of(html):
        for axis in (figure["layout"]["xaxis"], figure["layout"]["yaxis"]):
            assert axis.get("ticksuffix") or axis.get("ticktext") or axis["title"]["text"]


@pytest.mark.parametrize("count", [0, 1, 2, 119, 5000])
def test_thinned_points_keep_the_ends(count: int) -> None:
    """And there are never more of them than can be seen."""
    points = make_trace(batches=count).points
    few = thinned(points)

    assert len(few) <= 120
    assert (few[0], few[-1]) == (points[0], points[-1])
    assert few == sorted(few)


def test_points_at_one_time_are_counted_once() -> None:
    """Nothing is divided by no time."""
    trace = make_trace(batches=5)
    doubled = replace(trace, points=tuple(point for point in trace.points for _ in range(2)))

    assert thinned(doubled.points) == list(trace.points)
    assert thinned([]) == []


def test_a_report_is_a_web_page(tmp_path: Path) -> None:
    """Another ending is refused, with what to write instead."""
    with pytest.raises(ConfigError, match=r"report\.pdf.*\.html"):
        write_report(make_trace(), tmp_path / "report.pdf")
    write_report(CASES["strange"](), tmp_path / "report.html")

    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
