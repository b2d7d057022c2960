"""All kinds of workers agree: datasets, orders, samplers, batch sizes, collation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import infeed
from tests.helpers import Squares, Tree, assert_same, collected, flat, plain


class Batched:
    """A dataset with `__getitems__`."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        raise AssertionError("__getitems__ is there to be used")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index + 100 for index in indices]


class Words:
    """A dataset whose indices are strings."""

    def __getitem__(self, word: str) -> dict[str, Any]:
        return {"word": word, "length": len(word)}


class Grid:
    """A dataset whose indices are pairs."""

    def __getitem__(self, place: tuple[int, int]) -> int:
        row, column = place
        return 10 * row + column


def chunks(values: list[Any], size: int) -> list[list[Any]]:
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


# A dataset, and its batches of 4.
DATASETS: list[tuple[str, Callable[[], Any], list[Any]]] = [
    ("range", lambda: range(10), chunks(list(range(10)), 4)),
    ("list", lambda: [1.5, 2.5, 3.5, 4.5, 5.5], [[1.5, 2.5, 3.5, 4.5], [5.5]]),
    ("list of text", lambda: list("abcdef"), [list("abcd"), list("ef")]),
    ("list of tuples", lambda: [(i, str(i)) for i in range(6)], [[[0, 1, 2, 3], list("0123")], [[4, 5], ["4", "5"]]]),
    ("dict with numbers as keys", lambda: {0: 5, 1: 6, 2: 7}, [[5, 6, 7]]),
    ("array", lambda: np.arange(10), chunks(list(range(10)), 4)),
    ("array of rows", lambda: np.arange(10).reshape(5, 2), chunks([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], 4)),
    ("tuple of arrays", lambda: (np.arange(5), np.arange(5) * 2.0), [[[0, 1, 2, 3], [0.0, 2.0, 4.0, 6.0]], [[4], [8.0]]]),
    ("dict of arrays", lambda: {"x": np.arange(5), "y": -np.arange(5)}, [
        {"x": [0, 1, 2, 3], "y": [0, -1, -2, -3]}, {"x": [4], "y": [-4]},
    ]),
    ("class", lambda: Squares(6, 2), [
        [[[0, 0], [1, 1], [2, 2], [3, 3]], [0, 1, 4, 9]], [[[4, 4], [5, 5]], [16, 25]],
    ]),
    ("batched", Batched, chunks(list(range(100, 110)), 4)),
    ("one sample", lambda: [7], [[7]]),
    ("none at all", lambda: [], []),
]  # fmt: skip


@pytest.mark.parametrize(("make", "expected"), [case[1:] for case in DATASETS], ids=[case[0] for case in DATASETS])
def test_a_dataset_is_loaded_in_order_in_batches(
    every_engine: dict[str, Any], make: Callable[[], Any], expected: list[Any]
) -> None:
    """Each kind of dataset with an index gives the same batches from every kind of worker, epoch after epoch."""
    with infeed.DataLoader(make(), batch_size=4, **every_engine) as loader:
        assert len(loader) == len(expected)
        assert collected(loader) == expected
        assert collected(loader) == expected


@pytest.mark.parametrize(
    ("make", "first"),
    [
        pytest.param(lambda: (np.arange(6), np.arange(6) * 2), [[0, 0], [1, 2]], id="tuple"),
        pytest.param(lambda: {"x": np.arange(6), "y": np.arange(6) * 2}, [{"x": 0, "y": 0}, {"x": 1, "y": 2}], id="dict"),
    ],
)
def test_arrays_of_one_length_are_rows_with_a_collate_fn_too(make: Callable[[], Any], first: list[Any]) -> None:
    """What a dataset of arrays means does not depend on collate_fn."""
    with infeed.DataLoader(make(), batch_size=2, collate_fn=list) as loader:
        assert len(loader) == 3
        assert plain(next(iter(loader))) == first
    with infeed.DataLoader(make(), batch_size=None) as loader:
        assert len(loader) == 6
        assert plain(next(iter(loader))) == first[0]


