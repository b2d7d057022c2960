"""How datasets, samplers and batch samplers are iterated, side by side with torch: how often, and how far ahead."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")
ours = pytest.importorskip("infeed.torch")

from tests.helpers import wait_until  # noqa: E402  # after the lines that skip without torch

pytestmark = pytest.mark.torch

WORKERS = pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.process)])
# Of ours; torch's loader, to which it makes no difference there, has none, and starts no process.
ONE_WORKER = pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.process)])


def assert_alike(seen: Callable[[Any], Any]) -> None:
    """Fail unless the user sees the same of torch's loader and of ours."""
    results = []
    for cls in (data.DataLoader, ours.DataLoader):
        torch.manual_seed(3)
        random.seed(3)
        results.append(seen(cls))
    assert results[1] == results[0]


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def drained(iterator: Iterator[Any]) -> list[Any]:
    """Batches, and the types of exceptions in their places, until it ends; the first twenty, if it does not."""
    seen: list[Any] = []
    while len(seen) < 20:
        try:
            seen.append(plain(next(iterator)))
        except StopIteration:
            break
        except Exception as error:
            seen.append(type(error).__name__)
    return seen


# --- iterators


class NextOnly:
    """An iterator that has nothing but ``__next__``."""

    def __init__(self, elements: list[Any]) -> None:
        self.elements = list(elements)

    def __next__(self) -> Any:
        if not self.elements:
            raise StopIteration
        return self.elements.pop(0)


class Of:
    """Iterates over what a function makes."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __iter__(self) -> Any:
        return self.make()


class StreamOf(data.IterableDataset):  # type: ignore[misc, name-defined]
    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __iter__(self) -> Any:
        return self.make()


class Resetting:
    """Its ``__iter__`` starts from the beginning and returns itself."""

    def __init__(self, elements: list[Any]) -> None:
        self.elements, self.at, self.iter_count = elements, 0, 0

    def __iter__(self) -> Resetting:
        self.at, self.iter_count = 0, self.iter_count + 1
        return self

    def __next__(self) -> Any:
        if self.at == len(self.elements):
            raise StopIteration
        self.at += 1
        return self.elements[self.at - 1]


class ResettingStream(Resetting, data.IterableDataset):  # type: ignore[misc, name-defined]
    pass


class Rewinding(Resetting):
    """Restarts by itself at its end."""

    def __iter__(self) -> Rewinding:
        return self

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self.at = 0
            raise


class RewindingStream(Rewinding, data.IterableDataset):  # type: ignore[misc, name-defined]
    pass


STREAMS: dict[str, Callable[[], Any]] = {
    "next only": lambda: StreamOf(lambda: NextOnly([0, 1, 2, 3, 4])),
    "resets and returns itself": lambda: ResettingStream([0, 1, 2, 3, 4]),
    "rewinds when it has ended": lambda: RewindingStream([0, 1, 2, 3, 4]),
}
SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "next only": lambda: {"batch_size": None, "sampler": Of(lambda: NextOnly([3, 1, 2]))},
    "batches, next only": lambda: {"batch_sampler": Of(lambda: NextOnly([[3], [1, 2]]))},
    "resets": lambda: {"sampler": Resetting([3, 1, 2, 0, 4]), "batch_size": 2},
    "resets, singly": lambda: {"sampler": Resetting([3, 1, 2]), "batch_size": None},
    "batches, resets": lambda: {"batch_sampler": Resetting([[3], [1, 2], [0]])},
    "lists, singly": lambda: {"batch_size": None, "sampler": data.BatchSampler(data.SequentialSampler(range(5)), 2, False)},
    "shuffled lists, singly": lambda: {
        "batch_size": None,
        "sampler": data.BatchSampler(data.RandomSampler(range(5)), 2, False),
    },
    "yields what is no batch": lambda: {"batch_sampler": [[0], 5, [1], None, [2]]},
    "a batch of any iterable": lambda: {"batch_sampler": [(0, 1), range(2), np.array([3]), {4: 0}]},
}


class Telling:
    """A sample is what was asked for."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> Any:
        return str(index)


