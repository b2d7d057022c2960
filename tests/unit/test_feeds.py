"""The planned batches of one epoch: by index, or from the shards of an iterable dataset."""

from collections.abc import Iterator

import pytest

from infeed.engine.planning import IndexedFeed, StreamFeed, StreamShares
from infeed.plan.batches import BatchPlan, Lookahead, sampled_batches
from infeed.plan.sharding import Cut
from infeed.plan.state import Cursor, ShareCursor, StreamCursor
from infeed.scheduler.messages import WorkerId

W0, W1, W2 = map(WorkerId, range(3))


def test_an_indexed_feed_yields_the_batches_of_the_plan() -> None:
    """With position and grains, and then None."""
    feed = IndexedFeed(Cursor(3), sampled_batches(range(5), Cut(2)), grain_size=1)

    taken = [feed.take(), feed.take(), feed.take()]

    assert [(b.epoch, b.first_position, b.row_count, b.grain_count) for b in taken if b] == [
        (3, 0, 2, 2),
        (3, 2, 2, 2),
        (3, 4, 1, 1),
    ]
    assert not feed.is_exhausted
    assert feed.take() is None
    assert feed.is_exhausted
    assert feed.take() is None
    assert feed.error is None


def test_an_exception_of_the_sampler_is_kept_until_earlier_batches_are_delivered() -> None:
    """Prefetching reads the sampler early; its error must not be raised early, and only once."""

    def broken() -> Iterator[BatchPlan]:
        yield BatchPlan([1], 0, 1)
        raise KeyError("sampler")

    feed = IndexedFeed(Cursor(), broken(), grain_size=1)

    assert feed.take() is not None
    assert feed.take() is None
    assert not feed.is_exhausted
    assert isinstance(feed.take_error(), KeyError)
    assert feed.take() is None
    assert feed.is_exhausted
    assert feed.error is None


def counted(count: int, asked: list[int]) -> Iterator[BatchPlan]:
    """Batches of one; records when each is requested."""
    for number in range(count):
        asked.append(number)
        yield BatchPlan([number], number, number + 1)
    asked.append(count)


def test_a_sampler_is_read_a_fixed_number_of_batches_ahead() -> None:
    """Exactly this number beyond the delivered batches, whatever the room, also at its end."""
    asked: list[int] = []
    feed = IndexedFeed(Cursor(), counted(4, asked), 1, Lookahead(2, 0))
    feed.prime()
    counts = [len(asked)]
    assert [feed.take() is not None for _ in range(3)] == [True, True, False]
    assert not feed.is_exhausted
    for _ in range(4):
        feed.delivered()
        counts.append(len(asked))
    assert counts == [2, 3, 4, 5, 5]
    assert [feed.take() is not None for _ in range(3)] == [True, True, False]
    assert feed.is_exhausted


def test_known_batches_are_taken_without_limit() -> None:
    """Only later ones wait until enough is delivered."""
    asked: list[int] = []
    feed = IndexedFeed(Cursor(), counted(4, asked), 1, Lookahead(1, 3))
    feed.prime()
    assert [feed.take() is not None for _ in range(4)] == [True, True, True, False]
    feed.delivered()
    feed.delivered()
    assert len(asked) == 3
    feed.delivered()
    assert len(asked) == 4
    assert feed.take() is not None


def test_exceptions_count_as_delivered() -> None:
    """Otherwise a sampler that raises often would not be read again."""
    failures: list[BatchPlan | Exception] = [KeyError(), KeyError(), BatchPlan([1], 0, 1)]
    feed = IndexedFeed(Cursor(), iter(failures), 1, Lookahead(1, 0))
    feed.prime()
    for _ in range(2):
        assert feed.take() is None
        assert isinstance(feed.take_error(), KeyError)
    assert feed.take() is not None


def workers_of(feed: StreamFeed, count: int) -> list[WorkerId | None]:
    return [planned.worker if (planned := feed.take()) else None for _ in range(count)]


def test_an_iterable_dataset_with_one_worker_is_read_by_it() -> None:
    """There is nothing to decide."""
    feed = StreamFeed(Cursor(0), 4, StreamShares(1))
    first, second = feed.take(), feed.take()

    assert first is not None
    assert second is not None
    assert [(b.worker, b.first_position, b.row_count, b.grain_count, b.indices) for b in (first, second)] == [
        (W0, 0, 4, 1, None),
        (W0, 4, 4, 1, None),
    ]


def test_only_the_first_batch_is_requested_until_it_arrives() -> None:
    """Until then it is unknown which workers will read."""
    feed = StreamFeed(Cursor(0), 4, StreamShares(3))

    assert workers_of(feed, 3) == [W0, None, None]
    assert not feed.is_exhausted


def test_an_iterable_dataset_that_does_not_shard_itself_is_read_by_one_worker() -> None:
    """Otherwise each element would be delivered once per worker."""
    shares = StreamShares(3)
    feed = StreamFeed(Cursor(0), 4, shares)
    feed.take()

    shares.decide(shards_itself=False)

    assert workers_of(feed, 3) == [W0, W0, W0]


