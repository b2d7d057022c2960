"""The block shuffle: every index once, neighbors together, and a pure function of seed, epoch and position."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import infeed
from infeed.plan.order import Blocks, BlockShuffledOrder, EqualBlocks, ListedBlocks

STOPS = np.cumsum([7, 1, 300, 20, 20, 20, 5, 64, 90, 3])


def equal(length: int, size: int, window: int) -> Callable[[int, int], BlockShuffledOrder]:
    return lambda seed, epoch: BlockShuffledOrder(
        EqualBlocks(length, size, window, seed=seed, epoch=epoch), length, seed=seed, epoch=epoch
    )


def listed(window: int) -> Callable[[int, int], BlockShuffledOrder]:
    return lambda seed, epoch: BlockShuffledOrder(
        ListedBlocks(STOPS, window, seed=seed, epoch=epoch), int(STOPS[-1]), seed=seed, epoch=epoch
    )


ORDERS = {
    "one window": equal(50, 10, 8),
    "whole blocks": equal(640, 10, 4),
    "incomplete block": equal(647, 10, 4),
    "incomplete block alone": equal(641, 10, 4),
    "single samples": equal(100, 1, 3),
    "block beyond the end": equal(30, 64, 2),
    "one sample": equal(1, 5, 5),
    "listed": listed(3),
    "listed one by one": listed(1),
    "listed at once": listed(100),
}


@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
def test_every_index_occurs_once(make: Callable[[int, int], BlockShuffledOrder]) -> None:
    for seed in range(5):
        order = make(seed, 3)
        assert sorted(order.take(0, order.length).tolist()) == list(range(order.length))


@pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)
def test_any_slice_equals_that_of_the_whole(make: Callable[[int, int], BlockShuffledOrder]) -> None:
    """A run can be resumed at any position, with any batch size, on any rank."""
    whole = make(5, 1).take(0, make(5, 1).length)
    order = make(5, 1)
    for start in (len(whole) // 2, 0, len(whole) - 1, len(whole) // 3):
        for size in (0, 1, 9, 1000):
            assert order.take(start, min(start + size, len(whole))).tolist() == whole[start : start + size].tolist()


def test_epochs_and_seeds_differ() -> None:
    orders = [equal(647, 10, 4)(seed, epoch).take(0, 647).tolist() for seed in (1, 2) for epoch in (0, 1)]

    assert len({tuple(order) for order in orders}) == 4
    assert len({tuple(sorted(order[-7:])) for order in orders}) == 4  # The incomplete block has different samples.


def test_a_window_consists_of_few_runs_of_consecutive_indices() -> None:
    """One per block, and at most one more if the order begins in the middle of the dataset."""
    order = equal(6400, 10, 4)(3, 0)
    for start in range(0, 6400, 40):
        indices = np.sort(order.take(start, start + 40))
        assert np.count_nonzero(np.diff(indices) > 1) <= 4
        assert order.take(start, start + 40).tolist() != indices.tolist()


def test_listed_blocks_stay_together() -> None:
    order = listed(1)(3, 0)
    found = np.searchsorted(STOPS, order.take(0, order.length), side="right")

    assert np.count_nonzero(np.diff(found)) == len(STOPS) - 1


def test_a_billion_samples_need_no_list() -> None:
    order = equal(10**9, 64, 16)(3, 0)

    assert len(set(order.take(10**9 - 1000, 10**9).tolist())) == 1000


def test_the_order_is_pinned() -> None:
    """Runs of earlier releases are resumed with this order."""
    assert equal(1000, 4, 3)(7, 0).take(0, 12).tolist() == [143, 467, 468, 314, 470, 313, 311, 312, 144, 146, 145, 469]


class Remote(list[int]):
    prefers_block_shuffle = True
    shuffle_blocks = 8


def indices(loader: infeed.DataLoader) -> list[int]:
    return [index for batch in loader for index in batch.tolist()]


def test_a_dataset_may_request_blocks() -> None:
    """A RandomSampler still shuffles single samples."""
    dataset = Remote(range(800))
    blocks = indices(infeed.DataLoader(dataset, 10, shuffle=True, seed=1))

    assert blocks == indices(infeed.DataLoader(dataset, 10, shuffle="block", seed=1))
    assert blocks == indices(infeed.DataLoader(list(range(800)), 10, sampler=infeed.RandomSampler(block_size=8), seed=1))
    exact = indices(infeed.DataLoader(list(range(800)), 10, shuffle=True, seed=1))
    assert indices(infeed.DataLoader(dataset, 10, sampler=infeed.RandomSampler(), seed=1)) == exact != blocks
    assert sorted(blocks) == list(range(800))


def test_row_groups_are_blocks() -> None:
    class Groups(list[int]):
        shuffle_blocks = STOPS

    order = indices(
        infeed.DataLoader(Groups(range(int(STOPS[-1]))), 10, sampler=infeed.RandomSampler(block_size="auto", window=1))
    )
    assert np.count_nonzero(np.diff(np.searchsorted(STOPS, order, side="right"))) == len(STOPS) - 1


def test_a_state_resumes_with_another_batch_size_and_number_of_ranks() -> None:
    options = {"shuffle": "block", "seed": 4}
    whole = indices(infeed.DataLoader(list(range(500)), 10, **options))  # type: ignore[arg-type]
    loader = infeed.DataLoader(list(range(500)), 10, **options)  # type: ignore[arg-type]
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    state = loader.state_dict()
    loader.close()
    resumed = []
    for rank in (0, 1):
        half = infeed.DataLoader(list(range(500)), 43, shard=(rank, 2), **options)  # type: ignore[arg-type]
        half.load_state_dict(state)
        resumed += indices(half)

    assert sorted(resumed) == sorted(whole[70:])


def test_a_state_of_other_blocks_is_rejected() -> None:
    loader = infeed.DataLoader(list(range(500)), 10, shuffle="block", seed=4)
    other = infeed.DataLoader(list(range(500)), 10, sampler=infeed.RandomSampler(block_size=5), seed=4)
    with pytest.raises(infeed.StateError, match="order='block 64 x 4'"):
        other.load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"block_size": "big"}, "block_size='big' must be an int or 'auto'; use 1"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"block_size": 2, "replacement": True}, "block_size is not supported with weights or replacement"),
        ({"block_size": "auto", "weights": [1.0]}, "block_size is not supported with weights or replacement"),
    ],
)
def test_invalid_blocks_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(infeed.ConfigError, match=message):
        infeed.RandomSampler(**options)  # type: ignore[arg-type]


def test_other_strings_are_not_valid_for_shuffle() -> None:
    with pytest.raises(infeed.ConfigError, match="shuffle='exact' is not supported; use True, False or 'block'"):
        infeed.DataLoader([1], shuffle="exact")  # type: ignore[arg-type]


def test_blocks_implement_a_protocol_of_two_methods() -> None:
    """Window and position agree, for both kinds of blocks."""
    kinds: list[Blocks] = [EqualBlocks(100, 7, 3, seed=1, epoch=2), ListedBlocks(STOPS, 3, seed=1, epoch=2)]
    for blocks, length in zip(kinds, (100, int(STOPS[-1])), strict=True):
        position = number = 0
        while position < length:
            assert blocks.window_at(position) == number
            first, found = blocks.window(number)
            assert first == position
            position += len(found)
            assert blocks.window_at(position - 1) == number
            number += 1