def test_arrays_of_one_length_are_rows_whatever_they_hold() -> None:
    """A column of objects does not turn columns into samples."""
    columns = (np.arange(4), np.array(["a", None, "c", "d"], dtype=object))
    with infeed.DataLoader(columns, batch_size=2) as loader:
        assert len(loader) == 2
        assert [plain(batch[0]) for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"batch_size": 1}, [[0], [1], [2], [3], [4], [5], [6]], id="one"),
        pytest.param({"batch_size": 3}, [[0, 1, 2], [3, 4, 5], [6]], id="odd"),
        pytest.param({"batch_size": 3, "drop_last": True}, [[0, 1, 2], [3, 4, 5]], id="odd, last dropped"),
        pytest.param({"batch_size": 7, "drop_last": True}, [[0, 1, 2, 3, 4, 5, 6]], id="all in one"),
        pytest.param({"batch_size": 100}, [[0, 1, 2, 3, 4, 5, 6]], id="larger than the dataset"),
        pytest.param({"batch_size": 100, "drop_last": True}, [], id="larger, last dropped"),
        pytest.param({"batch_size": None}, [0, 1, 2, 3, 4, 5, 6], id="no batches"),
        pytest.param({"batch_size": 2, "grain_size": 1}, [[0, 1], [2, 3], [4, 5], [6]], id="smallest grains"),
        pytest.param({"batch_size": 4, "grain_size": 3}, [[0, 1, 2, 3], [4, 5, 6]], id="uneven grains"),
        pytest.param({"batch_size": 3, "prefetch": 1}, [[0, 1, 2], [3, 4, 5], [6]], id="one in flight"),
    ],
)
def test_batch_size_and_drop_last_decide_the_batches(
    light_engine: dict[str, Any], options: dict[str, Any], expected: list[Any]
) -> None:
    """A batch has batch_size samples, only the last may be smaller, and drop_last omits that one."""
    with infeed.DataLoader(range(7), **options, **light_engine) as loader:
        assert len(loader) == len(expected)
        assert collected(loader) == expected


def test_a_single_sample_is_delivered_unchanged(engine: dict[str, Any]) -> None:
    """Without batches a sample keeps its types; nothing is stacked or converted to an array."""
    samples = [(1, "a"), {"x": np.arange(3)}, [None, 2.5], b"bytes", 7]
    with infeed.DataLoader(samples, batch_size=None, **engine) as loader:
        for given, got in zip(samples, loader, strict=True):
            assert_same(got, given)


def test_shuffle_gives_every_index_once_in_a_new_order_each_epoch(light_engine: dict[str, Any]) -> None:
    """Each epoch is a different permutation, and the same seed reproduces all of them."""
    with infeed.DataLoader(range(50), batch_size=8, shuffle=True, seed=3, **light_engine) as loader:
        epochs = [flat(collected(loader)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, list(range(50))]}) == 4
    with infeed.DataLoader(range(50), batch_size=8, shuffle=True, seed=3, **light_engine) as again:
        assert [flat(collected(again)) for _ in range(3)] == epochs


@pytest.fixture(scope="module")
def shuffled_inline() -> list[Any]:
    with infeed.DataLoader(Squares(40), batch_size=7, shuffle=True, seed=11) as loader:
        return [collected(loader) for _ in range(2)]


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("kind", [pytest.param("thread"), pytest.param("process", marks=[pytest.mark.process])])
def test_the_order_does_not_depend_on_the_number_of_workers(shuffled_inline: list[Any], kind: Any, workers: int) -> None:
    """One seed gives the same batches in the same order for 1, 2 and 5 workers as for none (P2)."""
    options: dict[str, Any] = {"num_workers": workers, "worker": kind, "timeout": 30}
    with infeed.DataLoader(Squares(40), batch_size=7, shuffle=True, seed=11, **options) as loader:
        assert [collected(loader) for _ in range(2)] == shuffled_inline


def test_an_unseeded_loader_draws_a_seed_and_shows_it() -> None:
    """Without seed= each loader has its own order, and its repr shows the seed that reproduces it."""
    first, second = (infeed.DataLoader(range(100), batch_size=100, shuffle=True) for _ in range(2))
    assert collected(first) != collected(second)
    assert f"seed={first.seed}" in repr(first)
    again = infeed.DataLoader(range(100), batch_size=100, shuffle=True, seed=first.seed)
    fresh = infeed.DataLoader(range(100), batch_size=100, shuffle=True, seed=first.seed)
    assert collected(again) == collected(fresh)


