"""MkDocs hook: publishes repository files outside `docs/` and makes links work both on GitHub and on the site.

Pages link to each other by repository paths, so links also work in the source. The hook adds ARCHITECTURE.md and other files as
pages without copying them, adds result files as assets, and translates links to both. It leaves any other link to a file
outside `docs/` unchanged, which fails a strict build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

# Repository files that are pages, and their paths on the site.
PAGES = {
    "ARCHITECTURE.md": "internals/architecture.md",
    "CHANGELOG.md": "internals/changelog.md",
    "CODE_OF_CONDUCT.md": "internals/code-of-conduct.md",
    "CONTRIBUTING.md": "internals/contributing.md",
    "README.md": "index.md",
    "SECURITY.md": "internals/security.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
}
SOURCES = {page: source for source, page in PAGES.items() if page != "index.md"}
# Files that pages link to, published unchanged.
ASSETS = ("LICENSE", "benchmarks/results/*.json", "examples/*.py", "examples/*.ipynb")
ASSET_FOLDER = "files"
# Folders without a page.
FOLDERS = {"benchmarks": "benchmarks.md", "benchmarks/results": "benchmarks.md", "examples": "examples.md"}

LINK = re.compile(r"(\]\(|<img [^>]*src=\"|<a [^>]*href=\")([^)\s\"]+)")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def assets() -> list[str]:
    """Return the repository paths of all files that the site publishes unchanged."""
    return sorted(path.relative_to(ROOT).as_posix() for pattern in ASSETS for path in ROOT.glob(pattern))


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages and assets."""
    for page, source in SOURCES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for path in assets():
        files.append(File.generated(config, f"{ASSET_FOLDER}/{path}", content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Translate the links of one page."""
    uri = page.file.src_uri
    source = SOURCES.get(uri, f"docs/{uri}")
    parts = FENCE.split(markdown)
    return "".join(part if FENCE.match(part) else translate(part, source, uri) for part in parts)


def translate(text: str, source: str, uri: str) -> str:
    """Return `text` of the repository file `source` with its links rewritten for the page `uri`."""

    def translated(match: re.Match[str]) -> str:
        path, sharp, anchor = match[2].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        target = os.path.normpath(PurePosixPath(source).parent / path).replace(os.sep, "/")
        where = site_path(target)
        if where is None:
            return match[0]
        return match[1] + os.path.relpath(where, PurePosixPath(uri).parent).replace(os.sep, "/") + sharp + anchor

    return LINK.sub(translated, text)


def site_path(target: str) -> str | None:
    """Return the site path of the repository file or folder `target`; None if it is not on the site."""
    if target in PAGES:
        return PAGES[target]
    if target in FOLDERS:
        return FOLDERS[target]
    if target in assets():
        return f"{ASSET_FOLDER}/{target}"
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return None
