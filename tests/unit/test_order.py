"""Position to index: permutations of any length, without a list."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infeed.plan.order import SequentialOrder, ShuffledOrder

SORTED = 1 << 14  # Above this length the order is computed, below it sorted.
LENGTHS = [
    0,
    1,
    2,
    3,
    1000,
    SORTED - 1,
    SORTED,
    SORTED + 1,
    SORTED + 2,
    (1 << 15) - 1,
    1 << 15,
    (1 << 15) + 1,
    100_003,
    (1 << 17) + 1,
]
HUGE = [(1 << 32) - 1, 1 << 32, (1 << 32) + 1, (1 << 40) + 12345, (1 << 62) - 1, 1 << 62, (1 << 63) - 1]


def shuffled(length: int, seed: int = 7, epoch: int = 0) -> ShuffledOrder:
    return ShuffledOrder(length, seed=seed, epoch=epoch)


def test_a_sequential_order_is_the_identity() -> None:
    """Without shuffle, index and position are equal."""
    assert SequentialOrder(10).take(3, 7).tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("length", LENGTHS)
def test_every_index_occurs_exactly_once(length: int) -> None:
    """A shuffle is a permutation, also at lengths where the method or the number of bits changes."""
    taken = shuffled(length).take(0, length)

    assert taken.dtype == np.int64
    assert np.array_equal(np.sort(taken), np.arange(length))


@pytest.mark.parametrize("length", HUGE)
def test_windows_of_a_huge_epoch_have_distinct_indices(length: int) -> None:
    """Also where no list could hold the epoch, a window has no index twice and none out of range."""
    for start in (0, length // 3, length - 5000):
        taken = shuffled(length).take(start, start + 5000)

        assert len(np.unique(taken)) == 5000
        assert 0 <= taken.min() <= taken.max() < length


@pytest.mark.parametrize("length", [(1 << 33) + 1, 1 << 62])
def test_distant_windows_of_a_huge_epoch_share_no_index(length: int) -> None:
    """Indices are unique across windows, not only inside one."""
    order = shuffled(length)
    windows = [order.take(start, start + 4000) for start in (0, length // 2, length - 4000)]

    assert len(np.unique(np.concatenate(windows))) == 12_000


@given(
    length=st.sampled_from([1, 50, SORTED, SORTED + 1, 100_003, 1 << 40]),
    spans=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 70_000)), min_size=1, max_size=5),
)
@settings(max_examples=60)
def test_the_index_at_a_position_does_not_depend_on_the_access_order(length: int, spans: list[tuple[float, int]]) -> None:
    """Windows in any order and of any size, from one object or from new ones, agree."""
    order = shuffled(length)
    for where, size in spans:
        start = int(where * (length - 1))
        stop = min(length, start + size)

        assert np.array_equal(order.take(start, stop), shuffled(length).take(start, stop))


@pytest.mark.parametrize("length", [1000, SORTED + 1, 100_003])
@pytest.mark.parametrize("chunk", [1, 7, 256, 40_000])
def test_reading_in_chunks_equals_reading_at_once(length: int, chunk: int) -> None:
    """The batch size has no influence on the order."""
    order = shuffled(length)
    stop = min(length, 50 * chunk)

    chunks = [order.take(start, min(start + chunk, stop)) for start in range(0, stop, chunk)]

    assert np.array_equal(np.concatenate(chunks), shuffled(length).take(0, stop))


@pytest.mark.parametrize("length", [1000, 100_003, 1 << 40])
def test_epochs_and_seeds_have_different_orders(length: int) -> None:
    """Two epochs, or two seeds, agree only by chance."""
    base = shuffled(length).take(0, 1000)

    for other in (
        shuffled(length, epoch=1),
        shuffled(length, seed=8),
        shuffled(length, seed=-7),
        shuffled(length, seed=1 << 63),
    ):
        assert np.count_nonzero(other.take(0, 1000) == base) < 20


def test_all_orders_of_three_are_equally_frequent() -> None:
    """A short shuffle is uniform over permutations, not only over indices."""
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(6000):
        key = tuple(shuffled(3, seed=seed).take(0, 3).tolist())
        counts[key] = counts.get(key, 0) + 1

    assert len(counts) == 6
    assert min(counts.values()) > 880  # 1000 expected, standard deviation 29.
    assert max(counts.values()) < 1120


@pytest.mark.parametrize("length", [10_000, 100_003, 1 << 40])
def test_indices_are_spread_evenly_over_the_dataset(length: int) -> None:
    """The first positions are a fair sample of the dataset: chi-squared over 50 equal bins is in its usual range."""
    taken = shuffled(length).take(0, 10_000)
    counts, _ = np.histogram(taken, bins=50, range=(0, length))
    expected = 10_000 / 50

    assert np.sum((counts - expected) ** 2 / expected) < 110  # 49 expected, 0.999999 quantile 107.


@pytest.mark.parametrize("length", [10_000, 100_003, 1 << 40])
def test_neighbors_in_the_order_are_not_neighbors_in_the_dataset(length: int) -> None:
    """From one position to the next the index increases as often as it decreases, by steps of all sizes."""
    taken = shuffled(length).take(0, 10_000).astype(np.float64)

    assert abs(np.corrcoef(taken[:-1], taken[1:])[0, 1]) < 0.05
    assert 4800 < np.count_nonzero(np.diff(taken) > 0) < 5200
