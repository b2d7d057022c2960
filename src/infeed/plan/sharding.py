"""Split an epoch among ranks.

All ranks advance through the epoch in steps. A step is the next ``world_size * batch_size`` positions, and rank ``r`` gets the
``r``-th part of it. So batch ``s`` of rank ``r`` is batch ``s * world_size + r`` of a loader with one rank. A single number
describes the progress of all ranks, so a run can resume with more or fewer ranks.

The last step may have fewer positions, which are distributed evenly. If a rank has one row less than another, ``pad`` decides.
With padding it repeats a sample: all batches of a step have the same size, as training needs. Without padding it has one row
less: each sample occurs exactly once, as evaluation needs.

If fewer positions than ranks are left and padding is off, the last two steps are distributed together. So every rank gets the
same number of batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, final


class Shard(NamedTuple):
    """The rank of one of several processes that share an epoch."""

    rank: int
    world_size: int

    def part(self, count: int) -> tuple[int, int]:
        """Return the start and the end (exclusive) of this rank's part of ``count`` elements.

        >>> [Shard(r, 3).part(7) for r in range(3)]
        [(0, 2), (2, 4), (4, 7)]
        """
        return count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size

    def padding(self, count: int) -> int:
        """Return the number of rows this rank lacks compared with the rank that has most."""
        first, last = self.part(count)
        return -(-count // self.world_size) - (last - first)


ALONE: Final = Shard(0, 1)


@final
@dataclass(frozen=True, slots=True)
class Cut:
    """How to split an epoch into the batches of this rank."""

    batch_size: int
    drop_last: bool = False
    shard: Shard = ALONE
    pad: bool = True

    @property
    def step_size(self) -> int:
        """Number of positions that all ranks together take in a full step."""
        return self.batch_size * self.shard.world_size

    def merges(self, rest: int) -> bool:
        """Whether a last step of ``rest`` positions is distributed together with the previous one."""
        return not self.pad and not self.drop_last and 0 < rest < self.shard.world_size and self.batch_size > 1


class RankRows(NamedTuple):
    """One batch: ``row_count`` positions starting at ``first``, plus ``padding`` repeated rows."""

    first: int
    row_count: int
    padding: int
    stop: int  # position of all ranks after this step


@final
class Steps:
    """The batches of one rank between two positions of an epoch, each computed directly."""

    def __init__(self, start: int, stop: int, cut: Cut) -> None:
        self._start, self._stop, self._cut = start, max(start, stop), cut
        self._full, self._rest = divmod(self._stop - start, cut.step_size)
        self._is_merged = cut.merges(self._rest) and self._full > 0

    @property
    def count(self) -> int:
        """Number of batches, including a possibly empty last one: see ``is_last_empty``."""
        return self._full + (1 if self._rest and not self._cut.drop_last else 0)

    @property
    def is_last_empty(self) -> bool:
        """Whether this rank gets no row in the last step: fewer positions than ranks are left, and padding is off."""
        count = self.count
        if not count:
            return False
        last = self.piece(count - 1)
        return last.row_count + last.padding == 0

    def piece(self, step: int) -> RankRows:
        begin, end = self._bounds(step)
        count = end - begin
        first, last = self._cut.shard.part(count)
        return RankRows(begin + first, last - first, self._cut.shard.padding(count) if self._cut.pad else 0, end)

    def _bounds(self, step: int) -> tuple[int, int]:
        size = self._cut.step_size
        begin = self._start + step * size
        if self._is_merged and step >= self._full - 1:
            both = size + self._rest
            middle = self._stop - both // 2
            return (self._stop - both, middle) if step == self._full - 1 else (middle, self._stop)
        return begin, min(begin + size, self._stop)
