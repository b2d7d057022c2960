"""Iterable datasets: every element is delivered once, however many workers read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import infeed
from tests.helpers import Journal, Stream, collected, flat, kill_process, plain

WORKERS = pytest.mark.parametrize("workers", [0, 1, 3])


class Sharded:
    """Shards itself by the number of its worker."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = infeed.get_worker_info()
        yield from range(self.count) if info is None else range(info.id, self.count, info.num_workers)


class AsksLate(Sharded):
    """Yields an element before it calls get_worker_info."""

    def __iter__(self) -> Iterator[int]:
        yield from (-1, -2)
        yield from super().__iter__()


def kinds(workers: int, kind: str) -> dict[str, Any]:
    return {"num_workers": workers, "timeout": 30, **({"worker": kind} if workers else {})}


KINDS = pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.process)])


@KINDS
@WORKERS
def test_an_iterable_dataset_that_does_not_shard_is_delivered_once(workers: int, kind: str) -> None:
    """A dataset that never calls get_worker_info is read by one worker, so nothing is repeated, and its order is kept."""
    with infeed.DataLoader(Stream(50), batch_size=4, **kinds(workers, kind)) as loader:
        for _ in range(2):
            assert flat(collected(loader)) == list(range(50))


@KINDS
@WORKERS
def test_an_iterable_dataset_that_shards_itself_is_delivered_once(workers: int, kind: str) -> None:
    """A dataset that calls get_worker_info() is read by all workers, one shard each."""
    with infeed.DataLoader(Sharded(50), batch_size=4, **kinds(workers, kind)) as loader:
        for _ in range(2):
            assert sorted(flat(collected(loader))) == list(range(50))


@KINDS
@WORKERS
def test_an_iterable_dataset_that_calls_get_worker_info_late_loses_nothing(workers: int, kind: str) -> None:
    """Whenever it calls, the result fits how it is read."""
    with infeed.DataLoader(AsksLate(40), batch_size=2, **kinds(workers, kind)) as loader:
        assert sorted(set(flat(collected(loader)))) == [-2, -1, *range(40)]


@pytest.mark.process
def test_shards_are_read_by_different_workers() -> None:
    """All workers of a dataset that shards itself load, and their batches alternate."""

    class Shares(Sharded):
        def __iter__(self) -> Iterator[int]:
            info = infeed.get_worker_info()
            assert info is not None
            return iter([info.id] * 6)

    with infeed.DataLoader(Shares(0), batch_size=2, num_workers=3, timeout=30) as loader:
        batches = collected(loader)
    assert sorted(map(tuple, batches)) == sorted([(0, 0), (1, 1), (2, 2)] * 3)
    assert {batch[0] for batch in batches[1:4]} == {0, 1, 2}


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [
        pytest.param(0, {"batch_size": 4}, [], id="empty"),
        pytest.param(2, {"batch_size": 4}, [[0, 1]], id="shorter than a batch"),
        pytest.param(2, {"batch_size": 4, "drop_last": True}, [], id="shorter, dropped"),
        pytest.param(8, {"batch_size": 4}, [[0, 1, 2, 3], [4, 5, 6, 7]], id="whole batches"),
        pytest.param(9, {"batch_size": 4}, [[0, 1, 2, 3], [4, 5, 6, 7], [8]], id="a short last one"),
        pytest.param(9, {"batch_size": 4, "drop_last": True}, [[0, 1, 2, 3], [4, 5, 6, 7]], id="last dropped"),
        pytest.param(3, {"batch_size": None}, [0, 1, 2], id="no batches"),
        pytest.param(5, {"batch_size": 2, "collate_fn": sum}, [1, 5, 4], id="collated"),
        pytest.param(3, {"batch_size": 1}, [[0], [1], [2]], id="one by one"),
    ],
)
def test_an_iterable_dataset_is_batched(
    light_engine: dict[str, Any], count: int, options: dict[str, Any], expected: list[Any]
) -> None:
    """Batch size, drop_last and collate_fn mean the same as for a map-style dataset."""
    with infeed.DataLoader(Stream(count), **options, **light_engine) as loader:
        assert collected(loader) == expected
        assert collected(loader) == expected


@pytest.mark.process
def test_an_empty_shard_is_skipped() -> None:
    """More workers than elements: empty shards are skipped."""
    with infeed.DataLoader(Sharded(2), batch_size=1, num_workers=4, timeout=30) as loader:
        for _ in range(2):
            assert sorted(flat(collected(loader))) == [0, 1]


