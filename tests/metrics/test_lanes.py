"""What a timeline shows of a run."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infeed.metrics.lanes import DrawnSpan, Window, lane_names, lane_tops, marks_in, pieces, serial, whole, windows
from infeed.metrics.statistics import LOOP, Mark, Span, Trace
from tests.metrics.traces import MS, empty_trace, faulty_trace, make_trace, with_statistics


def run_of(lengths: list[tuple[int, int]]) -> list[Span]:
    """Returns the spans of one lane, from the length of each and of the pause before it."""
    spans, at = [], 0
    for position, (pause, length) in enumerate(lengths):
        spans.append(Span(0, "load", at + pause, at + pause + length, 0, position, position, 1))
        at += pause + length
    return spans


LENGTHS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**6)), min_size=1, max_size=300)


@given(LENGTHS, st.integers(1, 100))
def test_aggregated_spans_keep_all_time_and_samples(lengths: list[tuple[int, int]], most: int) -> None:
    """At any resolution they are in order, do not overlap, and contain all work."""
    spans = run_of(lengths)
    window = Window(0, spans[-1].end_ns, "")
    found = pieces(spans, window, most=most)

    assert sum(piece.busy_ns for piece in found) == sum(span.end_ns - span.begin_ns for span in spans)
    assert sum(piece.size for piece in found) == len(spans)
    assert all(before.end_ns <= after.begin_ns for before, after in pairwise(found))
    assert len(found) <= max(most, 4)


def test_visible_spans_are_not_aggregated() -> None:
    """Spans that are wide enough stay unchanged, also if they touch."""
    spans = run_of([(0, 5)] * 600)

    assert [(piece.begin_ns, piece.end_ns) for piece in pieces(spans, Window(0, 3000, ""))] == [
        (span.begin_ns, span.end_ns) for span in spans
    ]


def test_an_aggregated_span_with_gaps_is_less_dense() -> None:
    """A worker that works half of the time does not look busy."""
    found = pieces(run_of([(1, 1)] * 100_000), Window(0, 200_000, ""))

    assert len(found) < 2000
    assert all(0.45 < piece.density < 0.55 for piece in found if piece.span_count > 20)


def test_a_worker_that_becomes_slower_is_visible() -> None:
    """Short spans that lie close together are not all aggregated into one."""
    found = pieces(run_of([(1, 9)] * 10_000 + [(9, 1)] * 10_000), Window(0, 200_000, ""))

    assert {round(piece.density, 1) for piece in found[: len(found) // 3]} == {0.9}
    assert {round(piece.density, 1) for piece in found[-len(found) // 3 :]} == {0.1}


def test_spans_are_clipped_to_the_window() -> None:
    """An earlier span is shown from the start of the window."""
    (piece,) = pieces(run_of([(0, 100)]), Window(30, 60, ""))

    assert piece == DrawnSpan(0, "load", 30, 60, 30, 0, 0, 0, 1, 1)


def test_a_short_run_is_shown_completely() -> None:
    """There is space for all of it."""
    trace = make_trace(batches=24)

    assert windows(trace) == (whole(trace),)


def test_the_beginning_and_a_later_part_of_a_long_run_are_shown() -> None:
    """The two parts do not overlap, and both are small."""
    trace = make_trace(batches=500)
    everything = whole(trace)
    assert everything is not None
    beginning, later = windows(trace)

    assert beginning.begin_ns == everything.begin_ns
    assert beginning.end_ns <= later.begin_ns < later.end_ns <= everything.end_ns
    assert beginning.seconds + later.seconds < everything.seconds / 5


def test_the_later_part_contains_a_fault() -> None:
    """Users look for faults."""
    trace = faulty_trace()

    assert windows(trace)[-1].has(trace.marks[0].at_ns)


def test_a_dropped_beginning_is_not_shown() -> None:
    """Only recorded spans can be drawn."""
    trace = replace(make_trace(batches=500), lost_span_count=3)

    assert [window.title for window in windows(trace)] == ["the end"]


def cut(trace: Trace, since: dict[int, int]) -> Trace:
    """Returns the spans that are left if those that began before a time are dropped."""
    kept = tuple(span for span in trace.spans if span.begin_ns >= since.get(span.lane, 0))
    return replace(trace, spans=kept, lost_span_count=len(trace.spans) - len(kept))


def test_only_complete_parts_are_shown() -> None:
    """Less time is kept of workers than of the loop, and a different amount of each; no lane is empty."""
    trace = make_trace(batches=500)
    end_ns = trace.spans[-1].end_ns
    since = {0: end_ns * 7 // 10, 1: end_ns * 8 // 10, 2: end_ns * 75 // 100, 3: end_ns * 8 // 10, LOOP: end_ns // 3}
    kept = cut(trace, since)
    (window,) = windows(kept)

    assert window.begin_ns >= max(since.values())
    assert {piece.lane for piece in pieces(kept.spans, window)} == set(since)
    assert serial(kept, window) == serial(trace, window)


def test_a_kept_part_with_a_few_long_batches_is_shown() -> None:
    """Also where all batches would fit."""
    trace = make_trace(batches=40)
    half_ns = trace.spans[-1].end_ns // 2
    (window,) = windows(cut(trace, dict.fromkeys(range(4), half_ns)))

    assert window.begin_ns >= half_ns
    assert window.title == "the end"


def test_a_worker_that_started_late_has_lost_nothing() -> None:
    """Its spans begin with its start, however late; the window is not moved there."""
    trace = make_trace(batches=500)
    end_ns = trace.spans[-1].end_ns
    since = {0: end_ns // 5, 1: end_ns // 5, 2: end_ns // 5}
    before, after = cut(trace, {**since, 3: end_ns // 5}), cut(trace, {**since, 3: end_ns * 9 // 10})
    start = Span(3, "start", end_ns * 9 // 10 - 5, end_ns * 9 // 10, 0, 0, None, 0)
    late = replace(after, spans=tuple(sorted((*after.spans, start), key=lambda span: (span.lane, span.begin_ns))))

    assert [window[:2] for window in windows(late)] == [window[:2] for window in windows(before)]


def test_an_idle_worker_does_not_empty_the_timeline() -> None:
    """Its only span is the last of all; the latest batches are shown then."""
    trace = make_trace(batches=500)
    (window,) = windows(cut(trace, {0: trace.spans[-1].begin_ns - 20 * MS}))

    assert window.end_ns == trace.spans[-1].end_ns
    assert window.seconds > 0.1


def test_the_end_is_shown_instead_of_a_fault_if_spans_were_dropped() -> None:
    """Only the end of the run is complete."""
    trace = faulty_trace()
    (window,) = windows(cut(trace, {0: trace.marks[1].at_ns + 300 * MS}))

    assert window.title == "the end"


def test_a_loop_without_a_step_is_shown_in_parts_too() -> None:
    """It only waits, and its own work is unknown."""
    trace = make_trace(batches=500)
    idle = replace(trace, spans=tuple(span for span in trace.spans if span.kind != "away"))

    assert [window.title for window in windows(idle)] == ["the beginning", "steady state"]
    assert all(serial(idle, window) for window in windows(idle))


def test_an_empty_run_has_no_window() -> None:
    """No spans, no window."""
    assert windows(empty_trace()) == ()
    assert whole(empty_trace()) is None


def test_sequential_time_is_all_loading_plus_all_steps() -> None:
    """Writing to shared memory does not count: a loader without workers does not do it."""
    trace = make_trace(batches=20)
    (window,) = windows(trace)
    in_a_row = serial(trace, window)
    assert in_a_row is not None
    work_s = sum(span.seconds for span in trace.spans if span.kind in ("load", "collate", "away"))

    assert in_a_row.seconds == pytest.approx(work_s, rel=1e-6)
    assert in_a_row.factor == pytest.approx(work_s / window.seconds, rel=1e-6)
    assert in_a_row.text.startswith(f"{in_a_row.factor:.1f} times slower")
    assert len(in_a_row.steps) == 40
    assert all(before[2] == after[1] for before, after in pairwise(in_a_row.steps))


def test_sequential_work_loads_before_each_step() -> None:
    """Also where the step is known only as the time before the next request."""
    trace = make_trace(batches=20)
    spans = tuple(span._replace(position=span.position + 1) if span.kind == "away" else span for span in trace.spans)
    for one in (trace, replace(trace, spans=spans)):
        in_a_row = serial(one, windows(one)[0])
        assert in_a_row is not None
        assert [kind for kind, _, _ in in_a_row.steps[:39]] == ["load", "away"] * 19 + ["load"]


def test_work_loaded_ahead_is_not_compared() -> None:
    """Batches of the next epoch: the timeline is the same however late it is drawn."""
    trace = make_trace(batches=20)
    end_ns = trace.spans[-1].end_ns
    ahead = [Span(0, "load", end_ns + at * MS, end_ns + (at + 90) * MS, 1, at, at, 2) for at in range(0, 900, 100)]
    after = replace(trace, spans=(*ahead, *trace.spans))

    assert windows(after) == windows(trace)
    assert serial(after, windows(after)[0]) == serial(trace, windows(trace)[0])


def test_time_between_epochs_is_not_compared() -> None:
    """A long evaluation makes workers neither better nor worse; both pause in the timeline."""
    trace = make_trace(batches=10)
    end_ns = trace.spans[-1].end_ns

    def two(pause_ns: int) -> Trace:
        again = [
            span._replace(begin_ns=span.begin_ns + end_ns + pause_ns, end_ns=span.end_ns + end_ns + pause_ns, epoch=1)
            for span in trace.spans
        ]
        return replace(trace, spans=tuple(sorted((*trace.spans, *again), key=lambda span: (span.lane, span.begin_ns))))

    (at_once,), (later,) = windows(two(0)), windows(two(5_000 * MS))
    one, other = serial(two(0), at_once), serial(two(5_000 * MS), later)
    assert one is not None
    assert other is not None
    assert later.seconds > at_once.seconds + 4
    assert (other.seconds, other.loop_s) == pytest.approx((one.seconds, one.loop_s))
    assert other.steps[-1][2] - one.steps[-1][2] == pytest.approx(5_000 * MS, abs=2)


def test_samples_of_iterable_datasets_are_not_counted_twice() -> None:
    """Each shard counts its positions from 0, so several samples have the same one."""
    trace = make_trace(batches=20, load_time=lambda _, mean_ms: int(mean_ms * MS))
    spans = tuple(span if span.lane == LOOP else span._replace(position=span.position // 4) for span in trace.spans)
    one, other = serial(trace, windows(trace)[0]), serial(replace(trace, spans=spans), windows(trace)[0])
    assert one is not None
    assert other is not None

    assert other.seconds == pytest.approx(one.seconds, rel=0.05)


def test_no_gain_from_workers_is_reported() -> None:
    """Start-up that takes longer than all the work is not hidden."""
    trace = make_trace(batches=2, start_ms=5_000)
    in_a_row = serial(trace, windows(trace)[0])

    assert in_a_row is not None
    assert in_a_row.factor < 1
    assert in_a_row.text == "as fast as with workers"


def test_a_run_without_workers_is_not_compared_with_itself() -> None:
    """It was sequential."""
    trace = make_trace(workers=0, kind="inline")

    assert serial(trace, windows(trace)[0]) is None
    assert serial(with_statistics(make_trace(), sample_count=0), windows(make_trace())[0]) is None


def test_lanes_are_workers_by_number_then_the_loop() -> None:
    """Also workers with nothing but a mark; and lanes do not overlap."""
    trace = make_trace(workers=3, marks=(Mark(5, 7, "death", ""),))
    tops = list(lane_tops(trace, has_serial=True).values())

    assert list(lane_names(trace).values()) == ["worker 0", "worker 1", "worker 2", "worker 7", "training loop"]
    assert all(above + 1 <= below for above, below in zip([0, *tops], tops, strict=False))
    assert list(lane_names(make_trace(workers=0, kind="inline"))) == [0, LOOP]


def test_faults_are_kept_among_too_many_marks() -> None:
    """A thousand epochs do not hide one death."""
    marks = [Mark(at * MS, LOOP, "epoch", "") for at in range(1, 100)]
    trace = make_trace(marks=(*marks, Mark(300 * MS, 1, "death", "gone")))
    chosen, left_out = marks_in(trace, windows(trace)[0], most=3)

    assert [mark.kind for mark in chosen] == ["epoch", "epoch", "death"]
    assert left_out == 97