@ONE_WORKER
@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("name", STREAMS)
def test_an_iterable_dataset_is_asked_by_next_alone(name: str, batch_size: int | None, num_workers: int) -> None:
    """And not again once it has ended, in each of two epochs."""

    def seen(cls: Any) -> Any:
        loader = cls(STREAMS[name](), batch_size=batch_size, num_workers=num_workers if cls is ours.DataLoader else 0)
        return [drained(iter(loader)) for _ in range(2)]

    assert_alike(seen)


@ONE_WORKER
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_asked_by_next_alone(name: str, num_workers: int) -> None:
    """What it yields goes to the dataset as it is, in each of two epochs."""

    def seen(cls: Any) -> Any:
        loader = cls(Telling(), num_workers=num_workers if cls is ours.DataLoader else 0, **SAMPLERS[name]())
        return [drained(iter(loader)) for _ in range(2)]

    assert_alike(seen)


class TellingTogether(Telling):
    """A sample is what ``__getitems__`` got."""

    def __getitems__(self, indices: Any) -> list[str]:
        return [f"{type(indices).__name__} {indices}" for _ in range(2)]


@ONE_WORKER
def test_getitems_gets_a_batch_in_the_type_in_which_the_sampler_yields_it(num_workers: int) -> None:
    """An array, a tensor, and what is no batch at all."""
    batches = [[0, 1], (0, 1), range(2), np.array([3, 4]), torch.tensor([1, 2]), {4: 0}, "ab", 5, None]

    def seen(cls: Any) -> Any:
        workers = num_workers if cls is ours.DataLoader else 0
        return drained(iter(cls(TellingTogether(), batch_sampler=batches, num_workers=workers)))

    assert_alike(seen)


@ONE_WORKER
def test_default_collate_that_is_passed_without_batches_is_called_with_samples(num_workers: int) -> None:
    """Only without the argument, samples are converted and not collated."""
    dataset = [[1, 2], (3.0, 4.0), 5]

    def seen(cls: Any) -> Any:
        workers = num_workers if cls is ours.DataLoader else 0
        return drained(iter(cls(dataset, batch_size=None, collate_fn=data.default_collate, num_workers=workers)))

    assert_alike(seen)


def test_an_iteration_whose_sampler_fails_at_once_has_ended() -> None:
    """``next`` raises what the sampler raises, and then ``StopIteration``."""

    class Unsized:
        def __getitem__(self, index: int) -> int:
            return index

    assert_alike(lambda cls: drained(iter(cls(Unsized()))))


@WORKERS
def test_iter_is_called_on_a_batch_sampler_as_often_as_torch_calls_it(num_workers: int) -> None:
    """One that draws in ``__iter__`` gives the same order: torch calls it twice with workers."""

    class Drawing:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[index] for index in torch.randperm(8).tolist()])

    assert_alike(lambda cls: [drained(iter(cls(range(8), batch_sampler=Drawing(), num_workers=num_workers))) for _ in range(2)])


# --- several iterations of one loader


@WORKERS
@pytest.mark.parametrize("options", [{"sampler": [2, 0, 1]}, {"batch_sampler": [[2], [0, 1]]}], ids=str)
def test_two_iterators_of_one_loader_do_not_share_their_sampler(options: dict[str, Any], num_workers: int) -> None:
    """Each has asked ``iter`` of it."""

    def seen(cls: Any) -> Any:
        loader = cls(range(3), num_workers=num_workers, **options)
        return [(plain(left), plain(right)) for left, right in zip(loader, loader, strict=True)]

    assert_alike(seen)


def test_two_iterators_of_one_iterable_dataset_open_it_when_they_are_made() -> None:
    """One that returns itself is shared, as with torch; it is reset twice before anything is read."""

    def seen(cls: Any) -> Any:
        loader = cls(ResettingStream(list(range(8))), batch_size=2)
        return [(plain(left), plain(right)) for left, right in zip(loader, loader, strict=False)]

    assert_alike(seen)


