"""The progress of an epoch: every step counts exactly once, in any order, with failures and interruptions."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infeed
from infeed.collate.layout import infer_layout
from infeed.engine.planning import IndexedFeed, PlannedBatch
from infeed.engine.progress import Loss, Progress, Record
from infeed.plan.batches import ordered_batches, sampled_batches, user_batches
from infeed.plan.order import SequentialOrder
from infeed.plan.sharding import Cut, Shard
from infeed.plan.state import Cursor, Identity, ShareCursor, StreamCursor, read_state, write_state
from infeed.scheduler.messages import WorkerId
from infeed.testing import FaultyDataset
from tests.helpers import Stream

LAYOUT = infer_layout([0], [0])


def step(number: int, *, size: int = 4, elapsed_ns: int = 0) -> Record:
    """Batch ``number`` of an epoch of full batches, loaded by worker 0."""
    record = Record(PlannedBatch(0, number * size, size, 1, number, (number + 1) * size, list(range(size))))
    record.add_rows(WorkerId(0), 0, size, elapsed_ns, LAYOUT, [])
    return record


def shard_step(worker: int, number: int, rows: int = 4, state: Any = None, *, size: int = 4) -> Record:
    """A batch of a shard of an iterable dataset, step ``number`` of the epoch, with this number of rows."""
    record = Record(PlannedBatch(0, 0, size, 1, number, 0, None, WorkerId(worker)))
    record.add_rows(WorkerId(worker), 0, rows, 0, LAYOUT, [])
    record.keep_state(state)
    return record


def given_steps(progress: Progress, *numbers: int) -> Cursor:
    for number in numbers:
        progress.delivered(step(number), 0)
    return progress.cursor()


# --- in order and out of order


def test_initial_progress_is_at_its_start() -> None:
    """Before anything was delivered."""
    for start in (Cursor(), Cursor(3, 2, 8), Cursor(3, 2, 8, (4, 5)), Cursor(1, 2, 8, (2, 3))):
        assert Progress(start).cursor() == start


def test_in_order_each_batch_is_one_step() -> None:
    """The position is where the last batch ended."""
    assert given_steps(Progress(Cursor(5)), 0, 1, 2) == Cursor(5, 3, 12)


def test_early_batches_are_kept_separately_until_the_gap_is_closed() -> None:
    """The position never passes a missing batch."""
    progress = Progress(Cursor())
    assert given_steps(progress, 2) == Cursor(0, 0, 0, (2,))
    assert given_steps(progress, 1) == Cursor(0, 0, 0, (1, 2))
    assert given_steps(progress, 4) == Cursor(0, 0, 0, (1, 2, 4))
    assert given_steps(progress, 0) == Cursor(0, 3, 12, (4,))
    assert given_steps(progress, 3) == Cursor(0, 5, 20)


def test_batches_delivered_early_in_an_earlier_run_are_passed_with_the_next_batch() -> None:
    """Before that, their end is unknown."""
    progress = Progress(Cursor(0, 1, 4, (2, 3, 6)))
    assert given_steps(progress, 1) == Cursor(0, 2, 8, (2, 3, 6))
    assert given_steps(progress, 5) == Cursor(0, 2, 8, (2, 3, 5, 6))
    assert given_steps(progress, 4) == Cursor(0, 6, 24, (6,))
    assert given_steps(progress, 7) == Cursor(0, 8, 32)


def test_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    """Whatever was still kept separately."""
    progress = Progress(Cursor(4, 1, 4, (3,)))
    given_steps(progress, 1)
    progress.end()
    assert progress.cursor() == Cursor(5)


# --- failures


def test_a_failed_batch_is_pending_until_the_loop_continues_after_it() -> None:
    """If the run ends with the exception, the next run tries it again."""
    progress = Progress(Cursor())
    given_steps(progress, 0)
    progress.failed(step(1))
    assert progress.cursor() == Cursor(0, 1, 4)
    assert given_steps(progress, 2) == Cursor(0, 3, 12)


def test_several_failed_batches_are_passed_when_the_loop_continues() -> None:
    """Otherwise the state would stay at the first of them for the rest of the epoch, and grow with every batch."""
    progress = Progress(Cursor())
    given_steps(progress, 0)
    progress.failed(step(1))
    progress.failed(step(2))
    assert given_steps(progress, 3) == Cursor(0, 4, 16)


def test_the_last_of_several_failed_batches_is_pending() -> None:
    """The training loop continued after the first."""
    progress = Progress(Cursor())
    progress.failed(step(0))
    progress.failed(step(1))
    assert progress.cursor() == Cursor(0, 1, 4)


def test_a_failed_batch_that_was_early_is_no_gap_later() -> None:
    """Also out of order."""
    progress = Progress(Cursor())
    progress.failed(step(2))
    assert progress.cursor() == Cursor()
    assert given_steps(progress, 0) == Cursor(0, 1, 4, (2,))
    assert given_steps(progress, 1) == Cursor(0, 3, 12)


# --- recent batches


def test_recent_batches_are_remembered_and_old_ones_are_dropped() -> None:
    """Also failed ones; the latest information about a step wins."""
    progress = Progress(Cursor())
    record = step(0, elapsed_ns=1000)
    for text in ("worker 0 was killed", "worker 1 was killed"):
        record.add_death(Loss(text, None))
    progress.failed(record)
    past = progress.find(0)
    assert past is not None
    assert past.attempts == 3
    assert past.parts == [(WorkerId(0), 0, 4, 1000)]
    for number in range(1, 1000):
        progress.delivered(step(number), 0)
    assert progress.find(0) is None
    assert progress.find(1000) is None
    latest = progress.find(999)
    assert latest is not None
    assert latest.attempts == 1


# --- streams


def test_each_shard_is_counted_separately() -> None:
    """Rows, the dataset's own state, whether it is exhausted, and whose turn it is."""
    progress = Progress(Cursor())
    progress.delivered(shard_step(0, 0, state={"dataset": 4}), 2)
    assert progress.cursor().stream == StreamCursor(1, (ShareCursor(4, False, {"dataset": 4}), ShareCursor()))
    progress.delivered(shard_step(1, 1, 3), 2)
    progress.delivered(shard_step(0, 2, state={"dataset": 8}), 2)
    assert progress.cursor() == Cursor(
        0, 3, 11, (), StreamCursor(1, (ShareCursor(8, False, {"dataset": 8}), ShareCursor(3, True)))
    )


