"""Statistics of a loader: exact counters for every kind of worker, through epochs, deaths and close."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import infeed
from infeed.metrics.recent import Amounts
from infeed.testing import FaultyDataset
from tests.helpers import Squares, kill_process, session_of

KINDS = [{}, {"num_workers": 2, "worker": "thread"}, {"num_workers": 2}]
IDS = ["inline", "thread", "process"]


class Napping:
    """Every sample takes at least 2 ms, and one takes 50 ms."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> np.ndarray:
        time.sleep(0.05 if index == 17 else 0.002)
        return np.full(100, index, dtype=np.int64)


@pytest.mark.parametrize("workers", KINDS, ids=IDS)
def test_counts_are_exact(workers: dict[str, Any]) -> None:
    with infeed.DataLoader(Napping(), 8, seed=1, **workers) as loader:
        assert loader.statistics().batch_count == 0
        assert loader.statistics().finding.state == "warming up"
        for _ in range(2):
            for _batch in loader:
                pass
        known = loader.statistics()
    assert (known.batch_count, known.sample_count) == (16, 120)
    # Every leaf begins on an alignment boundary, so a batch may take a few bytes more than its arrays.
    assert 120 * 800 <= known.byte_count <= 120 * 800 + 16 * 64
    # Workers have started the next epoch, and one may have timed samples of a task that it has not written yet.
    loaded_count, timed_count = sum(one.sample_count for one in known.workers), sum(count for _, count in known.histogram)
    assert 120 <= loaded_count <= timed_count <= loaded_count + 8 * max(1, len(known.workers))
    assert sum(one.load_s for one in known.workers) >= 2 * (59 * 0.002 + 0.05)
    assert 17 in [one.index for one in known.slowest]  # On a busy machine others may be slow too.
    assert known.slowest[0].seconds >= 0.05
    assert known.sample_times["max"] == known.slowest[0].seconds
    assert 0.002 <= known.sample_times["median"] <= known.sample_times["p99"] <= known.sample_times["max"]
    assert known.waited_s > 0
    assert 0 <= known.wait_share <= 1
    assert (known.restart_count, known.retry_count, known.skipped_count) == (0, 0, 0)


@pytest.mark.parametrize("workers", KINDS, ids=IDS)
def test_statistics_are_kept_after_close(workers: dict[str, Any]) -> None:
    with infeed.DataLoader(Napping(), 8, **workers) as loader:
        list(loader)
        before = loader.statistics()
    after = loader.statistics()
    assert after.batch_count == before.batch_count == 8
    # Others may be from the next epoch, which has already started.
    assert after.slowest[0].seconds >= before.slowest[0].seconds > 0
    assert after.worker_count == before.worker_count == workers.get("num_workers", 0)
    assert sum(one.sample_count for one in after.workers) >= sum(one.sample_count for one in before.workers) >= 60
    assert not any(one.is_alive for one in after.workers)


@pytest.mark.parametrize("workers", KINDS, ids=IDS)
def test_an_epoch_without_batches_differs_from_no_epoch(workers: dict[str, Any]) -> None:
    with infeed.DataLoader(Squares(0), 8, **workers) as loader:
        assert loader.statistics().finding.action == "not-started"
        assert [list(loader), list(loader)] == [[], []]
        assert loader.statistics().finding.action == "no-batch"


def test_nested_loops_count_together() -> None:
    with infeed.DataLoader(Squares(40), 10, num_workers=1) as loader:
        for _ in loader:
            for _ in loader:
                pass
        known = loader.statistics()
    assert (known.batch_count, known.sample_count) == (20, 200)
    assert loader.statistics().sample_count == 200


def test_a_worker_that_is_killed_is_counted_and_marked() -> None:
    with infeed.DataLoader(Napping(), 4, num_workers=2) as loader:
        batches = iter(loader)
        next(batches)
        victim = loader.statistics().workers[0]  # Whichever was there first.
        pid = victim.pid
        assert pid is not None
        kill_process(pid)
        list(batches)
        known = loader.statistics()
    assert known.restart_count == 1
    assert known.sample_count == 60
    assert pid not in {one.pid for one in known.workers}
    marks = session_of(loader).trace().marks
    assert [mark.kind for mark in marks if mark.lane == victim.worker] == ["death"]
    assert f"pid {pid}" in next(mark.text for mark in marks if mark.kind == "death")
    assert "  1 restart" in str(known)
    assert "restarts" not in str(known)


@pytest.mark.parametrize("workers", KINDS, ids=IDS)
def test_bad_samples_and_retries_are_counted(workers: dict[str, Any]) -> None:
    with infeed.DataLoader(FaultyDataset(40, [3, 21]), 8, on_error=infeed.ErrorPolicy("skip", retries=2), **workers) as loader:
        list(loader)
        known = loader.statistics()
    assert known.skipped_count == 2
    assert known.retry_count >= 4
    with infeed.DataLoader(FaultyDataset(40, [3, 21]), 8, on_error="replace", **workers) as loader:
        list(loader)
        assert loader.statistics().replaced_count == len(loader.bad_samples) >= 2


