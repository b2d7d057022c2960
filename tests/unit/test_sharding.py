"""Which rank gets which part of an epoch."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infeed.distributed import find_shard
from infeed.errors import ConfigError
from infeed.plan.batches import BatchPlan, ordered_batches, sampled_batches, user_batches
from infeed.plan.order import SequentialOrder, ShuffledOrder
from infeed.plan.sharding import Cut, Shard, Steps

LENGTHS = st.integers(0, 200)
SIZES = st.integers(1, 9)
WORLDS = st.integers(1, 7)


def ranks(
    length: int, size: int, world: int, *, drop_last: bool = False, pad: bool = True, start: int = 0
) -> list[list[BatchPlan]]:
    order = ShuffledOrder(length, seed=1, epoch=0)
    return [list(ordered_batches(order, Cut(size, drop_last, Shard(rank, world), pad), start)) for rank in range(world)]


def seen(plans: list[list[BatchPlan]]) -> Counter[int]:
    return Counter(int(index) for rank in plans for plan in rank for index in plan.indices)


@given(LENGTHS, SIZES, WORLDS)
def test_padded_ranks_have_equal_batches_and_repeat_less_than_one_sample_each(length: int, size: int, world: int) -> None:
    """For training: every rank has equally many batches of the same sizes, and every sample is used."""
    plans = ranks(length, size, world)

    sizes = [[len(plan.indices) for plan in rank] for rank in plans]
    assert all(one == sizes[0] for one in sizes)
    assert all(1 <= rows <= size for rows in sizes[0])
    counts = seen(plans)
    assert set(counts) == set(range(length))
    assert sum(counts.values()) - length < world


@given(LENGTHS, SIZES, WORLDS)
def test_without_padding_every_sample_occurs_exactly_once(length: int, size: int, world: int) -> None:
    """For evaluation: nothing repeated, nothing omitted, no batch too large."""
    plans = ranks(length, size, world, pad=False)

    assert seen(plans) == Counter(range(length))
    assert all(1 <= len(plan.indices) <= size for rank in plans for plan in rank)


@given(LENGTHS, st.integers(2, 9), WORLDS)
def test_without_padding_ranks_have_equally_many_batches_unless_there_are_fewer_samples_than_ranks(
    length: int, size: int, world: int
) -> None:
    """A rank that waits for others in every step must not wait forever."""
    counts = [len(rank) for rank in ranks(length, size, world, pad=False)]

    if length >= world:
        assert len(set(counts)) == 1
    else:
        assert sum(counts) == length


@given(LENGTHS, SIZES, WORLDS)
def test_drop_last_omits_an_incomplete_step(length: int, size: int, world: int) -> None:
    """Every batch of every rank is full."""
    plans = ranks(length, size, world, drop_last=True)

    assert {len(plan.indices) for rank in plans for plan in rank} <= {size}
    assert [len(rank) for rank in plans] == [length // (size * world)] * world


@given(LENGTHS, SIZES, WORLDS, st.booleans())
def test_full_batches_are_those_of_a_single_rank(length: int, size: int, world: int, pad: bool) -> None:
    """Batch s of rank r is batch s * world + r, with the same positions, and so with the same seeds."""
    alone = list(ordered_batches(ShuffledOrder(length, seed=1, epoch=0), Cut(size)))
    full = length // (size * world) - (0 if pad else 1)

    for rank, plans in enumerate(ranks(length, size, world, pad=pad)):
        for step in range(full):
            expected = alone[step * world + rank]
            assert plans[step].first_position == expected.first_position
            assert plans[step].indices.tolist() == expected.indices.tolist()  # type: ignore[union-attr]


@given(LENGTHS, SIZES, WORLDS, st.booleans(), st.booleans())
def test_all_ranks_are_at_the_same_position_after_a_step(length: int, size: int, world: int, pad: bool, drop: bool) -> None:
    """The state of one rank is valid for all."""
    stops = [[plan.stop for plan in rank] for rank in ranks(length, size, world, pad=pad, drop_last=drop)]

    for row in zip(*stops, strict=False):
        assert len(set(row)) == 1


@given(LENGTHS, SIZES, WORLDS, SIZES, WORLDS, st.data())
def test_another_number_of_ranks_and_batch_size_continues_at_the_common_position(
    length: int, size: int, world: int, size_then: int, world_then: int, data: st.DataObject
) -> None:
    """Exactly once over both runs."""
    before = ranks(length, size, world, pad=False)
    steps = data.draw(st.integers(0, min(map(len, before))))
    position = before[0][steps - 1].stop if steps else 0

    after = ranks(length, size_then, world_then, pad=False, start=position)

    assert seen([rank[:steps] for rank in before]) + seen(after) == Counter(range(length))


@given(LENGTHS, SIZES, WORLDS, st.booleans(), st.booleans(), st.integers(0, 50))
def test_a_sampler_is_sharded_like_an_order(length: int, size: int, world: int, pad: bool, drop: bool, start: int) -> None:
    """Its length is unknown in advance, and the result is the same."""
    for rank in range(world):
        cut = Cut(size, drop, Shard(rank, world), pad)
        expected = [(list(p.indices), p[1:]) for p in ordered_batches(SequentialOrder(length), cut, min(start, length))]

        plans = [(list(p.indices), p[1:]) for p in sampled_batches(iter(range(length)), cut, min(start, length))]

        assert plans == expected


@given(LENGTHS, SIZES, WORLDS, st.booleans(), st.booleans())
def test_the_number_of_batches_is_known_in_advance(length: int, size: int, world: int, pad: bool, drop: bool) -> None:
    """len() is right."""
    for rank, plans in enumerate(ranks(length, size, world, pad=pad, drop_last=drop)):
        steps = Steps(0, length, Cut(size, drop, Shard(rank, world), pad))

        assert len(plans) == steps.count - steps.is_last_empty


@given(st.lists(st.integers(1, 4), max_size=12), WORLDS)
def test_a_batch_sampler_is_sharded_by_batches(sizes: list[int], world: int) -> None:
    """Each batch goes to one rank; ranks without a batch in the last round repeat the first ones."""
    batches = [[number * 10 + row for row in range(size)] for number, size in enumerate(sizes)]

    plans = [[list(map(int, p.indices)) for p in user_batches(batches, Cut(1, shard=Shard(r, world)))] for r in range(world)]

    assert {len(rank) for rank in plans} == {-(-len(batches) // world)}
    given_out = [batch for step in zip(*plans, strict=True) for batch in step]
    assert given_out[: len(batches)] == batches


def test_a_batch_sampler_continues_after_the_delivered_batches() -> None:
    """By the number of samples, whatever the sizes."""
    batches = [[1], [2, 3], [4], [5, 6, 7]]

    rest = list(user_batches(batches, Cut(1), 3))

    assert [(list(p.indices), p.first_position, p.stop) for p in rest] == [([4], 3, 4), ([5, 6, 7], 4, 7)]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, (1, 4)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6"}, (5, 6)),
        ({"RANK": "0"}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "5", "SLURM_NTASKS": "6"}, (1, 2)),
    ],
)
def test_the_environment_of_a_launcher_sets_the_rank(environ: dict[str, str], expected: tuple[int, int]) -> None:
    """The common launchers, the most specific first."""
    assert find_shard(environ) == expected


@pytest.mark.parametrize(
    "environ", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "-1", "WORLD_SIZE": "2"}]
)
def test_an_invalid_rank_is_rejected(environ: dict[str, Any]) -> None:
    """With the variable and the fix."""
    with pytest.raises(ConfigError, match=r"found RANK=.*WORLD_SIZE='2'.*pass shard="):
        find_shard(environ)
