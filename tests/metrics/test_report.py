"""The report and its contents, for all kinds of runs."""

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
    """In this order: rate, cause, time, samples, workers, environment."""
    html = report_page(faulty_trace())

    assert headings_of(html) == HEADINGS
    assert len(list(figures_of(html))) == 6


@ALL_CASES
def test_plotly_accepts_every_chart(make: Callable[[], Trace]) -> None:
    """Charts are plain data here; plotly's own classes check each name and value in them."""
    graphs = pytest.importorskip("plotly.graph_objects")
    for html in (report_page(make()), timeline_page(make())):
        for figure in figures_of(html):
            # Colors are names of the stylesheet until the page looks them up.
            plain = json.loads(re.sub(r"var\(--[a-z-]+\)", "#123456", json.dumps(figure)))
            assert graphs.Figure(plain).data


def test_user_text_is_escaped_in_charts() -> None:
    """plotly interprets markup in text; the text of a mark must not contain any."""
    for html in (report_page(strange_trace()), timeline_page(strange_trace())):
        texts = [text for figure in figures_of(html) for data in figure["data"] for text in data.get("text", [])]
        marks = [text for text in texts if "quoted" in text]

        assert marks
        assert all("&lt;b&gt;&amp;amp;" in text and "</script" not in text for text in marks)


@ALL_CASES
def test_every_color_is_in_the_stylesheet(make: Callable[[], Trace]) -> None:
    """An unknown name would be invisible, in light and in dark."""
    sheet = set(re.findall(r"(--[a-z-]+):", page("", [])))
    used = {name for figure in figures_of(report_page(make())) for name in re.findall(r"var\((.*?)\)", json.dumps(figure))}

    assert used <= sheet


def test_both_schemes_define_the_same_colors() -> None:
    """A color that is missing in dark would keep its light value."""
    light, dark = re.findall(r":root \{(.*?)\}", page("", []), re.DOTALL)

    assert re.findall(r"(--[a-z-]+):", light) == re.findall(r"(--[a-z-]+):", dark)


@ALL_CASES
def test_the_data_of_a_page_is_small_compared_with_the_library(make: Callable[[], Trace]) -> None:
    """A page may be opened on a phone."""
    library = len(re.search(r'id="library">(.*?)<', html)[1]) if 'id="library"' in (html := report_page(make())) else 0

    assert len(html) - library < 350_000
    assert library < len(plotly_source()) / 2


def test_a_long_run_has_a_page_of_the_same_size() -> None:
    """Ten times as many batches, as many points and spans."""
    sizes = [
        len(report_page(make_trace(batches=batches, batch_size=32, grain=4, load_ms=0.05, away_ms=0.3)))
        for batches in (400, 4000)
    ]

    assert sizes[1] < sizes[0] * 1.1


def test_a_report_of_an_empty_run_says_so() -> None:
    """It says what to do, and has no empty sections."""
    html = report_page(empty_trace())

    assert "No batch was delivered yet" in html
    assert headings_of(html) == []
    assert list(figures_of(html)) == []


def test_the_hint_to_iterate_disappears_after_an_iteration() -> None:
    html = report_page(with_statistics(empty_trace(), ended_count=2))
    assert "iterate over the loader" not in html


def test_missing_recordings_are_mentioned() -> None:
    """The user sees why a chart is missing."""
    html = report_page(CASES["untimed"]())

    assert "No timeline" in html
    assert "not timed individually" in html
    assert "too short for charts over time" in html


def test_a_run_without_workers_says_so() -> None:
    """There is a sentence instead of a chart with a line at zero."""
    assert "None: loading runs in the main process" in report_page(make_trace(workers=0, kind="inline"))


@pytest.mark.parametrize(("waited_s", "tone"), [(0.1, "good"), (1.0, "fair"), (5.0, "bad"), (0.0, "good")])
def test_the_diagnosis_has_the_color_of_the_wait(waited_s: float, tone: str) -> None:
    """Of ten seconds, or slightly more."""
    assert f'class="diagnosis {tone}"' in report_page(with_statistics(make_trace(), waited_s=waited_s, away_s=10.0))


def test_the_slowest_samples_are_listed_by_index() -> None:
    """So that users can find them."""
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
def test_downsampled_points_keep_the_ends(count: int) -> None:
    """There are never more points than can be seen."""
    points = make_trace(batches=count).points
    few = thinned(points)

    assert len(few) <= 120
    assert (few[0], few[-1]) == (points[0], points[-1])
    assert few == sorted(few)


def test_points_at_one_time_are_counted_once() -> None:
    """There is no division by zero."""
    trace = make_trace(batches=5)
    doubled = replace(trace, points=tuple(point for point in trace.points for _ in range(2)))

    assert thinned(doubled.points) == list(trace.points)
    assert thinned([]) == []


def test_a_report_is_an_html_file(tmp_path: Path) -> None:
    """Another suffix is rejected, with the right one."""
    with pytest.raises(ConfigError, match=r"report\.pdf.*\.html"):
        write_report(make_trace(), tmp_path / "report.pdf")
    write_report(CASES["strange"](), tmp_path / "report.html")

    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