def test_an_iterable_dataset_is_read_again_each_epoch(every_engine: dict[str, Any]) -> None:
    """Each epoch calls __iter__ again, also after an abandoned one."""
    with infeed.DataLoader(Stream(9), batch_size=2, **every_engine) as loader:
        assert plain(next(iter(loader))) == [0, 1]
        assert flat(collected(loader)) == list(range(9))


def test_an_endless_iterable_dataset_can_be_abandoned(engine: dict[str, Any]) -> None:
    """It is read ahead only as far as batches may be in flight."""

    class Endless:
        def __iter__(self) -> Iterator[int]:
            number = 0
            while True:
                yield number
                number += 1

    with infeed.DataLoader(Endless(), batch_size=2, **engine) as loader:
        batches = iter(loader)
        assert [plain(next(batches)) for _ in range(30)] == [[2 * i, 2 * i + 1] for i in range(30)]


def test_elements_with_arrays_are_stacked(every_engine: dict[str, Any]) -> None:
    """Elements of an iterable dataset are collated like other samples."""

    class Arrays:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for number in range(5):
                yield {"x": np.full(2, number), "name": str(number)}

    with infeed.DataLoader(Arrays(), batch_size=3, **every_engine) as loader:
        assert collected(loader) == [
            {"x": [[0, 0], [1, 1], [2, 2]], "name": ["0", "1", "2"]},
            {"x": [[3, 3], [4, 4]], "name": ["3", "4"]},
        ]


