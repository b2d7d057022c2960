"""How often and how far ahead datasets, samplers and batch samplers are iterated, compared with torch."""

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
# For infeed's loader. torch's has no workers, because they make no difference here, and starts no process.
ONE_WORKER = pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.process)])


def assert_alike(seen: Callable[[Any], Any]) -> None:
    """Fails unless the user observes the same with torch's loader and infeed's."""
    results = []
    for cls in (data.DataLoader, ours.DataLoader):
        torch.manual_seed(3)
        random.seed(3)
        results.append(seen(cls))
    assert results[1] == results[0]


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def drained(iterator: Iterator[Any]) -> list[Any]:
    """Returns batches, and the types of exceptions in their places, until the end; at most twenty."""
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
    """An iterator that has only ``__next__``."""

    def __init__(self, elements: list[Any]) -> None:
        self.elements = list(elements)

    def __next__(self) -> Any:
        if not self.elements:
            raise StopIteration
        return self.elements.pop(0)


class Of:
    """Iterates over the result of a function."""

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
    """Its ``__iter__`` resets it and returns it."""

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
    """Resets itself at its end."""

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


class Indices:
    """A sample is its index."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> Any:
        return str(index)


@ONE_WORKER
@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("name", STREAMS)
def test_only_next_is_called_on_an_iterable_dataset(name: str, batch_size: int | None, num_workers: int) -> None:
    """And not again after its end, in each of two epochs."""

    def seen(cls: Any) -> Any:
        loader = cls(STREAMS[name](), batch_size=batch_size, num_workers=num_workers if cls is ours.DataLoader else 0)
        return [drained(iter(loader)) for _ in range(2)]

    assert_alike(seen)


@ONE_WORKER
@pytest.mark.parametrize("name", SAMPLERS)
def test_only_next_is_called_on_a_sampler(name: str, num_workers: int) -> None:
    """The dataset receives its indices unchanged, in each of two epochs."""

    def seen(cls: Any) -> Any:
        loader = cls(Indices(), num_workers=num_workers if cls is ours.DataLoader else 0, **SAMPLERS[name]())
        return [drained(iter(loader)) for _ in range(2)]

    assert_alike(seen)


class IndicesTogether(Indices):
    """A sample is the argument of ``__getitems__``."""

    def __getitems__(self, indices: Any) -> list[str]:
        return [f"{type(indices).__name__} {indices}" for _ in range(2)]


@ONE_WORKER
def test_getitems_receives_a_batch_with_the_type_from_the_sampler(num_workers: int) -> None:
    """An array, a tensor, and something that is no batch."""
    batches = [[0, 1], (0, 1), range(2), np.array([3, 4]), torch.tensor([1, 2]), {4: 0}, "ab", 5, None]

    def seen(cls: Any) -> Any:
        workers = num_workers if cls is ours.DataLoader else 0
        return drained(iter(cls(IndicesTogether(), batch_sampler=batches, num_workers=workers)))

    assert_alike(seen)


@ONE_WORKER
def test_default_collate_without_batches_is_called_with_samples(num_workers: int) -> None:
    """Only without the argument, samples are converted and not collated."""
    dataset = [[1, 2], (3.0, 4.0), 5]

    def seen(cls: Any) -> Any:
        workers = num_workers if cls is ours.DataLoader else 0
        return drained(iter(cls(dataset, batch_size=None, collate_fn=data.default_collate, num_workers=workers)))

    assert_alike(seen)


def test_an_iteration_whose_sampler_fails_at_once_has_ended() -> None:
    """``next`` raises the sampler's exception, and then ``StopIteration``."""

    class Unsized:
        def __getitem__(self, index: int) -> int:
            return index

    assert_alike(lambda cls: drained(iter(cls(Unsized()))))


@WORKERS
def test_iter_is_called_on_a_batch_sampler_as_often_as_by_torch(num_workers: int) -> None:
    """A batch sampler that draws in ``__iter__`` gives the same order: torch calls it twice with workers."""

    class Drawing:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[index] for index in torch.randperm(8).tolist()])

    assert_alike(lambda cls: [drained(iter(cls(range(8), batch_sampler=Drawing(), num_workers=num_workers))) for _ in range(2)])


# --- several iterations of one loader


