"""Orders that draw with replacement, by weight, or a part of a shuffle: fair, in range, and independent of access order."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infeed.plan.order import Order, RepeatingOrder, ShuffledOrder, WeightedOrder, weight_ladder

SORTED = 1 << 14
MOST = (1 << 63) - 1


def repeating(length: int, count: int = 10**6, seed: int = 7, epoch: int = 0) -> RepeatingOrder:
    return RepeatingOrder(length, count, seed=seed, epoch=epoch)


def weighted(weights: Any, count: int = 10**6, seed: int = 7, epoch: int = 0) -> WeightedOrder:
    return WeightedOrder(weight_ladder(np.asarray(weights)), count, seed=seed, epoch=epoch)


def chi_square(counts: Any, expected: Any) -> float:
    return float(np.sum((counts - expected) ** 2 / expected))


# --- with replacement


@pytest.mark.parametrize("length", [50, 10**6, 1 << 32, (1 << 40) + 1, MOST])
def test_draws_are_spread_evenly_over_the_dataset(length: int) -> None:
    """Chi-squared over 50 equal bins is in its usual range, for seeds of all kinds."""
    for seed in (0, 1, -1, 1 << 63, 10**30):
        taken = repeating(length, seed=seed).take(0, 20_000)
        counts, _ = np.histogram((taken + 0.5) / length, bins=50, range=(0, 1))

        assert chi_square(counts, 400) < 110  # 49 expected, 0.999999 quantile 107.


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_every_index_of_a_short_dataset_is_equally_frequent(length: int) -> None:
    """Including the first and the last."""
    counts = np.bincount(repeating(length).take(0, 21_000), minlength=length)

    assert counts.sum() == 21_000
    assert len(counts) == length
    assert chi_square(counts, 21_000 / length) < 40  # At most 6 expected.


@pytest.mark.parametrize("length", [1, 2, SORTED, (1 << 31) - 1, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 1 << 62, MOST])
def test_draws_are_in_range(length: int) -> None:
    """For any length that a dataset can have, as signed 64-bit integers."""
    taken = repeating(length).take(0, 50_000)

    assert taken.dtype == np.int64
    assert taken.min() >= 0
    assert taken.max() < length


def test_an_index_may_repeat_soon() -> None:
    """Draws are independent: about 368 of 1000 indices never occur in 1000 draws."""
    missing = 1000 - len(np.unique(repeating(1000).take(0, 1000)))

    assert 300 < missing < 440


@given(length=st.integers(1, MOST), start=st.integers(0, 1 << 62), size=st.integers(0, 50))
def test_scaling_is_exact(length: int, start: int, size: int) -> None:
    """The upper half of the 128-bit product, as computed by Python integers."""
    from infeed.plan.seeds import derive, mix

    taken = repeating(length, count=MOST).take(start, start + size).tolist()
    key = derive(7, 0, 0x44524157)

    assert taken == [mix(position ^ key) * length >> 64 for position in range(start, start + size)]


def test_neighboring_draws_are_uncorrelated() -> None:
    """Neither from one position to the next, nor between two epochs."""
    one, other = (repeating(10**9, epoch=epoch).take(0, 20_000).astype(np.float64) for epoch in (0, 1))

    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.04
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.04


# --- by weight


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param([1, 2, 3, 4], id="integers"),
        pytest.param([0.1, 0.7, 0.2], id="fractions"),
        pytest.param([1e-300, 3e-300], id="tiny"),
        pytest.param([1e300, 3e300, 2e300], id="huge"),
        pytest.param([True, False, True], id="switches"),
        pytest.param(np.arange(1, 40, dtype=np.float32), id="narrow floats"),
        pytest.param(np.full(100, 255, dtype=np.uint8), id="narrow integers"),
    ],
)
def test_indices_are_as_frequent_as_their_weights(weights: Any) -> None:
    """Chi-squared against the weights is in its usual range, for seeds of all kinds."""
    wanted = np.asarray(weights, dtype=np.float64)
    some = wanted > 0
    expected = 40_000 * wanted[some] / wanted.sum()
    freedom = max(1, int(some.sum()) - 1)
    for seed in (0, 1, -5, 1 << 70):
        counts = np.bincount(weighted(weights, seed=seed).take(0, 40_000), minlength=len(wanted))

        assert counts.sum() == 40_000
        assert chi_square(counts[some], expected) < freedom + 8 * np.sqrt(2 * freedom) + 10


@pytest.mark.parametrize(
    "weights",
    [
        [0, 1, 1],
        [1, 1, 0],
        [1, 0, 1],
        [0, 0, 0, 1],
        [1, 0, 0, 0],
        [0, 1e-320, 0, 1e-320, 0],
        [0, 5e-324, 0],
        [0, 1e308, 0],
        [0, 1, 0, 1e-17, 0],
    ],
)
def test_a_weight_of_zero_is_never_drawn(weights: list[float]) -> None:
    """At the ends and in the middle, however small or large the others are."""
    drawn = np.unique(weighted(weights).take(0, 200_000))

    assert drawn.min() >= 0
    assert all(weights[index] > 0 for index in drawn)


@pytest.mark.parametrize("hash_value", [0, (1 << 64) - 1, 1 << 63])
def test_the_lowest_and_the_highest_draw_hit_positive_weights(hash_value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding must not push a draw over the edge."""
    import infeed.plan.order as module

    monkeypatch.setattr(module, "hash_positions", lambda key, start, stop: np.full(stop - start, hash_value, dtype=np.uint64))
    for weights in ([0, 1, 2, 0], [0.1] * 10 + [0], [0, 5e-324, 0], [0, 0, 1e308, 0], [1 / 3] * 3, [0, *[0.1] * 1000, 0]):
        drawn = int(weighted(weights).take(0, 1)[0])
        assert 0 <= drawn < len(weights)
        assert weights[drawn] > 0