class Refusing:
    """Every sample takes at least 2 ms, and every second one raises then; one takes 50 ms."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        time.sleep(0.05 if index == 17 else 0.002)
        if index % 2:
            raise ValueError(index)
        return index


@pytest.mark.parametrize("workers", KINDS, ids=IDS)
def test_time_of_samples_that_raise_is_counted_and_shown(workers: dict[str, Any]) -> None:
    with infeed.DataLoader(Refusing(), 8, on_error="skip", **workers) as loader:
        assert [int(number) for batch in loader for number in batch] == list(range(0, 32, 2))
        trace = session_of(loader).trace()
    known = trace.statistics
    # Each bad sample was requested once, and each good one at least once for its batch.
    assert sum(one.load_s for one in known.workers) >= 0.05 + 31 * 0.002
    assert known.slowest[0].seconds >= 0.05
    assert 17 in [one.index for one in known.slowest]
    loads = [span for span in trace.spans if span.kind == "load"]
    assert any(span.first_index == 17 and span.seconds >= 0.05 for span in loads)


def test_time_of_a_collate_fn_that_raises_is_counted() -> None:
    def refuse(_samples: list[int]) -> None:
        time.sleep(0.02)
        raise ValueError("no")

    with infeed.DataLoader(Squares(8), 4, collate_fn=refuse) as loader:
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                next(iter(loader))
        assert sum(one.collate_s for one in loader.statistics().workers) >= 0.04


class Flow:
    def __iter__(self) -> Iterator[np.ndarray]:
        for number in range(50):
            time.sleep(0.001)
            yield np.full(10, number)


@pytest.mark.parametrize("workers", KINDS, ids=IDS)
def test_iterable_datasets_are_counted(workers: dict[str, Any]) -> None:
    with infeed.DataLoader(Flow(), 8, **workers) as loader:
        list(loader)
        known = loader.statistics()
    assert (known.batch_count, known.sample_count) == (7, 50)
    assert sum(count for _, count in known.histogram) == 50
    assert known.loads_by == "__iter__"


def test_a_collate_fn_has_its_own_time() -> None:
    def collate(samples: list[Any]) -> Any:
        time.sleep(0.01)
        return np.stack([sample[0] for sample in samples])

    with infeed.DataLoader(Squares(40), 10, num_workers=1, collate_fn=collate) as loader:
        list(loader)
        known = loader.statistics()
    assert sum(one.collate_s for one in known.workers) >= 4 * 0.01
    assert known.has_collate_fn


def test_arrays_are_counted_too() -> None:
    with infeed.DataLoader(np.zeros((1000, 4)), 100) as loader:
        list(loader)
        known = loader.statistics()
    assert (known.batch_count, known.sample_count, known.byte_count) == (10, 1000, 32000)
    assert known.loads_by == "gathering rows"


@pytest.mark.parametrize("observe", ["counters", "off"])
def test_disabled_recordings_are_not_shown(observe: Any) -> None:
    with infeed.DataLoader(Napping(), 8, num_workers=1, observe=observe) as loader:
        list(loader)
        known = loader.statistics()
        with pytest.raises(infeed.ConfigError, match="observe='timeline'"):
            loader.timeline("run.json")
        assert not session_of(loader).collector.history.spans()
    assert (known.batch_count, bool(known.histogram)) == ((0, False) if observe == "off" else (8, True))
    assert (known.finding is None) == (observe == "off")


def test_statistics_are_immutable() -> None:
    """They can be pickled, compared and printed."""
    with infeed.DataLoader(Squares(4), 2) as loader:
        list(loader)
        known = loader.statistics()
    with pytest.raises(dataclasses.FrozenInstanceError):
        known.batch_count = 3  # type: ignore[misc]
    times: Any = known.sample_times
    was = dict(times)
    for change in (
        lambda: times.__setitem__("median", 0.0),
        lambda: times.__delitem__("median"),
        lambda: times.__ior__({"median": 0.0}),
        lambda: times.update(median=0.0),
        lambda: times.setdefault("mean", 0.0),
        lambda: times.pop("median"),
        times.popitem,
        times.clear,
    ):
        with pytest.raises(TypeError, match="read-only"):
            change()
    assert times == was == json.loads(json.dumps(dataclasses.asdict(known)))["sample_times"]
    for copied in (pickle.loads(pickle.dumps(known)), copy.deepcopy(known)):
        assert copied == known
        assert type(copied.sample_times) is type(times)


def test_the_first_line_is_the_diagnosis_and_the_rest_a_table() -> None:
    with infeed.DataLoader(Napping(), 4) as loader:
        list(loader)
        known = loader.statistics()
    first, *rows = str(known).splitlines()
    assert first == known.diagnosis
    assert (known.finding.state, known.finding.bottleneck) == ("data-bound", "inline")
    assert [row.split()[0] for row in rows] == ["delivered", "throughput", "training", "workers", "work", "per", "in"]


def test_statistics_can_be_printed_in_ascii() -> None:
    """Not all outputs support more than ASCII."""
    with infeed.DataLoader(Squares(1000), 8) as loader:
        list(loader)
        assert str(loader.statistics()).isascii()


def test_batches_on_a_device_are_counted_when_they_are_delivered() -> None:
    pytest.importorskip("torch")
    with infeed.DataLoader(Squares(64), 4, num_workers=1, device=infeed.Device("cpu", prefetch=3)) as loader:
        batches = iter(loader)
        next(batches)
        next(batches)
        assert loader.statistics().batch_count == 2


def test_training_steps_are_not_counted_as_waiting() -> None:
    with infeed.DataLoader(Squares(40), 4, num_workers=1) as loader:
        for _ in loader:
            time.sleep(0.02)
        known = loader.statistics()
    assert known.away_s >= 9 * 0.02


def test_time_between_epochs_is_not_counted() -> None:
    """Workers are not idle between epochs."""
    with infeed.DataLoader(Napping(), 8, num_workers=2) as loader:
        for _ in range(2):
            for _batch in loader:
                pass
            before = [one.alive_s for one in loader.statistics().workers]
            time.sleep(0.02)
            assert [one.alive_s for one in loader.statistics().workers] == before
            assert min(before) > 0


def test_a_trace_has_lanes_for_workers_and_for_the_loop() -> None:
    with infeed.DataLoader(Napping(), 8, num_workers=2) as loader:
        for _ in loader:
            time.sleep(0.001)
        trace = session_of(loader).trace()
    loads = [span for span in trace.spans if span.kind == "load" and span.epoch == 0]
    assert sum(span.size for span in loads) == 60
    assert {span.first_index for span in loads if span.size == 1} == set(range(60))
    loop = [span for span in trace.spans if span.lane == -1]
    assert {"wait", "away"} <= {span.kind for span in loop}
    assert {span.position for span in loop if span.kind == "wait"} <= set(range(8))
    for lane in {span.lane for span in trace.spans}:
        own = [span for span in trace.spans if span.lane == lane]
        own.sort(key=lambda span: span.begin_ns)
        assert all(one.begin_ns <= one.end_ns <= other.begin_ns for one, other in pairwise(own))
    assert trace.settings["num_workers"] == "2"
    assert trace.machine["python"]


class Calming:
    """Its samples take a while in epoch 0 and no time later."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if self.epoch == 0:
            time.sleep(0.01)
        return index


