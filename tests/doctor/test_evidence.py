"""Evidence that the doctor reads from the journal of a program."""

from __future__ import annotations

from typing import Any

import pytest

from infeed.doctor.evidence import EpochSeen, LoaderSeen, Run, read_events
from infeed.doctor.finding import describe
from tests.doctor.evidence_of import loader


def seen_by(asked: dict[str, Any], *workers: dict[str, Any]) -> LoaderSeen:
    """A loader of infeed as the journal describes it."""
    given = {"number": 0, "library": "infeed", "dataset": "D", "kind": "process", "num_workers": 1, **asked}
    events = [{"event": "loader", "at": 1.0, **given}, {"event": "epoch", "loader": 0, "at": 1.0}]
    seen = Run(program="train.py")
    read_events(seen, events + [{"event": "workers", "loader": 0, "is_gathered": False, **one} for one in workers])
    return seen.loaders[0]


def test_auto_workers_are_reported_as_last_seen() -> None:
    """The number and kind of workers seen last, and all processes ever seen."""
    asked = {"asked": "'auto'", "is_auto": True}
    few, many = {"kind": "process", "count": 2, "pids": [5, 6]}, {"kind": "process", "count": 3, "pids": [6, 7, 8]}
    seen = seen_by(asked, few, many)

    assert (seen.kind, seen.num_workers, seen.pids) == ("process", 3, [5, 6, 7, 8])
    assert describe(seen) == "infeed.DataLoader(D, batch_size=1, num_workers='auto'), now 3 processes"
    assert seen_by(asked, many, {"kind": "thread", "count": 1, "pids": []}).kind == "thread"


def test_an_explicit_number_of_workers_is_kept() -> None:
    """At the first batch some of the workers may be missing. If no workers are needed, the number is 0."""
    asked = {"asked": "4", "num_workers": 4}

    assert seen_by(asked, {"kind": "process", "count": 1, "pids": [5]}).num_workers == 4
    assert seen_by(asked, {"kind": "inline", "count": 0, "pids": []}).num_workers == 0


def test_auto_is_judged_after_its_warm_up() -> None:
    """Only batches after the tuner has settled count, with the workers it settled on."""
    given = {"number": 0, "library": "infeed", "dataset": "D", "kind": "process", "num_workers": 1}
    events: list[dict[str, Any]] = [
        {"event": "loader", "at": 1.0, **given, "asked": "'auto'", "is_auto": True},
        {"event": "epoch", "loader": 0, "at": 1.0},
    ]

    def waited(*, count: int, is_settled: bool, wait: float) -> tuple[float, float, int]:
        workers = {"kind": "process", "count": count, "is_gathered": False, "is_settled": is_settled, "pids": []}
        events.append({"event": "workers", "loader": 0, **workers})
        events.append({"event": "batches", "loader": 0, "waits": [wait] * 2, "aways": [1.0] * 2})
        seen = Run(program="train.py")
        read_events(seen, events)
        loader_seen = seen.loaders[0]
        assert loader_seen.delivered_count == sum(len(event.get("waits", ())) for event in events)
        assert loader_seen.iterated_s == sum(sum(event.get("waits", ())) + sum(event.get("aways", ())) for event in events)
        return loader_seen.waited_s, loader_seen.away_s, loader_seen.batch_count

    assert waited(count=2, is_settled=False, wait=8.0) == (0.0, 0.0, 0)
    assert waited(count=4, is_settled=False, wait=4.0) == (0.0, 0.0, 0)
    assert waited(count=4, is_settled=True, wait=0.5) == (1.0, 2.0, 2)
    assert waited(count=6, is_settled=False, wait=4.0) == (1.0, 2.0, 2)  # A trial that is reverted.
    assert waited(count=4, is_settled=True, wait=0.5) == (2.0, 4.0, 4)
    assert waited(count=6, is_settled=True, wait=0.25) == (0.5, 2.0, 2)
    assert waited(count=6, is_settled=True, wait=0.25) == (1.0, 4.0, 4)


def test_an_explicit_number_of_workers_is_judged_from_the_beginning() -> None:
    """The time that workers take to start counts too."""
    seen = seen_by({"asked": "4", "num_workers": 4}, {"kind": "process", "count": 1, "pids": [5]})
    seen.see_batches([0.5], [0.25])
    seen.see_workers("process", 4, is_gathered=False)

    assert (seen.has_warmed_up, seen.waited_s, seen.away_s) == (False, 0.5, 0.25)


def test_a_truncated_journal_is_read_to_its_end() -> None:
    """A killed program has written no final event."""
    events: list[dict[str, Any]] = [
        {"event": "loader", "at": 1.0, "number": 0, "library": "torch", "dataset": "D", "kind": "inline", "num_workers": 0},
        {"event": "epoch", "loader": 0, "at": 1.0},
        {"event": "batches", "loader": 0, "waits": [0.5], "aways": [0.25]},
    ]
    seen = Run(program="train.py")
    read_events(seen, events)

    assert (seen.loaders[0].waited_s, seen.loaders[0].away_s, seen.loaders[0].batch_count) == (0.5, 0.25, 1)


def test_an_epoch_without_a_batch_counts_no_batch() -> None:
    """Two epochs delivered three batches each, the first after one second; a third epoch was only started."""
    epochs = [EpochSeen(at, 1.0, True, [0.25] * 2, [0.5] * 2) for at in (0.0, 3.0)]
    seen = loader(epochs=[*epochs, EpochSeen(6.0)])

    assert (seen.delivered_count, seen.batch_count) == (6, 4)
    assert seen.iterated_s == pytest.approx(5.0)
