"""The documentation of the doctor matches the doctor."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from infeed.cli.doctor import print_report
from infeed.doctor.checks import NAMES, examine
from infeed.doctor.evidence import EpochSeen, LoaderSeen, Probe, Run
from infeed.doctor.report import findings_page
from tests.helpers import ROOT, start_python

TEXT = (ROOT / "docs" / "guides" / "doctor.md").read_text(encoding="utf-8")


def test_every_finding_is_explained_once() -> None:
    """The explanations have the order of the checks."""
    assert tuple(re.findall(r"^### ([\w-]+)$", TEXT, re.MULTILINE)) == NAMES


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.linux("its findings are about forked workers")
def test_the_example_has_the_documented_findings(tmp_path: Path) -> None:
    """The names have the same order; figures differ from machine to machine."""
    pytest.importorskip("torch")
    block = re.search(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert block is not None
    (tmp_path / "noisy.py").write_text(block[1])

    result = start_python(["-m", "infeed", "doctor", "--json", "-", "noisy.py"], cwd=tmp_path).finish(60)

    found = {finding["name"]: finding for finding in json.loads(result.out)["findings"]}
    shown = re.findall(r"^\d\. (.*?)  \[([\w-]+); .*\]$", TEXT, re.MULTILINE)
    assert list(found) == [name for _, name in shown]
    assert found["same-random-numbers"]["title"] == shown[0][0]


def test_the_documented_exit_codes_are_those_of_the_command() -> None:
    """They match the help of the command."""
    from infeed.cli import doctor

    for code, word in re.findall(r"(\d+) (\w+)", doctor._EPILOG):
        assert re.search(rf"^\| {code} \| .*{word}", TEXT, re.MULTILINE), (code, word)


def test_without_rich_the_report_is_plain_text() -> None:
    """The text is the same, on any stream."""
    run = Run(program="train.py", seconds=2.0, loaders=[seen()])
    stream = io.StringIO()

    print_report(run, examine(run), stream)

    lines = stream.getvalue().splitlines()
    assert lines[0] == "train.py: 1 loader, 1 epoch, 1 batch in 2 s; the program ran to its end"
    assert lines[3].endswith("[not-picklable; may fail]")
    assert any(line.strip().startswith("fix ") for line in lines)


def test_names_cannot_become_markup() -> None:
    """Names in the program are escaped on the page and in the terminal."""
    run = Run(program="<b>[bold]train.py", loaders=[seen()])

    assert "<b>[bold]" not in findings_page(run, examine(run))
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=120)
    print_report(run, examine(run), console)
    assert "<b>[bold]train.py" in console.file.getvalue()


def seen() -> LoaderSeen:
    """A loader of infeed over a dataset with a lock."""
    probe = Probe(unsendable="dataset.lock is a _thread.lock")
    epochs = [EpochSeen(0.0, start_s=0.1, has_batch=True)]
    return LoaderSeen(number=0, library="infeed", dataset="Faces", kind="process", num_workers=2, epochs=epochs, probe=probe)
