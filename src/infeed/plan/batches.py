"""Which positions make which batch, and where a batch is cut into grains.

The cut is part of the plan: it depends on batch size and options, never on timing or on the number of workers, because seeds
hang on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np

from infeed.plan.order import Indices, Order

# A batch is cut into at most this many grains. More lets more workers share a batch (the first comes sooner, a slow sample
# holds up less); each costs the seeding of three generators, some 6 microseconds, which tiny samples feel.
_GRAINS_PER_BATCH: Final = 4


class BatchPlan(NamedTuple):
    """One batch: what to load and where it stands in the epoch."""

    indices: Indices | list[Any]
    first_position: int


def default_grain_size(batch_size: int) -> int:
    """Rows per grain for batches of this size.

    >>> [default_grain_size(n) for n in (1, 4, 5, 32, 256)]
    [1, 1, 2, 8, 64]
    """
    return max(1, -(-batch_size // _GRAINS_PER_BATCH))


def grain_count(row_count: int, grain_size: int) -> int:
    """How many grains a batch of ``row_count`` rows is cut into; the last may be shorter."""
    return -(-row_count // grain_size)


def batch_count(length: int, batch_size: int, *, drop_last: bool) -> int:
    """Batches in an epoch of ``length`` samples."""
    return length // batch_size if drop_last else -(-length // batch_size)


def ordered_batches(order: Order, batch_size: int, *, drop_last: bool) -> Iterator[BatchPlan]:
    """Consecutive positions of an order, ``batch_size`` at a time."""
    for number in range(batch_count(order.length, batch_size, drop_last=drop_last)):
        start = number * batch_size
        yield BatchPlan(order.take(start, min(start + batch_size, order.length)), start)


def sampled_batches(sampler: Iterable[Any], batch_size: int, *, drop_last: bool) -> Iterator[BatchPlan]:
    """Indices as the user's sampler yields them, taken no earlier than they are needed."""
    indices = iter(sampler)
    position = 0
    while chunk := list(islice(indices, batch_size)):
        if len(chunk) < batch_size and drop_last:
            return
        yield BatchPlan(_compact(chunk), position)
        position += len(chunk)


def given_batches(batch_sampler: Iterable[Iterable[Any]]) -> Iterator[BatchPlan]:
    """Batches as the user's batch sampler yields them. An empty one is a batch of no rows, and left out."""
    position = 0
    for chunk in batch_sampler:
        indices = list(chunk)
        if indices:
            yield BatchPlan(_compact(indices), position)
            position += len(indices)


def single_samples(indices: Iterable[Any]) -> Iterator[BatchPlan]:
    """One sample each, for ``batch_size=None``; an index may be anything, also a list that goes whole to the dataset."""
    for position, index in enumerate(indices):
        yield BatchPlan(_compact([index]), position)


def _compact(indices: list[Any]) -> Indices | list[Any]:
    # Plain integers travel as 8 bytes each. `bool` and NumPy integers are left as they are: a dataset may tell them apart.
    if all(type(index) is int for index in indices):
        try:
            return np.array(indices, dtype=np.int64)
        except OverflowError:
            return indices
    return indices
