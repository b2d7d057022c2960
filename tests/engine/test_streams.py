"""Datasets without an index: every element once, however many workers read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import infeed
from tests.helpers import Journal, Stream, collected, flat, kill_process, plain

WORKERS = pytest.mark.parametrize("workers", [0, 1, 3])


class Sharded:
    """Chooses its share by the worker that it is read in."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = infeed.get_worker_info()
        yield from range(self.count) if info is None else range(info.id, self.count, info.num_workers)


class AsksLate(Sharded):
    """Yields something before it asks which worker it is in."""

    def __iter__(self) -> Iterator[int]:
        yield from (-1, -2)
        yield from super().__iter__()


def kinds(workers: int, kind: str) -> dict[str, Any]:
    return {"num_workers": workers, "timeout": 30, **({"worker": kind} if workers else {})}


KINDS = pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.process)])


@KINDS
@WORKERS
def test_every_element_comes_once_from_a_stream_that_does_not_shard(workers: int, kind: str) -> None:
    """A stream that never asks for its worker is read by one, so nothing comes twice, and in its own order."""
    with infeed.DataLoader(Stream(50), batch_size=4, **kinds(workers, kind)) as loader:
        for _ in range(2):
            assert flat(collected(loader)) == list(range(50))


@KINDS
@WORKERS
def test_every_element_comes_once_from_a_stream_that_shards_itself(workers: int, kind: str) -> None:
    """A stream that chooses its share by get_worker_info() is read by all workers, each its own share."""
    with infeed.DataLoader(Sharded(50), batch_size=4, **kinds(workers, kind)) as loader:
        for _ in range(2):
            assert sorted(flat(collected(loader))) == list(range(50))


@KINDS
@WORKERS
def test_a_stream_that_asks_for_its_worker_late_loses_nothing(workers: int, kind: str) -> None:
    """Whenever it asks, the answer fits how it is read."""
    with infeed.DataLoader(AsksLate(40), batch_size=2, **kinds(workers, kind)) as loader:
        assert sorted(set(flat(collected(loader)))) == [-2, -1, *range(40)]


@pytest.mark.process
def test_shares_are_read_by_different_workers() -> None:
    """With a stream that shards itself all workers work, and their batches come in turn."""

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
def test_a_stream_is_cut_into_batches(
    light_engine: dict[str, Any], count: int, options: dict[str, Any], expected: list[Any]
) -> None:
    """Batch size, drop_last and collate_fn mean the same for a stream as for an indexed dataset."""
    with infeed.DataLoader(Stream(count), **options, **light_engine) as loader:
        assert collected(loader) == expected
        assert collected(loader) == expected


@pytest.mark.process
def test_an_empty_share_is_no_trouble() -> None:
    """More workers than elements: shares with nothing in them are passed over."""
    with infeed.DataLoader(Sharded(2), batch_size=1, num_workers=4, timeout=30) as loader:
        for _ in range(2):
            assert sorted(flat(collected(loader))) == [0, 1]


def test_an_iterable_dataset_is_read_again_each_epoch(every_engine: dict[str, Any]) -> None:
    """Each epoch calls __iter__ again, also after one that was left in the middle."""
    with infeed.DataLoader(Stream(9), batch_size=2, **every_engine) as loader:
        assert plain(next(iter(loader))) == [0, 1]
        assert flat(collected(loader)) == list(range(9))


def test_an_endless_stream_can_be_left(engine: dict[str, Any]) -> None:
    """A stream may go on for ever: it is read ahead by no more than fits in flight."""

    class Endless:
        def __iter__(self) -> Iterator[int]:
            number = 0
            while True:
                yield number
                number += 1

    with infeed.DataLoader(Endless(), batch_size=2, **engine) as loader:
        batches = iter(loader)
        assert [plain(next(batches)) for _ in range(30)] == [[2 * i, 2 * i + 1] for i in range(30)]


def test_streams_of_samples_with_arrays_are_stacked(every_engine: dict[str, Any]) -> None:
    """Elements of a stream are samples like any others."""

    class Arrays:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for number in range(5):
                yield {"x": np.full(2, number), "name": str(number)}

    with infeed.DataLoader(Arrays(), batch_size=3, **every_engine) as loader:
        assert collected(loader) == [
            {"x": [[0, 0], [1, 1], [2, 2]], "name": ["0", "1", "2"]},
            {"x": [[3, 3], [4, 4]], "name": ["3", "4"]},
        ]


