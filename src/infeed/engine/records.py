"""What an engine is made of, and what it remembers of a batch and of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, final

from infeed.autotune.tuner import Tuner
from infeed.collate.layout import Layout
from infeed.collate.packing import Handed, Packed
from infeed.delivery.host import HostDelivery
from infeed.engine.bad_samples import BadRows, BadSampleHandler
from infeed.engine.planning import Feed, PlannedBatch, StreamShares
from infeed.engine.watchdog import Watchdog
from infeed.memory.arena import Arena, Block
from infeed.memory.segments import SegmentStore
from infeed.metrics.collector import EngineMetrics
from infeed.plan.state import Cursor
from infeed.scheduler.messages import BatchId, TaskId, WorkerId
from infeed.workers.exceptions import Failure
from infeed.workers.pool import WorkerPool
from infeed.workers.status import StatusBoard


class Gather(Protocol):
    """Copies rows of in-memory arrays into a block and returns the duration in ns."""

    def __call__(self, epoch: int, position: int, indices: Any, block: Block, row_count: int) -> int: ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What an engine is made of."""

    pool: WorkerPool
    store: SegmentStore
    arena: Arena
    workers: tuple[WorkerId, ...]  # all that there may be
    first_workers: tuple[WorkerId, ...]  # those that there are at first
    # For so many workers: batches in flight, usually, and the least that gives every worker something to do.
    windows: Callable[[int], tuple[int, int]]
    is_window_fixed: bool  # by the option prefetch, or because there is nothing to prefetch with
    is_lazy: bool  # inline: nothing is planned before it is wanted
    in_order: bool
    whole_batches: bool
    binds_batches: bool  # which worker loads a batch follows from its number, and not from who is free
    grain_size: int
    timeout_s: float
    sample_timeout_s: float
    has_init: bool  # workers call worker_init_fn
    stream: StreamShares | None
    make_feed: Callable[[Cursor, Iterator[Any] | None], Feed]  # from a cursor on, by the sampler's iterator if there is one
    prefetches_epochs: bool
    gather: Gather | None  # copies rows of in-memory arrays into a block; None: workers load samples
    table_layout: Layout | None  # of those rows
    delivery: HostDelivery
    bad_sample_handler: BadSampleHandler
    status_board: StatusBoard
    metrics: EngineMetrics
    memory_budget: int | None  # for workers and batches together, where the user has set one
    tuner: Tuner | None  # who decides how many workers there are, if that is not fixed
    watchdog: Watchdog | None  # inline there is nobody to look after
    epoch_length: Callable[[], int | None]

    def close(self, *, keeps_workers: bool) -> None:
        """Close all of it, memory last: a worker may write until it is gone or has dropped the memory."""
        try:
            self.pool.close(keeps_workers=keeps_workers)
            self.metrics.close()
            self.status_board.close()
        finally:  # Ctrl+C may end the wait for workers, which are killed then
            self.delivery.close()
            self.arena.close()
            self.store.close()


# What one worker did for a batch: who, from which row on, how many rows, how long in nanoseconds. Plain, because one is made
# for every task.
Part: TypeAlias = tuple[WorkerId, int, int, int]


class Loss(NamedTuple):
    """A worker died while it had a task of the batch."""

    text: str
    sample: tuple[Any, int | None] | None  # index and position of the one it was at, if it said so


_NOTHING: Final[dict[int, list[list[Any]]]] = {}


@final
class Record:
    """A batch between plan and delivery. One is made for every batch, so what few need is made when it is."""

    __slots__ = (
        "bad_rows",
        "beside",
        "deaths",
        "doom",
        "failures",
        "layout",
        "needed_bytes",
        "packed",
        "parts",
        "plan",
        "row_count",
        "stream_state",
    )  # fmt: skip

    def __init__(self, plan: PlannedBatch, before: Record | None = None) -> None:
        """``before`` is the record of the same batch, when all of it is loaded again."""
        self.plan = plan
        self.layout: Layout | None = None
        self.row_count = 0
        self.needed_bytes = 0
        self.packed: Packed | Handed | None = None
        self.parts: list[Part] = []
        self.stream_state: Any = None
        self.beside: dict[int, list[list[Any]]] = {}  # by first row of the task
        self.failures: dict[TaskId, tuple[WorkerId, Failure]] | None = None
        self.deaths: list[Loss] | None = None if before is None else before.deaths
        self.bad_rows: BadRows | None = None if before is None else before.bad_rows
        self.doom: BaseException | None = None  # what is raised in its place, if nothing can be done about it

    def let_go(self) -> None:
        """Forget what the batch itself is; what is left tells how it came about.

        And what was raised for it: an exception knows the loop that it was raised in, which would never end then.
        """
        self.failures = None
        self.doom = None
        self.beside = _NOTHING
        self.packed = None
        self.layout = None


class Task(NamedTuple):
    worker: WorkerId
    batch: BatchId
    first_row: int
    row_count: int
    layout: Layout | None
