"""Counters and spans that a worker records, read by the other side."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import pytest

from infeed.workers.recorder import (
    BUCKETS,
    COLLATE,
    LOAD,
    NO_INDEX,
    RECORDER_NUMBERS,
    WRITE,
    RawSpan,
    Recorder,
    RecorderReader,
    bucket_end_ns,
    bucket_of,
    spans_of,
)

MS = 1_000_000


def new_recorder(*, is_spanning: bool = True) -> tuple[Recorder, RecorderReader, memoryview]:
    numbers = memoryview(array("q", bytes(8 * RECORDER_NUMBERS)))
    return Recorder(numbers, is_spanning=is_spanning), RecorderReader(numbers, 0), numbers


def take(reader: RecorderReader, *, is_last: bool = True) -> tuple[list[RawSpan], int]:
    raw, lost = reader.take_spans(is_last=is_last)
    return spans_of(raw), lost


def run_task(
    recorder: Recorder, rows: int, times: list[int] | None = None, position: int = 0, *, is_written: bool = False
) -> None:
    """Runs a task like a runner does."""
    recorder.begin(perf_counter_ns() - sum(times or [0]), epoch=3, position=position)
    if recorder.is_fine:
        recorder.loaded(position, list(range(100 + position, 100 + position + rows)), times)
        if is_written:  # On a busy machine even that may take long enough for a span.
            recorder.written()
    recorder.end(rows, perf_counter_ns())


def test_a_duration_is_within_the_bounds_of_its_bucket() -> None:
    for ns in [*range(0, 5000, 7), *(random.Random(0).randrange(1 << 39) for _ in range(1000))]:
        bucket = bucket_of(ns)
        assert ns < bucket_end_ns(bucket)
        assert bucket == 0 or ns >= bucket_end_ns(bucket - 1)
    assert bucket_of(1 << 60) == BUCKETS - 1


def test_sums_are_those_of_all_tasks() -> None:
    recorder, reader, _ = new_recorder()
    for _ in range(10):
        run_task(recorder, 4, is_written=True)
    recorder.retried()
    run_task(recorder, 2)
    recorder.flush()
    sums = reader.sums()
    assert (sums.sample_count, sums.retry_count) == (42, 1)
    assert sums.load_ns > 0
    assert sums.write_ns > 0
    assert sums.collate_ns == 0
    assert sum(reader.histogram()) == 42


def test_the_time_of_a_failed_task_counts_but_not_its_samples() -> None:
    for tiny_count in (0, 1, 3):  # Timed individually, or among tiny tasks.
        recorder, reader, _ = new_recorder()
        for _ in range(tiny_count):
            run_task(recorder, 4)
        before = reader.sums()
        began_ns = perf_counter_ns() - 5 * MS
        recorder.begin(began_ns, epoch=3, position=8)
        recorder.failed(began_ns + 5 * MS)
        after = reader.sums()
        assert after.sample_count == before.sample_count == 4 * tiny_count
        assert after.load_ns - before.load_ns >= 4 * MS
        assert sum(reader.histogram()) == 4 * tiny_count


def test_a_restarted_worker_continues_the_counters() -> None:
    first, reader, numbers = new_recorder()
    run_task(first, 3, [2 * MS, 3 * MS, 2 * MS])
    first.flush()
    before = reader.sums()
    second = Recorder(numbers)
    run_task(second, 1, [9 * MS])
    sums = reader.sums()
    assert sums.sample_count == 4
    assert sums.load_ns >= before.load_ns + 9 * MS
    assert [took for took, *_ in sorted(reader.slowest(), reverse=True)] == [9 * MS, 3 * MS, 2 * MS, 2 * MS]


def test_slow_samples_have_their_own_spans_and_fast_ones_share_one() -> None:
    recorder, reader, _ = new_recorder()
    run_task(recorder, 5, [2 * MS, 1000, 1000, 5 * MS, 1000], position=40)
    spans, lost = take(reader)
    loads = [span for span in spans if span.kind == LOAD]
    assert [(span.position, span.first_index, span.size) for span in loads] == [
        (40, 140, 1),
        (41, 141, 2),
        (43, 143, 1),
        (44, 144, 1),
    ]
    assert [span.end_ns - span.begin_ns for span in loads] == [2 * MS, 2000, 5 * MS, 1000]
    assert all(one.end_ns <= other.begin_ns for one, other in pairwise(loads))
    assert {span.epoch for span in spans} == {3}
    assert lost == 0


def test_tiny_tasks_are_aggregated_without_loss() -> None:
    recorder, reader, _ = new_recorder()
    for number in range(500):
        run_task(recorder, 2, position=2 * number)
    recorder.flush()
    spans, lost = take(reader)
    assert len(spans) + lost < 500
    assert sum(span.size for span in spans) == 1000
    assert {span.kind for span in spans} <= {LOAD, WRITE}


def test_the_latest_span_may_still_grow_and_is_read_last() -> None:
    recorder, reader, _ = new_recorder()
    run_task(recorder, 1, [2 * MS])
    run_task(recorder, 1, [3 * MS])
    taken = [span.end_ns - span.begin_ns for span in take(reader, is_last=False)[0]]
    rest = [span.end_ns - span.begin_ns for span in take(reader)[0]]
    assert (taken, rest) == ([2 * MS], [3 * MS])
    assert take(reader) == ([], 0)


def test_overwritten_spans_are_counted() -> None:
    recorder, reader, _ = new_recorder()
    for number in range(5000):
        run_task(recorder, 1, [2 * MS], position=number)
    spans, lost = take(reader)
    assert lost > 0
    assert len(spans) + lost == 5000
    assert [span.position for span in spans] == list(range(lost, 5000))


def test_without_spans_sums_and_times_are_kept() -> None:
    recorder, reader, _ = new_recorder(is_spanning=False)
    run_task(recorder, 2, [2 * MS, 4 * MS])
    run_task(recorder, 8)
    recorder.flush()
    assert take(reader) == ([], 0)
    assert reader.sums().sample_count == sum(reader.histogram()) == 10
    assert len(reader.slowest()) == 2


def test_an_index_that_is_not_a_number_is_not_kept() -> None:
    recorder, reader, _ = new_recorder()
    for index in ("a", True, 1 << 70, (1, 2)):
        recorder.begin(perf_counter_ns(), 0, 0)
        recorder.loaded(0, [index], [2 * MS])
        recorder.end(1, perf_counter_ns())
    assert [span.first_index for span in take(reader)[0]] == [NO_INDEX] * 4


def test_the_sixteen_slowest_samples_are_kept() -> None:
    recorder, reader, _ = new_recorder()
    times = [random.Random(1).randrange(1, 1000) * MS for _ in range(300)]
    for number, took in enumerate(times):
        run_task(recorder, 1, [took], position=number)
    slowest = sorted(reader.slowest(), reverse=True)
    assert [took for took, *_ in slowest] == sorted(times, reverse=True)[:16]
    assert all(times[position] == took for took, _, position, *_ in slowest)


def test_worker_start_up_is_a_span() -> None:
    recorder, reader, _ = new_recorder()
    recorder.started(perf_counter_ns() - 5 * MS)
    (span,) = take(reader)[0]
    assert isinstance(span, RawSpan)
    assert span.end_ns - span.begin_ns >= 5 * MS


# --- tiny tasks, with a clock that the test controls

US = 1000


class Doer:
    """Runs tasks of four samples: loads for three quarters of the time, and writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now = 1_000 * MS
        monkeypatch.setattr("infeed.workers.recorder.perf_counter_ns", lambda: self.now)
        self.recorder, self.reader, self.numbers = new_recorder(**options)
        self.count = 0  # Tasks.
        self.timed_at: list[int] = []

    def do(self, us: int, pause_us: int = 1) -> None:
        recorder = self.recorder
        self.now += pause_us * US
        recorder.begin(self.now, epoch=0, position=4 * self.count)
        if recorder.is_fine:
            self.timed_at.append(self.now)
        self.now += us * US * 3 // 4
        if recorder.is_fine:
            recorder.loaded(4 * self.count, range(4))
        self.now += us * US // 4
        if recorder.is_fine:
            recorder.written()
        recorder.end(4, self.now)
        self.count += 1


