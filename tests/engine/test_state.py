"""State: the progress of an epoch in a few numbers, valid for any number of workers, batch size and number of ranks."""

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
    """Returns some batches of an epoch, and the state after them, through JSON."""
    iterator = iter(loader)
    batches = [plain(next(iterator)) for _ in range(steps)]
    return batches, json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_run_resumed_after_any_step_delivers_the_same_rest(options: dict[str, Any]) -> None:
    """Bit-identical, with random numbers in the dataset (P2)."""
    with made(**options) as loader:
        assert_resumable(loader)


@pytest.mark.process
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_state_can_be_loaded_with_another_kind_of_worker(options: dict[str, Any]) -> None:
    """From no workers to processes and back, with batches in flight when the state is taken (P2)."""
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
def test_processes_can_be_resumed(workers: int) -> None:
    """Batches in flight when the state is taken do not count as delivered."""
    with made(batch_size=8, shuffle=True, num_workers=workers, timeout=30) as loader:
        assert_resumable(loader)


def test_threads_can_be_resumed_with_the_generator_of_the_sample() -> None:
    """Threads share the global generators, but not the one that `get_rng` returns."""
    with made(OWN_RANDOM, batch_size=8, shuffle=True, num_workers=3, worker="thread", timeout=30) as loader:
        assert_resumable(loader)


@pytest.mark.process
def test_out_of_order_each_batch_comes_exactly_once_over_both_runs() -> None:
    """The state contains which batches were delivered early."""
    with made(Squares(80), batch_size=4, num_workers=3, in_order=False, timeout=30) as loader:
        for steps in (1, 3, 7):
            loader.set_epoch(0)
            begun, state = after(loader, steps)
            loader.load_state_dict(state)
            rest = collected(loader)
            assert Counter(flat([batch[1] for batch in begun + rest])) == Counter(i * i for i in range(80))


def test_batches_that_were_delivered_early_are_not_repeated() -> None:
    """Steps 0 and 2 were delivered, 1 was not."""
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
def test_another_batch_size_continues_at_the_same_sample(size: int | None, then: int | None) -> None:
    """With the generator of the sample, random numbers are the same too."""
    with made(OWN_RANDOM, batch_size=1, shuffle=True) as single, made(OWN_RANDOM, batch_size=size, shuffle=True) as first:
        expected = [sample["infeed"][0] for sample in collected(single)]
        begun, state = after(first, 3)
        with made(OWN_RANDOM, batch_size=then, shuffle=True) as second:
            second.load_state_dict(state)
            values = [batch["infeed"] for batch in begun + collected(second)]
    assert [v for value in values for v in (value if isinstance(value, list) else [value])] == expected


def test_two_ranks_become_three_in_mid_epoch() -> None:
    """Every sample is used exactly once over both runs, with the random numbers of a single rank."""
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
def test_ranks_together_deliver_the_batches_of_one(world: int) -> None:
    """Batch s of rank r is batch s * world + r of a single-rank loader, bit-identical, with the global generators too."""
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
    """As in torchdata."""
    with made(batch_size=8) as loader:
        begun, _ = after(loader, 2)
        loader.load_state_dict({})
        assert loader.state_dict()["step"] == 2
        assert begun


def test_a_state_applies_to_the_next_iteration() -> None:
    """An active iteration continues unchanged."""
    with made(Squares(16), batch_size=4) as loader:
        _, state = after(loader, 3)
        loader.set_epoch(0)
        under_way = iter(loader)
        next(under_way)
        loader.load_state_dict(state)
        assert plain(next(under_way))[1] == [16, 25, 36, 49]
        assert [batch[1] for batch in collected(loader)] == [[144, 169, 196, 225]]


def test_an_iterator_created_before_a_state_was_loaded_ignores_it() -> None:
    """It belongs to an earlier iteration."""
    with made(Squares(16), batch_size=4) as loader:
        _, state = after(loader, 3)
        loader.set_epoch(0)
        made_before = iter(loader)
        loader.load_state_dict(state)
        assert len(list(made_before)) == 4
        assert len(list(loader)) == 1


def test_creating_an_iterator_does_not_consume_the_state() -> None:
    """Frameworks call iter() and discard the result."""
    with made(Squares(16), batch_size=4) as loader:
        _, state = after(loader, 3)
        loader.load_state_dict(state)
        iter(loader)
        iter(loader)
        assert len(list(loader)) == 1
        assert len(list(loader)) == 4


def test_a_state_after_an_epoch_starts_the_next() -> None:
    """The state is taken after the training loop has ended."""
    with made(batch_size=8, shuffle=True) as loader, made(batch_size=8, shuffle=True) as other:
        collected(loader)
        state = loader.state_dict()
        assert (state["epoch"], state["step"], state["position"]) == (1, 0, 0)
        other.load_state_dict(state)
        assert collected(other) == collected(loader)


def test_a_state_of_the_last_step_has_an_empty_rest() -> None:
    """It is taken in the training loop at the last batch: the epoch is not over, and nothing of it is left."""
    with made(batch_size=8, shuffle=True) as loader:
        _, state = after(loader, len(loader))
        loader.load_state_dict(state)
        assert collected(loader) == []
        assert loader.epoch == 1


def test_a_state_before_any_iteration_is_the_beginning() -> None:
    """In another loader, it sets the seed too."""
    loader, other = (infeed.DataLoader(RANDOM, batch_size=8, shuffle=True) for _ in range(2))
    other.load_state_dict(loader.state_dict())
    assert other.seed == loader.seed
    assert collected(other) == collected(loader)