@given(
    st.lists(st.sampled_from([0.0, 1.0, 1e-300, 1e300, 0.1, 5e-324, 3.0]), min_size=1, max_size=30).filter(any),
    st.integers(),
)
@settings(max_examples=150)
def test_draws_are_in_range_and_never_of_weight_zero_for_any_weights(weights: list[float], seed: int) -> None:
    """Mixed sizes, zeros anywhere."""
    drawn = np.unique(weighted(weights, seed=seed).take(0, 2000))

    assert drawn.dtype == np.int64
    assert all(0 <= index < len(weights) and weights[index] > 0 for index in drawn.tolist())


def test_positions_of_a_huge_epoch_can_be_drawn() -> None:
    """Where no list could hold the epoch."""
    for order in (weighted([1, 2, 3], count=MOST), repeating(3, count=MOST)):
        for start in (0, MOST // 2, MOST - 1000):
            assert set(order.take(start, start + 1000).tolist()) == {0, 1, 2}


def test_weights_take_no_more_memory_than_eight_bytes_each() -> None:
    """Neither the cumulative sums nor drawing makes a second copy."""
    weights = np.ones(1_000_000)
    tracemalloc.start()
    try:
        order = weighted(weights)
        order.take(0, 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak <= 8 * len(weights) + 200_000


def test_the_weights_are_not_changed() -> None:
    """Later changes by the user have no influence."""
    weights = np.array([1.0, 2.0, 3.0, 0.0])
    order = weighted(weights)
    before = order.take(0, 100)
    assert weights.tolist() == [1, 2, 3, 0]
    weights[:] = [0, 0, 0, 1]

    assert np.array_equal(order.take(0, 100), before)


def test_cumulative_sums_end_at_the_last_positive_weight() -> None:
    """Trailing zeros are omitted; earlier zeros add nothing."""
    assert weight_ladder(np.array([0, 2, 0, 1, 0, 0])).tolist() == [0, 2, 2, 3]
    assert weight_ladder(np.array([5])).tolist() == [5]


# --- a part of a shuffle


@pytest.mark.parametrize("length", [1, 50, SORTED, SORTED + 1, 100_003, 1 << 40, MOST])
def test_a_part_of_a_shuffle_is_its_prefix(length: int) -> None:
    """The same samples in the same order as in the whole."""
    for count in (1, min(length, 7), min(length, 40_000)):
        part = ShuffledOrder(length, seed=7, epoch=2, count=count)

        assert part.length == count
        assert np.array_equal(part.take(0, count), ShuffledOrder(length, seed=7, epoch=2).take(0, count))


@pytest.mark.parametrize("length", [1000, 100_003])
def test_parts_of_other_epochs_have_other_samples(length: int) -> None:
    """Over many epochs every sample is used."""
    parts = [ShuffledOrder(length, seed=7, epoch=epoch, count=100).take(0, 100).tolist() for epoch in range(3)]

    assert all(len(set(part)) == 100 for part in parts)
    assert len(set(parts[0]) & set(parts[1])) < 40
    assert parts[1] != parts[2]


def test_every_sample_is_in_the_part_equally_often_over_many_epochs() -> None:
    """A tenth of the samples each epoch: chi-squared over the samples is in its usual range."""
    taken = [ShuffledOrder(100, seed=7, epoch=epoch, count=10).take(0, 10) for epoch in range(3000)]
    counts = np.bincount(np.concatenate(taken), minlength=100)

    assert chi_square(counts, 300) < 200  # 89 expected.


# --- all orders


ORDERS: dict[str, Any] = {
    "repeating": lambda seed, epoch: repeating(1000, seed=seed, epoch=epoch),
    "repeating, huge": lambda seed, epoch: repeating(MOST, seed=seed, epoch=epoch),
    "weighted": lambda seed, epoch: weighted(np.arange(1000), seed=seed, epoch=epoch),
    "part of a shuffle": lambda seed, epoch: ShuffledOrder(10**6, seed=seed, epoch=epoch, count=500_000),
}


@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
def test_reading_in_chunks_equals_reading_at_once(make: Any) -> None:
    """For any batch size, from any position, in any order."""
    order: Order = make(7, 0)
    whole = make(7, 0).take(0, 5000)
    for size in (1, 7, 256):
        chunks = [order.take(start, min(start + size, 5000)) for start in range(0, 5000, size)]
        assert np.array_equal(np.concatenate(chunks), whole)
    assert np.array_equal(order.take(4000, 4100), whole[4000:4100])
    assert np.array_equal(order.take(10, 20), whole[10:20])
    assert len(order.take(10, 10)) == 0


@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
def test_epochs_and_seeds_are_independent(make: Any) -> None:
    """Different ones agree only by chance; equal ones agree everywhere."""
    base = make(7, 0).take(0, 2000)

    assert np.array_equal(make(7, 0).take(0, 2000), base)
    for seed, epoch in ((7, 1), (8, 0), (-7, 0), (7 + (1 << 64), 1), (0, 7), (7, 10**15)):
        other = make(seed, epoch).take(0, 2000)
        assert np.count_nonzero(other == base) < 25


def test_draws_are_pinned() -> None:
    """They decide runs of earlier releases and must not change."""
    assert repeating(1000).take(0, 5).tolist() == [349, 212, 346, 845, 796]
    assert weighted([1, 2, 3, 4]).take(0, 10).tolist() == [2, 1, 2, 3, 3, 2, 1, 2, 3, 1]