# Supported samplers, and their batches of `range(10)` with batch_size=2.
SAMPLERS: list[tuple[str, Callable[[], Any], list[Any]]] = [
    ("list", lambda: [5, 3, 1], [[5, 3], [1]]),
    ("range", lambda: range(9, 3, -2), [[9, 7], [5]]),
    ("array", lambda: np.array([4, 4, 2, 2]), [[4, 4], [2, 2]]),
    ("tuple", lambda: (0, 9), [[0, 9]]),
    ("empty", lambda: [], []),
]


@pytest.mark.parametrize(("make", "expected"), [case[1:] for case in SAMPLERS], ids=[case[0] for case in SAMPLERS])
def test_a_sampler_decides_the_order(light_engine: dict[str, Any], make: Callable[[], Any], expected: list[Any]) -> None:
    """Indices have the sampler's order, with repetitions, and its length is the loader's."""
    with infeed.DataLoader(range(10), batch_size=2, sampler=make(), **light_engine) as loader:
        assert len(loader) == len(expected)
        assert collected(loader) == expected
        assert collected(loader) == expected


def test_a_sampler_without_batches_gives_single_samples(light_engine: dict[str, Any]) -> None:
    """With batch_size=None an index may be anything; a list of indices is passed to the dataset as one index."""
    array = np.arange(10) * 10
    with infeed.DataLoader(array, batch_size=None, sampler=[[1, 2], [3]], **light_engine) as loader:
        assert collected(loader) == [[10, 20], [30]]


@pytest.mark.parametrize(
    ("dataset", "batches", "expected"),
    [
        pytest.param(range(10), [[1, 2, 3], [4], [5, 6]], [[1, 2, 3], [4], [5, 6]], id="lists"),
        pytest.param(range(10), [(1, 2), np.array([3, 4])], [[1, 2], [3, 4]], id="tuples and arrays"),
        pytest.param(
            Words(), [["a", "bb"], ["ccc"]], [{"word": ["a", "bb"], "length": [1, 2]}, {"word": ["ccc"], "length": [3]}],
            id="text",
        ),
        pytest.param(Grid(), [[(1, 2), (3, 4)], [(5, 6)]], [[12, 34], [56]], id="pairs"),
        pytest.param(range(10), [[], [1], []], [[1]], id="empty ones are left out"),
    ],
)  # fmt: skip
def test_a_batch_sampler_decides_the_batches(
    light_engine: dict[str, Any], dataset: Any, batches: list[Any], expected: list[Any]
) -> None:
    """Any iterable of iterables of indices works, and the dataset needs no length."""
    with infeed.DataLoader(dataset, batch_sampler=batches, **light_engine) as loader:
        assert collected(loader) == expected


def test_a_generator_is_a_sampler_for_one_epoch(light_engine: dict[str, Any]) -> None:
    """A one-shot iterable gives one epoch and then empty ones, and has no length."""
    with infeed.DataLoader(range(10), batch_size=2, sampler=(i for i in (3, 1, 4)), **light_engine) as loader:
        with pytest.raises(TypeError, match="sampler of type generator has no len"):
            len(loader)
        assert collected(loader) == [[3, 1], [4]]
        assert collected(loader) == []


def test_an_endless_batch_sampler_is_read_only_as_far_as_needed(light_engine: dict[str, Any]) -> None:
    """Batches are requested as slots become free, so a sampler may be endless."""
    taken = []

    def endless() -> Iterator[list[int]]:
        number = 0
        while True:
            taken.append(number)
            yield [number % 10, (number + 1) % 10]
            number += 1

    with infeed.DataLoader(range(10), batch_sampler=endless(), prefetch=4, **light_engine) as loader:
        batches = iter(loader)
        assert [plain(next(batches)) for _ in range(6)] == [[i, i + 1] for i in range(6)]
        assert len(taken) <= 6 + 4


def test_a_sampler_is_iterated_when_the_epoch_begins(light_engine: dict[str, Any]) -> None:
    """Changes to a sampler between epochs, such as set_epoch, take effect in the next epoch."""

    class Turning:
        epoch = 0

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch, self.epoch + 1])

        def __len__(self) -> int:
            return 2

    sampler = Turning()
    with infeed.DataLoader(range(10), batch_size=2, sampler=sampler, **light_engine) as loader:
        for epoch in range(3):
            sampler.epoch = epoch
            assert collected(loader) == [[epoch, epoch + 1]]


