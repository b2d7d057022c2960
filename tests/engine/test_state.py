"""State: what was given to the loop, in a few numbers, good for any other workers, batch size and number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import infeed
from infeed import RandomSampler
from infeed.testing import RandomDataset, assert_resumable
from tests.helpers import Squares, Stream, collected, flat, plain

RANDOM = RandomDataset(50, ["python", "numpy", "infeed"])
OWN_RANDOM = RandomDataset(50, ["infeed"])

OPTIONS: dict[str, dict[str, Any]] = {
    "sequential": {"batch_size": 8},
    "shuffled": {"batch_size": 8, "shuffle": True},
    "drop_last": {"batch_size": 8, "shuffle": True, "drop_last": True},
    "single": {"batch_size": None, "sampler": RandomSampler(num_samples=12)},
    "collated": {"batch_size": 8, "shuffle": True, "collate_fn": list},
    "subset": {"batch_size": 8, "sampler": RandomSampler(num_samples=30)},
    "replacement": {"batch_size": 8, "sampler": RandomSampler(replacement=True, num_samples=70)},
    "weights": {"batch_size": 8, "sampler": RandomSampler(np.arange(50))},
    "sampler": {"batch_size": 8, "sampler": list(range(49, -1, -1))},
    "batch_sampler": {"batch_sampler": [[1, 2, 3], [4], list(range(10, 20)), [7, 7]]},
    "smallest grains": {"batch_size": 8, "shuffle": True, "grain_size": 1},
    "rank 1 of 3": {"batch_size": 4, "shuffle": True, "shard": (1, 3)},
    "rank 2 of 3, exact": {"batch_size": 4, "shard": (2, 3), "pad": False},
}


def made(dataset: Any = RANDOM, **options: Any) -> infeed.DataLoader:
    return infeed.DataLoader(dataset, **{"seed": 3, **options})


def after(loader: infeed.DataLoader, steps: int) -> tuple[list[Any], dict[str, Any]]:
    """Some batches of an epoch, and the state behind them, as JSON leaves it."""
    iterator = iter(loader)
    batches = [plain(next(iterator)) for _ in range(steps)]
    return batches, json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_resumed_after_every_step_the_rest_is_the_same(options: dict[str, Any]) -> None:
    """Bit for bit, with random numbers in the dataset (P2)."""
    with made(**options) as loader:
        assert_resumable(loader)


@pytest.mark.process
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_state_of_one_kind_of_worker_is_good_for_another(options: dict[str, Any]) -> None:
    """From inline to processes and back, with batches in flight when the state is taken (P2)."""
    with made(**options) as inline, made(num_workers=2, timeout=30, **options) as processes:
        expected = collected(inline)
        inline.set_epoch(0)
        for first, second in ((inline, processes), (processes, inline)):
            first.set_epoch(0)
            begun, state = after(first, 2)
            second.load_state_dict(state)
            assert begun + collected(second) == expected


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_processes_are_resumable(workers: int) -> None:
    """What is in flight when the state is taken does not count as given."""
    with made(batch_size=8, shuffle=True, num_workers=workers, timeout=30) as loader:
        assert_resumable(loader)


def test_threads_are_resumable_with_the_generator_of_the_sample() -> None:
    """The global generators are shared there; the one that infeed offers is not."""
    with made(OWN_RANDOM, batch_size=8, shuffle=True, num_workers=3, worker="thread", timeout=30) as loader:
        assert_resumable(loader)


@pytest.mark.process
def test_out_of_order_each_batch_comes_exactly_once_over_both_runs() -> None:
    """Which batches came early is part of the state."""
    with made(Squares(80), batch_size=4, num_workers=3, in_order=False, timeout=30) as loader:
        for steps in (1, 3, 7):
            loader.set_epoch(0)
            begun, state = after(loader, steps)
            loader.load_state_dict(state)
            rest = collected(loader)
            assert Counter(flat([batch[1] for batch in begun + rest])) == Counter(i * i for i in range(80))


def test_batches_that_came_early_are_not_given_again() -> None:
    """Steps 0 and 2 were given, 1 was not."""
    with made(Squares(16), batch_size=4) as loader:
        state = {**loader.state_dict(), "step": 1, "position": 4, "ahead": [2]}
        loader.load_state_dict(state)
        iterator = iter(loader)
        assert loader.state_dict() == state
        assert plain(next(iterator))[1] == [16, 25, 36, 49]
        assert plain(next(iterator))[1] == [144, 169, 196, 225]
        assert loader.state_dict()["step"] == 4
        assert "ahead" not in loader.state_dict()


@pytest.mark.parametrize(("size", "then"), [(8, 3), (3, 8), (8, None), (None, 8)])
def test_another_batch_size_goes_on_at_the_same_sample(size: int | None, then: int | None) -> None:
    """With the generator of the sample, also the random numbers are the same."""
    with made(OWN_RANDOM, batch_size=1, shuffle=True) as single, made(OWN_RANDOM, batch_size=size, shuffle=True) as first:
        expected = [sample["infeed"][0] for sample in collected(single)]
        begun, state = after(first, 3)
        with made(OWN_RANDOM, batch_size=then, shuffle=True) as second:
            second.load_state_dict(state)
            values = [batch["infeed"] for batch in begun + collected(second)]
    assert [v for value in values for v in (value if isinstance(value, list) else [value])] == expected


def test_two_ranks_become_three_in_mid_epoch() -> None:
    """Every sample is seen exactly once over both runs, under the random numbers that it would have had alone."""
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "pad": False}
    with made(OWN_RANDOM, batch_size=1, shuffle=True) as alone:
        expected = sorted((b["index"][0], b["infeed"][0]) for b in collected(alone))
    seen: list[tuple[int, float]] = []
    states = []
    for rank in range(2):
        with made(OWN_RANDOM, shard=(rank, 2), **options) as loader:
            batches, state = after(loader, 3)
            states.append(state)
            seen += [pair for batch in batches for pair in zip(batch["index"], batch["infeed"], strict=True)]
    assert states[0] == states[1]
    for rank in range(3):
        with made(OWN_RANDOM, shard=(rank, 3), **options) as loader:
            loader.load_state_dict(states[0])
            seen += [pair for batch in collected(loader) for pair in zip(batch["index"], batch["infeed"], strict=True)]
    assert sorted(seen) == expected


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_together_give_the_batches_of_one(world: int) -> None:
    """Batch s of rank r is batch s * world + r of a loader that is alone, bit for bit, with the global generators too."""
    dataset = RandomDataset(48, ["python", "numpy", "infeed"])
    with made(dataset, batch_size=4, shuffle=True) as alone:
        expected = collected(alone)
    ranks = []
    for rank in range(world):
        with made(dataset, batch_size=4, shuffle=True, shard=(rank, world)) as loader:
            assert len(loader) == 12 // world
            ranks.append(collected(loader))
    assert [batch for step in zip(*ranks, strict=True) for batch in step] == expected


# --- the contract of stateful loaders


def test_an_empty_state_changes_nothing() -> None:
    """As torchdata has it."""
    with made(batch_size=8) as loader:
        begun, _ = after(loader, 2)
        loader.load_state_dict({})
        assert loader.state_dict()["step"] == 2
        assert begun


def test_a_state_applies_to_the_next_iteration() -> None:
    """One that is under way goes on as it was."""
    with made(Squares(16), batch_size=4) as loader:
        _, state = after(loader, 3)
        loader.set_epoch(0)
        under_way = iter(loader)
        next(under_way)
        loader.load_state_dict(state)
        assert plain(next(under_way))[1] == [16, 25, 36, 49]
        assert [batch[1] for batch in collected(loader)] == [[144, 169, 196, 225]]


def test_an_iteration_that_was_made_before_a_state_was_loaded_is_not_of_it() -> None:
    """It was asked for before."""
    with made(Squares(16), batch_size=4) as loader:
        _, state = after(loader, 3)
        loader.set_epoch(0)
        made_before = iter(loader)
        loader.load_state_dict(state)
        assert len(list(made_before)) == 4
        assert len(list(loader)) == 1


def test_looking_at_an_iterator_does_not_use_the_state_up() -> None:
    """Frameworks call iter() and throw it away."""
    with made(Squares(16), batch_size=4) as loader:
        _, state = after(loader, 3)
        loader.load_state_dict(state)
        iter(loader)
        iter(loader)
        assert len(list(loader)) == 1
        assert len(list(loader)) == 4


def test_a_state_of_the_end_of_an_epoch_begins_the_next() -> None:
    """After the loop has ended."""
    with made(batch_size=8, shuffle=True) as loader, made(batch_size=8, shuffle=True) as other:
        collected(loader)
        state = loader.state_dict()
        assert (state["epoch"], state["step"], state["position"]) == (1, 0, 0)
        other.load_state_dict(state)
        assert collected(other) == collected(loader)


def test_a_state_of_the_last_step_has_an_empty_rest() -> None:
    """Within the loop of the last batch: the epoch is not over, and nothing of it is left."""
    with made(batch_size=8, shuffle=True) as loader:
        _, state = after(loader, len(loader))
        loader.load_state_dict(state)
        assert collected(loader) == []
        assert loader.epoch == 1


def test_a_state_before_anything_is_the_beginning() -> None:
    """Loaded into another loader, it gives its seed too."""
    loader, other = (infeed.DataLoader(RANDOM, batch_size=8, shuffle=True) for _ in range(2))
    other.load_state_dict(loader.state_dict())
    assert other.seed == loader.seed
    assert collected(other) == collected(loader)


@pytest.mark.process
def test_a_drawn_seed_is_taken_over_by_workers_that_live_already() -> None:
    """They were born with another."""
    loader = infeed.DataLoader(RANDOM, batch_size=8, shuffle=True)
    with infeed.DataLoader(RANDOM, batch_size=8, shuffle=True, num_workers=2, timeout=30) as other:
        collected(other)
        other.load_state_dict(loader.state_dict())
        assert collected(other) == collected(loader)


def test_what_was_loaded_is_what_is_saved_until_the_next_batch() -> None:
    """A checkpoint right after a resume is the same checkpoint."""
    with made(batch_size=8, shuffle=True) as loader:
        _, state = after(loader, 3)
        loader.load_state_dict(state)
        assert loader.state_dict() == state


def test_a_batch_that_failed_is_still_to_come() -> None:
    """If the run ends with its exception, the next run tries it again; if the loop went on behind it, so does the next run."""
    from infeed.testing import FaultyDataset

    with made(FaultyDataset(16, [5]), batch_size=4) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ValueError, match="5"):
            next(iterator)
        assert loader.state_dict()["position"] == 4
        next(iterator)
        assert loader.state_dict()["position"] == 12


# --- what states look like


def test_a_state_is_small_plain_and_readable() -> None:
    """Every field can be understood by looking at it."""
    with made(batch_size=8, shuffle=True) as loader:
        _, state = after(loader, 3)
    assert state == {
        "version": 1,
        "epoch": 0,
        "step": 3,
        "position": 24,
        "seed": 3,
        "order": "shuffled",
        "length": 50,
        "num_samples": None,
        "batch_size": 8,
        "world_size": 1,
    }


@pytest.mark.process
def test_a_state_is_under_1500_bytes_also_out_of_order() -> None:
    """With as many batches ahead as can be."""
    with made(Squares(10**6), batch_size=4, num_workers=5, in_order=False, timeout=30) as loader:
        iterator = iter(loader)
        for _ in range(300):
            next(iterator)
            assert len(json.dumps(loader.state_dict())) < 1500


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dataset": RandomDataset(51)}, "length=50, this loader has length=51"),
        ({"shuffle": False}, "order='shuffled', this loader has order='sequential'"),
        ({"seed": 4}, "seed=3, this loader has seed=4"),
        ({"shuffle": False, "sampler": RandomSampler(num_samples=20)}, "num_samples=None, this loader has num_samples=20"),
        ({"shuffle": False, "sampler": RandomSampler(np.ones(50))}, "order='shuffled', this loader has order='weighted"),
    ],
)
def test_a_state_of_another_loader_is_refused_with_both_sides(change: dict[str, Any], words: str) -> None:
    """And the loader works on."""
    with made(batch_size=8, shuffle=True) as loader:
        _, state = after(loader, 3)
    with made(**{"dataset": RANDOM, "batch_size": 8, "shuffle": True, **change}) as other:
        expected = collected(other)
        other.set_epoch(0)
        with pytest.raises(infeed.StateError, match=words):
            other.load_state_dict(state)
        assert collected(other) == expected


def test_other_weights_are_another_order() -> None:
    """A state of one would go on among other samples."""
    loader, other = (made(batch_size=8, sampler=RandomSampler(weights)) for weights in (np.ones(50), np.arange(50)))
    with pytest.raises(infeed.StateError, match=r"order='weighted .*order='weighted "):
        other.load_state_dict(loader.state_dict())


# --- streams


class Counting:
    """A stream that knows where it is."""

    def __init__(self, count: int, opened: list[int] | None = None) -> None:
        self.count, self.next = count, 0

    def __iter__(self) -> Iterator[int]:
        start, self.next = self.next, 0
        for number in range(start, self.count):
            self.next = number + 1
            yield number
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class CountingIterator:
    """The iterator of a stream, which knows where it is."""

    def __init__(self, count: int) -> None:
        self.count, self.next, self.first = count, 0, 0

    def __iter__(self) -> CountingIterator:
        return self

    def __next__(self) -> int:
        if self.next >= self.count:
            raise StopIteration
        self.next += 1
        return self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class WithIterator:
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> CountingIterator:
        return CountingIterator(self.count)


class RandomStream:
    """Draws a number for each element, and shares itself out among workers if it is to."""

    def __init__(self, count: int, *, shares: bool) -> None:
        self.count, self.shares = count, shares

    def __iter__(self) -> Iterator[tuple[int, float, float]]:
        info = infeed.get_worker_info() if self.shares else None
        for number in range(self.count):
            if info is None or number % info.num_workers == info.id:
                yield number, float(np.random.random()), float(infeed.get_rng().random())


STREAMS = {
    "plain": Stream(23),
    "own state": Counting(23),
    "state of the iterator": WithIterator(23),
    "random": RandomStream(23, shares=False),
    "random, shared": RandomStream(23, shares=True),
}


@pytest.mark.parametrize("dataset", STREAMS.values(), ids=STREAMS)
def test_streams_are_resumable(dataset: Any, light_engine: dict[str, Any]) -> None:
    """By their own state where they have one, else by reading and forgetting."""
    if light_engine.get("worker") == "thread" and isinstance(dataset, RandomStream):
        pytest.skip("draws from the global generators")
    with made(dataset, batch_size=4, **light_engine) as loader:
        assert_resumable(loader)


@pytest.mark.process
def test_a_stream_that_knows_where_it_is_is_not_read_again(forkserver: dict[str, Any]) -> None:
    """Its own state is in ours, and nothing before it is asked for."""

    class Jumping(Counting):
        def load_state_dict(self, state: dict[str, int]) -> None:
            self.next = 1000  # so that it can be told apart from reading again

    with made(Jumping(1010), batch_size=4, **forkserver) as loader:
        _, state = after(loader, 3)
        assert state["stream"]["shares"] == [{"rows": 12, "ended": False, "state": {"source": {"next": 12}}}]
        loader.load_state_dict(state)
        assert flat(collected(loader)) == list(range(1000, 1010))


@pytest.mark.process
def test_a_stream_read_by_one_goes_on_with_any_number_of_workers() -> None:
    """Also one that would share itself out: the epoch is read to its end as it was begun."""
    for dataset in (Stream(23), RandomStream(23, shares=True)):
        with made(dataset, batch_size=4) as inline, made(dataset, batch_size=4, num_workers=3, timeout=30) as processes:
            expected = collected(inline)
            inline.set_epoch(0)
            begun, state = after(inline, 2)
            processes.load_state_dict(state)
            assert begun + collected(processes) == expected
            collected(processes)  # and the next epoch is shared out, if it shares itself


@pytest.mark.process
def test_shares_of_a_stream_need_as_many_workers() -> None:
    """Nobody else knows how the dataset would cut itself."""
    dataset = RandomStream(23, shares=True)
    with made(dataset, batch_size=4, num_workers=2, timeout=30) as two, made(dataset, batch_size=4) as inline:
        _, state = after(two, 3)
        with pytest.raises(infeed.StateError, match=r"with 2 workers.*this loader has 1; use num_workers=2"):
            inline.load_state_dict(state)


def test_ranks_share_a_stream(light_engine: dict[str, Any]) -> None:
    """Each element comes once, and with pad all have as many."""
    seen: list[int] = []
    for rank in range(3):
        with made(Stream(24), batch_size=4, shard=(rank, 3), **light_engine) as loader:
            seen += flat(collected(loader))
            assert_resumable(loader)
    assert sorted(seen) == list(range(24))


def test_ranks_that_share_a_stream_have_as_many_elements() -> None:
    """One repeats an element where it would have one less."""
    ranks = []
    for rank in range(3):
        with made(Stream(25), batch_size=4, shard=(rank, 3)) as loader:
            ranks.append(flat(collected(loader)))
    assert {len(rank) for rank in ranks} == {9}
    assert set(flat(ranks)) == set(range(25))


def test_ranks_that_share_a_stream_without_padding_see_each_element_once() -> None:
    """For evaluation."""
    seen: list[int] = []
    for rank in range(3):
        with made(Stream(25), batch_size=4, shard=(rank, 3), pad=False) as loader:
            seen += flat(collected(loader))
    assert sorted(seen) == list(range(25))
