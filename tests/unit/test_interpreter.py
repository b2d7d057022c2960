"""Which executable runs workers."""

from __future__ import annotations

import sys

import pytest

from infeed.workers.interpreter import without_redirector

VENV, BASE = "venv-python.exe", "base-python.exe"


@pytest.mark.parametrize(
    ("python", "base", "started", "launcher"),
    [
        (VENV, BASE, BASE, VENV),
        (VENV, VENV, VENV, None),  # No virtual environment.
        (VENV, None, VENV, None),  # An embedded interpreter.
        ("chosen.exe", BASE, "chosen.exe", None),  # By multiprocessing.set_executable.
    ],
    ids=["virtual environment", "none", "embedded", "chosen"],
)
def test_the_redirector_of_a_virtual_environment_is_bypassed(
    monkeypatch: pytest.MonkeyPatch, python: str, base: str | None, started: str, launcher: str | None
) -> None:
    """On Windows it starts Python as its child; the base interpreter gets the path of the environment in a variable."""
    monkeypatch.setattr(sys, "executable", VENV)
    monkeypatch.setattr(sys, "_base_executable", base, raising=False)
    environ = {"A": "1"}

    program, given = without_redirector(python, environ)

    assert (program, given.get("__PYVENV_LAUNCHER__"), given["A"]) == (started, launcher, "1")
    assert environ == {"A": "1"}
