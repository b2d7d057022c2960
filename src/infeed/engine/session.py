"""What every loader knows, whatever its arguments look like: where it stands, where batches came from, what it found out.

``infeed.DataLoader`` and ``infeed.torch.DataLoader`` are two doors to this.
"""

from __future__ import annotations

import logging
import operator
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, final

from infeed.engine.bad_samples import BadSample, ErrorBudget, new_list
from infeed.engine.build import build_engine
from infeed.engine.engine import Engine
from infeed.engine.planning import Plan, seed_grain
from infeed.engine.progress import Lineage, Past, Progress, lineage_of
from infeed.engine.scaling import WorkerChoice
from infeed.errors import ConfigError, LoaderClosedError, StateError, WorkerStartError
from infeed.memory.limits import available_bytes
from infeed.metrics.collector import Collector
from infeed.metrics.machine import describe_machine
from infeed.metrics.progress_bar import Show, check_progress
from infeed.metrics.statistics import Statistics, Trace
from infeed.options import LoaderConfig
from infeed.plan.batches import BatchPlan
from infeed.plan.state import Cursor, ShareCursor, StreamCursor, read_state, write_state
from infeed.plan.stateful import is_stateful, load_own_state, own_state, source_state

MSG_CLOSED: Final = "this loader is closed; make another, or do not close the one you iterate"


@final
class EngineCache:
    """Keeps one engine, gives it to an epoch and takes it back.

    One stays, with its workers warm. An epoch that begins while another of the same loader is still being iterated (nested
    loops, ``zip(loader, loader)``) gets an engine of its own, which is closed when both are not needed.
    """

    def __init__(self) -> None:
        self.is_keeping = True  # whether an engine waits for the next epoch, with its workers
        # Guards both. Reentrant, because an epoch that the garbage collector finds is given back from wherever it runs.
        self._lock = threading.RLock()
        self._idle_engine: Engine | None = None
        self._out: set[Engine] = set()
        self._outdated: set[Engine] = set()  # of those that are out: not to be parked again
        self.is_closed = False

    def take(self, make: Callable[[], Engine]) -> Engine:
        """An engine for one epoch.

        Raises:
            LoaderClosedError: the loader was closed, before or while an engine was made.
        """
        with self._lock:
            if self.is_closed:
                raise LoaderClosedError(MSG_CLOSED)
            engine, self._idle_engine = self._idle_engine, None
        if engine is None or not engine.is_usable:
            engine = make()
        with self._lock:
            if not self.is_closed:
                self._out.add(engine)
                return engine
        engine.close()
        raise LoaderClosedError(MSG_CLOSED)

    def give_back(self, engine: Engine) -> None:
        with self._lock:
            self._out.discard(engine)
            is_good = engine not in self._outdated
            self._outdated.discard(engine)
            if self._idle_engine is None and engine.is_usable and is_good and self.is_keeping and not self.is_closed:
                self._idle_engine = engine
                return
        if engine.is_usable:
            engine.close(keeps_workers=True)

    @property
    def has_engines_out(self) -> bool:
        """Whether another epoch is in progress."""
        return bool(self._out)

    def retire(self, engine: Engine) -> None:
        """Let no later epoch have this engine."""
        with self._lock:
            self._outdated.add(engine)

    def clear(self, *, keeps_workers: bool = True) -> None:
        """Let no later epoch have the engine that waits for one."""
        with self._lock:
            parked, self._idle_engine = self._idle_engine, None
            self._outdated |= self._out
        if parked is not None and parked.is_usable:
            parked.close(keeps_workers=keeps_workers)

    def close(self) -> None:
        self.is_closed = True
        self.stop()

    def close_unasked(self) -> None:
        """Close for a finalizer: where the loader was forgotten, or Python ends.

        Ctrl+C ends the wait for workers here as well, but there is nobody to raise it to: Python would print it and go on.
        """
        with suppress(KeyboardInterrupt):
            self.is_closed = True
            # When Python ends there is no next loader, and finalizers may have closed the pipes already.
            self.stop(keeps_workers=threading.main_thread().is_alive())

    def stop(self, *, keeps_workers: bool = False) -> None:
        """Close all engines, also those of epochs in progress; another epoch may begin."""
        with self._lock:
            engines = [engine for engine in (self._idle_engine, *self._out) if engine is not None]
            self._idle_engine = None
        for engine in engines:
            if engine.is_usable:
                engine.close(keeps_workers=keeps_workers)