def test_the_count_of_an_iterable_dataset_continues_after_resume() -> None:
    """Exhausted shards keep their values."""
    start = Cursor(2, 3, 11, (), StreamCursor(1, (ShareCursor(8), ShareCursor(3, True, "x"))))
    progress = Progress(start)
    assert progress.cursor() == start
    progress.delivered(shard_step(0, 4), 2)
    assert progress.cursor() == Cursor(2, 5, 15, (), StreamCursor(1, (ShareCursor(12), ShareCursor(3, True, "x"))))


def test_an_iterable_dataset_read_by_one_worker_has_one_shard() -> None:
    """Whatever was assumed before its first batch."""
    progress = Progress(Cursor())
    progress.delivered(shard_step(0, 0), 1)
    assert progress.cursor().stream == StreamCursor(1, (ShareCursor(4),))


def test_little_is_remembered_of_an_iterable_dataset() -> None:
    """Its own state may be large, such as a buffer: one per shard is kept, not one per batch."""
    tracemalloc.start()
    try:
        progress = Progress(Cursor())
        for number in range(256):
            progress.delivered(shard_step(0, number, state={"dataset": bytearray(100_000)}), 1)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2_000_000


def refuse_five(samples: list[int]) -> list[int]:
    if 5 in samples:
        raise ValueError("five")
    return samples


def test_a_batch_of_an_iterable_dataset_that_could_not_be_collated_is_passed() -> None:
    """Its elements were read: neither they nor later ones are repeated in the next run."""
    with infeed.DataLoader(Stream(40), batch_size=4, collate_fn=refuse_five, seed=3) as loader:
        iterator = iter(loader)
        assert next(iterator) == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="five"):
            next(iterator)
        assert next(iterator) == [8, 9, 10, 11]
        loader.load_state_dict(loader.state_dict())
        assert next(iter(loader)) == [12, 13, 14, 15]


def test_a_batch_of_an_iterable_dataset_that_could_not_be_collated_is_pending() -> None:
    """If the run ended with its exception."""
    with infeed.DataLoader(Stream(40), batch_size=4, collate_fn=refuse_five, seed=3) as loader:
        iterator = iter(loader)
        assert next(iterator) == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="five"):
            next(iterator)
        loader.load_state_dict(loader.state_dict())
        iterator = iter(loader)
        with pytest.raises(ValueError, match="five"):
            next(iterator)
        assert next(iterator) == [8, 9, 10, 11]


def test_several_bad_batches_in_a_row_leave_a_small_state() -> None:
    """With a real loader: position and step advance, nothing is kept separately."""
    with infeed.DataLoader(FaultyDataset(40, [5, 9, 13]), batch_size=4, seed=3) as loader:
        iterator = iter(loader)
        next(iterator)
        for _ in range(3):
            with pytest.raises(ValueError, match="bad"):
                next(iterator)
        next(iterator)
        state = loader.state_dict()
        assert (state["step"], state["position"]) == (5, 20)
        assert "ahead" not in state


# --- random orders and interruptions


CUTS = st.builds(
    lambda size, world, rank, pad, drop: Cut(size, drop, Shard(rank % world, world), pad),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)


def identity(cut: Cut, length: int) -> Identity:
    return Identity(
        order="sequential",
        length=length,
        num_samples=None,
        seed=0,
        is_seed_given=True,
        batch_size=cut.batch_size,
        world_size=cut.shard.world_size,
        worker_count=1,
    )


