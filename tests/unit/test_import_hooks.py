"""Calls a function when a module has been imported, even if something searches for the module earlier."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infeed.import_hooks import when_imported

NAME = "infeed_test_imported_module"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that can be imported; removed afterwards, with all finders."""
    path = tmp_path / f"{NAME}.py"
    path.write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield path
    sys.meta_path[:] = finders
    sys.modules.pop(NAME, None)


def test_the_function_is_called_once_after_the_module_was_executed(module: Path) -> None:
    calls: list[int] = []
    when_imported(NAME, lambda: calls.append(sys.modules[NAME].VALUE))
    assert calls == []

    imported = importlib.import_module(NAME)
    importlib.reload(imported)

    assert calls == [7]
    assert type(imported.__loader__).__module__ != "infeed.import_hooks"


def test_searching_for_the_module_first_changes_nothing(module: Path) -> None:
    """Transformers, datasets, polars and seaborn search for torch."""
    calls: list[str] = []
    when_imported(NAME, lambda: calls.append("first"))
    when_imported(NAME, lambda: calls.append("second"))

    for _ in range(2):
        spec = importlib.util.find_spec(NAME)
        assert spec is not None
        assert spec.origin == str(module)
        assert spec.loader is not None
        assert spec.loader.get_source(NAME) == "VALUE = 7\n"  # type: ignore[attr-defined]
    assert calls == []

    importlib.import_module(NAME)
    assert sorted(calls) == ["first", "second"]


def test_a_failed_import_can_be_retried(module: Path) -> None:
    calls: list[str] = []
    when_imported(NAME, lambda: calls.append("called"))
    module.write_text("raise RuntimeError('not yet')\n")
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module(NAME)
    assert calls == []

    module.write_text("LONGER_VALUE = 12345\n")
    importlib.import_module(NAME)
    assert calls == ["called"]


def test_a_missing_module_is_not_found(module: Path) -> None:
    when_imported("infeed_test_absent_module", lambda: None)

    assert importlib.util.find_spec("infeed_test_absent_module") is None