@WORKERS
@pytest.mark.parametrize("options", [{"sampler": [2, 0, 1]}, {"batch_sampler": [[2], [0, 1]]}], ids=str)
def test_two_iterators_of_one_loader_do_not_share_their_sampler(options: dict[str, Any], num_workers: int) -> None:
    """Each has called ``iter`` on it."""

    def seen(cls: Any) -> Any:
        loader = cls(range(3), num_workers=num_workers, **options)
        return [(plain(left), plain(right)) for left, right in zip(loader, loader, strict=True)]

    assert_alike(seen)


def test_two_iterators_of_one_iterable_dataset_open_it_on_creation() -> None:
    """A dataset that returns itself is shared, as with torch; it is reset twice before anything is read."""

    def seen(cls: Any) -> Any:
        loader = cls(ResettingStream(list(range(8))), batch_size=2)
        return [(plain(left), plain(right)) for left, right in zip(loader, loader, strict=False)]

    assert_alike(seen)


def test_an_iterator_keeps_the_options_from_its_creation() -> None:
    """Also if the first batch is requested later."""

    def seen(cls: Any) -> Any:
        loader = cls(range(4), batch_size=2)
        before = iter(loader)
        loader.collate_fn = str
        after = iter(loader)
        return [drained(before), drained(after)]

    assert_alike(seen)


# --- reading ahead


class Counting:
    """Counts how often its iterator was called, including calls after its end."""

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
def test_a_sampler_is_read_ahead_as_far_as_by_torch(kind: str, num_workers: int, prefetch_factor: int | None) -> None:
    """After ``iter`` and after every batch, exactly."""

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


def test_an_adaptive_sampler_observes_the_loop() -> None:
    """Without workers it is called when the training loop requests a batch."""

    def seen(cls: Any) -> Any:
        done: list[int] = []
        for batch in cls(range(9), sampler=Of(lambda: (len(done) for _ in range(4)))):
            done.append(batch.item())
        return done

    assert_alike(seen)


def test_an_index_of_a_one_shot_sampler_is_not_lost_after_break() -> None:
    """The next loop continues after the last batch."""

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
def test_after_break_the_generator_state_is_that_of_torch(num_workers: int, name: str, batch_size: int) -> None:
    """Wherever the training loop is left: before, at and after the last batch."""

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
    """An iterator that raises at some elements, and continues."""

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
def test_an_iterable_dataset_continues_after_it_raised(batch_size: int | None, num_workers: int) -> None:
    """Earlier elements of that batch are lost; a generator ends, an iterator need not."""

    def seen(cls: Any) -> Any:
        stream = StreamOf(lambda: FailingAt(9, 0, 4, 5))
        return drained(iter(cls(stream, batch_size=batch_size, num_workers=num_workers if cls is ours.DataLoader else 0)))

    assert_alike(seen)


@ONE_WORKER
def test_with_drop_last_an_incomplete_batch_is_not_collated(num_workers: int) -> None:
    """It is dropped before collate_fn is called."""

    def whole(samples: list[Any]) -> Any:
        assert len(samples) == 3
        return samples

    loader = ours.DataLoader(StreamOf(lambda: iter(range(7))), 3, drop_last=True, collate_fn=whole, num_workers=num_workers)
    assert drained(iter(loader)) == [[0, 1, 2], [3, 4, 5]]


def test_without_workers_a_sampler_that_raised_is_called_again() -> None:
    """It may continue."""
    assert_alike(lambda cls: drained(iter(cls(range(9), batch_size=None, sampler=Of(lambda: FailingAt(6, 0, 3, 5))))))


@pytest.mark.process
def test_an_immediate_exception_of_a_sampler_is_raised_by_iter() -> None:
    """With workers, which read it before the first batch. So does torch, but it leaves its workers behind."""
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
    """The engine stores the exception, whose traceback must not reference the iteration that references the engine."""
    loader = ours.DataLoader(range(9), num_workers=1, prefetch_factor=1, **options)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    workers = iterator._workers
    del iterator, loader
    gc.collect()
    wait_until(lambda: not any(worker.is_alive() for worker in workers), "the end of the workers")


@pytest.mark.process
def test_a_later_exception_of_a_sampler_is_raised_once_in_order() -> None:
    """No batch is lost: torch loses the one that was due when the exception was raised."""
    loader = ours.DataLoader(range(9), batch_size=None, sampler=Of(lambda: FailingAt(9, 6)), num_workers=1)
    assert drained(iter(loader)) == [0, 1, 2, 3, 4, 5, "LookupError", 7, 8]
