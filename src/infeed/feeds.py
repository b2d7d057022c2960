"""One epoch's batches as the engine plans them: by index, or from the shares of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from infeed.plan.batches import BatchPlan, grain_count
from infeed.plan.order import Indices
from infeed.scheduler.messages import WorkerId


class PlannedBatch(NamedTuple):
    """A batch before it is loaded. ``indices`` is ``None`` for streams, which are asked for whatever comes next."""

    epoch: int
    first_position: int
    row_count: int
    grain_count: int
    indices: Indices | list[Any] | None = None
    worker: WorkerId | None = None


class Feed(ABC):
    """The source of an epoch's batches. Taken from no earlier than there is room in flight."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.is_exhausted = False
        # What the user's sampler raised; kept until the batches before it are delivered, as without prefetching.
        self.error: Exception | None = None

    @abstractmethod
    def take(self) -> PlannedBatch | None:
        """The next batch; ``None`` if there is none now, and none ever again if ``is_exhausted``."""


@final
class IndexedFeed(Feed):
    def __init__(self, epoch: int, batches: Iterator[BatchPlan], grain_size: int) -> None:
        super().__init__(epoch)
        self._batches = batches
        self._grain_size = grain_size

    def take(self) -> PlannedBatch | None:
        if self.is_exhausted:
            return None
        try:
            plan = next(self._batches)
        except StopIteration:
            self.is_exhausted = True
            return None
        except Exception as error:  # the user's sampler
            self.is_exhausted = True
            self.error = error
            return None
        rows = len(plan.indices)
        return PlannedBatch(self.epoch, plan.first_position, rows, grain_count(rows, self._grain_size), plan.indices)


@final
@dataclass(slots=True)
class _Share:
    planned_rows: int = 0
    loaded_rows: int = 0
    is_open: bool = False
    is_ended: bool = False


@final
@dataclass(slots=True)
class StreamShares:
    """How a stream is read: by one worker, or by all if the dataset asks which worker it is in. Known after its first batch."""

    worker_count: int
    is_known: bool = field(init=False)
    is_alone: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.is_known = self.worker_count == 1
        self.is_alone = self.is_known

    def decide(self, *, shards_itself: bool) -> None:
        if not self.is_known:
            self.is_known = True
            self.is_alone = not shards_itself


@final
class StreamFeed(Feed):
    """Batches of each share in turn: 0, 1, ..., 0, 1, ...; a share that has ended is passed over."""

    def __init__(self, epoch: int, batch_size: int, shares: StreamShares) -> None:
        super().__init__(epoch)
        self._batch_size = batch_size
        self._shares = shares
        self._by_worker = {WorkerId(0): _Share()}
        self._turn = 0
        self._has_asked = False

    def take(self) -> PlannedBatch | None:
        if not self._shares.is_known:
            # Until the first batch is here it is not known who else will read.
            if self._has_asked:
                return None
            self._has_asked = True
        elif not self._shares.is_alone:
            for number in range(self._shares.worker_count):
                self._by_worker.setdefault(WorkerId(number), _Share())
        count = len(self._by_worker)
        for _ in range(count):
            worker = WorkerId(self._turn % count)
            self._turn += 1
            share = self._by_worker[worker]
            if not share.is_ended:
                position = share.planned_rows
                share.planned_rows += self._batch_size
                return PlannedBatch(self.epoch, position, self._batch_size, 1, worker=worker)
        self.is_exhausted = self._shares.is_known
        return None

    def opening(self, worker: WorkerId) -> bool:
        """Whether this share is used for the first time in this epoch."""
        share = self._by_worker[worker]
        is_first, share.is_open = not share.is_open, True
        return is_first

    def loaded(self, worker: WorkerId, row_count: int, planned_count: int) -> None:
        share = self._by_worker[worker]
        share.loaded_rows += row_count
        if row_count < planned_count:
            share.is_ended = True

    def loaded_rows(self, worker: WorkerId) -> int:
        share = self._by_worker.get(worker)
        return share.loaded_rows if share is not None else 0