@pytest.mark.parametrize("pause_us", [1, 80], ids=["without pauses", "with pauses"])
@pytest.mark.parametrize("is_spanning", [True, False])
def test_one_tiny_task_per_ten_milliseconds_is_timed(monkeypatch: pytest.MonkeyPatch, is_spanning: bool, pause_us: int) -> None:
    """The work of the others is estimated from it, and they are counted at once."""
    doer = Doer(monkeypatch, is_spanning=is_spanning)
    for _ in range(1000):
        doer.do(200, pause_us)
        assert doer.reader.sums().sample_count == sum(doer.reader.histogram()) == 4 * doer.count
    assert all(one - other >= 10 * MS for other, one in pairwise(doer.timed_at))
    assert len(doer.timed_at) > 10
    doer.recorder.flush()
    sums = doer.reader.sums()
    assert (sums.load_ns, sums.write_ns, sums.sample_count) == (150 * MS, 50 * MS, 4000)
    assert sum(doer.reader.histogram()) == 4000


def test_runs_of_tiny_tasks_have_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    doer = Doer(monkeypatch)
    for number in range(30):
        doer.do(200, pause_us=300 if number % 3 == 0 else 1)
    doer.recorder.flush()
    spans, lost = take(doer.reader)
    assert lost == 0
    assert sum(span.size for span in spans) == 120
    assert {0, 12, 24, 36, 48, 60, 72, 84, 96, 108} <= {span.position for span in spans}
    for span in spans:
        assert span.end_ns - span.begin_ns == (50 * span.size + span.size // 4 - 1) * US


def test_runs_of_tiny_tasks_are_split_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    doer = Doer(monkeypatch)
    for _ in range(100):
        doer.do(200, pause_us=0)
    doer.recorder.flush()
    spans, lost = take(doer.reader)
    assert lost == 0
    assert [span.position for span in spans] == [sum(span.size for span in spans[:number]) for number in range(len(spans))]
    assert sum(span.size for span in spans) == 400
    assert all(one.end_ns == other.begin_ns for one, other in pairwise(spans))
    assert max(span.end_ns - span.begin_ns for span in spans) <= 2 * MS + 400 * US


def test_after_an_unexpectedly_long_task_the_next_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    doer = Doer(monkeypatch)
    doer.do(200)
    doer.do(50_000)
    began = doer.now
    doer.do(3000)
    assert doer.timed_at[1:] == [began + US]
    assert doer.recorder.is_fine


def test_retries_are_recorded_at_once() -> None:
    recorder, reader, _ = new_recorder()
    run_task(recorder, 4)
    recorder.retried()
    assert reader.sums().retry_count == 1


def test_tiny_tasks_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing costs the most."""
    doer = Doer(monkeypatch)
    entered = []
    for _ in range(50):
        doer.do(200)
        entered.append(doer.numbers[3])
    assert entered[0] == 4  # It was timed.
    assert len(set(entered)) <= 7
    doer.recorder.flush()
    doer.recorder.flush()  # Once is enough.
    assert doer.reader.sums().sample_count == 200


@pytest.mark.parametrize(("times", "us", "kinds"), [
    (None, 2000, [LOAD, COLLATE, WRITE]),
    (None, 200, []),  # Only the sums of the three parts of a tiny task are recorded.
    ([2 * MS], 200, [LOAD, COLLATE, WRITE]),
    ([2 * MS], 50, [LOAD]),
])  # fmt: skip
def test_long_parts_of_a_task_have_their_own_spans(
    monkeypatch: pytest.MonkeyPatch, times: list[int] | None, us: int, kinds: list[int]
) -> None:
    doer = Doer(monkeypatch)
    recorder = doer.recorder
    recorder.begin(doer.now, epoch=0, position=0)
    doer.now += sum(times or [us * US])
    recorder.loaded(0, [7], times)
    doer.now += us * US
    recorder.collated()
    doer.now += us * US
    recorder.written()
    recorder.end(1, doer.now)
    assert [span.kind for span in take(doer.reader)[0]] == kinds
    sums = doer.reader.sums()
    assert (sums.collate_ns, sums.write_ns) == (us * US, us * US)


def test_a_long_task_with_short_parts_has_one_span(monkeypatch: pytest.MonkeyPatch) -> None:
    doer = Doer(monkeypatch)
    for _ in range(2):
        doer.recorder.begin(doer.now, epoch=0, position=0)
        for _ in range(40):
            doer.now += 80 * US
            doer.recorder.loaded(0, [7])
        doer.recorder.end(8, doer.now)
    assert [(span.end_ns - span.begin_ns, span.size) for span in take(doer.reader)[0]] == [(3200 * US, 8)] * 2


def test_the_gil_share_is_recorded_once_it_is_known() -> None:
    recorder, reader, _ = new_recorder()
    assert reader.sums().gil_share is None
    recorder.note_gil(0.25)
    assert reader.sums().gil_share == 0.25
    recorder.note_gil(0.0)
    assert reader.sums().gil_share == 0.0


def test_all_parts_of_a_long_task_are_recorded_unless_they_are_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    doer = Doer(monkeypatch)
    doer.recorder.begin(doer.now, epoch=0, position=0)
    for us, record in (
        (1200, lambda: doer.recorder.loaded(0, [7])),
        (850, doer.recorder.collated),
        (90, doer.recorder.written),
    ):
        doer.now += us * US
        record()
    doer.recorder.end(1, doer.now)
    spans = take(doer.reader)[0]
    assert [(span.kind, span.end_ns - span.begin_ns) for span in spans] == [(LOAD, 1200 * US), (COLLATE, 850 * US)]


def test_a_task_that_only_wrote_does_not_change_the_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that a worker had loaded waited for their slot: that is no share of later tasks."""
    doer = Doer(monkeypatch)
    doer.recorder.begin(doer.now, epoch=0, position=0)
    doer.now += 100 * US
    doer.recorder.written()
    doer.recorder.end(0, doer.now)
    for _ in range(10):
        doer.do(200)
    sums = doer.reader.sums()
    assert (sums.load_ns, sums.write_ns) == (1500 * US, 600 * US)


def test_tiny_tasks_of_a_dead_worker_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    doer = Doer(monkeypatch)
    for _ in range(5):
        doer.do(200)
    before, times = doer.reader.sums(), doer.reader.histogram()
    doer.recorder = Recorder(doer.numbers)
    assert (doer.reader.sums(), doer.reader.histogram()) == (before, times)
    doer.do(200)
    assert doer.reader.sums().sample_count == 24
    assert sum(doer.reader.histogram()) == 24
