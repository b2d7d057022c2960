"""The documentation site builds and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_docstrings import PUBLIC
from tests.helpers import ROOT

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings_handlers")

# What a browser fetches to show a page.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\ssrc=\"(?:https?:)?//|<link\b(?![^>]*rel=\"canonical\")[^>]*\shref=\"(?:https?:)?//"
)

# The heading of any reference entry except modules.
ENTRY = re.compile(
    r'<h\d id="(infeed\.[\w.]+)" class="doc doc-heading">\s*<code class="[^"]*doc-symbol-heading doc-symbol-(?!module)'
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.process
def test_the_site_builds_without_broken_links(site: Path) -> None:
    """Strict mode fails on a page outside the navigation, a broken link, a missing anchor or an unknown object."""
    assert (site / "index.html").exists()
    assert len(list((site / "how-to").glob("*.html"))) == 13


@pytest.mark.slow
@pytest.mark.process
def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    """Fonts, scripts, styles and images are local, so the site works offline."""
    pages = list(site.rglob("*.html"))

    assert [page.name for page in pages if FETCHED.search(page.read_text(encoding="utf-8"))] == []
    assert [
        path.name for path in site.rglob("*.css") if re.search(r"url\([\"']?(?:https?:)?//", path.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", ["dataloader", "torch", "statistics", "dataset", "errors", "testing"])
def test_reference_pages_have_text(site: Path, name: str) -> None:
    """Each page of the reference has entries with text, not only headings."""
    page = (site / "reference" / f"{name}.html").read_text(encoding="utf-8")

    assert re.findall(r'class="doc doc-object', page)
    assert "doc-contents" in page


@pytest.mark.slow
@pytest.mark.process
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """Each public name has an entry under its full name, with its properties and methods.

    A module of that name does not count.
    """
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    anchors = set(ENTRY.findall(text))
    of_torch = {f"infeed.torch.{name}" for name in ("DataLoader", "ImageConvert", "install", "uninstall")}

    assert {*PUBLIC, *of_torch} - anchors == set()
