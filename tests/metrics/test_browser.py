"""Pages in a real browser: they open without errors, make no requests, and look right."""

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

# The drawn elements of each chart: bars, lines, points.
DRAWN = """[...document.querySelectorAll("figure.chart .plot")].map(
    plot => plot.querySelectorAll(".barlayer path, .scatterlayer path").length)"""


@pytest.fixture(autouse=True)
def leak_guard() -> None:
    """Replaces the leak guard: a browser starts and ends processes. All of them end with it, and the test waits for that."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests: starting it takes as long as all pages."""
    with Browser() as browser:
        yield browser


def written(trace: Trace, folder: Path, form: str) -> Path:
    path = folder / f"{form}.html"
    (write_report if form == "report" else write_timeline)(trace, path)
    return path


@pytest.mark.parametrize(("is_dark", "is_phone"), [(False, False), (True, True)], ids=["light on a desk", "dark on a phone"])
def test_a_page_works_in_light_and_dark_on_desktop_and_phone(
    browser: Browser, is_dark: bool, is_phone: bool, tmp_path: Path
) -> None:
    """The page with all sections, in all four combinations."""
    path = written(faulty_trace(), tmp_path, "report")
    browser.open(path, is_dark=is_dark, is_phone=is_phone)

    assert_works(browser, path, is_phone=is_phone)
    ground = browser.value("getComputedStyle(document.body).backgroundColor")
    red, green, blue = map(int, re.findall(r"\d+", ground))
    assert (red + green + blue < 3 * 128) is is_dark


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_the_report_of_any_run_works(browser: Browser, make: Callable[[], Trace], tmp_path: Path) -> None:
    """On a phone, which has the least space."""
    path = written(make(), tmp_path, "report")
    browser.open(path, is_phone=True)

    assert_works(browser, path, is_phone=True)


@pytest.mark.parametrize("name", ["faulty", "many workers", "strange", "empty"])
def test_a_page_with_only_the_timeline_works(browser: Browser, name: str, tmp_path: Path) -> None:
    """In the dark, where a missing color is visible."""
    path = written(CASES[name](), tmp_path, "timeline")
    browser.open(path, is_dark=True)

    assert_works(browser, path, is_phone=False)


def assert_works(browser: Browser, path: Path, *, is_phone: bool) -> None:
    """Checks: no error, no network request, each chart is drawn, and the page does not scroll sideways."""
    drawn = browser.value(DRAWN)

    assert browser.complaints == []
    assert browser.requests == [path.as_uri()]
    assert len(drawn) == path.read_text(encoding="utf-8").count('<figure class="chart">')
    assert all(drawn)
    assert browser.value("document.documentElement.scrollWidth") <= (PHONE_PX if is_phone else DESK_PX)


def test_a_page_and_its_charts_switch_to_dark(browser: Browser, tmp_path: Path) -> None:
    """Background, text and bars change, also while the page is open."""
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


def test_unusual_text_is_shown_literally(browser: Browser, tmp_path: Path) -> None:
    """It becomes no element of the page or of a chart."""
    browser.open(written(strange_trace(), tmp_path, "report"))

    assert browser.value("document.querySelectorAll('b').length") == 0
    assert browser.value("document.querySelector('.diagnosis').textContent").startswith('</script><b>&amp; "quoted"')


def test_a_touch_on_a_chart_scrolls_the_page(browser: Browser, tmp_path: Path) -> None:
    """On a phone, charts are as wide as the screen: a chart that takes drags would block scrolling."""
    path = written(faulty_trace(), tmp_path, "report")
    modes = "[...new Set([...document.querySelectorAll('.plot')].map(plot => plot._fullLayout.dragmode))]"
    browser.open(path, is_phone=True)
    assert browser.value(modes) == [False]
    assert browser.value("getComputedStyle(document.querySelector('.hint')).display") == "none"

    browser.open(path)
    assert browser.value(modes) == ["zoom"]


def test_a_chart_that_cannot_be_drawn_shows_a_message(browser: Browser, tmp_path: Path) -> None:
    """In an old browser, or from a damaged file, there is a sentence instead of an empty space."""
    html = page("Page", [chart({"data": [{"type": "bar", "x": [1], "y": [2]}]})])
    at = html.index('id="library">') + len('id="library">')
    path = tmp_path / "page.html"
    path.write_text(html[:at] + "@" + html[at:], encoding="utf-8")
    browser.open(path)

    assert "could not be drawn" in browser.value("document.querySelector('.plot').textContent")
    assert browser.complaints


def test_a_request_of_a_page_is_blocked(browser: Browser, tmp_path: Path) -> None:
    """The page's own policy forbids requests, and this test would detect one."""
    path = tmp_path / "page.html"
    path.write_text(page("Page", []).replace("</main>", '<img src="other.png"></main>'), encoding="utf-8")
    browser.open(path)

    assert any("Content Security Policy" in complaint for complaint in browser.complaints)
