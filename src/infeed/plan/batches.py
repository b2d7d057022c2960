"""Which positions make which batch, and where a batch is cut into grains.

The cut is part of the plan: it depends on batch size and options, never on timing or on the number of workers, because seeds
hang on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np

from infeed.plan.order import Indices, Order
from infeed.plan.shards import ALONE, Cut, Piece, Steps

# A batch is cut into at most this many grains. More lets more workers share a batch (the first comes sooner, a slow sample
# holds up less); each costs the seeding of three generators, some 6 microseconds, which tiny samples feel.
_GRAINS_PER_BATCH: Final = 4


class BatchPlan(NamedTuple):
    """One batch: what to load and where it stands in the epoch."""

    indices: Indices | list[Any]
    first_position: int
    stop: int  # the position that all ranks have come to with it


def default_grain_size(batch_size: int) -> int:
    """Rows per grain for batches of this size.

    >>> [default_grain_size(n) for n in (1, 4, 5, 32, 256)]
    [1, 1, 2, 8, 64]
    """
    return max(1, -(-batch_size // _GRAINS_PER_BATCH))


def grain_count(row_count: int, grain_size: int) -> int:
    """How many grains a batch of ``row_count`` rows is cut into; the last may be shorter."""
    return -(-row_count // grain_size)


def ordered_batches(order: Order, cut: Cut, start: int = 0) -> Iterator[BatchPlan]:
    """Consecutive positions of an order, from ``start`` on."""
    if cut.shard == ALONE:
        # As below, for the usual case, in a third of the time: it is asked for every batch.
        size, end = cut.batch_size, order.length
        for first in range(start, end - size + 1 if cut.drop_last else end, size):
            stop = min(first + size, end)
            yield BatchPlan(order.take(first, stop), first, stop)
        return
    steps = Steps(start, order.length, cut)
    for step in range(steps.count):
        plan = ordered_batch(order, steps.piece(step))
        if plan is not None:
            yield plan


def ordered_batch(order: Order, piece: Piece) -> BatchPlan | None:
    """The batch of one piece of an order; ``None`` if it has nothing for this rank."""
    first, count, padding, stop = piece
    if count + padding == 0:
        return None
    indices = order.take(first, first + count)
    if padding:
        # At most one row for each rank, from the beginning of the epoch: every rank knows what stands there.
        again = order.take(0, 1)
        indices = np.concatenate([indices, np.repeat(again, padding)])
    return BatchPlan(indices, first, stop)


def sampled_batches(sampler: Iterable[Any], cut: Cut, start: int = 0) -> Iterator[BatchPlan]:
    """Indices as the user's sampler yields them, taken no earlier than they are needed; the first ``start`` are passed over."""
    indices = iter(sampler)
    opening = list(islice(indices, 1)) if start else []
    position = start
    if start:
        _skip(indices, start - len(opening))
    for chunk in steps_of(indices, cut):
        if not opening:
            opening = chunk[:1]
        first, last = cut.shard.part(len(chunk))
        stop = position + len(chunk)
        mine = chunk[first:last] + opening * (cut.shard.padding(len(chunk)) if cut.pad else 0)
        if mine:
            yield BatchPlan(_compact(mine), position + first, stop)
        position = stop


def steps_of(indices: Iterator[Any], cut: Cut) -> Iterator[list[Any]]:
    """What all ranks take in each step, as ``Steps`` has it, of things whose number is not known before."""
    size = cut.step_size
    looks_ahead = not cut.pad and cut.shard.world_size > 1
    before: list[Any] = []
    while chunk := list(islice(indices, size)):
        if len(chunk) < size and cut.drop_last:
            break
        if before and cut.merges(len(chunk)) and len(chunk) < size:
            both = before + chunk
            middle = len(both) - len(both) // 2
            yield both[:middle]
            before, chunk = [], both[middle:]
        if before:
            yield before
            before = []
        if looks_ahead and len(chunk) == size:
            before = chunk
        else:
            yield chunk
    if before:
        yield before


def given_batches(
    batch_sampler: Iterable[Iterable[Any]], cut: Cut, start: int = 0, *, is_torch: bool = False
) -> Iterator[BatchPlan]:
    """Batches as the user's batch sampler yields them, each rank's in turn. An empty one is a batch of no rows, and left out.

    For torch nothing is left out, and what is yielded goes to ``__getitems__`` as it is.

    Of a last step with fewer batches than ranks, those without one get the first batches of the epoch again.
    """
    rank, world_size = cut.shard
    opening: list[list[Any]] = []
    position = 0
    batches: Iterator[Any] = map(_sized, batch_sampler) if is_torch else filter(None, map(list, batch_sampler))
    while position < start and (passed := next(batches, None)) is not None:
        # One by one: how they were shared out before does not matter.
        position += len(passed)
        if len(opening) < world_size:
            opening.append(passed)
    while step := list(islice(batches, world_size)):
        if len(opening) < world_size:
            opening += step
        first = position + sum(map(len, step[:rank]))
        position += sum(map(len, step))
        mine = step[rank] if rank < len(step) else opening[(rank - len(step)) % len(opening)]
        yield BatchPlan(_compact(mine), first, position)


def _sized(chunk: Any) -> Any:
    return chunk if isinstance(chunk, list | tuple) else list(chunk)


def _skip(indices: Iterator[Any], count: int) -> None:
    deque(islice(indices, count), maxlen=0)


def _compact(indices: list[Any]) -> Indices | list[Any]:
    # Plain integers travel as 8 bytes each. `bool` and NumPy integers are left as they are: a dataset may tell them apart.
    if type(indices) is list and all(type(index) is int for index in indices):
        try:
            return np.array(indices, dtype=np.int64)
        except OverflowError:
            return indices
    return indices
