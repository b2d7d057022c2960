"""Which part of an epoch is whose, where several ranks share it.

All ranks go through the epoch in steps. A step is the next ``world_size * batch_size`` positions, and rank ``r`` has the
``r``-th part of it. So batch ``s`` of rank ``r`` is batch ``s * world_size + r`` of the loader that is alone, and how far all
have come is one number, whatever their number: a run may go on with more ranks, or fewer.

The last step may have fewer positions. They are shared out evenly, and where one rank has a row less than another it either
repeats a sample (``pad``: all batches of a step have the same size, as training wants it) or has a row less (each sample
exactly once, as evaluation wants it). If there are fewer positions than ranks and nothing is to be repeated, the last two steps
are shared out together, so that nobody goes without a batch that others have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, final


class Shard(NamedTuple):
    """One of several processes that share an epoch."""

    rank: int
    world_size: int

    def part(self, count: int) -> tuple[int, int]:
        """First and last (exclusive) of ``count`` things that are this rank's.

        >>> [Shard(r, 3).part(7) for r in range(3)]
        [(0, 2), (2, 4), (4, 7)]
        """
        return count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size

    def padding(self, count: int) -> int:
        """How many rows this rank lacks to have as many as the one that has most."""
        first, last = self.part(count)
        return -(-count // self.world_size) - (last - first)


ALONE: Final = Shard(0, 1)


@final
@dataclass(frozen=True, slots=True)
class Cut:
    """How an epoch is cut into batches of this rank."""

    batch_size: int
    drop_last: bool = False
    shard: Shard = ALONE
    pad: bool = True

    @property
    def step_size(self) -> int:
        """Positions that all ranks together take in a full step."""
        return self.batch_size * self.shard.world_size

    def merges(self, rest: int) -> bool:
        """Whether a last step of ``rest`` positions is shared out together with the one before it."""
        return not self.pad and not self.drop_last and 0 < rest < self.shard.world_size and self.batch_size > 1


class Piece(NamedTuple):
    """One batch: ``row_count`` positions from ``first`` on, and how many rows are repeated to fill it."""

    first: int
    row_count: int
    padding: int
    stop: int  # where all ranks are after this step


@final
class Steps:
    """The batches of one rank between two positions of an epoch, each found by arithmetic."""

    def __init__(self, start: int, stop: int, cut: Cut) -> None:
        self._start, self._stop, self._cut = start, max(start, stop), cut
        self._full, self._rest = divmod(self._stop - start, cut.step_size)
        self._is_merged = cut.merges(self._rest) and self._full > 0

    @property
    def count(self) -> int:
        """How many there are, one of them perhaps empty: see ``is_last_empty``."""
        return self._full + (1 if self._rest and not self._cut.drop_last else 0)

    @property
    def is_last_empty(self) -> bool:
        """Whether the last has nothing for this rank: fewer positions than ranks are left, and none is to be repeated."""
        count = self.count
        if not count:
            return False
        last = self.piece(count - 1)
        return last.row_count + last.padding == 0

    def piece(self, step: int) -> Piece:
        begin, end = self._bounds(step)
        count = end - begin
        first, last = self._cut.shard.part(count)
        return Piece(begin + first, last - first, self._cut.shard.padding(count) if self._cut.pad else 0, end)

    def _bounds(self, step: int) -> tuple[int, int]:
        size = self._cut.step_size
        begin = self._start + step * size
        if self._is_merged and step >= self._full - 1:
            both = size + self._rest
            middle = self._stop - both // 2
            return (self._stop - both, middle) if step == self._full - 1 else (middle, self._stop)
        return begin, min(begin + size, self._stop)
