"""Where a batch came from: what ``DataLoader.explain`` returns."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any, final

from infeed.plan.batches import BatchPlan
from infeed.plan.order import plain_indices
from infeed.plan.seeds import derive
from infeed.trail import Past


@final
@dataclass(frozen=True, slots=True)
class Loading:
    """What one worker did for a batch."""

    worker: int
    first_row: int
    row_count: int
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a batch comes from.

    Attributes:
        epoch, step: which batch it is; ``step`` counts the batches of this loader in its epoch, from 0.
        first_position: where its first sample stands in the epoch's order, which all ranks share.
        indices: what was, or will be, asked of the dataset; ``None`` for a stream.
        seeds: one for each ``grain_size`` samples, in order: what ``random``, ``numpy.random`` and torch are seeded with.
        grain_size: samples that share a seed.
        attempts: how often it was tried; 0 if it was not loaded yet, or too long ago to be remembered.
        loadings: who loaded which rows of it, and how long that took. Empty if ``attempts`` is 0.
    """

    __module__ = "infeed"

    epoch: int
    step: int
    first_position: int
    indices: list[Any] | None
    seeds: list[int]
    grain_size: int
    attempts: int
    loadings: tuple[Loading, ...]

    def __str__(self) -> str:
        what = "elements of a stream" if self.indices is None else f"indices {reprlib.repr(self.indices)}"
        lines = [
            f"batch {self.step} of epoch {self.epoch}, from position {self.first_position}: {what}",
            f"  seeds of {self.grain_size} samples each: {reprlib.repr(self.seeds)}",
        ]
        if not self.attempts:
            lines.append("  not loaded yet, or too long ago to be remembered")
        for loading in self.loadings:
            last = loading.first_row + loading.row_count - 1
            lines.append(f"  rows {loading.first_row} to {last} by worker {loading.worker} in {loading.seconds * 1e3:.3f} ms")
        if self.attempts > 1:
            lines.append(f"  it took {self.attempts} attempts: workers died")
        return "\n".join(lines)


def lineage_of(
    epoch: int, step: int, plan: BatchPlan | None, past: Past | None, *, seed: int, grain_size: int, rank: int
) -> Lineage:
    """Of a batch that is planned, remembered, or both."""
    if past is not None:
        indices, first, count = past.plan.indices, past.plan.first_position, past.row_count or past.plan.row_count
    else:
        assert plan is not None
        indices, first, count = plan.indices, plan.first_position, len(plan.indices)
    grain_size = max(1, min(grain_size, count))  # nothing may be left of it
    starts = range(first, first + count, grain_size)
    if indices is None:
        assert past is not None
        share = (past.plan.worker or 0) + (rank << 32)
        seeds = [derive(seed, epoch, derive(start, share)) for start in starts]
    else:
        seeds = [derive(seed, epoch, start) for start in starts]
    parts = () if past is None else past.parts
    return Lineage(
        epoch=epoch,
        step=step,
        first_position=first,
        indices=None if indices is None else plain_indices(indices),
        seeds=seeds,
        grain_size=grain_size,
        attempts=0 if past is None else past.attempts,
        loadings=tuple(Loading(worker, first_row, row_count, ns / 1e9) for worker, first_row, row_count, ns in parts),
    )