def test_an_iterator_has_the_options_of_when_it_was_made() -> None:
    """Also if the first batch is asked for later."""

    def seen(cls: Any) -> Any:
        loader = cls(range(4), batch_size=2)
        before = iter(loader)
        loader.collate_fn = str
        after = iter(loader)
        return [drained(before), drained(after)]

    assert_alike(seen)


# --- how far ahead


class Counting:
    """Counts how often its iterator was asked, also in vain."""

    def __init__(self, elements: list[Any]) -> None:
        self.elements, self.asked_count = elements, 0

    def __iter__(self) -> Iterator[Any]:
        for element in self.elements:
            self.asked_count += 1
            yield element
        self.asked_count += 1


LOOKAHEADS: list[tuple[int, int | None]] = [(0, None), (1, None), (2, 1), (2, 3)]


@pytest.mark.parametrize(("num_workers", "prefetch_factor"), LOOKAHEADS)
@pytest.mark.parametrize("kind", ["sampler", "singly", "batch_sampler"])
@pytest.mark.process
def test_a_sampler_is_asked_as_far_ahead_as_torch_asks(kind: str, num_workers: int, prefetch_factor: int | None) -> None:
    """After ``iter`` and after every batch: no further, and no less far."""

    def seen(cls: Any) -> Any:
        sampler = Counting([[index] for index in range(9)] if kind == "batch_sampler" else list(range(9)))
        options = {"batch_sampler": sampler} if kind == "batch_sampler" else {"sampler": sampler}
        if kind == "singly":
            options["batch_size"] = None
        loader = cls(range(9), num_workers=num_workers, prefetch_factor=prefetch_factor, **options)
        iterator = iter(loader)
        counts = [sampler.asked_count]
        for _ in iterator:
            counts.append(sampler.asked_count)
        return counts

    assert_alike(seen)


def test_an_adaptive_sampler_sees_what_the_loop_has_done() -> None:
    """Without workers it is asked when the loop asks."""

    def seen(cls: Any) -> Any:
        done: list[int] = []
        for batch in cls(range(9), sampler=Of(lambda: (len(done) for _ in range(4)))):
            done.append(batch.item())
        return done

    assert_alike(seen)


def test_an_index_of_a_one_shot_sampler_is_not_lost_after_break() -> None:
    """The next loop goes on behind the last batch."""

    def seen(cls: Any) -> Any:
        loader = cls(range(9), sampler=iter(range(9)), batch_size=2)
        return [plain(next(iter(loader))) for _ in range(3)], drained(iter(loader))

    assert_alike(seen)


def shuffles() -> dict[str, Callable[[Any], dict[str, Any]]]:
    return {
        "shuffle": lambda generator: {"shuffle": True, "generator": generator},
        "shuffle, drop_last": lambda generator: {"shuffle": True, "generator": generator, "drop_last": True},
        "replacement": lambda generator: {
            "sampler": data.RandomSampler(range(48), replacement=True, num_samples=96, generator=generator)
        },
        "more than there are": lambda generator: {
            "sampler": data.RandomSampler(range(48), num_samples=60, generator=generator)
        },
        "subset": lambda generator: {"sampler": data.SubsetRandomSampler(range(0, 48, 2), generator=generator)},
        "weighted": lambda generator: {"sampler": data.WeightedRandomSampler([1.0] * 48, 20, generator=generator)},
    }


