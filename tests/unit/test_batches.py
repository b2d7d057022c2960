"""Which positions make which batch, and where it is cut into grains."""

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
def test_batches_of_an_order_are_its_positions_one_after_another(length: int, batch_size: int, drop_last: bool) -> None:
    """Nothing is left out but an incomplete last batch if that is asked for, and len() says how many come."""
    order = ShuffledOrder(length, seed=1, epoch=0)
    plans = listed(ordered_batches(order, Cut(batch_size, drop_last)))

    kept = length - length % batch_size if drop_last else length
    assert [index for indices, _ in plans for index in indices] == order.take(0, kept).tolist()
    assert [position for _, position in plans] == list(range(0, kept, batch_size))
    assert len(plans) == Steps(0, length, Cut(batch_size, drop_last)).count


@given(length=st.integers(0, 200), batch_size=st.integers(1, 50), drop_last=st.booleans())
def test_a_sampler_is_cut_like_an_order(length: int, batch_size: int, drop_last: bool) -> None:
    """The same indices from a sampler and from an order make the same batches."""
    from_sampler = listed(sampled_batches(iter(range(length)), Cut(batch_size, drop_last)))

    assert from_sampler == listed(ordered_batches(SequentialOrder(length), Cut(batch_size, drop_last)))


def test_a_sampler_is_asked_no_earlier_than_a_batch_needs_it() -> None:
    """What a sampler yields may depend on what happened before, so nothing is taken ahead."""
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
def test_other_generators_are_as_lazy(kind: str) -> None:
    """One batch is asked for at a time, however it is made."""
    asked: list[int] = []

    def source() -> Iterator[Any]:
        for number in range(5):
            asked.append(number)
            yield [number] if kind == "batch_sampler" else number

    plans = user_batches(source(), Cut(1)) if kind == "batch_sampler" else sampled_batches(source(), Cut(1))
    next(plans)

    assert asked == [0]


def test_a_batch_sampler_decides_batches_of_any_size() -> None:
    """Positions count samples, whatever the sizes."""
    assert listed(user_batches([[5], (3, 1), iter([2]), np.array([9, 8, 7])], Cut(1))) == [
        ([5], 0),
        ([3, 1], 1),
        ([2], 3),
        ([9, 8, 7], 4),
    ]


class _Resetting:
    """Its ``__iter__`` starts from the beginning and returns itself."""

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
    """One that resets itself whenever it is asked for an iterator is not read from its beginning again."""
    sampler, batch_sampler = _Resetting([4, 2, 5, 1, 3]), _Resetting([[4, 2], [5, 1], [3]])

    assert [list(plan.indices) for plan in sampled_batches(sampler, Cut(2), start)] == [[4, 2], [5, 1], [3]][start // 2 :]
    assert listed(user_batches(batch_sampler, Cut(2), start)) == [([4, 2], 0), ([5, 1], 2), ([3], 4)][start // 2 :]


def test_what_is_no_batch_is_an_exception_in_its_place() -> None:
    """The batches behind it still come, of each rank."""
    plans = list(user_batches([[1], 5, [2, 3]], Cut(1)))
    assert [type(plan) for plan in plans] == [BatchPlan, TypeError, BatchPlan]
    plans = [plan for rank in range(2) for plan in user_batches([[1], 5, [2, 3], [4]], Cut(1, shard=Shard(rank, 2)))]
    assert [type(plan) for plan in plans] == [BatchPlan, BatchPlan, TypeError, BatchPlan]


def test_an_empty_batch_of_a_batch_sampler_is_left_out() -> None:
    """A batch of no rows is no batch, and takes no position."""
    assert listed(user_batches([[], [1], [], [2, 3], []], Cut(1))) == [([1], 0), ([2, 3], 1)]


def test_single_samples_are_batches_of_one() -> None:
    """With batch_size=None each index is asked for by itself."""
    assert listed(sampled_batches([4, 2], Cut(1))) == [([4], 0), ([2], 1)]


def test_a_list_as_an_index_goes_whole_to_the_dataset() -> None:
    """With batch_size=None an index may be a list of indices: the dataset's affair."""
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
def test_indices_that_are_not_plain_integers_arrive_as_they_are(indices: list[Any]) -> None:
    """A dataset may tell True from 1 and NumPy's integers from Python's."""
    (plan,) = sampled_batches(indices, Cut(len(indices)))

    assert isinstance(plan.indices, list)
    assert plan.indices == indices
    assert list(map(type, plan.indices)) == list(map(type, indices))


@pytest.mark.parametrize("indices", [[0, 1], [-1, 5], [(1 << 63) - 1, -(1 << 63)]], ids=["small", "negative", "64 bits"])
def test_plain_integers_become_a_vector(indices: list[int]) -> None:
    """They travel as 8 bytes each."""
    (plan,) = sampled_batches(indices, Cut(2))

    assert isinstance(plan.indices, np.ndarray)
    assert plan.indices.dtype == np.int64
    assert plan.indices.tolist() == indices


def test_what_a_sampler_raises_comes_through() -> None:
    """The batches before it are given first."""

    def sampler() -> Iterator[int]:
        yield from range(2)
        raise KeyError("gone")

    batches = sampled_batches(sampler(), Cut(2))

    next(batches)
    with pytest.raises(KeyError, match="gone"):
        next(batches)


@given(row_count=st.integers(0, 1000), grain_size=st.integers(1, 300))
def test_grains_cover_a_batch_and_none_is_empty(row_count: int, grain_size: int) -> None:
    """The cut has as many grains as are needed, no more."""
    count = grain_count(row_count, grain_size)

    assert (count - 1) * grain_size < row_count <= count * grain_size or row_count == count == 0


@given(st.integers(1, 100_000))
def test_a_batch_is_cut_into_four_grains_at_most(batch_size: int) -> None:
    """Enough for several workers to share a batch, few enough that seeding does not count."""
    assert 1 <= grain_count(batch_size, default_grain_size(batch_size)) <= 4