def test_an_iterable_dataset_that_shards_itself_is_read_by_all_in_turn() -> None:
    """Workers 0, 1, 2, 0, 1, 2; each shard has its own positions."""
    shares = StreamShares(3)
    feed = StreamFeed(Cursor(0), 4, shares)
    feed.take()
    shares.decide(shards_itself=True)

    assert workers_of(feed, 5) == [W1, W2, W0, W1, W2]
    planned = feed.take()
    assert planned is not None
    assert (planned.worker, planned.first_position) == (W0, 8)


def test_the_decision_is_permanent() -> None:
    """The first batch of the first epoch decides for this loader."""
    shares = StreamShares(2)
    shares.decide(shards_itself=True)
    shares.decide(shards_itself=False)

    assert shares.is_known
    assert not shares.is_alone
    assert workers_of(StreamFeed(Cursor(1), 4, shares), 3) == [W0, W1, W0]


def test_an_exhausted_shard_is_skipped() -> None:
    """The others continue in turn, and the epoch ends with the last."""
    shares = StreamShares(3)
    shares.decide(shards_itself=True)
    feed = StreamFeed(Cursor(0), 4, shares)
    assert workers_of(feed, 3) == [W0, W1, W2]

    feed.loaded(W1, 2, 4)
    assert workers_of(feed, 4) == [W0, W2, W0, W2]

    feed.loaded(W0, 0, 4)
    feed.loaded(W2, 3, 4)
    assert workers_of(feed, 1) == [None]
    assert feed.is_exhausted


def test_a_full_batch_does_not_end_a_shard() -> None:
    """Only an incomplete one does."""
    feed = StreamFeed(Cursor(0), 4, StreamShares(1))
    feed.take()
    feed.loaded(W0, 4, 4)

    assert feed.take() is not None


def test_loaded_rows_are_counted_per_shard() -> None:
    """A worker that replaces a dead one skips them."""
    shares = StreamShares(2)
    shares.decide(shards_itself=True)
    feed = StreamFeed(Cursor(0), 4, shares)
    feed.take()
    feed.take()
    feed.loaded(W1, 4, 4)

    assert [feed.open_message(worker).skip for worker in (W0, W1, W2)] == [0, 4, 0]


def test_a_shard_is_opened_once_per_epoch() -> None:
    """The worker calls `iter` when its first batch is planned."""
    feed = StreamFeed(Cursor(0), 4, StreamShares(1))
    feed.take()

    assert [feed.opening(W0), feed.opening(W0)] == [True, False]


@pytest.mark.parametrize("rows", [0, 3], ids=["empty", "short"])
def test_an_iterable_dataset_that_ends_with_its_first_batch_is_over_for_all(rows: int) -> None:
    """If it does not shard itself, no other worker reads it."""
    shares = StreamShares(2)
    feed = StreamFeed(Cursor(0), 4, shares)
    feed.take()
    shares.decide(shards_itself=False)
    feed.loaded(W0, rows, 4)

    assert feed.take() is None
    assert feed.is_exhausted


def test_steps_are_numbered_from_the_cursor() -> None:
    """A resumed epoch continues the count."""
    feed = IndexedFeed(Cursor(1, 4, 8), sampled_batches(range(12), Cut(2), 8), grain_size=1)

    assert [(b.step, b.first_position, b.stop) for b in iter(feed.take, None)] == [(4, 8, 10), (5, 10, 12)]


def test_steps_delivered_out_of_order_are_skipped() -> None:
    """They were delivered before the interruption; those between them were not."""
    feed = IndexedFeed(Cursor(0, 1, 2, ahead=(1, 3)), sampled_batches(range(12), Cut(2), 2), grain_size=1)

    assert [b.step for b in iter(feed.take, None)] == [2, 4, 5]


def test_a_resumed_shard_continues_after_the_last_delivered_element() -> None:
    """From the dataset's own state, or by reading again; an exhausted shard stays exhausted."""
    shares = (ShareCursor(8, state={"dataset": 3}), ShareCursor(4), ShareCursor(2, is_ended=True))
    feed = StreamFeed(Cursor(0, 4, 14, stream=StreamCursor(1, shares)), 4, StreamShares(3))

    assert workers_of(feed, 3) == [W1, W0, W1]
    assert [(m.state_rows, m.skip, m.state) for m in map(feed.open_message, (W0, W1))] == [(8, 0, {"dataset": 3}), (0, 4, None)]


def test_an_iterable_dataset_started_by_one_worker_is_finished_by_one() -> None:
    """Also if the dataset would shard itself among the current workers."""
    shares = StreamShares(3)
    shares.decide(shards_itself=True)
    feed = StreamFeed(Cursor(0, 1, 4, stream=StreamCursor(1, (ShareCursor(4),))), 4, shares)

    assert workers_of(feed, 3) == [W0, W0, W0]
    assert feed.open_message(W0).is_alone


def test_a_replacement_worker_continues_from_the_latest_state_of_a_shard() -> None:
    """The worker need not read again what the dataset can skip."""
    feed = StreamFeed(Cursor(), 4, StreamShares(1))
    for state in ({"dataset": 4}, None, {"dataset": 12}):
        feed.take()
        feed.loaded(W0, 4, 4, state)
    feed.take()
    feed.loaded(W0, 4, 4)

    message = feed.open_message(W0)
    assert (message.state_rows, message.skip, message.state) == (12, 4, {"dataset": 12})
