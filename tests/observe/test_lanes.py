"""What a picture of a run shows."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infeed.observe.lanes import Piece, Window, lane_names, lane_tops, marks_in, pieces, serial, whole, windows
from infeed.observe.records import LOOP, Mark, Span
from tests.observe.traces import MS, empty_trace, faulty_trace, make_trace, with_statistics


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

    assert piece == Piece(0, "load", 30, 60, 30, 0, 0, 0, 1, 1)


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

    assert [window.title for window in windows(trace)] == ["later"]


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
    assert in_a_row.text == f"{in_a_row.factor:.1f} times as long \u25b8"
    assert len(in_a_row.steps) == 40
    assert all(before[2] == after[1] for before, after in pairwise(in_a_row.steps))


def test_where_workers_gain_nothing_it_is_said_so() -> None:
    """A start that takes longer than all the work is not hidden."""
    trace = make_trace(batches=2, start_ms=5_000)
    in_a_row = serial(trace, windows(trace)[0])

    assert in_a_row is not None
    assert in_a_row.factor < 1
    assert in_a_row.text == "no longer than with workers"


def test_a_run_without_workers_is_not_compared_with_itself() -> None:
    """It was one after another."""
    trace = make_trace(workers=0, kind="inline")

    assert serial(trace, windows(trace)[0]) is None
    assert serial(with_statistics(make_trace(), sample_count=0), windows(make_trace())[0]) is None


def test_lanes_are_workers_by_number_then_the_loop() -> None:
    """Also those of which only a mark is known; and they do not lie on each other."""
    trace = make_trace(workers=3, marks=(Mark(5, 7, "death", ""),))
    tops = list(lane_tops(trace, has_serial=True).values())

    assert list(lane_names(trace).values()) == ["worker 0", "worker 1", "worker 2", "worker 7", "your loop"]
    assert all(above + 1 <= below for above, below in zip([0, *tops], tops, strict=False))
    assert list(lane_names(make_trace(workers=0, kind="inline"))) == [0, LOOP]


def test_of_too_many_marks_the_faults_are_kept() -> None:
    """A thousand epochs do not hide one death."""
    marks = [Mark(at * MS, LOOP, "epoch", "") for at in range(1, 100)]
    trace = make_trace(marks=(*marks, Mark(300 * MS, 1, "death", "gone")))
    chosen, left_out = marks_in(trace, windows(trace)[0], most=3)

    assert [mark.kind for mark in chosen] == ["epoch", "epoch", "death"]
    assert left_out == 97