def test_a_stream_that_raises_gives_what_came_before_and_then_its_error(engine: dict[str, Any]) -> None:
    """Whole batches before the bad element arrive; its own exception follows, and then the stream is at its end."""

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


def test_a_batch_that_cannot_be_collated_does_not_end_the_stream(engine: dict[str, Any]) -> None:
    """The elements after a bad batch still come: what failed was collate_fn, not the stream."""

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


def test_an_iterator_is_a_stream_for_one_epoch() -> None:
    """A generator can be given as it is where nothing has to be sent: it ends with its first epoch."""
    loader = infeed.DataLoader((i * i for i in range(5)), batch_size=2)
    assert collected(loader) == [[0, 1], [4, 9], [16]]
    assert collected(loader) == []


@pytest.mark.parametrize("option", ["shuffle", "sampler", "batch_sampler"])
def test_an_iterable_dataset_rejects_options_of_order(option: str) -> None:
    """Options about the order are refused for a dataset that has none but its own."""
    value: Any = {"shuffle": True, "sampler": [1], "batch_sampler": [[1]]}[option]
    with pytest.raises(infeed.ConfigError, match=f"{option}.* is not supported for iterable datasets"):
        infeed.DataLoader(Stream(4), **{option: value})


@pytest.mark.process
def test_a_stream_goes_on_where_a_killed_worker_was(tmp_path: Any) -> None:
    """The worker is replaced, passes over what was delivered, and every element comes once, in order (P1)."""
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
def test_a_stream_with_random_state_is_the_same_after_a_death(tmp_path: Any) -> None:
    """What a stream carries over from element to element and drew at random is the same when it is read again (P2)."""
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
    """Its ``__iter__`` starts from the beginning and returns itself, and it restarts by itself at its end."""

    def __iter__(self) -> Resetting:
        self.at = 0
        return self

    def __next__(self) -> int:
        if self.at == 5:
            self.at = 0
            raise StopIteration
        self.at += 1
        return self.at


def test_a_stream_that_resets_itself_is_read_once(engine: dict[str, Any]) -> None:
    """``iter`` is asked of it once an epoch, and nothing after its end."""
    with infeed.DataLoader(Resetting(), batch_size=2, **engine) as loader:
        for _ in range(2):
            assert collected(loader) == [[1, 2], [3, 4], [5]]


class FailingAt:
    """Raises for one element, and goes on."""

    def __init__(self, length: int, failing: int) -> None:
        self.length, self.failing = length, failing

    def __iter__(self) -> Iterator[int]:
        return map(self.element, range(self.length))

    def element(self, number: int) -> int:
        if number == self.failing:
            raise LookupError(number)
        return number


class FailingShares(FailingAt):
    """Each worker reads a part of it."""

    def __iter__(self) -> Iterator[int]:
        info = infeed.get_worker_info()
        numbers = range(self.length) if info is None else range(info.id, self.length, info.num_workers)
        return map(self.element, numbers)


def outcomes(batches: Iterator[Any]) -> list[Any]:
    """Batches, or the exceptions in their places."""
    seen: list[Any] = []
    while True:
        try:
            seen.append(plain(next(batches)))
        except StopIteration:
            return seen
        except LookupError:
            seen.append("error")


def test_a_stream_that_goes_on_after_it_raised_is_read_to_its_end(engine: dict[str, Any]) -> None:
    """Its batch is lost, with what was read of it; all others come."""
    with infeed.DataLoader(FailingAt(9, 3), batch_size=2, **engine) as loader:
        assert outcomes(iter(loader)) == [[0, 1], "error", [4, 5], [6, 7], [8]]


def test_a_stream_that_raises_in_its_first_batch_is_shared_out_all_the_same(engine: dict[str, Any]) -> None:
    """Whether it asks for its worker is known by then."""
    with infeed.DataLoader(FailingShares(12, 0), batch_size=2, **engine) as loader:
        seen = outcomes(iter(loader))
    assert seen.count("error") == 1
    assert sorted(flat([batch for batch in seen if batch != "error"])) == list(range(1, 12))


def test_a_state_behind_an_exception_goes_on_behind_it() -> None:
    """What raised then raises again while what was had is read and forgotten."""
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


def test_a_stream_that_fails_while_it_is_resumed_does_not_end_in_silence() -> None:
    """A generator that raises before it has come to where it was gives nothing more."""

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