def test_the_diagnosis_is_about_the_recent_past() -> None:
    with infeed.DataLoader(Calming(), 1) as loader:
        for epoch in range(3):
            for _ in loader:
                time.sleep(0.02 if epoch else 0)
        known = loader.statistics()
    assert known.recent is not None
    assert not known.recent.is_all
    # The samples of epoch 0 were long ago.
    assert {one.recent_s for one in known.slowest if one.epoch == 0} == {0.0}
    assert known.recent_wait_share < known.wait_share
    assert known.finding.covered_s is not None


def test_idle_workers_during_waits_are_counted() -> None:
    for prefetch, idle_share in ((1, 0.5), (8, 0.0)):  # A batch that is collated goes to one of two workers.
        options: dict[str, Any] = {"num_workers": 2, "worker": "thread", "collate_fn": np.stack, "prefetch": prefetch}
        with infeed.DataLoader(Napping(), 2, **options) as loader:
            for number, _ in enumerate(loader):
                if number == 20:  # Before the last batches, for which the training loop may wait alone.
                    break
            recent = loader.statistics().recent
        assert recent is not None
        assert recent.amounts.manned_ns > 0
        assert recent.amounts.idled_ns / recent.amounts.manned_ns == pytest.approx(idle_share, abs=0.3)


@pytest.mark.parametrize("workers", KINDS, ids=IDS)
def test_slices_of_the_past_sum_to_the_total(workers: dict[str, Any]) -> None:
    with infeed.DataLoader(Napping(), 8, **workers) as loader:
        for _ in range(2):
            for _batch in loader:
                sum(range(20_000))
    known = loader.statistics()
    past = Amounts.sum_of(one.amounts for one in session_of(loader).collector.history.past.slices)
    assert past.batch_count == known.batch_count
    assert past.waited_ns == round(known.waited_s * 1e9)
    assert past.away_ns == round(known.away_s * 1e9)
    assert past.load_ns == pytest.approx(1e9 * sum(one.load_s for one in known.workers))
    assert past.own_cpu_ns > 0


def test_singular_and_plural_differ() -> None:
    with infeed.DataLoader(Squares(1), 1) as loader:
        list(loader)
        known = dataclasses.replace(loader.statistics(), batches_in_flight=1)
    assert "1 batch, 1 sample," in str(known)
    assert "in flight   1 batch," in str(known)
    assert known.finding.action == "too-early"
