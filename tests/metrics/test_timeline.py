"""Timelines: for Perfetto, as pictures, as a page."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from infeed import ConfigError
from infeed.metrics.run_report import write_report
from infeed.metrics.statistics import LOOP, Mark, Span, Trace
from infeed.metrics.timeline import write_timeline
from tests.metrics.traces import CASES, MS, STRANGE, empty_trace, faulty_trace, make_trace, strange_trace
from tests.unit.fresh import run_fresh

ALL_CASES = pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))


@pytest.fixture(scope="module", autouse=True)
def fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib keeps font files open once it has used them; the leak guard must not report these."""
    for name in ("run.svg", "run.png"):
        write_timeline(strange_trace(), tmp_path_factory.mktemp("fonts") / name)


def events_of(trace: Trace, folder: Path) -> list[dict[str, Any]]:
    path = folder / "run.json"
    write_timeline(trace, path)
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


@ALL_CASES
def test_every_event_has_the_required_fields(make: Callable[[], Trace], tmp_path: Path) -> None:
    """Phase, time, process and thread; a duration for spans, a scope for instants, numbers for counters."""
    for event in events_of(make(), tmp_path):
        assert event["ph"] in "MXiC"
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "i" or event["s"] in "tpg"
        assert event["ph"] != "C" or all(isinstance(value, int | float) for value in event["args"].values())
        assert event["ph"] != "M" or event["name"].endswith(("_name", "_sort_index"))


@ALL_CASES
def test_spans_of_a_thread_are_nested_or_disjoint(make: Callable[[], Trace], tmp_path: Path) -> None:
    """Viewers draw others wrongly or drop them; events are in order of time."""
    assert_nested(events_of(make(), tmp_path))


def assert_nested(events: list[dict[str, Any]]) -> None:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)))
    for spans in threads.values():
        assert spans == sorted(spans, key=lambda span: span[0])
        ends: list[int] = []
        for begin, end in spans:
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1]
            ends.append(end)


def test_every_span_is_written_once_with_its_details(tmp_path: Path) -> None:
    """This format aggregates and omits nothing."""
    trace = make_trace()
    events = [event for event in events_of(trace, tmp_path) if event["ph"] == "X"]
    known = [(span.kind, span.begin_ns, span.end_ns) for span in trace.spans]

    assert sorted((one["name"], round(one["ts"] * 1e3), round((one["ts"] + one["dur"]) * 1e3)) for one in events) == sorted(
        known
    )
    load = next(span for span in trace.spans if span.kind == "load")
    arguments = next(one["args"] for one in events if one["name"] == "load")
    assert arguments == {"epoch": load.epoch, "position": load.position, "index": load.first_index, "samples": load.size}


def test_each_lane_has_a_name(tmp_path: Path) -> None:
    """Workers by number, the training loop, and delivery separate from the training loop's own work."""
    events = events_of(make_trace(workers=2), tmp_path)
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    kinds = defaultdict(set)
    for one in events:
        if one["ph"] == "X":
            kinds[names[one["pid"], one["tid"]]].add(one["name"])

    assert kinds == {
        "worker 0": {"start", "load", "write"},
        "worker 1": {"start", "load", "write"},
        "training loop": {"wait", "away"},
        "delivery": {"deliver"},
    }
    numbers = [{one["pid"] for one in events}, {one["tid"] for one in events} - {0}]
    assert not set.intersection(*numbers), "a viewer takes such a row for the main thread of its process"


def test_overlapping_spans_get_a_second_row(tmp_path: Path) -> None:
    """Short spans are aggregated when they are recorded, and the result may overlap."""
    spans = (Span(0, "load", 0, 1000, 0, 0, 0, 4), Span(0, "write", 500, 1200, 0, 0, 0, 4))
    events = events_of(replace(make_trace(), spans=spans), tmp_path)

    assert_nested(events)
    assert "worker 0 (2)" in [one["args"]["name"] for one in events if one["name"] == "thread_name"]


def test_events_are_marked_in_their_lane(tmp_path: Path) -> None:
    """A worker's death in the worker's lane, an epoch in the training loop's."""
    marks = [one for one in events_of(faulty_trace(), tmp_path) if one["ph"] == "i"]

    assert [(one["name"], one["s"]) for one in marks] == [("death", "t"), ("restart", "t"), ("epoch", "t")]
    assert "SIGKILL" in marks[0]["args"]["text"]


def test_waiting_is_shown_in_percent(tmp_path: Path) -> None:
    """Between two points, so it never exceeds 100%."""
    trace = make_trace()
    shares = [one["args"]["%"] for one in events_of(trace, tmp_path) if one["ph"] == "C" and "%" in one["args"]]

    assert len(shares) == len(trace.points) - 1
    assert all(0 <= share <= 100 for share in shares)


def test_unusual_text_is_preserved(tmp_path: Path) -> None:
    """It is unchanged, and is not interpreted as markup."""
    path = tmp_path / "run.json"
    write_timeline(strange_trace(), path)

    assert json.loads(path.read_text(encoding="utf-8"))["otherData"]["diagnosis"] == STRANGE


@ALL_CASES
def test_a_picture_is_an_svg_file(make: Callable[[], Trace], tmp_path: Path) -> None:
    """It is valid XML with any text in it, and identical for the same run."""
    once, twice = tmp_path / "run.svg", tmp_path / "again.svg"
    write_timeline(make(), once)
    write_timeline(make(), twice)

    assert ElementTree.parse(once).getroot().tag.endswith("svg")
    assert once.read_bytes() == twice.read_bytes()


