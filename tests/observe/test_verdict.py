"""The one sentence: right about made-up runs of which the answer is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infeed.observe.records import SlowSample, Statistics, WorkerStatistics
from infeed.observe.verdict import verdict_of


def worker(number: int, **changes: Any) -> WorkerStatistics:
    base = WorkerStatistics(
        worker=number,
        pid=100 + number,
        is_alive=True,
        sample_count=1000,
        load_s=9.0,
        collate_s=0.2,
        write_s=0.3,
        alive_s=10.0,
        cpu_s=9.4,
        queued_s=0.0,
        memory_bytes=1 << 26,
        restart_count=0,
        retry_count=0,
    )
    return replace(base, **changes)


def run(workers: int = 2, each: dict[str, Any] | None = None, **changes: Any) -> Statistics:
    """Ten seconds in which the loop waits for six."""
    base = Statistics(
        epoch=0,
        batch_count=200,
        sample_count=2000,
        byte_count=1 << 30,
        waited_s=6.0,
        started_s=0.1,
        away_s=4.0,
        deliver_s=0.1,
        loads_by="__getitem__",
        has_collate_fn=False,
        kind="process",
        is_auto=False,
        worker_count=workers,
        workers=tuple(worker(number, **(each or {})) for number in range(max(1, workers))),
        core_count=8.0,
        batches_in_flight=16,
        bytes_in_flight=1 << 28,
        memory_limit=1 << 33,
        skipped_count=0,
        replaced_count=0,
        sample_times={"median": 0.009, "p90": 0.01, "p99": 0.012, "max": 0.013},
        histogram=((0.01, 2000),),
        slowest=(SlowSample(0, 5, 5, 0.013),),
        verdict="",
    )
    return replace(base, **changes)


def test_workers_that_compute_are_missing_and_cores_are_free() -> None:
    said = verdict_of(run())
    assert said == (
        "input-bound: the loop waited 60% of the time, 93% of it for __getitem__; 4 more workers would help, 6 cores are free"
    )


def test_no_more_workers_are_advised_than_the_loop_can_use() -> None:
    assert "1 more worker would help" in verdict_of(run(waited_s=0.6, away_s=9.4, each={"load_s": 9.3, "alive_s": 10.0}))


def test_no_number_is_advised_where_infeed_decides_it() -> None:
    assert "there are as many workers as bring something" in verdict_of(run(is_auto=True))


def test_all_cores_are_busy() -> None:
    assert "all 2 cores are busy" in verdict_of(run(core_count=2.0))


def test_waiting_for_a_core_is_not_waiting_for_a_disk() -> None:
    assert "all 2 cores are busy" in verdict_of(run(core_count=2.0, each={"cpu_s": 4.0, "queued_s": 5.4}))


def test_work_that_waits_gains_from_more_workers_than_cores() -> None:
    said = verdict_of(run(core_count=2.0, each={"cpu_s": 0.5}))
    assert "it waits and does not compute" in said
    assert "more workers would help" in said


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"has_collate_fn": True, "each": {"load_s": 1.0, "collate_s": 8.0}}, "collate_fn"),
        ({"each": {"load_s": 1.0, "collate_s": 8.0}}, "stacking samples"),
        ({"each": {"load_s": 1.0, "write_s": 8.0}}, "writing into shared memory"),
        ({"loads_by": "__iter__"}, "__iter__"),
        ({"deliver_s": 5.5}, "infeed's own work in the loop's thread"),
    ],
)
def test_it_names_what_most_of_the_wait_was_for(changes: dict[str, Any], named: str) -> None:
    assert f"of it for {named}" in verdict_of(run(**changes))


def test_one_slow_sample_that_holds_up_idle_workers_is_named() -> None:
    slow = (SlowSample(0, 7, 3, 2.5),)
    said = verdict_of(run(each={"load_s": 3.0}, slowest=slow))
    assert "index=3 took 2500 ms" in said


def test_idle_workers_without_a_slow_sample_need_more_in_flight() -> None:
    assert "prefetch" in verdict_of(run(each={"load_s": 3.0}))


def test_a_loop_that_does_not_wait_is_left_alone() -> None:
    said = verdict_of(run(waited_s=0.1, away_s=9.9))
    assert said == "keeping up: the loop waited 1.0% of the time"


def test_workers_that_are_too_many_are_named() -> None:
    said = verdict_of(run(workers=8, waited_s=0.1, away_s=9.9, each={"load_s": 0.9, "sample_count": 250}))
    assert "2 workers would do" in said


def test_what_is_loaded_ahead_needs_no_workers() -> None:
    """Twice as much was loaded as the loop has had: that is for the next epoch."""
    said = verdict_of(run(workers=8, waited_s=0.1, away_s=9.9, each={"load_s": 2.0, "sample_count": 500}))
    assert "2 workers would do" in said


def test_workers_that_are_started_anew_for_every_epoch_are_named() -> None:
    said = verdict_of(run(changeover_s=4.5, keeps_workers=False))
    assert said == (
        "input-bound: the loop waited 60% of the time, 75% of it for workers that are started anew for every epoch; "
        "persistent_workers=True keeps them"
    )
    for others in ({"changeover_s": 1.0, "keeps_workers": False}, {"changeover_s": 4.5}):
        assert "persistent_workers" not in verdict_of(run(**others))


def test_a_loop_that_loads_by_itself_is_told_how_many_workers_would_do() -> None:
    inline: dict[str, Any] = {"workers": 0, "kind": "inline", "each": {"load_s": 5.9}}
    assert "num_workers=2 would hide it" in verdict_of(run(**inline))
    assert "num_workers=4, one for each core" in verdict_of(run(**inline, away_s=0.9, core_count=4.0))


def test_nothing_is_said_too_early() -> None:
    assert verdict_of(run(batch_count=0)) == "nothing was loaded yet"
    assert verdict_of(run(batch_count=2)).startswith("too early to tell")
