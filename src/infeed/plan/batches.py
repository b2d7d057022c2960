"""Which positions make which batch, and where a batch is cut into grains.

The cut is part of the plan: it depends on batch size and options, never on timing or on the number of workers, because seeds
hang on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from typing import Any, Final, NamedTuple, final

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
    rows: list[int] | None = None  # where each sample stood before others were left out; None: none were


@final
class GivenIndices(list[Any]):
    """Indices of a whole batch, with the object that the batch sampler yielded: ``__getitems__`` gets that object."""

    def __init__(self, indices: list[Any], given: Any) -> None:
        super().__init__(indices)
        self.given = given

    def __getitem__(self, key: Any) -> Any:
        return self if key == slice(0, len(self)) else super().__getitem__(key)


class Lookahead(NamedTuple):
    """How far beyond the delivered batches a sampler may be asked, where somebody could notice."""

    batch_count: int
    known_count: int  # the first batches of the epoch that can be planned without asking


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


def next_only(iterator: Iterator[Any]) -> Iterator[Any]:
    """The same elements, by ``next(iterator)`` alone.

    `islice` and `for` call ``iter(iterator)`` again. That restarts an object whose ``__iter__`` resets and returns ``self``,
    and fails for an iterator without ``__iter__``.
    """
    return map(next, repeat(iterator))


def sampled_batches(sampler: Iterable[Any], cut: Cut, start: int = 0) -> Iterator[BatchPlan]:
    """Indices as the user's sampler yields them, taken no earlier than they are needed; the first ``start`` are passed over."""
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


def given_batches(batch_sampler: Iterable[Any], cut: Cut, start: int = 0) -> Iterator[BatchPlan | Exception]:
    """Batches as the user's batch sampler yields them, each rank's in turn. An empty one is a batch of no rows, and left out.

    Where it yields something that is no batch, there is an exception in its place.

    Of a last step with fewer batches than ranks, those without one get the first batches of the epoch again.
    """
    rank, world_size = cut.shard
    opening: list[Any] = []
    position = 0
    batches: Iterator[Any] = filter(None, map(listed, batch_sampler))
    while position < start and (passed := next(batches, None)) is not None:
        # One by one: how they were shared out before does not matter.
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
    """A batch as a list; if it is not iterable, the exception that says so."""
    try:
        return list(chunk)
    except Exception as error:
        return error.with_traceback(None)  # its frames would hold the iteration until it is raised


def _row_count(chunk: Any) -> int:
    return 0 if isinstance(chunk, Exception) else len(chunk)


def _skip(indices: Iterator[Any], count: int) -> None:
    deque(islice(indices, count), maxlen=0)


def compacted(indices: list[Any]) -> Indices | list[Any]:
    """Plain integers as an array, 8 bytes each; `bool` and NumPy integers unchanged, because a dataset may tell them apart."""
    if type(indices) is list and all(type(index) is int for index in indices):
        try:
            return np.array(indices, dtype=np.int64)
        except OverflowError:
            return indices
    return indices