def test_an_error_of_the_sampler_is_raised_after_the_batches_before_it(light_engine: dict[str, Any]) -> None:
    """The original error is raised where a plain loop would raise it."""

    def failing() -> Iterator[int]:
        yield from (1, 2, 3, 4)
        raise LookupError("no more")

    with infeed.DataLoader(range(10), batch_size=2, sampler=failing(), **light_engine) as loader:
        batches = iter(loader)
        assert [plain(next(batches)) for _ in range(2)] == [[1, 2], [3, 4]]
        with pytest.raises(LookupError, match="no more"):
            next(batches)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"batch_size": 4}, 3, id="rounded up"),
        pytest.param({"batch_size": 4, "drop_last": True}, 2, id="rounded down"),
        pytest.param({"batch_size": None}, 10, id="samples"),
        pytest.param({"batch_size": 4, "sampler": [1, 2, 3, 4, 5]}, 2, id="of the sampler"),
        pytest.param({"batch_sampler": [[1], [2], [3]]}, 3, id="of the batch sampler"),
    ],
)
def test_the_length_is_the_number_of_batches(options: dict[str, Any], expected: int) -> None:
    """len(loader) is the number of batches of an epoch, before anything is loaded."""
    loader = infeed.DataLoader(range(10), **options)
    assert len(loader) == expected == len(list(loader))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        pytest.param({"dataset": iter(range(3))}, "dataset", id="stream"),
        pytest.param({"dataset": range(3), "sampler": iter([1])}, "sampler", id="sampler"),
        pytest.param({"dataset": range(3), "batch_sampler": iter([[1]])}, "batch_sampler", id="batch sampler"),
    ],
)
def test_a_missing_length_is_a_type_error_with_the_cause(options: dict[str, Any], named: str) -> None:
    """len() raises TypeError, as list() and progress bars expect."""
    with pytest.raises(TypeError, match=rf"^{named} of type \w+ has no len"):
        len(infeed.DataLoader(**options))


def test_a_lambda_can_be_collate_fn(engine: dict[str, Any]) -> None:
    """It is pickled by value and receives the samples as a list."""
    with infeed.DataLoader(
        range(7), batch_size=3, collate_fn=lambda samples: [type(samples), sum(samples)], **engine
    ) as loader:
        assert list(loader) == [[list, 3], [list, 12], [list, 6]]


def test_a_closure_can_be_collate_fn(engine: dict[str, Any]) -> None:
    """collate_fn may close over local values and use arrays, text and its own containers."""
    offset = np.array([10, 20])

    def collate(samples: list[int]) -> dict[str, Any]:
        return {"sum": offset + sum(samples), "names": [str(s) for s in samples], "pair": (samples[0], np.float32(1.5))}

    with infeed.DataLoader(range(4), batch_size=2, collate_fn=collate, **engine) as loader:
        for got, first in zip(loader, (0, 2), strict=True):
            assert_same(got, collate([first, first + 1]))


def test_a_collate_fn_may_return_an_object_of_a_local_class(every_engine: dict[str, Any]) -> None:
    """The batch is an instance of the user's own class, with its arrays."""

    class Padded:
        def __init__(self, samples: list[int]) -> None:
            self.values = np.array(samples)
            self.lengths = [1] * len(samples)

    with infeed.DataLoader(range(4), batch_size=2, collate_fn=Padded, **every_engine) as loader:
        for batch, first in zip(loader, (0, 2), strict=True):
            assert type(batch) is Padded
            assert batch.values.tolist() == [first, first + 1]
            assert batch.lengths == [1, 1]


def test_classes_of_a_local_scope_can_be_samples(engine: dict[str, Any]) -> None:
    """Named tuples and dataclasses defined in a function are pickled by value, and samples have the original class."""

    class Pair(NamedTuple):
        left: Any
        right: Any

    @dataclass
    class Box:
        content: Any

    with infeed.DataLoader(Tree(4, lambda i: Pair(Box(i), Box(str(i)))), batch_size=2, **engine) as loader:
        for got, first in zip(loader, (0, 2), strict=True):
            assert type(got) is Pair
            assert type(got.left) is Box
            assert plain(got.left.content) == [first, first + 1]
            assert got.right.content == [str(first), str(first + 1)]


