"""Build an engine from the options: worker pool, memory and feed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from math import ceil
from typing import Any, Final

from infeed.autotune.capacity import WorkerKind
from infeed.autotune.tuner import Tuner
from infeed.collate.arrays import ArrayTable
from infeed.collate.torch_compat import collate_as_torch
from infeed.delivery.backend import find_backend, is_gpu
from infeed.delivery.host import HostDelivery
from infeed.engine.bad_samples import BadSampleHandler
from infeed.engine.binding import draws_per_worker
from infeed.engine.engine import Engine, EngineSetup
from infeed.engine.faults import Faults
from infeed.engine.planning import Feed, IndexedFeed, Plan, StreamFeed, StreamShares, rows_of, seed_grain
from infeed.engine.scaling import AutoScaler, WorkerScaling
from infeed.engine.slots import SlotAllocator
from infeed.engine.watchdog import HangLimits, Watchdog
from infeed.memory.arena import Arena
from infeed.memory.limits import available_bytes
from infeed.memory.search import advise
from infeed.memory.segments import PrivateStore, SegmentStore, open_store
from infeed.memory.serialized_dataset import copy_out, send
from infeed.metrics.collector import Collector
from infeed.options import Options
from infeed.plan.batches import BatchPlan
from infeed.plan.state import Cursor
from infeed.scheduler.messages import WorkerId
from infeed.scheduler.pacing import REMOTE_TASKS
from infeed.scheduler.scheduler import Scheduler
from infeed.workers.epoch_hooks import EpochHooks, Recalls
from infeed.workers.in_process import InlinePool, ThreadPool
from infeed.workers.launcher import prepare
from infeed.workers.loop import Runner
from infeed.workers.pool import WorkerPool
from infeed.workers.process import ProcessPool
from infeed.workers.process_tools import is_importing
from infeed.workers.program_state import PickledProgramState
from infeed.workers.protocol import Making, Seeding, Source, WorkerSpec
from infeed.workers.ray_options import RayWorkers
from infeed.workers.status import StatusBoard

_LOG: Final = logging.getLogger("infeed")
_MSG_IMPORTING: Final = (
    "a loader runs without workers, because a module that workers import iterates it at import time; move the iteration into a "
    "function that the program calls"
)
# Minimum batches in flight, memory permitting: enough that one slow sample in fifty does not stall the others.
_USUAL_BATCHES: Final = 16
# Plans of loaders that already got dataset advice: log it once per loader.
_advised: Final[weakref.WeakSet[Plan]] = weakref.WeakSet()


def build_engine(
    config: Options,
    plan: Plan,
    collector: Collector,
    *,
    kind: WorkerKind | None = None,
    tuner: Tuner | None = None,
    first_count: int | None = None,
    probes: bool = False,
    only: BatchPlan | None = None,
) -> Engine:
    """Build an engine and start its workers.

    Args:
        collector: Collects the engine's metrics.
        kind: Worker kind, if the options leave it open.
        tuner: Sets the number of workers while the engine runs.
        first_count: Initial number of workers; the maximum by default.
        probes: Whether workers measure if threads would be as fast.
        only: The only batch of every epoch, for replay.

    Raises:
        WorkerStartError: The dataset cannot be pickled for worker processes.
        MemoryLimitError: There is not enough memory for the engine.
    """
    table = plan.table
    kind = "inline" if table is not None else kind or config.kind
    if kind == "process" and is_importing():
        # The workers would import the same module and start workers again, without end.
        _LOG.warning("%s", _MSG_IMPORTING)
        kind = "inline"
    ray = config.ray if kind == "process" else None
    if kind == "process" and (ray is None or ray.local):
        prepare(config.start_method)
    is_inline = kind == "inline"
    source = _source(config, table)
    count = 1 if is_inline else config.most_workers
    workers = tuple(map(WorkerId, range(count)))
    grain_size = seed_grain(config)
    limit = config.memory_limit_bytes or available_bytes() // 2
    is_mapped = kind == "process" and (ray is None or ray.local > 0)  # by workers in other processes
    store: SegmentStore = open_store() if is_mapped else PrivateStore()
    arena = Arena(store, limit_bytes=limit)
    seeding = {"inline": Seeding.LEND, "thread": Seeding.LEAVE, "process": Seeding.SET}[kind]
    if table is not None or (is_inline and config.is_torch and config.seed is None):
        seeding = Seeding.LEAVE  # no user code runs, or it draws from the process's generators as in torch
    specs = {
        worker: WorkerSpec(
            worker=worker,
            worker_count=count,
            seed=plan.seed,
            grain_size=grain_size,
            seeding=seeding,
            cut=plan.cut,
            kind=kind,
            torch_seed=plan.torch_seed,
            sets_epochs=plan.sets_epochs,
            retries=config.error_policy.retries,
            handles_bad_samples=config.error_policy.action != "raise",
            is_watched=config.sample_timeout > 0,
            observe=config.observe,
            probes=probes and kind == "process",
            probes_gil=probes and kind == "process" and worker == 0,
        )
        for worker in workers
    }
    stream = StreamShares(count) if config.is_stream else None
    if stream is not None and config.is_torch:
        stream.decide(shards_itself=True)  # every worker reads a full copy; the dataset does the sharding
    limits = HangLimits(float(config.sample_timeout), config.hang_warning)
    # If workers have generators of their own, their numbers depend on which batches the worker loads. To make that independent
    # of timing, worker i % count loads batch i, as in torch. Not with num_workers="auto", where the count changes, and not
    # on a Ray cluster, where a batch would wait for a worker that may never get a place.
    can_bind = config.is_torch and tuner is None and stream is None and count > 1 and ray is None
    binds = can_bind and (config.worker_init_fn is not None or draws_per_worker(config.dataset, config.collate_fn))
    # A round trip to another machine takes a millisecond, and a part of a batch would have to be copied column by column.
    is_whole = ray is not None or count == 1 or binds or source.making is not Making.ROWS or source.is_batched
    remote = frozenset(workers[ray.local :]) if ray is not None else frozenset()
    windows = partial(_windows, config, is_inline=is_inline, is_whole=is_whole, is_remote=bool(remote))
    # Threads share the dataset: set_epoch for the next epoch must wait until all threads have finished this one.
    shares_epoch_hooks = kind == "thread" and plan.sets_epochs and bool(EpochHooks(source.dataset, source.collate_fn))
    undo = ExitStack()
    undo.callback(store.close)
    with undo:
        status_board = StatusBoard(workers, store if is_mapped else None)
        undo.callback(status_board.close)
        pool = _pool(config, plan, kind, source, store, arena, status_board, specs)
        undo.callback(pool.close)
        first_workers = workers[:first_count]
        delivery = HostDelivery(arena, find_backend() if _is_pinned(config) else None, is_staged=config.is_staged)
        metrics = collector.metrics(status_board, workers, kind, limit)
        allocator = SlotAllocator(
            arena, pool, delivery, windows, len(first_workers),
            is_window_fixed=is_inline or not (config.prefetch is None and config.prefetch_factor is None),
        )  # fmt: skip
        scheduler = Scheduler(
            workers=first_workers, window=allocator.window, in_order=config.in_order or count == 1, whole_batches=is_whole,
            remote_workers=remote,
        )  # fmt: skip
        watchdog = Watchdog(pool, status_board, workers, limits)
        faults = Faults(
            BadSampleHandler(config.error_policy.action, plan), pool, status_board, watchdog,
            worker_count=count, grain_size=grain_size, sample_timeout_s=limits.sample_timeout_s, is_inline=is_inline,
        )  # fmt: skip
        scaling = WorkerScaling(
            pool, metrics, workers, len(first_workers),
            has_init=not is_inline and config.worker_init_fn is not None, is_fixed=is_inline or stream is not None,
        )  # fmt: skip
        setup = EngineSetup(
            scheduler=scheduler,
            pool=pool,
            store=store,
            arena=arena,
            delivery=delivery,
            status_board=status_board,
            metrics=metrics,
            allocator=allocator,
            scaling=scaling,
            autoscaler=AutoScaler(None if is_inline or stream else tuner, metrics, scheduler, config.memory_limit_bytes),
            faults=faults,
            watchdog=watchdog,
            workers=workers,
            first_workers=first_workers,
            is_lazy=is_inline,
            binds_batches=binds,
            grain_size=grain_size,
            timeout_s=float(config.timeout),
            stream=stream,
            make_feed=partial(_make_feed, config, plan, grain_size, stream, only),
            prefetches_epochs=not is_inline and plan.is_foreseeable and not shares_epoch_hooks,
            # To skip or replace bad indices, use tasks: they report each bad sample.
            gather=pool.gather
            if isinstance(pool, InlinePool) and table is not None and config.error_policy.action == "raise"
            else None,
            table_layout=None if table is None else table.layout,
            handles_bad_samples=config.error_policy.action != "raise",
        )
        engine = Engine(setup)
        undo.pop_all()  # success: the engine closes them from here on
    return engine


def _source(config: Options, table: ArrayTable | None) -> Source:
    if table is not None:
        making = Making.GATHERED
    elif config.batch_size is None and config.batch_sampler is None:
        making = Making.SINGLE
    elif config.collate_fn is not None:
        making = Making.COLLATED
    else:
        making = Making.ROWS
    torch_collate = collate_as_torch if config.is_torch and making is Making.ROWS else None
    dataset = rows_of(config)
    return Source(dataset, making, config.is_stream, config.collate_fn, config.worker_init_fn, table, torch_collate)


def _windows(config: Options, count: int, *, is_inline: bool, is_whole: bool, is_remote: bool = False) -> tuple[int, int]:
    """Return the usual number of batches in flight, and the minimum that keeps every worker busy at any batch size."""
    if is_inline:
        return 1, 1
    if config.prefetch is not None:
        return config.prefetch, config.prefetch
    if config.prefetch_factor is not None:
        window = max(1, config.prefetch_factor * count)
        return window, window
    # A large batch filled by several workers keeps them busy, and few slots stay in the CPU cache.
    least = REMOTE_TASKS * count if is_remote else count if is_whole else count // 4
    return max(_USUAL_BATCHES, 2 * count + 2), 2 + least


def _pool(
    config: Options,
    plan: Plan,
    kind: str,
    source: Source,
    store: SegmentStore,
    arena: Arena,
    status_board: StatusBoard,
    specs: dict[WorkerId, WorkerSpec],
) -> WorkerPool:
    given = {"dataset": config.dataset, "collate_fn": config.collate_fn, "worker_init_fn": config.worker_init_fn}
    ray = config.ray

    def runner(worker: WorkerId, recalls: Recalls | None = None) -> Runner:
        spec = specs[worker]
        cell, recorder = status_board.cell(worker), status_board.recorder(worker, spec.observe)
        return Runner(spec, source, arena, cell, recorder, recalls)

    def process_pool() -> ProcessPool:
        serialized = send(given, (PickledProgramState(), source), store)
        if ray is None and plan not in _advised:
            _advised.add(plan)
            usual = min(len(specs), ceil(config.core_limit)) if config.is_auto else len(specs)
            advise(config.dataset, serialized.sizes, usual)
        return ProcessPool(
            serialized=serialized,
            store=store,
            status_board=status_board,
            specs=specs,
            start_method=config.start_method,
            threads=config.threads_per_worker,
            init_fn=config.worker_init_fn,
        )

    def ray_pool(options: RayWorkers, on_news: Callable[[], None] | None) -> WorkerPool:
        from infeed.workers.ray_cluster import Connection, connect
        from infeed.workers.ray_pool import RayPool

        return RayPool(
            connection=Connection(connect()),
            parts=copy_out(given, (PickledProgramState(), source)),
            segments=arena,
            status_board=status_board,
            specs=specs,
            options=options,
            threads=config.threads_per_worker,
            sample_timeout_s=float(config.sample_timeout),
            ranks=config.ranks,
            on_news=on_news,
        )

    if kind == "inline":
        return InlinePool(runner(WorkerId(0)))
    if kind == "thread":
        return ThreadPool(runner)
    if ray is None:
        return process_pool()
    if not ray.local:
        return ray_pool(ray, None)
    from infeed.workers.mixed import MixedPool

    local = process_pool()
    try:
        return MixedPool(local, partial(ray_pool, ray), ray.local)
    except BaseException:
        local.close()
        raise


def _make_feed(
    config: Options,
    plan: Plan,
    grain_size: int,
    stream: StreamShares | None,
    only: BatchPlan | None,
    cursor: Cursor,
    asked: Iterator[Any] | None,
) -> Feed:
    if stream is not None:
        return StreamFeed(cursor, config.batch_size or 1, stream)
    if only is not None:
        return IndexedFeed(cursor, iter([only]), grain_size)
    is_inline = config.kind == "inline"
    return IndexedFeed(cursor, plan.batches(cursor, asked), grain_size, plan.lookahead(cursor), is_inline=is_inline)


def _is_pinned(config: Options) -> bool:
    """Whether batches need pinned memory, so that a torch accelerator can read them directly."""
    delivery = config.delivery
    return config.pin_memory or (delivery is not None and delivery.output is None and is_gpu(delivery.target))
