"""From options to an engine: which workers, which memory, which feed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Final

from infeed.batch.arrays import ArrayTable, as_rows, table_of
from infeed.config import LoaderConfig
from infeed.engine import Engine
from infeed.feeds import Feed, IndexedFeed, StreamFeed, StreamShares
from infeed.memory.arena import Arena
from infeed.memory.budget import available_bytes
from infeed.memory.parcel import send
from infeed.memory.segments import PrivateStore, SegmentStore, open_store
from infeed.plan.batches import (
    BatchPlan,
    default_grain_size,
    given_batches,
    ordered_batches,
    sampled_batches,
    single_samples,
)
from infeed.plan.order import Order, SequentialOrder, ShuffledOrder
from infeed.records import EngineSetup
from infeed.scheduler.messages import WorkerId
from infeed.workers.crew import Crew
from infeed.workers.inline import InlineCrew
from infeed.workers.process import ProcessCrew, prepare
from infeed.workers.runner import Runner
from infeed.workers.sources import Making, Seeding, Source, WorkerSpec
from infeed.workers.thread import ThreadCrew

_ALL: Final = sys.maxsize
# Batches in flight, at least, while memory allows: deep enough that one slow sample among fifty does not hold up the rest.
_USUAL_BATCHES: Final = 16


def table_for(config: LoaderConfig) -> ArrayTable | None:
    """The dataset as a table of arrays, if it is one and batches are made by default collation."""
    if config.collate_fn is not None or config.batch_size is None or config.is_stream:
        return None
    return table_of(config.dataset)


def dataset_length(config: LoaderConfig) -> int:
    """Samples in the dataset: rows, if it is made of arrays."""
    table = table_for(config)
    return table.length if table is not None else len(as_rows(config.dataset))


def build_engine(config: LoaderConfig, seed: int) -> Engine:
    """An engine for these options, with its workers started.

    Raises:
        WorkerStartError: the dataset cannot be sent to processes.
        MemoryLimitError: there is no memory for it.
    """
    table = table_for(config)
    kind = "inline" if table is not None else config.kind
    if kind == "process":
        prepare(config.start_method)
    source = _source(config, table)
    count = 1 if kind == "inline" else config.num_workers
    workers = tuple(map(WorkerId, range(count)))
    grain_size = _grain_size(config, source)
    limit = config.memory_limit_bytes or available_bytes() // 2
    store: SegmentStore = open_store() if kind == "process" else PrivateStore()
    arena = Arena(store, limit_bytes=limit)
    seeding = {"inline": Seeding.LEND, "thread": Seeding.LEAVE, "process": Seeding.SET}[kind]
    if table is not None:
        seeding = Seeding.LEAVE  # nothing of the user's runs
    specs = {
        worker: WorkerSpec(worker=worker, worker_count=count, seed=seed, grain_size=grain_size, seeding=seeding)
        for worker in workers
    }
    stream = StreamShares(count) if config.is_stream else None
    window, least_window = _windows(config, count, is_inline=kind == "inline")
    undo = ExitStack()
    undo.callback(store.close)
    with undo:
        crew = _crew(config, kind, source, store, arena, specs)
        undo.callback(crew.close)
        setup = EngineSetup(
            crew=crew,
            store=store,
            arena=arena,
            workers=workers,
            window=window,
            least_window=least_window,
            is_window_fixed=config.prefetch is not None or kind == "inline",
            is_lazy=kind == "inline",
            in_order=config.in_order,
            whole_batches=count == 1 or source.making is not Making.ROWS or source.is_batched,
            grain_size=grain_size,
            timeout_s=float(config.timeout),
            drop_last=config.drop_last,
            stream=stream,
            make_feed=partial(_make_feed, config, seed, grain_size, stream),
            # A sampler of the user's may depend on what they do between epochs, such as set_epoch: it is asked when they begin.
            prefetches_epochs=(kind != "inline" and stream is None and config.sampler is None and config.batch_sampler is None),
        )
        engine = Engine(setup)
        undo.pop_all()  # all is well: from here on the engine closes them
    return engine


def _source(config: LoaderConfig, table: ArrayTable | None) -> Source:
    if table is not None:
        making = Making.GATHERED
    elif config.batch_size is None and config.batch_sampler is None:
        making = Making.SINGLE
    elif config.collate_fn is not None:
        making = Making.COLLATED
    else:
        making = Making.ROWS
    return Source(as_rows(config.dataset), making, config.is_stream, config.collate_fn, config.worker_init_fn, table)


def _grain_size(config: LoaderConfig, source: Source) -> int:
    if source.making is Making.ROWS and not source.is_batched:
        if config.grain_size is not None:
            return config.grain_size
        # The size of a batch sampler's batches is not known; what it is for others is the best guess there is.
        return default_grain_size(config.batch_size or 32) if config.batch_sampler is None else default_grain_size(32)
    return _ALL if source.making is not Making.SINGLE else 1


def _windows(config: LoaderConfig, count: int, *, is_inline: bool) -> tuple[int, int]:
    """Batches in flight: the usual number, and the least that keeps every worker busy."""
    if is_inline:
        return 1, 1
    if config.prefetch is not None:
        return config.prefetch, config.prefetch
    return max(_USUAL_BATCHES, 2 * count + 2), 2 + count // 2


def _crew(
    config: LoaderConfig,
    kind: str,
    source: Source,
    store: SegmentStore,
    arena: Arena,
    specs: dict[WorkerId, WorkerSpec],
) -> Crew:
    if kind == "inline":
        return InlineCrew(Runner(specs[WorkerId(0)], source, arena))
    if kind == "thread":
        return ThreadCrew(lambda worker: Runner(specs[worker], source, arena))
    given = {
        "dataset": config.dataset,
        "collate_fn": config.collate_fn,
        "worker_init_fn": config.worker_init_fn,
    }
    parcel = send(given, source, store)
    return ProcessCrew(parcel=parcel, store=store, specs=specs, start_method=config.start_method)


def _make_feed(config: LoaderConfig, seed: int, grain_size: int, stream: StreamShares | None, epoch: int) -> Feed:
    if stream is not None:
        return StreamFeed(epoch, config.batch_size or 1, stream)
    return IndexedFeed(epoch, _batches(config, seed, epoch), grain_size)


def _batches(config: LoaderConfig, seed: int, epoch: int) -> Iterator[BatchPlan]:
    if config.batch_sampler is not None:
        return given_batches(config.batch_sampler)
    if config.sampler is not None:
        if config.batch_size is None:
            return single_samples(config.sampler)
        return sampled_batches(config.sampler, config.batch_size, drop_last=config.drop_last)
    length = dataset_length(config)
    order: Order = ShuffledOrder(length, seed=seed, epoch=epoch) if config.shuffle else SequentialOrder(length)
    return ordered_batches(order, config.batch_size or 1, drop_last=config.drop_last)