@pytest.mark.parametrize("batch_size", [4, 5])
@pytest.mark.parametrize("name", shuffles())
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.process)])
def test_after_break_the_generator_is_where_torch_leaves_it(num_workers: int, name: str, batch_size: int) -> None:
    """Wherever the loop is left: before, at and after the last batch."""

    def seen(cls: Any) -> Any:
        generator = torch.Generator().manual_seed(1)
        options = {"worker": "thread"} if cls is ours.DataLoader else {}
        loader = cls(range(48), batch_size=batch_size, num_workers=num_workers, **shuffles()[name](generator), **options)
        count = len(loader)
        states = []
        for taken in (1, count - 3, count - 2, count - 1, count, count + 1):
            iterator = iter(loader)
            states.append([plain(batch) for batch in islice(iterator, taken)])
            states.append(generator.get_state().tolist())
            del iterator
        return states

    assert_alike(seen)


# --- exceptions


class FailingAt:
    """An iterator that raises at some elements, and goes on."""

    def __init__(self, count: int, *failing: int) -> None:
        self.count, self.failing, self.at = count, failing, 0

    def __iter__(self) -> FailingAt:
        return self

    def __next__(self) -> Any:
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        if self.at - 1 in self.failing:
            raise LookupError(self.at - 1)
        return self.at - 1


@ONE_WORKER
@pytest.mark.parametrize("batch_size", [1, 2, 3, None])
def test_an_iterable_dataset_goes_on_after_it_raised(batch_size: int | None, num_workers: int) -> None:
    """What it had given of that batch is lost; a generator ends, an iterator need not."""

    def seen(cls: Any) -> Any:
        stream = StreamOf(lambda: FailingAt(9, 0, 4, 5))
        return drained(iter(cls(stream, batch_size=batch_size, num_workers=num_workers if cls is ours.DataLoader else 0)))

    assert_alike(seen)


@ONE_WORKER
def test_with_drop_last_an_incomplete_batch_is_not_collated(num_workers: int) -> None:
    """It is dropped before the user's function sees it."""

    def whole(samples: list[Any]) -> Any:
        assert len(samples) == 3
        return samples

    loader = ours.DataLoader(StreamOf(lambda: iter(range(7))), 3, drop_last=True, collate_fn=whole, num_workers=num_workers)
    assert drained(iter(loader)) == [[0, 1, 2], [3, 4, 5]]


def test_without_workers_a_sampler_that_raised_is_asked_again() -> None:
    """It goes on if it can."""
    assert_alike(lambda cls: drained(iter(cls(range(9), batch_size=None, sampler=Of(lambda: FailingAt(6, 0, 3, 5))))))


@pytest.mark.process
def test_what_a_sampler_raises_at_once_is_raised_by_iter() -> None:
    """With workers, if it is asked for before the first batch. So does torch, but it leaves its workers behind."""
    failing = [4]
    sampler = Of(lambda: FailingAt(6, *failing))
    loader = ours.DataLoader(range(9), batch_size=None, sampler=sampler, num_workers=2, prefetch_factor=3)
    for _ in range(2):
        with pytest.raises(LookupError):
            iter(loader)
    failing.clear()
    assert drained(iter(loader)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.process
@pytest.mark.parametrize(
    "options",
    [{"batch_size": None, "sampler": Of(lambda: FailingAt(9, 2))}, {"batch_sampler": [[0], [1], 5, [3]]}],
    ids=["raises", "yields no batch"],
)
def test_an_iteration_that_is_left_before_an_exception_of_its_sampler_ends(options: dict[str, Any]) -> None:
    """The exception waits in the engine, and must not hold the iteration that holds the engine."""
    loader = ours.DataLoader(range(9), num_workers=1, prefetch_factor=1, **options)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    workers = iterator._workers
    del iterator, loader
    gc.collect()
    wait_until(lambda: not any(worker.is_alive() for worker in workers), "the end of the workers")


@pytest.mark.process
def test_what_a_sampler_raises_later_comes_in_its_turn_and_once() -> None:
    """No batch is lost to it: torch loses the one that was to be delivered when it was raised."""
    loader = ours.DataLoader(range(9), batch_size=None, sampler=Of(lambda: FailingAt(9, 6)), num_workers=1)
    assert drained(iter(loader)) == [0, 1, 2, 3, 4, 5, "LookupError", 7, 8]