_LOG: Final = logging.getLogger("infeed")


@final
class Session:
    """Belongs to one loader, which closes it."""

    def __init__(self, config: LoaderConfig, plan: Plan) -> None:
        self.config = config
        self.plan = plan
        # Where the next epoch begins. Taken when its first batch is asked for: `iter` alone, as frameworks call it to look,
        # begins nothing.
        self._next = Cursor()
        self._progress: Progress | None = None  # of the epoch that was begun last
        # The latest iteration that was made and has not begun. A state is of it while somebody holds it.
        self._made: weakref.ref[object] | None = None
        self._lock = threading.Lock()  # guards these while an epoch begins
        self.engine_cache = EngineCache()
        self._shows: weakref.WeakSet[Show] = weakref.WeakSet()
        self._bad_samples = new_list()
        self.collector = Collector(config.observe)
        self.worker_choice = WorkerChoice()
        self.cores = config.core_limit
        if config.progress:
            check_progress()

    def __reduce__(self) -> Any:
        return _no_session, ()  # a loader that is copied or sent makes another

    def offer(self, iteration: object) -> Cursor:
        """Where ``iteration`` would begin, which is being made.

        Raises:
            LoaderClosedError: there is none any more.
        """
        if self.engine_cache.is_closed:
            raise LoaderClosedError(MSG_CLOSED)
        self._made = weakref.ref(iteration)
        return self._next

    @property
    def next(self) -> Cursor:
        """Where the next iteration begins."""
        return self._next

    @property
    def epoch(self) -> int:
        return self._cursor().epoch

    def set_epoch(self, epoch: int) -> None:
        try:
            epoch = operator.index(epoch)
        except TypeError:
            raise ConfigError(f"epoch={epoch!r} must be a whole number; pass the number of the epoch, from 0") from None
        if epoch < 0 or epoch >> 62:
            shown = epoch if epoch.bit_length() < 128 else "(of many digits)"
            raise ConfigError(f"epoch={shown} must be 0 or more; pass the number of the epoch, from 0 to 2**62")
        sampler = self.config.batch_sampler if self.config.sampler is None else self.config.sampler
        for one in (sampler, getattr(sampler, "sampler", None)):
            hear = getattr(one, "set_epoch", None)
            if callable(hear):
                hear(epoch)
        if not (self._next.epoch == epoch and self._progress is None):
            self._next = Cursor(epoch)
            self._progress = None

    def state_dict(self) -> dict[str, Any]:
        progress = self._progress
        if progress is None or progress.is_over or (self._made is not None and self._made() is not None):
            cursor, start = self._next, None  # between epochs
            if cursor.stream is None:
                cursor = replace(cursor, stream=self._beginning())
        else:
            cursor, start = progress.cursor(), progress.start
        state = write_state(cursor, self.plan.identity(is_fresh=False))
        sampler, dataset = self.plan.sampler_state(cursor, start), self._dataset_state(cursor)
        if sampler is not None:
            state["sampler"] = sampler
        if dataset is not None:
            state["dataset"] = dataset
        return state

    def load_state_dict(self, state: Any) -> None:
        if isinstance(state, dict) and not state:
            return
        cursor, seed = read_state(state, self.plan.identity())
        dataset = state.get("dataset")
        if dataset is not None:
            self._check_dataset_state()
        self._next = replace(cursor, sampler=self.plan.read_sampler_state(state.get("sampler"), cursor), dataset=dataset)
        self._progress = self._made = None
        # Its workers were born with the other seed, or have gone on with the stream.
        if seed != self.plan.seed or self.config.is_stream:
            self.plan.seed = seed
            self.engine_cache.clear()

    def _beginning(self) -> StreamCursor | None:
        """The states that the shares of a stream begin the next epoch with, unless a loaded state says otherwise."""
        config = self.config
        if not config.is_stream or self.plan.cut.shard.world_size > 1:
            return None
        if self.worker_choice.kind(config) == "process":
            # Worker processes that are kept go on with their copy of the dataset; others get a new copy.
            return (
                self._progress.carried
                if self._progress is not None and self._progress.is_over and self.engine_cache.is_keeping
                else None
            )
        state = source_state(config.dataset) if config.most_workers <= 1 else None
        return None if state is None else StreamCursor(0, (ShareCursor(state=state),))

    def _dataset_state(self, cursor: Cursor) -> Any:
        """An indexed dataset's own state, if it has one.

        Raises:
            StateError: it cannot be known.
        """
        if cursor.dataset is not None or self.config.is_stream or not is_stateful(self.config.dataset):
            return cursor.dataset
        self._check_dataset_state()
        return own_state(self.config.dataset)

    def _check_dataset_state(self) -> None:
        config = self.config
        name = type(config.dataset).__qualname__
        if config.is_stream or not is_stateful(config.dataset):
            raise StateError(f"state holds one of the dataset, but {name} has no state_dict() and load_state_dict(state)")
        if config.kind != "inline" or config.is_staged:
            raise StateError(
                f"the dataset {name} has a state_dict, but workers load ahead, each from its own copy of it, so its state is "
                "not that of what was delivered; use num_workers=0 without device, or a dataset without state_dict"
            )

    def restore_dataset(self, start: Cursor) -> None:
        """Put an indexed dataset where a loaded state says, before the epoch is read."""
        if start.dataset is not None:
            load_own_state(self.config.dataset, start.dataset)

    def explain(self, step: int, epoch: int | None) -> Lineage:
        epoch, plan, past = self._look_up(epoch, step)
        return lineage_of(
            epoch, step, plan, past, seed=self.plan.seed, grain_size=seed_grain(self.config), rank=self.plan.cut.shard.rank
        )

    def replay(self, step: int, epoch: int | None) -> Any:
        epoch, plan, past = self._look_up(epoch, step)
        start = Cursor(epoch, step)
        if past is not None and past.plan.indices is not None:
            if not len(past.plan.indices):
                raise IndexError(f"batch {step} of epoch {epoch} has nothing to replay; all its samples were bad and left out")
            plan = BatchPlan(past.plan.indices, past.plan.first_position, past.plan.stop, past.plan.rows)
        elif past is not None:
            start = self._stream_start(start, past)
        # Without a time-out: whoever replays may be looking around in a debugger.
        engine = build_engine(
            replace(self.config, num_workers=0, worker="process", cpu_limit=None, timeout=0),
            self.plan,
            Collector("off"),
            only=plan,
        )
        try:
            engine.begin_epoch(Progress(start))
            return engine.next_batch()
        finally:
            engine.close()

    def _stream_start(self, start: Cursor, past: Past) -> Cursor:
        """Where a stream is to be read from again, from its beginning, to come to a batch."""
        if self._progress is None or self._progress.share_count > 1:
            raise ConfigError(
                "replay cannot read the share of one worker of a stream again; use num_workers=1 to replay, or replay what "
                "__iter__ reads by hand"
            )
        rows = past.plan.first_position
        return Cursor(start.epoch, start.step, rows, stream=StreamCursor(0, (ShareCursor(rows),)))

    def _look_up(self, epoch: int | None, step: int) -> tuple[int, BatchPlan | None, Past | None]:
        """The epoch that is meant, and of its batch ``step`` either what is planned or what is remembered."""
        progress = self._progress
        if epoch is None:
            epoch = self.epoch if progress is None else progress.epoch
        if progress is not None and progress.epoch != epoch:
            progress = None
        past = progress.find(step) if progress is not None else None
        if past is not None:
            return epoch, None, past
        if self.plan.is_given:
            raise IndexError(
                f"batch {step} of epoch {epoch} is not remembered; of samplers and streams only the latest batches are, of the "
                "epoch that was begun last"
            )
        start = progress.start if progress is not None else self._next
        if start.epoch != epoch or step < start.step:
            start = Cursor(epoch)
        plan = self.plan.batch(start, step)
        if plan is None:
            raise IndexError(f"epoch {epoch} has no batch {step}; it has {self.plan.batch_count()} batches, counted from 0")
        return epoch, plan, None

    def _cursor(self) -> Cursor:
        return self._next if self._progress is None else self._progress.cursor()

    def begin(self, offered: Cursor) -> Progress:
        """Begin an epoch for an iteration that was made when ``offered`` was the next."""
        beginning = self._beginning() if self._next.stream is None else None
        with self._lock:
            if self._next is not offered and self._progress is None:
                # A state was loaded, or an epoch set, after `iter`: that is for the next one.
                return Progress(offered, self._error_budget())
            start = self._next
            progress = self._progress = Progress(start, self._error_budget(), beginning)
            self._next, self._made = Cursor(start.epoch + 1), None
        self.plan.begin(start, lambda: progress.cursor().step)
        return progress

    @property
    def bad_samples(self) -> list[BadSample]:
        return list(self._bad_samples)

    def build(self, config: LoaderConfig) -> Engine:
        """An engine for an epoch, with as many workers, and of the kind, that have turned out best so far."""
        worker_choice = self.worker_choice
        tuner = worker_choice.tuner(config, self.cores)
        # Of several engines at a time only one is tuned by what it does: the others have as many workers as that.
        is_alone = not self.engine_cache.has_engines_out
        build = partial(
            build_engine, config, self.plan, self.collector,
            tuner=tuner if is_alone else None,
            first_count=None if tuner is None else tuner.count,
            probes=config.is_kind_auto and worker_choice.is_open,
        )  # fmt: skip
        try:
            return build(kind=worker_choice.kind(config))
        except WorkerStartError as error:
            if not worker_choice.is_back(config):
                raise
            # Threads have used the dataset meanwhile, and left something in it that cannot be sent.
            _LOG.info("workers stay threads: %s", error)
            worker_choice.stay("thread")
            return build(kind="thread")

    def learn(self, engine: Engine) -> None:
        """An epoch is over, or was left: see whether another kind of worker would be better."""
        if not (self.config.is_kind_auto and self.worker_choice.is_open):
            return
        if self.worker_choice.reconsider(engine.work(), self.cores):
            self.engine_cache.retire(engine)

    def statistics(self) -> Statistics:
        config = self.config
        return self.collector.statistics(
            epoch=self.epoch,
            is_auto=config.is_auto,
            is_settled=self.worker_choice.is_settled,
            bound=self.worker_choice.bound,
            cpu_limit=None if config.cpu_limit is None else float(config.cpu_limit),
            core_count=self.cores,
            memory_limit=config.memory_limit_bytes or available_bytes() // 2,
            loads_by=_loads_by(config, self.plan),
            has_collate_fn=config.collate_fn is not None,
            most_workers=config.most_workers,
            keeps_workers=self.engine_cache.is_keeping,
            prefetch=config.prefetch or (config.prefetch_factor or 0) * config.most_workers,
        )

    def trace(self) -> Trace:
        """Everything that is known of the run so far.

        Raises:
            ConfigError: it is not kept.
        """
        config = self.config
        if config.observe != "timeline":
            raise ConfigError(f"observe={config.observe!r} keeps no timeline; use observe='timeline', which is the default")
        statistics = self.statistics()
        return self.collector.trace(statistics, config.shown(), describe_machine(statistics.core_count))

    def show(self, progress: Progress) -> Show | None:
        """What is to be seen of an iteration while it runs, if anything."""
        config = self.config
        if not config.progress and config.on_statistics is None:
            return None
        if config.progress:
            check_progress()
        try:
            batch_count = self.plan.batch_count()
        except Exception:  # nobody knows, or a length of the user's that refuses: the bar has no end then
            batch_count = None
        show = Show(
            self.statistics,
            epoch=progress.epoch,
            first_step=progress.start.step,
            batch_count=batch_count,
            is_shown=config.progress,
            on_statistics=config.on_statistics,
            every_s=config.statistics_every,
        )
        self._shows.add(show)
        return show

    def close(self) -> None:
        """Stop workers and give memory back; what was shown of an iteration in progress is as it is."""
        self.engine_cache.close()
        for show in list(self._shows):
            show.close()

    def _error_budget(self) -> ErrorBudget:
        return ErrorBudget(self.config.error_budget, self._bad_samples)

    def take_back(self, progress: Progress) -> None:
        """The epoch could not begin: it is still the next."""
        with self._lock:
            if self._progress is progress:
                self._next, self._progress = progress.start, None


def _loads_by(config: LoaderConfig, plan: Plan) -> str:
    """What of the dataset gives samples, as a user knows it."""
    if plan.table is not None:
        return "gathering rows"
    if config.is_stream:
        return "__iter__"
    is_batched = config.batch_size is not None and callable(getattr(config.dataset, "__getitems__", None))
    return "__getitems__" if is_batched else "__getitem__"


def _no_session() -> None:
    return None
