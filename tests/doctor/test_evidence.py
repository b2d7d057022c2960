"""What a journal tells of a program."""

from __future__ import annotations

from typing import Any

import pytest

from infeed.doctor.evidence import EpochSeen, LoaderSeen, Run, read_events
from infeed.doctor.findings.finding import describe
from tests.doctor.evidence_of import loader


def seen_by(asked: dict[str, Any], *workers: dict[str, Any]) -> LoaderSeen:
    """A loader of infeed, as a journal tells of it."""
    given = {"number": 0, "library": "infeed", "dataset": "D", "kind": "process", "num_workers": 1, **asked}
    events = [{"event": "loader", "at": 1.0, **given}, {"event": "epoch", "loader": 0, "at": 1.0}]
    seen = Run(program="train.py")
    read_events(seen, events + [{"event": "workers", "loader": 0, "is_gathered": False, **one} for one in workers])
    return seen.loaders[0]


def test_what_is_auto_is_what_was_seen_last() -> None:
    """The number, the kind, and all processes that were there."""
    asked = {"asked": "'auto'", "is_auto": True}
    few, many = {"kind": "process", "count": 2, "pids": [5, 6]}, {"kind": "process", "count": 3, "pids": [6, 7, 8]}
    seen = seen_by(asked, few, many)

    assert (seen.kind, seen.num_workers, seen.pids) == ("process", 3, [5, 6, 7, 8])
    assert describe(seen) == "infeed.DataLoader(D, batch_size=1, num_workers='auto'), by now 3 processes"
    assert seen_by(asked, many, {"kind": "thread", "count": 1, "pids": []}).kind == "thread"


def test_a_number_that_was_given_stays() -> None:
    """When the first batch comes not all of them may be there. Where none are needed there are none."""
    asked = {"asked": "4", "num_workers": 4}

    assert seen_by(asked, {"kind": "process", "count": 1, "pids": [5]}).num_workers == 4
    assert seen_by(asked, {"kind": "inline", "count": 0, "pids": []}).num_workers == 0


def test_a_journal_that_breaks_off_is_read_as_far_as_it_goes() -> None:
    """A program that was killed has written no end."""
    events: list[dict[str, Any]] = [
        {"event": "loader", "at": 1.0, "number": 0, "library": "torch", "dataset": "D", "kind": "inline", "num_workers": 0},
        {"event": "epoch", "loader": 0, "at": 1.0},
        {"event": "batches", "loader": 0, "waits": [0.5], "aways": [0.25]},
    ]
    seen = Run(program="train.py")
    read_events(seen, events)

    assert (seen.loaders[0].waited_s, seen.loaders[0].away_s, seen.loaders[0].batch_count) == (0.5, 0.25, 1)


def test_of_an_epoch_that_gave_none_no_batch_is_counted() -> None:
    """Two gave three batches each, the first of which took a second to come; a third was only asked for."""
    epochs = [EpochSeen(at, 1.0, True, [0.25] * 2, [0.5] * 2) for at in (0.0, 3.0)]
    seen = loader(epochs=[*epochs, EpochSeen(6.0)])

    assert (seen.given_count, seen.batch_count) == (6, 4)
    assert seen.iterated_s == pytest.approx(5.0)
