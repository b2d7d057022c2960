"""Predicts from its source which libraries a program imports."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from infeed.workers.preload import likely_imports


def imports_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, **own: str) -> list[str]:
    """Returns the predicted libraries of a program; some of its modules are in the package ``parts``."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    for name in ("kornia", "monai", "wandb"):
        (installed / f"{name}.py").write_text("raise AssertionError('nothing is imported')")
    folder = tmp_path / "program"
    (folder / "parts").mkdir(parents=True)
    (folder / "program.py").write_text(dedent(program))
    for name, source in own.items():
        (folder / f"{name.replace('parts_', 'parts/')}.py").write_text(source)
    monkeypatch.syspath_prepend(installed)
    monkeypatch.syspath_prepend(folder)
    return likely_imports(str(folder / "program.py"))


def test_libraries_have_the_order_of_their_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    import os, monai as m, numpy.linalg
    from kornia import augmentation  # for workers
    """
    assert imports_of(tmp_path, monkeypatch, program=source) == ["monai", "numpy.linalg", "kornia"]


def test_libraries_unrelated_to_datasets_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may open connections or devices on import."""
    assert imports_of(tmp_path, monkeypatch, program="import wandb, kornia, no_such_module\nnum_workers = 2") == ["kornia"]


def test_imports_inside_functions_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may never run."""
    assert imports_of(tmp_path, monkeypatch, program="def workers():\n    import kornia\n") == []


def test_modules_of_the_program_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in packages, with relative imports, and one with the name of a library."""
    found = imports_of(
        tmp_path,
        monkeypatch,
        program="from parts import data\nimport monai\n",
        parts___init__="from . import more\n",
        parts_data="from .more import thing\nfrom .. import nothing\nimport monai\n",
        parts_more="import kornia\nfrom parts.data import workers\n",
        monai="import numpy\n",
    )
    assert found == ["numpy", "kornia"]


def test_a_program_that_does_not_mention_workers_needs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert imports_of(tmp_path, monkeypatch, program="import kornia\n") == []
