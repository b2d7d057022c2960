"""What a picture of a run shows."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infeed.metrics.lanes import DrawnSpan, Window, lane_names, lane_tops, marks_in, pieces, serial, whole, windows
from infeed.metrics.statistics import LOOP, Mark, Span, Trace
from tests.metrics.traces import MS, empty_trace, faulty_trace, make_trace, with_statistics


def run_of(lengths: list[tuple[int, int]]) -> list[Span]:
    """Spans of one lane, from how long each was and how long the pause before it."""
    spans, at = [], 0
    for position, (pause, length) in enumerate(lengths):
        spans.append(Span(0, "load", at + pause, at + pause + length, 0, position, position, 1))
        at += pause + length
    return spans


LENGTHS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**6)), min_size=1, max_size=300)


@given(LENGTHS, st.integers(1, 100))
def test_no_time_and_no_sample_is_lost_in_pieces(lengths: list[tuple[int, int]], most: int) -> None:
    """However coarse they are: they are in order, do not cross, and hold all work."""
    spans = run_of(lengths)
    window = Window(0, spans[-1].end_ns, "")
    found = pieces(spans, window, most=most)

    assert sum(piece.busy_ns for piece in found) == sum(span.end_ns - span.begin_ns for span in spans)
    assert sum(piece.size for piece in found) == len(spans)
    assert all(before.end_ns <= after.begin_ns for before, after in pairwise(found))
    assert len(found) <= max(most, 4)


def test_what_can_be_seen_is_not_put_together() -> None:
    """Spans that are wide enough stay as they are, also when they touch."""
    spans = run_of([(0, 5)] * 600)

    assert [(piece.begin_ns, piece.end_ns) for piece in pieces(spans, Window(0, 3000, ""))] == [
        (span.begin_ns, span.end_ns) for span in spans
    ]


def test_a_piece_with_gaps_is_less_dense() -> None:
    """A worker that works half of the time does not look busy."""
    found = pieces(run_of([(1, 1)] * 100_000), Window(0, 200_000, ""))

    assert len(found) < 2000
    assert all(0.45 < piece.density < 0.55 for piece in found if piece.span_count > 20)


def test_one_sees_when_a_worker_becomes_slower() -> None:
    """Short spans are not all put into one piece, though they all lie close together."""
    found = pieces(run_of([(1, 9)] * 10_000 + [(9, 1)] * 10_000), Window(0, 200_000, ""))

    assert {round(piece.density, 1) for piece in found[: len(found) // 3]} == {0.9}
    assert {round(piece.density, 1) for piece in found[-len(found) // 3 :]} == {0.1}


def test_spans_are_cut_at_the_ends_of_a_window() -> None:
    """What began before is shown from the window's beginning on."""
    (piece,) = pieces(run_of([(0, 100)]), Window(30, 60, ""))

    assert piece == DrawnSpan(0, "load", 30, 60, 30, 0, 0, 0, 1, 1)


def test_a_short_run_is_shown_whole() -> None:
    """There is room for all of it."""
    trace = make_trace(batches=24)

    assert windows(trace) == (whole(trace),)


def test_of_a_long_run_the_beginning_and_a_later_part_are_shown() -> None:
    """They do not overlap, and both are small parts."""
    trace = make_trace(batches=500)
    everything = whole(trace)
    assert everything is not None
    beginning, later = windows(trace)

    assert beginning.begin_ns == everything.begin_ns
    assert beginning.end_ns <= later.begin_ns < later.end_ns <= everything.end_ns
    assert beginning.seconds + later.seconds < everything.seconds / 5


def test_the_later_part_is_where_something_went_wrong() -> None:
    """That is what one looks for."""
    trace = faulty_trace()

    assert windows(trace)[-1].has(trace.marks[0].at_ns)


def test_a_beginning_that_was_not_kept_is_not_shown() -> None:
    """Only what is there can be drawn."""
    trace = replace(make_trace(batches=500), lost_span_count=3)

    assert [window.title for window in windows(trace)] == ["the end"]


def cut(trace: Trace, since: dict[int, int]) -> Trace:
    """What is left when spans of lanes that began before a time were not kept."""
    kept = tuple(span for span in trace.spans if span.begin_ns >= since.get(span.lane, 0))
    return replace(trace, spans=kept, lost_span_count=len(trace.spans) - len(kept))


