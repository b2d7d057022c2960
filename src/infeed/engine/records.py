"""The parts of an engine, and its records of batches and tasks."""

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
    """The parts and settings of an engine."""

    pool: WorkerPool
    store: SegmentStore
    arena: Arena
    workers: tuple[WorkerId, ...]  # all workers that may exist
    first_workers: tuple[WorkerId, ...]  # workers started at first
    # By worker count: the usual number of batches in flight, and the minimum that keeps every worker busy.
    windows: Callable[[int], tuple[int, int]]
    is_window_fixed: bool  # set by the prefetch options, or loading is in the main process
    is_lazy: bool  # in the main process: a batch is planned only when it is wanted
    in_order: bool
    whole_batches: bool
    binds_batches: bool  # the step of a batch, not availability, determines its worker
    grain_size: int
    timeout_s: float
    sample_timeout_s: float
    has_init: bool  # workers call worker_init_fn
    stream: StreamShares | None
    make_feed: Callable[[Cursor, Iterator[Any] | None], Feed]  # from a cursor and, if given, the sampler's iterator
    prefetches_epochs: bool
    gather: Gather | None  # None: tasks load the samples
    table_layout: Layout | None  # of the gathered rows
    delivery: HostDelivery
    bad_sample_handler: BadSampleHandler
    status_board: StatusBoard
    metrics: EngineMetrics
    memory_budget: int | None  # for workers and batches together, if the user set memory_limit
    tuner: Tuner | None  # sets the number of workers; None: fixed
    watchdog: Watchdog | None  # None in the main process
    epoch_length: Callable[[], int | None]

    def close(self, *, keeps_workers: bool) -> None:
        """Close all parts, memory last: a worker may write until it has exited or unmapped the memory."""
        try:
            self.pool.close(keeps_workers=keeps_workers)
            self.metrics.close()
            self.status_board.close()
        finally:  # Ctrl+C may end the wait for workers, which are then killed
            self.delivery.close()
            self.arena.close()
            self.store.close()


# Worker, first row, number of rows, duration in ns. A plain tuple for speed: one is created per task.
Part: TypeAlias = tuple[WorkerId, int, int, int]


class Loss(NamedTuple):
    """The death of a worker that had a task of the batch."""

    text: str
    sample: tuple[Any, int | None] | None  # index and position of the sample it was loading, if reported


_NOTHING: Final[dict[int, list[list[Any]]]] = {}


@final
class Record:
    """A batch between plan and delivery. One is created per batch, so rarely used fields are created on demand."""

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
        """Create a record; ``before`` is the earlier record of the same batch if it is reloaded."""
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
        self.doom: BaseException | None = None  # raised in its place, if it cannot be loaded

    def let_go(self) -> None:
        """Release the content of the batch; the rest of the record serves ``explain``.

        Release its exceptions too: their tracebacks reference the iteration, which would then never be freed.
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