def feed(kind: str, cursor: Cursor, cut: Cut, length: int) -> IndexedFeed:
    if kind == "ordered":
        return IndexedFeed(cursor, ordered_batches(SequentialOrder(length), cut, cursor.position), 2)
    if kind == "sampled":
        return IndexedFeed(cursor, sampled_batches(range(length), cut, cursor.position), 2)
    batches = [list(range(first, min(first + 1 + first % 3, length))) for first in range(0, length, 3)]
    return IndexedFeed(cursor, user_batches(batches, cut, cursor.position), 2)


def taken(source: IndexedFeed) -> list[PlannedBatch]:
    batches = []
    while (planned := source.take()) is not None:
        batches.append(planned)
    return batches


def loaded(planned: PlannedBatch) -> Record:
    record = Record(planned)
    record.add_rows(WorkerId(0), 0, planned.row_count, 0, LAYOUT, [])
    return record


def rows(planned: PlannedBatch) -> tuple[int, ...]:
    assert planned.indices is not None
    return tuple(int(index) for index in planned.indices)


@given(kind=st.sampled_from(["ordered", "sampled", "given"]), cut=CUTS, length=st.integers(0, 60), data=st.data())
@settings(max_examples=200)
def test_every_step_is_delivered_exactly_once_despite_interruptions(
    kind: str, cut: Cut, length: int, data: st.DataObject
) -> None:
    """In any order within a window, left after any number of batches, resumed any number of times (P2)."""
    whole = taken(feed(kind, Cursor(), cut, length))
    expected = {planned.step: rows(planned) for planned in whole}
    seen: list[tuple[int, tuple[int, ...]]] = []
    cursor = Cursor()
    for _ in range(data.draw(st.integers(0, 4), label="interruptions")):
        progress = Progress(cursor)
        in_flight = taken(feed(kind, cursor, cut, length))
        for _ in range(data.draw(st.integers(0, len(in_flight)), label="batches of this run")):
            planned = in_flight.pop(data.draw(st.integers(0, min(4, len(in_flight) - 1)), label="which of the window"))
            progress.delivered(loaded(planned), 0)
            seen.append((planned.step, rows(planned)))
        state = json.loads(json.dumps(write_state(progress.cursor(), identity(cut, length))))
        cursor, _ = read_state(state, identity(cut, length))
    rest = taken(feed(kind, cursor, cut, length))
    seen += [(planned.step, rows(planned)) for planned in rest]

    assert Counter(seen) == Counter(expected.items())


@given(cut=CUTS, length=st.integers(0, 60), data=st.data())
@settings(max_examples=100)
def test_in_order_the_state_has_nothing_ahead(cut: Cut, length: int, data: st.DataObject) -> None:
    """A few numbers at every step; the position is that of the whole step, of all ranks."""
    cursor = Cursor()
    for planned in taken(feed("ordered", cursor, cut, length)):
        progress = Progress(cursor)
        progress.delivered(loaded(planned), 0)
        cursor = progress.cursor()
        assert cursor == Cursor(0, planned.step + 1, planned.stop)
        if data.draw(st.booleans(), label="resumed here"):
            assert [p.step for p in taken(feed("ordered", cursor, cut, length))][:1] in ([], [planned.step + 1])


@given(start=st.integers(1, 3), then=st.integers(1, 4), size=st.integers(1, 4), count=st.integers(0, 9), at=st.integers(0, 9))
@settings(max_examples=150)
def test_batches_of_a_batch_sampler_are_delivered_once_if_the_number_of_ranks_changes(
    start: int, then: int, size: int, count: int, at: int
) -> None:
    """The first ranks reached a position; the others continue there, with no batch repeated or omitted."""
    batches = [[number * size + row for row in range(size)] for number in range(count * start)]

    def planned(world: int, rank: int, position: int) -> list[Any]:
        return [list(plan.indices) for plan in user_batches(batches, Cut(1, shard=Shard(rank, world)), position)]

    at = min(at, count)
    seen = [batch for rank in range(start) for batch in planned(start, rank, 0)[:at]]
    ranks = [planned(then, rank, at * start * size) for rank in range(then)]
    if len({len(rank) for rank in ranks}) == 1:
        seen += [batch for rank in ranks for batch in rank]
    assert {batch[0] for batch in seen} == {batch[0] for batch in batches}
    assert len(seen) <= len(batches) + then - 1  # What is missing in the last step is repeated.


def test_a_batch_is_found_while_another_thread_takes_batches() -> None:
    progress = Progress(Cursor())
    for number in range(3):
        progress.delivered(step(number), 0)
    sought = progress._recent[0].plan

    class Taking(NamedTuple):
        """A plan that is called while the training loop takes the next batch."""

        number: int

        @property
        def step(self) -> int:
            progress.delivered(step(self.number + 10), 0)
            return self.number

    for number in (1, 2):
        progress._recent[number].plan = Taking(number)  # type: ignore[assignment]
    past = progress.find(0)
    assert past is not None
    assert past.plan is sought
