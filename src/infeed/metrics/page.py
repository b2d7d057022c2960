"""Build a self-contained HTML page of text, tables and charts. It needs no network and supports dark mode and phones.

A page consists of blocks. All functions here take plain text, escape it and return blocks, so the name of a dataset
or a setting cannot become markup. In the diagnosis and in facts, a name in backticks becomes code.

    page("Report", [diagnosis("The training loop waits.", "bad"), section("Rate", paragraph("..."), chart(figure))])

plotly.js, from the plotly package, draws the charts. A page with charts embeds it once, compressed to about 2 MB (from 5 MB).
A page without charts does not need plotly.
"""

from __future__ import annotations

import base64
import gzip
import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any, Literal, TypeAlias, final

from infeed.errors import ConfigError

__all__ = [
    "Figure",
    "Html",
    "Tone",
    "bars",
    "chart",
    "code",
    "diagnosis",
    "facts",
    "hint",
    "label",
    "page",
    "paragraph",
    "row",
    "section",
    "table",
    "tiles",
]

# A plotly.js figure: {"data": [...], "layout": {...}}. A colour may be a CSS variable such as "var(--load)". The page
# resolves it, so that it follows light and dark mode.
Figure: TypeAlias = Mapping[str, Any]
Tone: TypeAlias = Literal["good", "fair", "bad", "plain"]

# Everything is in the file, so the policy forbids all network requests.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; font-src data:"


@final
@dataclass(frozen=True, slots=True)
class Html:
    """A piece of a page: HTML with all text escaped."""

    html: str
    has_chart: bool = False


def page(title: str, blocks: Iterable[Html], *, subtitle: str = "") -> str:
    """Return a complete HTML page with these blocks.

    Raises:
        ConfigError: The blocks contain a chart, and plotly is not installed.
    """
    body = _join(blocks)
    head = f"<h1>{escape(title)}</h1>" + (f'<p class="subtitle">{escape(subtitle)}</p>' if subtitle else "")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_part('style.css')}</style>\n</head>\n"
        f"<body>\n<header>{head}</header>\n<main>\n{body.html}\n</main>\n"
        f"{_scripts() if body.has_chart else ''}</body>\n</html>\n"
    )


def section(title: str, *blocks: Html, note: str = "") -> Html:
    """Return blocks under a heading; ``note`` explains them in small print below the heading."""
    body = _join(blocks)
    small = f'<p class="note">{escape(note)}</p>' if note else ""
    return Html(f"<section><h2>{escape(title)}</h2>{small}\n{body.html}</section>", body.has_chart)


def row(*blocks: Html) -> Html:
    """Return blocks side by side, or stacked on a narrow screen."""
    body = _join(Html(f"<div>{block.html}</div>", block.has_chart) for block in blocks)
    return Html(f'<div class="row">{body.html}</div>', body.has_chart)


def diagnosis(text: str, tone: Tone = "plain") -> Html:
    """Return the diagnosis: the first line large, the other lines below it."""
    first, _, rest = text.strip().partition("\n")
    lines = "".join(f"<p>{_with_code(line.strip())}</p>" for line in rest.splitlines() if line.strip())
    return Html(f'<div class="diagnosis {tone}"><p class="first">{_with_code(first)}</p>{lines}</div>')


def _with_code(text: str) -> str:
    """Escape the text, and mark up names in backticks as code."""
    return re.sub(r"`(\w+)`", r"<code>\1</code>", escape(text))


def paragraph(text: str) -> Html:
    return Html(f"<p>{escape(text)}</p>")


def hint(text: str) -> Html:
    """Return mouse instructions in small print; devices without a mouse do not show them."""
    return Html(f'<p class="note hint">{escape(text)}</p>')


def code(text: str) -> Html:
    """Return preformatted monospace text, which scrolls horizontally if it is wide."""
    return Html(f"<pre><code>{escape(text)}</code></pre>")


def label(text: str, tone: Tone = "plain") -> Html:
    """Return a word or two on a coloured background; usable as a table cell."""
    return Html(f'<span class="label {tone}">{escape(text)}</span>')


def tiles(values: Iterable[tuple[str, str, str]]) -> Html:
    """Return large figures side by side. Each value is a name, a figure with its unit, and a remark or ``""``."""
    cells = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f'<small>{escape(remark)}</small>' if remark else ''}</dd></div>"
        for name, value, remark in values
    )
    return Html(f'<dl class="tiles">{"".join(cells)}</dl>')


def facts(values: Mapping[str, str]) -> Html:
    """Return a two-column table of names and values."""
    rows = (f'<tr><th scope="row">{escape(name)}</th><td>{_with_code(value)}</td></tr>' for name, value in values.items())
    return Html(f'<div class="scroll"><table class="facts">{"".join(rows)}</table></div>')


def table(head: Sequence[str], rows: Iterable[Sequence[str | Html]], *, numbers: Iterable[int] = ()) -> Html:
    """Return a table that scrolls horizontally if it is wide; columns in ``numbers`` are right-aligned."""
    right = set(numbers)

    def cell(tag: str, column: int, content: str | Html) -> str:
        inner = content.html if isinstance(content, Html) else escape(content)
        kind = ' class="number"' if column in right else ""
        return f"<{tag}{kind}>{inner}</{tag}>"

    def line(tag: str, cells: Sequence[str | Html]) -> str:
        return f"<tr>{''.join(cell(tag, column, content) for column, content in enumerate(cells))}</tr>"

    return Html(
        f'<div class="scroll"><table><thead>{line("th", head)}</thead>'
        f"<tbody>{''.join(line('td', cells) for cells in rows)}</tbody></table></div>"
    )


def bars(share: float) -> Html:
    """Return a bar for a table cell, filled to ``share`` (0 to 1) of its length."""
    return Html(f'<span class="bar"><i style="width:{min(1.0, max(0.0, share)) * 100:.1f}%"></i></span>')


def chart(figure: Figure, *, height_px: int = 260) -> Html:
    """Return a chart of full width. plotly.js treats text in a figure as markup: apply ``html.escape`` to untrusted text."""
    # Only "</script" and "<!--" could break out of the script element, and JSON can escape the "<" of both.
    data = json.dumps(figure, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return Html(
        f'<figure class="chart"><div class="plot" style="--height:{height_px}px"></div>'
        f'<script type="application/json">{data}</script></figure>',
        has_chart=True,
    )


def plotly_source() -> str:
    """Return the source of plotly.js from the plotly package."""
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError:
        raise ConfigError('charts need plotly; install it with: pip install "infeed[report]"') from None
    source: str = offline.get_plotlyjs()
    return source


def _scripts() -> str:
    packed = base64.b64encode(gzip.compress(plotly_source().encode(), mtime=0)).decode()
    return (
        "<noscript><p>Enable JavaScript to see the charts.</p></noscript>\n"
        f'<script type="text/plain" id="library">{packed}</script>\n<script>\n{_part("charts.js")}</script>\n'
    )


def _join(blocks: Iterable[Html]) -> Html:
    parts = tuple(blocks)
    return Html("\n".join(part.html for part in parts), any(part.has_chart for part in parts))


def _part(name: str) -> str:
    return files("infeed.metrics").joinpath(name).read_text(encoding="utf-8")