def test_a_part_is_shown_of_which_everything_was_kept() -> None:
    """Of workers less time is kept than of the loop, and not the same of each; none of their lanes is blank."""
    trace = make_trace(batches=500)
    end_ns = trace.spans[-1].end_ns
    since = {0: end_ns * 7 // 10, 1: end_ns * 8 // 10, 2: end_ns * 75 // 100, 3: end_ns * 8 // 10, LOOP: end_ns // 3}
    kept = cut(trace, since)
    (window,) = windows(kept)

    assert window.begin_ns >= max(since.values())
    assert {piece.lane for piece in pieces(kept.spans, window)} == set(since)
    assert serial(kept, window) == serial(trace, window)


def test_a_part_that_was_kept_of_a_few_long_batches_is_shown() -> None:
    """Also where all batches would have found room."""
    trace = make_trace(batches=40)
    half_ns = trace.spans[-1].end_ns // 2
    (window,) = windows(cut(trace, dict.fromkeys(range(4), half_ns)))

    assert window.begin_ns >= half_ns
    assert window.title == "the end"


def test_a_worker_that_came_late_has_lost_nothing() -> None:
    """Its spans begin with its start, however late; the window is not put there for that."""
    trace = make_trace(batches=500)
    end_ns = trace.spans[-1].end_ns
    since = {0: end_ns // 5, 1: end_ns // 5, 2: end_ns // 5}
    before, after = cut(trace, {**since, 3: end_ns // 5}), cut(trace, {**since, 3: end_ns * 9 // 10})
    start = Span(3, "start", end_ns * 9 // 10 - 5, end_ns * 9 // 10, 0, 0, None, 0)
    late = replace(after, spans=tuple(sorted((*after.spans, start), key=lambda span: (span.lane, span.begin_ns))))

    assert [window[:2] for window in windows(late)] == [window[:2] for window in windows(before)]


def test_a_worker_that_had_nothing_to_do_does_not_empty_the_picture() -> None:
    """Its only span is the last of all; the latest batches are shown then."""
    trace = make_trace(batches=500)
    (window,) = windows(cut(trace, {0: trace.spans[-1].begin_ns - 20 * MS}))

    assert window.end_ns == trace.spans[-1].end_ns
    assert window.seconds > 0.1


def test_a_fault_is_not_looked_for_if_spans_were_not_kept() -> None:
    """Only the end of the run is complete."""
    trace = faulty_trace()
    (window,) = windows(cut(trace, {0: trace.marks[1].at_ns + 300 * MS}))

    assert window.title == "the end"


def test_a_loop_that_does_nothing_is_shown_in_parts_too() -> None:
    """It only waits, and nothing is known of its own work."""
    trace = make_trace(batches=500)
    idle = replace(trace, spans=tuple(span for span in trace.spans if span.kind != "away"))

    assert [window.title for window in windows(idle)] == ["the beginning", "steady state"]
    assert all(serial(idle, window) for window in windows(idle))


def test_nothing_is_shown_of_nothing() -> None:
    """No spans, no window."""
    assert windows(empty_trace()) == ()
    assert whole(empty_trace()) is None


def test_one_after_another_takes_as_long_as_all_loading_and_all_of_the_loops_work() -> None:
    """Writing into shared memory is not counted: a loader without workers does not do it."""
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


def test_the_work_in_a_row_is_loaded_before_it_is_worked_on() -> None:
    """Also where the loop's work is known as what it did before it asked for the next batch."""
    trace = make_trace(batches=20)
    spans = tuple(span._replace(position=span.position + 1) if span.kind == "away" else span for span in trace.spans)
    for one in (trace, replace(trace, spans=spans)):
        in_a_row = serial(one, windows(one)[0])
        assert in_a_row is not None
        assert [kind for kind, _, _ in in_a_row.steps[:39]] == ["load", "away"] * 19 + ["load"]


def test_what_workers_load_after_the_loop_is_not_compared() -> None:
    """The next epoch's batches, loaded ahead: the same is shown and said however late somebody asks."""
    trace = make_trace(batches=20)
    end_ns = trace.spans[-1].end_ns
    ahead = [Span(0, "load", end_ns + at * MS, end_ns + (at + 90) * MS, 1, at, at, 2) for at in range(0, 900, 100)]
    after = replace(trace, spans=(*ahead, *trace.spans))

    assert windows(after) == windows(trace)
    assert serial(after, windows(after)[0]) == serial(trace, windows(trace)[0])


def test_time_between_epochs_is_not_compared() -> None:
    """A long evaluation makes workers neither better nor worse; in the picture both pause."""
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


def test_samples_of_streams_are_not_counted_several_times() -> None:
    """Each stream counts its positions from 0 on, so that several samples have the same."""
    trace = make_trace(batches=20, load_time=lambda _, mean_ms: int(mean_ms * MS))
    spans = tuple(span if span.lane == LOOP else span._replace(position=span.position // 4) for span in trace.spans)
    one, other = serial(trace, windows(trace)[0]), serial(replace(trace, spans=spans), windows(trace)[0])
    assert one is not None
    assert other is not None

    assert other.seconds == pytest.approx(one.seconds, rel=0.05)


def test_where_workers_gain_nothing_it_is_said_so() -> None:
    """A start that takes longer than all the work is not hidden."""
    trace = make_trace(batches=2, start_ms=5_000)
    in_a_row = serial(trace, windows(trace)[0])

    assert in_a_row is not None
    assert in_a_row.factor < 1
    assert in_a_row.text == "as fast as with workers"


def test_a_run_without_workers_is_not_compared_with_itself() -> None:
    """It was one after another."""
    trace = make_trace(workers=0, kind="inline")

    assert serial(trace, windows(trace)[0]) is None
    assert serial(with_statistics(make_trace(), sample_count=0), windows(make_trace())[0]) is None


def test_lanes_are_workers_by_number_then_the_loop() -> None:
    """Also those of which only a mark is known; and they do not lie on each other."""
    trace = make_trace(workers=3, marks=(Mark(5, 7, "death", ""),))
    tops = list(lane_tops(trace, has_serial=True).values())

    assert list(lane_names(trace).values()) == ["worker 0", "worker 1", "worker 2", "worker 7", "training loop"]
    assert all(above + 1 <= below for above, below in zip([0, *tops], tops, strict=False))
    assert list(lane_names(make_trace(workers=0, kind="inline"))) == [0, LOOP]


def test_of_too_many_marks_the_faults_are_kept() -> None:
    """A thousand epochs do not hide one death."""
    marks = [Mark(at * MS, LOOP, "epoch", "") for at in range(1, 100)]
    trace = make_trace(marks=(*marks, Mark(300 * MS, 1, "death", "gone")))
    chosen, left_out = marks_in(trace, windows(trace)[0], most=3)

    assert [mark.kind for mark in chosen] == ["epoch", "epoch", "death"]
    assert left_out == 97
