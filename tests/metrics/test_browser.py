"""Pages in a real browser: they open without errors, make no requests, and look as they should."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infeed.metrics.page import chart, page
from infeed.metrics.run_report import write_report
from infeed.metrics.statistics import Trace
from infeed.metrics.timeline import write_timeline
from tests.metrics.traces import CASES, faulty_trace, strange_trace

if sys.platform == "win32":
    pytest.skip("the browser is driven through pipes that Windows does not have", allow_module_level=True)

from tests.metrics.browser import DESK_PX, NAMES, PHONE_PX, Browser, find_browser

pytest.importorskip("plotly")

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason=f"no browser: looked for {', '.join(NAMES)}"),
]

# What is drawn, of each chart: bars, lines, points.
DRAWN = """[...document.querySelectorAll("figure.chart .plot")].map(
    plot => plot.querySelectorAll(".barlayer path, .scatterlayer path").length)"""


@pytest.fixture(autouse=True)
def leak_guard() -> None:
    """Not for these tests: a browser has processes come and go. All of them end with it, which it waits for."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for all tests: starting it takes as long as all pages."""
    with Browser() as browser:
        yield browser


def written(trace: Trace, folder: Path, form: str) -> Path:
    path = folder / f"{form}.html"
    (write_report if form == "report" else write_timeline)(trace, path)
    return path


@pytest.mark.parametrize(("is_dark", "is_phone"), [(False, False), (True, True)], ids=["light on a desk", "dark on a phone"])
def test_a_page_is_well_in_light_and_dark_on_a_desk_and_on_a_phone(
    browser: Browser, is_dark: bool, is_phone: bool, tmp_path: Path
) -> None:
    """The page that has everything in it, in all four."""
    path = written(faulty_trace(), tmp_path, "report")
    browser.open(path, is_dark=is_dark, is_phone=is_phone)

    assert_well(browser, path, is_phone=is_phone)
    ground = browser.value("getComputedStyle(document.body).backgroundColor")
    red, green, blue = map(int, re.findall(r"\d+", ground))
    assert (red + green + blue < 3 * 128) is is_dark


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_the_report_of_any_run_is_well(browser: Browser, make: Callable[[], Trace], tmp_path: Path) -> None:
    """On a phone, where there is least room."""
    path = written(make(), tmp_path, "report")
    browser.open(path, is_phone=True)

    assert_well(browser, path, is_phone=True)


@pytest.mark.parametrize("name", ["faulty", "many workers", "strange", "empty"])
def test_a_page_with_the_timeline_alone_is_well(browser: Browser, name: str, tmp_path: Path) -> None:
    """In the dark, where a forgotten colour is seen."""
    path = written(CASES[name](), tmp_path, "timeline")
    browser.open(path, is_dark=True)

    assert_well(browser, path, is_phone=False)


def assert_well(browser: Browser, path: Path, *, is_phone: bool) -> None:
    """No complaint, nothing asked of a network, each chart is drawn, and the page does not scroll sideways."""
    drawn = browser.value(DRAWN)

    assert browser.complaints == []
    assert browser.requests == [path.as_uri()]
    assert len(drawn) == path.read_text(encoding="utf-8").count('<figure class="chart">')
    assert all(drawn)
    assert browser.value("document.documentElement.scrollWidth") <= (PHONE_PX if is_phone else DESK_PX)


def test_a_page_turns_dark_and_its_charts_with_it(browser: Browser, tmp_path: Path) -> None:
    """While it is open, too: the ground, the letters and the bars."""
    browser.open(written(faulty_trace(), tmp_path, "timeline"))
    looks = """new Promise(done => setTimeout(() => requestAnimationFrame(() => done([
        getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector(".xtick text")).fill,
        getComputedStyle(document.querySelector(".barlayer path")).fill])), 0))"""
    light = browser.value(looks)
    browser.value("""Promise.resolve(document.querySelector(".plot").on("plotly_afterplot",
        () => document.documentElement.dataset.again = "yes")).then(() => 0)""")
    browser.turn(is_dark=True)
    browser.value("""new Promise(done => { const look = () => document.documentElement.dataset.again
        ? done() : requestAnimationFrame(look); look(); })""")
    dark = browser.value(looks)

    assert all(before != after for before, after in zip(light, dark, strict=True))


def test_strange_text_is_shown_as_it_is(browser: Browser, tmp_path: Path) -> None:
    """It becomes no element of the page, nor of a chart."""
    browser.open(written(strange_trace(), tmp_path, "report"))

    assert browser.value("document.querySelectorAll('b').length") == 0
    assert browser.value("document.querySelector('.diagnosis').textContent").startswith('</script><b>&amp; "quoted"')


def test_a_finger_on_a_chart_scrolls_the_page(browser: Browser, tmp_path: Path) -> None:
    """On a phone charts are wide as the screen: one that takes drags would be the end of the page."""
    path = written(faulty_trace(), tmp_path, "report")
    modes = "[...new Set([...document.querySelectorAll('.plot')].map(plot => plot._fullLayout.dragmode))]"
    browser.open(path, is_phone=True)
    assert browser.value(modes) == [False]
    assert browser.value("getComputedStyle(document.querySelector('.hint')).display") == "none"

    browser.open(path)
    assert browser.value(modes) == ["zoom"]


def test_a_chart_that_cannot_be_drawn_says_so(browser: Browser, tmp_path: Path) -> None:
    """An old browser, a damaged file: there is a sentence, and not just nothing."""
    html = page("Page", [chart({"data": [{"type": "bar", "x": [1], "y": [2]}]})])
    at = html.index('id="library">') + len('id="library">')
    path = tmp_path / "page.html"
    path.write_text(html[:at] + "@" + html[at:], encoding="utf-8")
    browser.open(path)

    assert "could not be drawn" in browser.value("document.querySelector('.plot').textContent")
    assert browser.complaints


def test_a_page_that_would_fetch_something_is_stopped(browser: Browser, tmp_path: Path) -> None:
    """The page's own policy forbids it, and a test like this one would hear of it."""
    path = tmp_path / "page.html"
    path.write_text(page("Page", []).replace("</main>", '<img src="other.png"></main>'), encoding="utf-8")
    browser.open(path)

    assert any("Content Security Policy" in complaint for complaint in browser.complaints)
