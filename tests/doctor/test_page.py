"""The page of the documentation is about the doctor that there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from infeed.doctor.findings import NAMES
from tests.helpers import ROOT, start_python

TEXT = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")


def test_every_finding_is_explained_once() -> None:
    """In the order in which they are looked for."""
    assert tuple(re.findall(r"^### ([\w-]+)$", TEXT, re.MULTILINE)) == NAMES


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.linux
def test_the_example_has_the_findings_that_are_shown(tmp_path: Path) -> None:
    """By name, in the same order; figures differ from machine to machine."""
    pytest.importorskip("torch")
    block = re.search(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert block is not None
    (tmp_path / "noisy.py").write_text(block[1])

    result = start_python(["-m", "infeed", "doctor", "--json", "-", "noisy.py"], cwd=tmp_path).finish(60)

    found = {finding["name"]: finding for finding in json.loads(result.out)["findings"]}
    shown = re.findall(r"^\d\. (.*?)  \[([\w-]+); .*\]$", TEXT, re.MULTILINE)
    assert list(found) == [name for _, name in shown]
    assert found["same-random-numbers"]["title"] == shown[0][0]


def test_the_exit_codes_are_those_of_the_command() -> None:
    """As its help tells them."""
    from infeed.cli import doctor

    for code, word in re.findall(r"(\d) (\w+)", doctor._EPILOG):
        assert re.search(rf"^\| {code} \| .*{word}", TEXT, re.MULTILINE), (code, word)
