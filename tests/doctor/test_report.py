"""The first lines of a report (how long the training loop waited, how the program ended), and a report on a narrow terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest

from infeed.cli.doctor import print_report
from infeed.doctor.checks import examine
from infeed.doctor.evidence import LoaderSeen
from infeed.doctor.report import ending, findings_page, overview
from tests.doctor.evidence_of import costly, loader, run


@pytest.mark.parametrize(
    ("seen", "share"),
    [
        (loader(wait=0.1, away=0.1), "50%"),
        (loader(wait=0.0, away=0.1, waiting_s=18.0), "90%"),  # 2 s of work, then a wait that does not end.
        (loader(batches=0, waiting_s=9.0), "100%"),
        (loader(batches=0), "0%"),
    ],
)
def test_an_unfinished_wait_counts_in_the_first_line(seen: LoaderSeen, share: str) -> None:
    """On the page as well. A finding about one batch must not contradict the first line."""
    program = run(seen)

    assert overview(program).endswith(f"waited for data {share} of the time")
    if share != "0%":
        assert share in findings_page(program, examine(program)).partition("Monitored loaders")[2]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"exit_code": -9}, "was killed by SIGKILL"),
        ({"exit_code": -99}, "was killed by signal 99"),
        ({"exit_code": 0}, "called os._exit(0), so its datasets could not be examined"),
    ],
)
@pytest.mark.linux("names signals of POSIX")
def test_a_process_that_exits_by_itself_has_not_died(options: dict[str, Any], text: str) -> None:
    """For example with os._exit."""
    assert ending(run(loader(), ending="died", **options)) == text


def test_no_word_is_truncated_on_a_narrow_terminal() -> None:
    """Long words are wrapped."""
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=40)
    program = run(loader(wait=0.3, away=0.01, probe=costly(0.1)))

    print_report(program, examine(program), console, is_verbose=True)

    text = console.file.getvalue()
    assert "…" not in text
    assert "persistent_workers=True" in "".join(text.split())