def test_an_exception_of_an_iterable_dataset_is_raised_after_earlier_batches(engine: dict[str, Any]) -> None:
    """Full batches before the bad element are delivered; the exception follows, and then the dataset is at its end."""

    class Failing:
        def __iter__(self) -> Iterator[int]:
            yield from range(5)
            raise OSError("connection lost")

    with infeed.DataLoader(Failing(), batch_size=2, **engine) as loader:
        batches = iter(loader)
        assert [plain(next(batches)) for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(OSError, match="connection lost"):
            next(batches)
        assert list(batches) == []


def test_a_batch_that_cannot_be_collated_does_not_end_the_iteration(engine: dict[str, Any]) -> None:
    """Later elements are delivered: collate_fn failed, not the dataset."""

    def collate(samples: list[int]) -> list[int]:
        if 5 in samples:
            raise ValueError("five")
        return samples

    got: list[Any] = []
    with infeed.DataLoader(Stream(60), batch_size=2, collate_fn=collate, **engine) as loader:
        batches = iter(loader)
        while True:
            try:
                got.append(next(batches))
            except StopIteration:
                break
            except ValueError:
                got.append("error")
    assert got == [[i, i + 1] if i != 4 else "error" for i in range(0, 60, 2)]


def test_an_iterator_is_a_dataset_for_one_epoch() -> None:
    """A generator works where nothing has to be pickled: it ends with its first epoch."""
    loader = infeed.DataLoader((i * i for i in range(5)), batch_size=2)
    assert collected(loader) == [[0, 1], [4, 9], [16]]
    assert collected(loader) == []


@pytest.mark.parametrize("option", ["shuffle", "sampler", "batch_sampler"])
def test_an_iterable_dataset_rejects_options_for_the_order(option: str) -> None:
    """Only the dataset decides its order."""
    value: Any = {"shuffle": True, "sampler": [1], "batch_sampler": [[1]]}[option]
    with pytest.raises(infeed.ConfigError, match=f"{option}.* is not supported for iterable datasets"):
        infeed.DataLoader(Stream(4), **{option: value})


@pytest.mark.process
def test_an_iterable_dataset_continues_after_its_worker_was_killed(tmp_path: Any) -> None:
    """The new worker skips what was delivered, and every element is delivered once, in order (P1)."""
    import os

    journal = Journal(tmp_path / "deaths")

    class Deadly:
        def __iter__(self) -> Iterator[int]:
            for number in range(40):
                if number == 23 and not journal.lines():
                    journal.write("died")
                    kill_process(os.getpid())
                yield number

    with infeed.DataLoader(Deadly(), batch_size=4, num_workers=2, timeout=30) as loader:
        assert flat(collected(loader)) == list(range(40))
    assert journal.lines() == ["died"]


@pytest.mark.process
def test_an_iterable_dataset_with_random_state_is_the_same_after_a_death(tmp_path: Any) -> None:
    """State that it keeps between elements, and its random numbers, are reproduced by reading again (P2)."""
    import os
    import random

    journal = Journal(tmp_path / "deaths")

    class Walk:
        def __init__(self, is_deadly: bool) -> None:
            self.is_deadly = is_deadly

        def __iter__(self) -> Iterator[float]:
            place = 0.0
            for number in range(24):
                place += random.random()
                if self.is_deadly and number == 15 and not journal.lines():
                    journal.write("died")
                    kill_process(os.getpid())
                yield place

    def walk(is_deadly: bool) -> list[Any]:
        with infeed.DataLoader(Walk(is_deadly), batch_size=4, num_workers=1, seed=1, timeout=30) as loader:
            return collected(loader)

    assert walk(is_deadly=True) == walk(is_deadly=False)
    assert journal.lines() == ["died"]


class Resetting:
    """Its ``__iter__`` resets it and returns it, and it resets itself at its end."""

    def __iter__(self) -> Resetting:
        self.at = 0
        return self

    def __next__(self) -> int:
        if self.at == 5:
            self.at = 0
            raise StopIteration
        self.at += 1
        return self.at


def test_a_dataset_that_resets_itself_is_read_once(engine: dict[str, Any]) -> None:
    """``iter`` is called once per epoch, and nothing is requested after the end."""
    with infeed.DataLoader(Resetting(), batch_size=2, **engine) as loader:
        for _ in range(2):
            assert collected(loader) == [[1, 2], [3, 4], [5]]


class FailingAt:
    """Raises for one element, and continues."""

    def __init__(self, length: int, failing: int) -> None:
        self.length, self.failing = length, failing

    def __iter__(self) -> Iterator[int]:
        return map(self.element, range(self.length))

    def element(self, number: int) -> int:
        if number == self.failing:
            raise LookupError(number)
        return number


class FailingShares(FailingAt):
    """Each worker reads a shard."""

    def __iter__(self) -> Iterator[int]:
        info = infeed.get_worker_info()
        numbers = range(self.length) if info is None else range(info.id, self.length, info.num_workers)
        return map(self.element, numbers)


def outcomes(batches: Iterator[Any]) -> list[Any]:
    """Returns batches, with exceptions in their places."""
    seen: list[Any] = []
    while True:
        try:
            seen.append(plain(next(batches)))
        except StopIteration:
            return seen
        except LookupError:
            seen.append("error")


def test_an_iterable_dataset_that_continues_after_raising_is_read_to_its_end(engine: dict[str, Any]) -> None:
    """Its batch is lost, with the elements read for it; all others are delivered."""
    with infeed.DataLoader(FailingAt(9, 3), batch_size=2, **engine) as loader:
        assert outcomes(iter(loader)) == [[0, 1], "error", [4, 5], [6, 7], [8]]


def test_an_iterable_dataset_that_raises_in_its_first_batch_is_still_sharded(engine: dict[str, Any]) -> None:
    """Whether it calls get_worker_info is known by then."""
    with infeed.DataLoader(FailingShares(12, 0), batch_size=2, **engine) as loader:
        seen = outcomes(iter(loader))
    assert seen.count("error") == 1
    assert sorted(flat([batch for batch in seen if batch != "error"])) == list(range(1, 12))


def test_a_state_after_an_exception_continues_after_it() -> None:
    """The dataset raises again while the elements before the state are skipped."""
    loader = infeed.DataLoader(FailingAt(9, 3), batch_size=2)
    batches = iter(loader)
    first = [plain(next(batches))]
    with pytest.raises(LookupError):
        next(batches)
    first.append(plain(next(batches)))
    state = loader.state_dict()
    resumed = infeed.DataLoader(FailingAt(9, 3), batch_size=2)
    resumed.load_state_dict(state)
    assert [*first, *collected(resumed)] == [[0, 1], [4, 5], [6, 7], [8]]


def test_an_iterable_dataset_that_fails_during_resume_raises() -> None:
    """A generator that raises before it has reached its position yields nothing more."""

    def failing() -> Iterator[int]:
        yield from range(3)
        raise LookupError

    class Good:
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    class Broken:
        def __iter__(self) -> Iterator[int]:
            return failing()

    loader = infeed.DataLoader(Good(), batch_size=2)
    batches = iter(loader)
    next(batches)
    next(batches)
    state = loader.state_dict()
    resumed = infeed.DataLoader(Broken(), batch_size=2)
    resumed.load_state_dict(state)
    with pytest.raises(LookupError):
        next(iter(resumed))