@pytest.mark.process
def test_a_loaded_seed_reaches_live_workers() -> None:
    """They started with another."""
    loader = infeed.DataLoader(RANDOM, batch_size=8, shuffle=True)
    with infeed.DataLoader(RANDOM, batch_size=8, shuffle=True, num_workers=2, timeout=30) as other:
        collected(other)
        other.load_state_dict(loader.state_dict())
        assert collected(other) == collected(loader)


def test_a_loaded_state_is_saved_unchanged_before_the_next_batch() -> None:
    """A checkpoint right after a resume equals the one that was loaded."""
    with made(batch_size=8, shuffle=True) as loader:
        _, state = after(loader, 3)
        loader.load_state_dict(state)
        assert loader.state_dict() == state


def test_a_batch_that_failed_is_loaded_again_after_resume() -> None:
    """If the run ends with its exception, the next run tries it again; if the loop continued after it, so does the next run."""
    from infeed.testing import FaultyDataset

    with made(FaultyDataset(16, [5]), batch_size=4) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ValueError, match="5"):
            next(iterator)
        assert loader.state_dict()["position"] == 4
        next(iterator)
        assert loader.state_dict()["position"] == 12


# --- format of states


def test_a_state_is_small_plain_and_readable() -> None:
    """Every field is human-readable."""
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
    """With the maximum number of batches delivered early."""
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
def test_an_incompatible_state_is_rejected_with_both_sides(change: dict[str, Any], words: str) -> None:
    """The loader stays usable."""
    with made(batch_size=8, shuffle=True) as loader:
        _, state = after(loader, 3)
    with made(**{"dataset": RANDOM, "batch_size": 8, "shuffle": True, **change}) as other:
        expected = collected(other)
        other.set_epoch(0)
        with pytest.raises(infeed.StateError, match=words):
            other.load_state_dict(state)
        assert collected(other) == expected


def test_other_weights_are_another_order() -> None:
    """A state of one would continue among other samples."""
    loader, other = (made(batch_size=8, sampler=RandomSampler(weights)) for weights in (np.ones(50), np.arange(50)))
    with pytest.raises(infeed.StateError, match=r"order='weighted .*order='weighted "):
        other.load_state_dict(loader.state_dict())


# --- streams


class Counting:
    """An iterable dataset with a state."""

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
    """The stateful iterator of an iterable dataset."""

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
    """An iterable dataset that draws a number for each element, and optionally shards itself."""

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
def test_iterable_datasets_can_be_resumed(dataset: Any, light_engine: dict[str, Any]) -> None:
    """By their own state if they have one, otherwise by skipping elements."""
    if light_engine.get("worker") == "thread" and isinstance(dataset, RandomStream):
        pytest.skip("draws from the global generators")
    with made(dataset, batch_size=4, **light_engine) as loader:
        assert_resumable(loader)


@pytest.mark.process
def test_a_stateful_iterable_dataset_is_not_read_again(forkserver: dict[str, Any]) -> None:
    """The loader's state contains its own, and no earlier element is requested."""

    class Jumping(Counting):
        def load_state_dict(self, state: dict[str, int]) -> None:
            self.next = 1000  # So that it differs from reading again.

    with made(Jumping(1010), batch_size=4, **forkserver) as loader:
        _, state = after(loader, 3)
        assert state["stream"]["shares"] == [{"rows": 12, "ended": False, "state": {"source": {"next": 12}}}]
        loader.load_state_dict(state)
        assert flat(collected(loader)) == list(range(1000, 1010))


@pytest.mark.process
def test_an_iterable_dataset_read_by_one_worker_continues_with_any_number() -> None:
    """Also one that shards itself: the epoch is finished the way it started."""
    for dataset in (Stream(23), RandomStream(23, shares=True)):
        with made(dataset, batch_size=4) as inline, made(dataset, batch_size=4, num_workers=3, timeout=30) as processes:
            expected = collected(inline)
            inline.set_epoch(0)
            begun, state = after(inline, 2)
            processes.load_state_dict(state)
            assert begun + collected(processes) == expected
            collected(processes)  # The next epoch is sharded if the dataset shards itself.


@pytest.mark.process
def test_shards_of_an_iterable_dataset_need_the_same_number_of_workers() -> None:
    """Only the dataset knows how it shards itself."""
    dataset = RandomStream(23, shares=True)
    with made(dataset, batch_size=4, num_workers=2, timeout=30) as two, made(dataset, batch_size=4) as inline:
        _, state = after(two, 3)
        with pytest.raises(infeed.StateError, match=r"with 2 workers.*this loader has 1; use num_workers=2"):
            inline.load_state_dict(state)


def test_ranks_share_an_iterable_dataset(light_engine: dict[str, Any]) -> None:
    """Each element is delivered once, and with pad all ranks have equally many."""
    seen: list[int] = []
    for rank in range(3):
        with made(Stream(24), batch_size=4, shard=(rank, 3), **light_engine) as loader:
            seen += flat(collected(loader))
            assert_resumable(loader)
    assert sorted(seen) == list(range(24))


def test_ranks_that_share_an_iterable_dataset_have_equally_many_elements() -> None:
    """A rank repeats an element where it would have one fewer."""
    ranks = []
    for rank in range(3):
        with made(Stream(25), batch_size=4, shard=(rank, 3)) as loader:
            ranks.append(flat(collected(loader)))
    assert {len(rank) for rank in ranks} == {9}
    assert set(flat(ranks)) == set(range(25))


def test_ranks_that_share_an_iterable_dataset_without_padding_see_each_element_once() -> None:
    """For evaluation."""
    seen: list[int] = []
    for rank in range(3):
        with made(Stream(25), batch_size=4, shard=(rank, 3), pad=False) as loader:
            seen += flat(collected(loader))
    assert sorted(seen) == list(range(25))
