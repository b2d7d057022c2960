"""The documentation site can be built, and loads nothing from other hosts."""

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

# What a browser would fetch when it shows a page.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\ssrc=\"(?:https?:)?//|<link\b(?![^>]*rel=\"canonical\")[^>]*\shref=\"(?:https?:)?//"
)

# The heading of anything but a module in the reference.
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
def test_the_site_builds_without_a_broken_link(site: Path) -> None:
    """Strict: a page that is not in the navigation, a broken link, a missing anchor or an unknown object fails."""
    assert (site / "index.html").exists()
    assert len(list((site / "how-to").glob("*.html"))) == 13


@pytest.mark.slow
@pytest.mark.process
def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    """No fonts, scripts, styles or pictures of other hosts: the site can be read without a network."""
    pages = list(site.rglob("*.html"))

    assert [page.name for page in pages if FETCHED.search(page.read_text(encoding="utf-8"))] == []
    assert [
        path.name for path in site.rglob("*.css") if re.search(r"url\([\"']?(?:https?:)?//", path.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", ["dataloader", "torch", "statistics", "dataset", "errors", "testing"])
def test_the_reference_describes_what_is_public(site: Path, name: str) -> None:
    """Each page of the reference has entries with text, not only headings."""
    page = (site / "reference" / f"{name}.html").read_text(encoding="utf-8")

    assert re.findall(r'class="doc doc-object', page)
    assert "doc-contents" in page


@pytest.mark.slow
@pytest.mark.process
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """Each has an entry under its full name, and so have its properties and methods. A module of that name does not count."""
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    anchors = set(ENTRY.findall(text))
    of_torch = {f"infeed.torch.{name}" for name in ("DataLoader", "ImageConvert", "install", "uninstall")}

    assert {*PUBLIC, *of_torch} - anchors == set()
