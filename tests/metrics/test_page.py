"""HTML pages in one file."""

from html.parser import HTMLParser

import pytest

from infeed.metrics import page as pages
from infeed.metrics.page import bars, chart, code, diagnosis, facts, hint, label, page, paragraph, row, section, table, tiles
from tests.metrics.traces import STRANGE
from tests.unit.fresh import run_fresh

FIGURE = {"data": [{"type": "bar", "x": [1], "y": [2], "name": STRANGE}], "layout": {}}


class Reader(HTMLParser):
    """The text and the tags of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize(
    "block",
    [
        paragraph(STRANGE),
        hint(STRANGE),
        code(STRANGE),
        label(STRANGE),
        diagnosis(f"{STRANGE}\n{STRANGE}"),
        tiles([(STRANGE, STRANGE, STRANGE)]),
        facts({STRANGE: STRANGE}),
        table([STRANGE, ""], [[STRANGE, bars(0.5)]], numbers=[0]),
        section(STRANGE, paragraph(STRANGE), note=STRANGE),
        row(paragraph(STRANGE), paragraph(STRANGE)),
    ],
    ids=["paragraph", "hint", "code", "label", "diagnosis", "tiles", "facts", "table", "section", "row"],
)
def test_text_is_escaped(block: pages.Html) -> None:
    """Names of datasets and values of options are shown and are never markup."""
    read = Reader(page(STRANGE, [block], subtitle=STRANGE))

    assert "b" not in read.tags
    assert "script" not in read.tags
    assert sum("<b>&amp;" in text for text in read.texts) > 3  # Title, heading, subtitle, and the heading of the block.
    assert read.open == []


@pytest.mark.parametrize("block", [diagnosis("Bottleneck: `__getitem__`.\n`collate_fn`"), facts({"x": "`a` and `collate_fn`"})])
def test_names_in_backticks_are_code(block: pages.Html) -> None:
    """A page has no Markdown. Only names are code, so that no other text of users becomes markup."""
    assert block.html.count("<code>") == 2
    assert "<code>collate_fn</code>" in block.html
    assert "`" not in block.html
    assert "<code>" not in diagnosis("`<b>` and a single `").html


def test_a_chart_cannot_end_its_script() -> None:
    """Names in a figure are inside a script, where only the script's end tag matters."""
    block = chart(FIGURE)

    assert block.html.count("</script") == 1
    assert "<!--" not in block.html


def test_a_page_embeds_the_library_once_and_only_for_charts() -> None:
    """The library is what makes a page large."""
    pytest.importorskip("plotly")
    plain = page("Page", [section("Title", paragraph("text"))])
    charts = page("Page", [row(section("Title", chart(FIGURE))), chart(FIGURE)])

    assert "<script" not in plain
    assert charts.count('id="library"') == 1
    assert len(plain) < 20_000 < len(charts) < 2_500_000


def test_a_page_forbids_requests() -> None:
    """Nothing in it may fetch, so it can be sent to anyone."""
    assert "default-src 'none'" in page("Page", [])


@pytest.mark.process
def test_only_charts_need_plotly() -> None:
    """A page without charts is written without plotly; with charts the error says what to install."""
    said = run_fresh(
        """
        import sys
        sys.modules["plotly"] = None
        from infeed.metrics.page import chart, page, paragraph
        assert "text" in page("Page", [paragraph("text")])
        try:
            page("Page", [chart({"data": []})])
        except ValueError as error:
            print(error)
        """
    )

    assert said == 'charts need plotly; install it with: pip install "infeed[report]"'