def test_objects_of_a_local_class_can_be_in_samples(engine: dict[str, Any]) -> None:
    """Anything that is not a container is listed unchanged."""

    class Token:
        def __init__(self, number: int) -> None:
            self.number = number

    with infeed.DataLoader(Tree(4, Token), batch_size=2, **engine) as loader:
        for got, first in zip(loader, (0, 2), strict=True):
            assert [type(token) for token in got] == [Token, Token]
            assert [token.number for token in got] == [first, first + 1]


@pytest.mark.parametrize("value", [None, 5, "text", [], {}], ids=repr)
def test_a_collate_fn_may_return_anything(engine: dict[str, Any], value: Any) -> None:
    """No return value means "no batch": falsy values and None are delivered."""
    with infeed.DataLoader(range(4), batch_size=2, collate_fn=lambda samples: value, **engine) as loader:
        assert list(loader) == [value, value]


def test_collate_fn_receives_single_samples_without_batches(engine: dict[str, Any]) -> None:
    """With batch_size=None the function receives the sample itself."""
    with infeed.DataLoader(range(3), batch_size=None, collate_fn=lambda sample: -sample, **engine) as loader:
        assert list(loader) == [0, -1, -2]


def test_getitems_receives_plain_integers_one_batch_at_a_time(engine: dict[str, Any]) -> None:
    """`__getitems__` gets the whole batch as a list of int."""

    class Asked:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            raise AssertionError

        def __getitems__(self, indices: list[int]) -> list[str]:
            return [f"{type(indices).__name__} of {len(indices)} {type(index).__name__}" for index in indices]

    with infeed.DataLoader(Asked(), batch_size=3, shuffle=True, **engine) as loader:
        assert list(loader) == [["list of 3 int"] * 3, ["list of 2 int"] * 2]


def test_indices_are_plain_integers(engine: dict[str, Any]) -> None:
    """A dataset gets int, not NumPy integers, which json and SQL reject."""

    class Kinds:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> str:
            return type(index).__name__

    with infeed.DataLoader(Kinds(), batch_size=3, shuffle=True, **engine) as loader:
        assert list(loader) == [["int"] * 3] * 2


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True, "seed": 5}, {"collate_fn": list}], ids=["rows", "shuffled", "collated"]
)
def test_out_of_order_gives_the_same_batches_as_a_set(engine: dict[str, Any], options: dict[str, Any]) -> None:
    """in_order=False changes when a batch is delivered, never its contents."""
    with infeed.DataLoader(range(41), batch_size=4, in_order=False, **options, **engine) as loader:
        for epoch in range(2):
            got = sorted(map(tuple, collected(loader)))
            reference = infeed.DataLoader(range(41), batch_size=4, **options)
            for _ in range(epoch):
                collected(reference)
            assert got == sorted(map(tuple, collected(reference)))


def test_one_worker_delivers_in_order_with_in_order_false(engine: dict[str, Any]) -> None:
    """Also if the layout of a sample differs, so that it waits for memory: as torch does, and streams rely on it."""

    class Differing:
        def __iter__(self) -> Any:
            for number in range(6):
                yield np.zeros(2), number if number % 2 == 0 else np.array([number])

    with infeed.DataLoader(Differing(), batch_size=None, in_order=False, **{**engine, "num_workers": 1}) as loader:
        assert [int(np.sum(number)) for _, number in loader] == list(range(6))


def test_a_dataset_may_keep_state_in_its_worker(engine: dict[str, Any]) -> None:
    """For example a cache or an open file."""

    class Counting:
        def __init__(self) -> None:
            self.count = 0

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> bool:
            self.count += 1
            return self.count > 0

    with infeed.DataLoader(Counting(), batch_size=2, **engine) as loader:
        assert collected(loader) == [[True, True]] * 3


def test_the_loader_shows_its_arguments() -> None:
    """dataset, batch_size and seed are attributes, and repr shows them."""
    dataset = Squares(5)
    loader = infeed.DataLoader(dataset, batch_size=2, seed=9, num_workers=3)
    assert (loader.dataset, loader.batch_size, loader.seed) == (dataset, 2, 9)
    assert repr(loader) == "DataLoader(Squares, batch_size=2, num_workers=3, seed=9)"
