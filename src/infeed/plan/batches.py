"""Group positions into batches, and split batches into grains.

The split is part of the plan. It depends on the batch size and options, never on timing or the number of workers, because the
seeds depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from typing import Any, Final, NamedTuple, final

import numpy as np

from infeed.plan.order import Indices, Order
from infeed.plan.sharding import ALONE, Cut, RankRows, Steps

# Maximum number of grains per batch. With more grains, more workers share a batch: the first batch arrives sooner, and a slow
# sample delays less. Each grain seeds three generators (about 6 microseconds), which is noticeable for tiny samples.
_GRAINS_PER_BATCH: Final = 4


class BatchPlan(NamedTuple):
    """One batch: the indices to load and its position in the epoch."""

    indices: Indices | list[Any]
    first_position: int
    stop: int  # position of all ranks together after this batch
    rows: list[int] | None = None  # original row of each sample if others were left out; None: none were


@final
class GivenIndices(list[Any]):
    """Indices of a whole batch plus the batch sampler's original object, which ``__getitems__`` receives."""

    def __init__(self, indices: list[Any], given: Any) -> None:
        super().__init__(indices)
        self.given = given

    def __getitem__(self, key: Any) -> Any:
        return self if key == slice(0, len(self)) else super().__getitem__(key)


class Lookahead(NamedTuple):
    """How far the planner may advance a sampler beyond the delivered batches, where user code could observe it."""

    batch_count: int
    known_count: int  # first batches of the epoch that can be planned without advancing the sampler


def default_grain_size(batch_size: int) -> int:
    """Return the number of rows per grain for batches of this size.

    >>> [default_grain_size(n) for n in (1, 4, 5, 32, 256)]
    [1, 1, 2, 8, 64]
    """
    return max(1, -(-batch_size // _GRAINS_PER_BATCH))


def grain_count(row_count: int, grain_size: int) -> int:
    """Return the number of grains in a batch of ``row_count`` rows; the last grain may be shorter."""
    return -(-row_count // grain_size)


def ordered_batches(order: Order, cut: Cut, start: int = 0) -> Iterator[BatchPlan]:
    """Yield batches of consecutive positions of an order, beginning at ``start``."""
    if cut.shard == ALONE:
        # Fast path for a single rank, three times as fast as the code below: runs for every batch.
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


def ordered_batch(order: Order, piece: RankRows) -> BatchPlan | None:
    """Return the batch of one piece of an order; ``None`` if this rank gets no rows."""
    first, count, padding, stop = piece
    if count + padding == 0:
        return None
    indices = order.take(first, first + count)
    if padding:
        # Pad with at most one row per rank, taken from the beginning of the epoch, which every rank can compute.
        again = order.take(0, 1)
        indices = np.concatenate([indices, np.repeat(again, padding)])
    return BatchPlan(indices, first, stop)


def next_only(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the same elements, calling only ``next(iterator)``.

    `islice` and `for` call ``iter(iterator)`` again. That restarts an object whose ``__iter__`` resets and returns ``self``,
    and fails for an iterator without ``__iter__``.
    """
    return map(next, repeat(iterator))


def sampled_batches(sampler: Iterable[Any], cut: Cut, start: int = 0) -> Iterator[BatchPlan]:
    """Yield batches of the sampler's indices, skipping the first ``start``. Indices are read no earlier than needed."""
    indices = next_only(iter(sampler))
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
            yield BatchPlan(compacted(mine), position + first, stop)
        position = stop


def steps_of(indices: Iterator[Any], cut: Cut) -> Iterator[list[Any]]:
    """Yield the elements that all ranks take in each step, split like ``Steps`` but for an unknown total length."""
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


def user_batches(batch_sampler: Iterable[Any], cut: Cut, start: int = 0) -> Iterator[BatchPlan | Exception]:
    """Yield this rank's batches from the user's batch sampler; ranks take batches in turn. Empty batches are left out.

    An element that is not iterable is replaced by its exception.

    If the last step has fewer batches than ranks, the remaining ranks get the first batches of the epoch again.
    """
    rank, world_size = cut.shard
    opening: list[Any] = []
    position = 0
    batches: Iterator[Any] = filter(None, map(listed, batch_sampler))
    while position < start and (passed := next(batches, None)) is not None:
        # Skip batches one by one: the previous distribution over ranks does not matter.
        position += _row_count(passed)
        if len(opening) < world_size:
            opening.append(passed)
    while step := list(islice(batches, world_size)):
        if len(opening) < world_size:
            opening += step
        first = position + sum(map(_row_count, step[:rank]))
        position += sum(map(_row_count, step))
        mine = step[rank] if rank < len(step) else opening[(rank - len(step)) % len(opening)]
        yield mine if isinstance(mine, Exception) else BatchPlan(compacted(mine), first, position)


def listed(chunk: Any) -> list[Any] | Exception:
    """Return the batch as a list, or the exception if it is not iterable."""
    try:
        return list(chunk)
    except Exception as error:
        return error.with_traceback(None)  # its frames would keep the iteration alive until it is raised


def _row_count(chunk: Any) -> int:
    return 0 if isinstance(chunk, Exception) else len(chunk)


def _skip(indices: Iterator[Any], count: int) -> None:
    deque(islice(indices, count), maxlen=0)


def compacted(indices: list[Any]) -> Indices | list[Any]:
    """Return plain integers as an array of 8 bytes each.

    `bool` and NumPy integers stay unchanged, because a dataset may treat them differently.
    """
    if type(indices) is list and all(type(index) is int for index in indices):
        try:
            return np.array(indices, dtype=np.int64)
        except OverflowError:
            return indices
    return indices
