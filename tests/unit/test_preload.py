"""Which modules the fork server imports ahead: installed ones, and those that the user's modules have imported."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from infeed.workers.preload import preloadable


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user's modules: one that imports another, and their imports."""
    (tmp_path / "mine_for_preload.py").write_text("import json\nfrom fractions import Fraction\nimport other_for_preload\n")
    (tmp_path / "other_for_preload.py").write_text("import mine_for_preload\nimport csv\nimport numpy as np\nNAME = 'x'\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("mine_for_preload")
    yield
    for name in ("mine_for_preload", "other_for_preload"):
        sys.modules.pop(name, None)


def test_installed_modules_are_preloaded() -> None:
    """Modules of the standard library and of site-packages."""
    assert preloadable([json.__name__, numpy.__name__]) == ["json", "numpy"]


def test_the_users_modules_are_searched_but_not_listed(own_modules: None) -> None:
    """They may do anything on import; their own imports take most of the time."""
    found = preloadable(["mine_for_preload"])

    assert {"json", "fractions", "csv", "numpy"} <= set(found)
    assert "mine_for_preload" not in found
    assert "other_for_preload" not in found


def test_circular_imports_are_searched_once(own_modules: None) -> None:
    """Each module is searched once."""
    assert preloadable(["mine_for_preload", "other_for_preload"]) == preloadable(["other_for_preload", "mine_for_preload"])


@pytest.mark.parametrize(
    "name", ["__main__", "sys", "builtins", "no_such_module", "infeed", "infeed.loader"],
    ids=["the script", "built in", "builtins", "unknown", "infeed itself", "a part of infeed"],
)  # fmt: skip
def test_other_modules_are_skipped(name: str) -> None:
    """They cannot be imported, must not be, or are already."""
    assert name not in preloadable([name])


def test_no_modules_give_an_empty_list() -> None:
    """A dataset of plain lists needs no module."""
    assert preloadable([]) == []