@ALL_CASES
def test_a_picture_is_a_png_file(make: Callable[[], Trace], tmp_path: Path) -> None:
    """It is readable, not blank, and not too large to display."""
    path = tmp_path / "run.PNG"
    write_timeline(make(), path)
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 2
        assert picture.height < 3000


def test_a_picture_contains_the_complete_diagnosis_and_all_faults(tmp_path: Path) -> None:
    """The action comes last. Text is wrapped, and no line leaves the picture."""
    svg, png = tmp_path / "run.svg", tmp_path / "run.png"
    diagnosis = " ".join(f"so {number} more workers would help" for number in range(100, 118))
    text = " ".join(f"index {number} could not be read" for number in range(12))
    trace = make_trace(diagnosis=diagnosis, marks=(Mark(50 * MS, 1, "death", text),))
    write_timeline(trace, svg)
    write_timeline(trace, png)

    # Letters are drawn as shapes; their text is in comments.
    written = " ".join(" ".join(re.findall(r"<!-- (.*?) -->", svg.read_text(encoding="utf-8"))).split())
    assert diagnosis in written
    assert text in written
    with Image.open(png) as picture:
        right = picture.convert("L").crop((picture.width * 99 // 100, 0, picture.width, picture.height))
        assert right.getextrema() == (255, 255)


def test_a_picture_shows_names_without_backticks(tmp_path: Path) -> None:
    write_timeline(make_trace(diagnosis="Bottleneck: `__getitem__`, which is I/O-bound."), tmp_path / "run.svg")

    written = " ".join(re.findall(r"<!-- (.*?) -->", (tmp_path / "run.svg").read_text(encoding="utf-8")))
    assert "Bottleneck: __getitem__, which is I/O-bound." in written


def test_picture_page_and_report_agree(tmp_path: Path) -> None:
    """The speed-up for the same part of the run, which the pages name: also when older spans were dropped."""
    trace = make_trace(batches=500)
    kept = tuple(span for span in trace.spans if span.lane == LOOP or span.begin_ns > trace.spans[-1].end_ns * 4 // 5)
    trace = replace(trace, spans=kept, lost_span_count=len(trace.spans) - len(kept))
    write_timeline(trace, tmp_path / "run.svg")
    write_timeline(trace, tmp_path / "run.html")
    write_report(trace, tmp_path / "report.html")
    texts = [(tmp_path / name).read_text(encoding="utf-8") for name in ("run.svg", "run.html", "report.html")]

    said = [re.findall(r"[0-9.]+ times slower", text) for text in texts]
    assert said[0]
    assert said[0] == said[1] == said[2]
    assert all("the end, " in text for text in texts)


def test_the_size_of_a_picture_is_limited(tmp_path: Path) -> None:
    """The parts of a long run that are drawn have at most a few thousand spans."""
    path = tmp_path / "run.svg"
    spans = tuple(Span(0, "load", at * 1000, at * 1000 + 400, 0, at, at, 1) for at in range(60_000))
    write_timeline(replace(make_trace(), spans=(*spans, Span(LOOP, "away", 0, 60_000_000, 0, 0, None, 1))), path)

    assert path.stat().st_size < 2_000_000


@pytest.mark.process
def test_a_picture_does_not_change_matplotlibs_settings(tmp_path: Path) -> None:
    """Neither pyplot nor a back end is loaded, and the user's style does not affect the picture."""
    write_timeline(make_trace(), tmp_path / "plain.svg")
    said = run_fresh(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        import matplotlib
        matplotlib.rcParams["font.size"] = 31
        matplotlib.rcParams["axes.facecolor"] = "red"
        def settings():  # Reading the name of the back end chooses it and loads pyplot.
            return {{name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}}
        before = settings()
        from infeed.metrics.timeline import write_timeline
        from tests.metrics.traces import make_trace
        write_timeline(make_trace(), {str(tmp_path / "styled.svg")!r})
        print("matplotlib.pyplot" in sys.modules, settings() == before)
        """
    )

    assert said == "False True"
    assert (tmp_path / "plain.svg").read_bytes() == (tmp_path / "styled.svg").read_bytes()


@pytest.mark.process
def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path) -> None:
    """The format for Perfetto needs nothing."""
    said = run_fresh(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        sys.modules["matplotlib"] = sys.modules["plotly"] = None
        from infeed.metrics.timeline import write_timeline
        from tests.metrics.traces import make_trace
        write_timeline(make_trace(), {str(tmp_path / "run.json")!r})
        for name in ("run.png", "run.html"):
            try:
                write_timeline(make_trace(), name)
            except ValueError as error:
                print('pip install "infeed[report]"' in str(error))
        """
    )

    assert said.split() == ["True", "True"]


@pytest.mark.parametrize("name", ["run", "run.pdf", "run.json.gz"])
def test_an_unknown_suffix_is_rejected(name: str, tmp_path: Path) -> None:
    """The error lists the supported ones, and nothing is written."""
    with pytest.raises(ConfigError, match=r"use \.json, \.svg, \.png or \.html"):
        write_timeline(empty_trace(), tmp_path / name)

    assert list(tmp_path.iterdir()) == []
