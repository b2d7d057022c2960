"""Which positions form a batch, and how it is split into grains."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infeed.plan.batches import (
    BatchPlan,
    default_grain_size,
    grain_count,
    ordered_batches,
    sampled_batches,
    user_batches,
)
from infeed.plan.order import SequentialOrder, ShuffledOrder
from infeed.plan.sharding import Cut, Shard, Steps


def listed(batches: Iterator[BatchPlan | Exception]) -> list[tuple[list[Any], int]]:
    return [(list(map(int, plan.indices)), plan.first_position) for plan in batches if isinstance(plan, BatchPlan)]


@given(length=st.integers(0, 200), batch_size=st.integers(1, 50), drop_last=st.booleans())
def test_batches_are_consecutive_positions_of_an_order(length: int, batch_size: int, drop_last: bool) -> None:
    """Only an incomplete last batch is omitted if drop_last is set, and len() is the number of batches."""
    order = ShuffledOrder(length, seed=1, epoch=0)
    plans = listed(ordered_batches(order, Cut(batch_size, drop_last)))

    kept = length - length % batch_size if drop_last else length
    assert [index for indices, _ in plans for index in indices] == order.take(0, kept).tolist()
    assert [position for _, position in plans] == list(range(0, kept, batch_size))
    assert len(plans) == Steps(0, length, Cut(batch_size, drop_last)).count


@given(length=st.integers(0, 200), batch_size=st.integers(1, 50), drop_last=st.booleans())
def test_a_sampler_is_split_into_batches_like_an_order(length: int, batch_size: int, drop_last: bool) -> None:
    """The same indices from a sampler and from an order form the same batches."""
    from_sampler = listed(sampled_batches(iter(range(length)), Cut(batch_size, drop_last)))

    assert from_sampler == listed(ordered_batches(SequentialOrder(length), Cut(batch_size, drop_last)))


def test_a_sampler_is_not_read_before_a_batch_needs_it() -> None:
    """Indices may depend on earlier events, so none are read ahead."""
    asked: list[int] = []

    def sampler() -> Iterator[int]:
        for index in range(10):
            asked.append(index)
            yield index

    batches = sampled_batches(sampler(), Cut(3))
    assert asked == []
    next(batches)
    assert asked == [0, 1, 2]
    next(batches)
    assert asked == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["batch_sampler", "single"])
def test_other_batch_generators_are_lazy_too(kind: str) -> None:
    """One batch is requested at a time."""
    asked: list[int] = []

    def source() -> Iterator[Any]:
        for number in range(5):
            asked.append(number)
            yield [number] if kind == "batch_sampler" else number

    plans = user_batches(source(), Cut(1)) if kind == "batch_sampler" else sampled_batches(source(), Cut(1))
    next(plans)

    assert asked == [0]


def test_batches_of_a_batch_sampler_may_have_any_size() -> None:
    """Positions count samples."""
    assert listed(user_batches([[5], (3, 1), iter([2]), np.array([9, 8, 7])], Cut(1))) == [
        ([5], 0),
        ([3, 1], 1),
        ([2], 3),
        ([9, 8, 7], 4),
    ]


class _Resetting:
    """Its ``__iter__`` resets it and returns it."""

    def __init__(self, elements: list[Any]) -> None:
        self.elements = elements

    def __iter__(self) -> Any:
        self.left = list(self.elements)
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


@pytest.mark.parametrize("start", [0, 2])
def test_iter_is_called_on_a_sampler_once(start: int) -> None:
    """A sampler that resets itself in `__iter__` is not read from its beginning again."""
    sampler, batch_sampler = _Resetting([4, 2, 5, 1, 3]), _Resetting([[4, 2], [5, 1], [3]])

    assert [list(plan.indices) for plan in sampled_batches(sampler, Cut(2), start)] == [[4, 2], [5, 1], [3]][start // 2 :]
    assert listed(user_batches(batch_sampler, Cut(2), start)) == [([4, 2], 0), ([5, 1], 2), ([3], 4)][start // 2 :]


def test_an_invalid_batch_is_an_exception_in_its_place() -> None:
    """Later batches of each rank follow."""
    plans = list(user_batches([[1], 5, [2, 3]], Cut(1)))
    assert [type(plan) for plan in plans] == [BatchPlan, TypeError, BatchPlan]
    plans = [plan for rank in range(2) for plan in user_batches([[1], 5, [2, 3], [4]], Cut(1, shard=Shard(rank, 2)))]
    assert [type(plan) for plan in plans] == [BatchPlan, BatchPlan, TypeError, BatchPlan]


def test_an_empty_batch_of_a_batch_sampler_is_skipped() -> None:
    """It takes no position."""
    assert listed(user_batches([[], [1], [], [2, 3], []], Cut(1))) == [([1], 0), ([2, 3], 1)]


def test_single_samples_are_batches_of_one() -> None:
    """With batch_size=None each index is requested by itself."""
    assert listed(sampled_batches([4, 2], Cut(1))) == [([4], 0), ([2], 1)]


def test_a_list_as_an_index_is_passed_to_the_dataset_unchanged() -> None:
    """With batch_size=None an index may be a list of indices."""
    (plan,) = sampled_batches([[1, 2, 3]], Cut(1))

    assert plan.indices == [[1, 2, 3]]


@pytest.mark.parametrize(
    "indices",
    [
        ["a", "b"],
        [(0, 1), (2, 3)],
        [True, False],
        [np.int32(3), np.int32(4)],
        [1, 2.0],
        [1 << 70, 1],
        [None],
        [-(1 << 63) - 1],
    ],
    ids=["str", "tuple", "bool", "numpy integers", "mixed", "beyond 64 bits", "None", "below 64 bits"],
)
def test_indices_that_are_not_plain_integers_are_passed_unchanged(indices: list[Any]) -> None:
    """A dataset may distinguish True from 1 and NumPy integers from Python's."""
    (plan,) = sampled_batches(indices, Cut(len(indices)))

    assert isinstance(plan.indices, list)
    assert plan.indices == indices
    assert list(map(type, plan.indices)) == list(map(type, indices))


@pytest.mark.parametrize("indices", [[0, 1], [-1, 5], [(1 << 63) - 1, -(1 << 63)]], ids=["small", "negative", "64 bits"])
def test_plain_integers_become_an_array(indices: list[int]) -> None:
    """They are sent as 8 bytes each."""
    (plan,) = sampled_batches(indices, Cut(2))

    assert isinstance(plan.indices, np.ndarray)
    assert plan.indices.dtype == np.int64
    assert plan.indices.tolist() == indices


def test_an_exception_of_a_sampler_propagates() -> None:
    """Earlier batches are yielded first."""

    def sampler() -> Iterator[int]:
        yield from range(2)
        raise KeyError("gone")

    batches = sampled_batches(sampler(), Cut(2))

    next(batches)
    with pytest.raises(KeyError, match="gone"):
        next(batches)


@given(row_count=st.integers(0, 1000), grain_size=st.integers(1, 300))
def test_grains_cover_a_batch_and_none_is_empty(row_count: int, grain_size: int) -> None:
    """There are no more grains than needed."""
    count = grain_count(row_count, grain_size)

    assert (count - 1) * grain_size < row_count <= count * grain_size or row_count == count == 0


@given(st.integers(1, 100_000))
def test_a_batch_has_at_most_four_grains(batch_size: int) -> None:
    """Several workers can share a batch, and the cost of seeding is small."""
    assert 1 <= grain_count(batch_size, default_grain_size(batch_size)) <= 4
