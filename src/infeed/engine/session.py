"""The common core of ``infeed.DataLoader`` and ``infeed.torch.DataLoader``, and its engine cache.

A session holds the position in the data, the lineage of batches, the choice of workers and the statistics.
"""

from __future__ import annotations

import logging
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, final

from infeed.engine.bad_samples import BadSample, ErrorBudget, new_list
from infeed.engine.build import build_engine
from infeed.engine.engine import Engine
from infeed.engine.planning import Plan, is_loaded_together, seed_grain
from infeed.engine.progress import Lineage, PastBatch, Progress, lineage_of
from infeed.engine.scaling import WorkerTuning
from infeed.errors import ConfigError, LoaderClosedError, StateError, WorkerStartError
from infeed.memory.limits import available_bytes
from infeed.metrics.collector import Collector
from infeed.metrics.machine import describe_machine
from infeed.metrics.progress_bar import ProgressDisplay, check_progress
from infeed.metrics.statistics import Statistics, Trace
from infeed.options import Options
from infeed.plan.batches import BatchPlan
from infeed.plan.state import Cursor, ShareCursor, StreamCursor, read_state, write_state
from infeed.plan.stateful import is_stateful, load_own_state, own_state, source_state

MSG_CLOSED: Final = "this loader is closed; create another, or close it later"
# Field of a state: a map-style dataset has a state of its own that could not be saved.
_UNKNOWN_DATASET: Final = "dataset_unknown"
_KEEP_STATE: Final = "use num_workers=0 without device, keep the state in the sampler, or compute samples from the index alone"


def call_unasked(function: Callable[[], None], engines: Iterable[Engine]) -> None:
    """Call a function that closes engines from a finalizer: in another thread, if this thread must not close one of them."""
    if all(engine.can_close_here for engine in engines):
        function()
    else:
        threading.Thread(target=function, name="infeed:close").start()


@final
class EngineCache:
    """Keeps one idle engine with warm workers between epochs.

    An epoch that begins during another epoch of the same loader (nested loops, ``zip(loader, loader)``) gets a second engine.
    The cache keeps the first engine that is given back and closes the other.
    """

    def __init__(self) -> None:
        self.is_keeping = True  # whether to keep an engine and its workers for the next epoch
        # Guards the engines. Reentrant: the garbage collector may end an iteration, and so call give_back, anywhere.
        self._lock = threading.RLock()
        self._idle_engine: Engine | None = None
        self.engines_out: set[Engine] = set()
        self._outdated: set[Engine] = set()  # engines in use that must not be kept afterwards
        self.is_closed = False

    def take(self, make: Callable[[], Engine]) -> Engine:
        """Return an engine for one epoch, the idle one or a new one.

        Raises:
            LoaderClosedError: The loader was closed before or during the call.
        """
        with self._lock:
            if self.is_closed:
                raise LoaderClosedError(MSG_CLOSED)
            engine, self._idle_engine = self._idle_engine, None
        if engine is None or not engine.is_usable:
            engine = make()
        with self._lock:
            if not self.is_closed:
                self.engines_out.add(engine)
                return engine
        engine.close()
        raise LoaderClosedError(MSG_CLOSED)

    def give_back(self, engine: Engine) -> None:
        with self._lock:
            self.engines_out.discard(engine)
            is_good = engine not in self._outdated
            self._outdated.discard(engine)
            if self._idle_engine is None and engine.is_usable and is_good and self.is_keeping and not self.is_closed:
                self._idle_engine = engine
                return
        if engine.is_usable:
            engine.close(keeps_workers=True)

    @property
    def is_empty(self) -> bool:
        """Whether there is no engine, idle or in use."""
        return self._idle_engine is None and not self.engines_out

    def retire(self, engine: Engine) -> None:
        """Exclude this engine from later epochs."""
        with self._lock:
            self._outdated.add(engine)

    def clear(self, *, keeps_workers: bool = True) -> None:
        """Close the idle engine, and exclude the engines in use from later epochs."""
        with self._lock:
            idle, self._idle_engine = self._idle_engine, None
            self._outdated |= self.engines_out
        if idle is not None and idle.is_usable:
            idle.close(keeps_workers=keeps_workers)

    def configure(self, *, is_keeping: bool) -> None:
        """Set whether to keep an engine and its workers for the next epoch."""
        self.is_keeping = is_keeping

    def close(self) -> None:
        self.is_closed = True
        self.stop()

    def close_unasked(self) -> None:
        """Close from a finalizer: the loader was garbage-collected, or Python exits.

        Ctrl+C ends the wait for workers here too, but a finalizer cannot raise: Python would print the error and continue.
        """
        with suppress(KeyboardInterrupt):
            self.is_closed = True
            # When Python exits there is no next loader, and other finalizers may already have closed the pipes.
            stop = partial(self.stop, keeps_workers=threading.main_thread().is_alive())
            call_unasked(stop, self._engines())

    def _engines(self) -> list[Engine]:
        with self._lock:
            return [engine for engine in (self._idle_engine, *self.engines_out) if engine is not None]

    def stop(self, *, keeps_workers: bool = False) -> None:
        """Close all engines, including those of epochs in progress; a new epoch may begin."""
        with self._lock:
            engines = self._engines()
            self._idle_engine = None
        for engine in engines:
            if engine.is_usable:
                engine.close(keeps_workers=keeps_workers)


_LOG: Final = logging.getLogger("infeed")


@final
class Session:
    """State of one loader, which closes it."""

    def __init__(self, config: Options, plan: Plan) -> None:
        self.config = config
        self.plan = plan
        # Start of the next epoch. The first `next` takes it: frameworks call `iter` just to check, so `iter` begins nothing.
        self._next = Cursor()
        self._progress: Progress | None = None  # of the latest epoch
        # The latest iteration that has not begun. While it is referenced, a state describes it.
        self._made: weakref.ref[object] | None = None
        self._lock = threading.Lock()  # guards the fields above while an epoch begins
        self.engine_cache = EngineCache()
        self._shows: weakref.WeakSet[ProgressDisplay] = weakref.WeakSet()
        self._bad_samples = new_list()
        self.collector = Collector(config.observe)
        self.worker_tuning = WorkerTuning()
        self.cores = config.core_limit
        self._has_warned = False  # that a state lacks the dataset's own
        if config.progress:
            check_progress()

    def __reduce__(self) -> Any:
        return _no_session, ()  # a copied or pickled loader creates its own

    def reconfigure(self, config: Options, *, keeps_engine: bool, is_outdated: bool) -> None:
        """Apply options that changed since the last epoch.

        Args:
            config: The options from now on.
            keeps_engine: Whether to keep an engine and its workers for the next epoch.
            is_outdated: Whether existing engines must not be used for the next epoch.
        """
        self.config = config
        if is_outdated:
            self.engine_cache.clear()
        self.engine_cache.configure(is_keeping=keeps_engine)

    def offer(self, iteration: object) -> Cursor:
        """Register a new iteration and return the cursor where it would begin.

        Raises:
            LoaderClosedError: The loader is closed.
        """
        if self.engine_cache.is_closed:
            raise LoaderClosedError(MSG_CLOSED)
        self._made = weakref.ref(iteration)
        return self._next

    @property
    def next(self) -> Cursor:
        """Cursor where the next iteration begins."""
        return self._next

    @property
    def epoch(self) -> int:
        return self._cursor().epoch

    def set_epoch(self, epoch: int) -> None:
        try:
            epoch = operator.index(epoch)
        except TypeError:
            raise ConfigError(f"epoch={epoch!r} must be an int; pass the number of the epoch") from None
        if epoch < 0 or epoch >> 62:
            shown = epoch if epoch.bit_length() < 128 else "(many digits)"
            raise ConfigError(f"epoch={shown} must be from 0 to 2**62 - 1; pass the number of the epoch")
        sampler = self.config.batch_sampler if self.config.sampler is None else self.config.sampler
        for one in (sampler, getattr(sampler, "sampler", None)):
            set_epoch = getattr(one, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
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
        sampler = self.plan.sampler_state(cursor, start)
        if sampler is not None:
            state["sampler"] = sampler
        return state | self._dataset_state(cursor)

    def load_state_dict(self, state: Any) -> None:
        if isinstance(state, dict) and not state:
            return
        cursor, seed = read_state(state, self.plan.identity())
        dataset = self._read_dataset_state(state, cursor)
        self._next = replace(cursor, sampler=self.plan.read_sampler_state(state.get("sampler"), cursor), dataset=dataset)
        self._progress = self._made = None
        # Existing workers have the old seed, or their copy of the dataset has another state.
        if seed != self.plan.seed or self.config.is_stream or dataset is not None:
            self.plan.reseed(seed)
            self.engine_cache.clear()

    def _beginning(self) -> StreamCursor | None:
        """Return the initial states of an iterable dataset's shares in the next epoch, unless a loaded state sets them."""
        config = self.config
        if not config.is_stream or self.plan.cut.shard.world_size > 1:
            return None
        if self.worker_tuning.kind(config) == "process":
            # Kept worker processes continue with their copy of the dataset; new ones get a fresh copy.
            return None if self._progress is None or not self.engine_cache.is_keeping else self._progress.carried
        state = source_state(config.dataset) if config.most_workers <= 1 else None
        return None if state is None else StreamCursor(0, (ShareCursor(state=state),))

    def _dataset_state(self, cursor: Cursor) -> dict[str, Any]:
        """Return the part of the state for a map-style dataset that has its own; a mark if it is unknown.

        Workers load ahead from copies of the dataset, so its state at a batch is unknown. New workers copy the dataset of the
        main process, so that one has the state in which an epoch begins.
        """
        config, dataset = self.config, self.config.dataset
        if cursor.dataset is not None:
            return {"dataset": cursor.dataset}
        if config.is_stream or not is_stateful(dataset):
            return {}
        has_new_workers = self.engine_cache.is_empty or not self.engine_cache.is_keeping
        if not self._loads_ahead or (has_new_workers and self._is_epoch_edge(cursor)):
            return {"dataset": own_state(dataset)}
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"dataset={type(dataset).__qualname__} has a state_dict(), but workers or device= load ahead, so the state of "
                f"this loader is saved without it and cannot be loaded into a loader of such a dataset; {_KEEP_STATE}",
                RuntimeWarning,
                stacklevel=4,
            )
        return {_UNKNOWN_DATASET: True}

    def _read_dataset_state(self, state: dict[str, Any], cursor: Cursor) -> Any:
        """Return a map-style dataset's own state from a loader's state.

        Raises:
            StateError: The state lacks it, or it does not fit this loader.
        """
        dataset, name = state.get("dataset"), type(self.config.dataset).__qualname__
        has_state = not self.config.is_stream and is_stateful(self.config.dataset)
        if has_state and state.get(_UNKNOWN_DATASET):
            raise StateError(
                f"state lacks the state of dataset={name}, because workers or device= loaded ahead when it was saved; "
                f"to save a complete one, {_KEEP_STATE}; to resume from this one, remove state_dict() of the dataset"
            )
        if dataset is None:
            return None
        if not has_state:
            raise StateError(
                f"state contains a dataset state, but {name} has no state_dict() and load_state_dict(state); implement both"
            )
        if self._loads_ahead and not self._is_epoch_edge(cursor):
            raise StateError(
                f"state contains the state of dataset={name} in mid-epoch, which is not supported with workers or device=: "
                "they load ahead; use num_workers=0 without device, or remove state_dict() of the dataset"
            )
        return dataset

    @property
    def _loads_ahead(self) -> bool:
        return self.config.kind != "inline" or self.config.is_staged

    def _is_epoch_edge(self, cursor: Cursor) -> bool:
        """Whether the cursor is before the first batch or after the last one."""
        if not cursor.step and not cursor.ahead:
            return True
        try:
            return cursor.step >= self.plan.batch_count()
        except Exception:  # the user's sampler has no length
            return False

    def restore_dataset(self, offered: Cursor) -> None:
        """Restore a map-style dataset from a loaded state, before workers copy it."""
        start = self._start(offered)
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
                raise IndexError(
                    f"batch {step} of epoch {epoch} has nothing to replay, because all its samples were bad and skipped"
                )
            plan = BatchPlan(past.plan.indices, past.plan.first_position, past.plan.stop, past.plan.rows)
        elif past is not None:
            start = self._stream_start(start, past)
        # No timeout: the user may be in a debugger.
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

    def _stream_start(self, start: Cursor, past: PastBatch) -> Cursor:
        """Return the cursor that re-reads an iterable dataset from its beginning up to a batch."""
        if self._progress is None or self._progress.share_count > 1:
            raise ConfigError("replay() is not supported for iterable datasets that several workers share; use num_workers=1")
        rows = past.plan.first_position
        return Cursor(start.epoch, start.step, rows, stream=StreamCursor(0, (ShareCursor(rows),)))

    def _look_up(self, epoch: int | None, step: int) -> tuple[int, BatchPlan | None, PastBatch | None]:
        """Return the epoch, and either the plan or the record of its batch ``step``."""
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
                f"batch {step} of epoch {epoch} is no longer stored; with a sampler or an iterable dataset, only the latest "
                "batches of the latest epoch are"
            )
        start = progress.start if progress is not None else self._next
        if start.epoch != epoch or step < start.step:
            start = Cursor(epoch)
        plan = self.plan.batch(start, step)
        if plan is None:
            raise IndexError(f"epoch {epoch} has no batch {step}; it has {self.plan.batch_count()} batches, numbered from 0")
        return epoch, plan, None

    def _cursor(self) -> Cursor:
        return self._next if self._progress is None else self._progress.cursor()

    def begin(self, offered: Cursor) -> Progress:
        """Begin an epoch for an iteration that was created when ``offered`` was the next cursor."""
        beginning = self._beginning() if self._next.stream is None else None
        with self._lock:
            start = self._start(offered)
            if start is not self._next:
                return Progress(start, self._error_budget())
            progress = self._progress = Progress(start, self._error_budget(), beginning)
            self._next, self._made = Cursor(start.epoch + 1), None
        self.plan.begin(start, lambda: progress.cursor().step)
        return progress

    def _start(self, offered: Cursor) -> Cursor:
        """Return where an iteration begins that was created when ``offered`` was the next cursor.

        A state that was loaded, or an epoch that was set, after ``iter`` applies to the next iteration.
        """
        return offered if self._progress is None else self._next

    @property
    def bad_samples(self) -> list[BadSample]:
        return list(self._bad_samples)

    def build(self, config: Options) -> Engine:
        """Build an engine with the best known number and kind of workers."""
        worker_tuning = self.worker_tuning
        tuner = worker_tuning.tuner(config, cores_of_workers(config, self.cores))
        # Only one of several concurrent engines is tuned; the others use its worker count.
        is_alone = not self.engine_cache.engines_out
        build = partial(
            build_engine, config, self.plan, self.collector,
            tuner=tuner if is_alone else None,
            first_count=None if tuner is None else tuner.count,
            probes=config.is_kind_auto and worker_tuning.is_open,
        )  # fmt: skip
        try:
            return build(kind=worker_tuning.kind(config))
        except WorkerStartError as error:
            if not worker_tuning.is_back(config):
                raise
            # Threads have used the dataset in the meantime and left something in it that cannot be pickled.
            _LOG.info("still using threads, because processes cannot be started: %s", error)
            worker_tuning.stay("thread")
            return build(kind="thread")

    def learn(self, engine: Engine) -> None:
        """Evaluate a finished or abandoned epoch: retire its engine if another kind of worker is better."""
        if not (self.config.is_kind_auto and self.worker_tuning.is_open):
            return
        if self.worker_tuning.reconsider(engine.metrics.work(), self.cores):
            self.engine_cache.retire(engine)

    def statistics(self) -> Statistics:
        config = self.config
        return self.collector.statistics(
            epoch=self.epoch,
            is_auto=config.is_auto,
            is_settled=self.worker_tuning.is_settled,
            bound=self.worker_tuning.bound,
            cpu_limit=None if config.cpu_limit is None else float(config.cpu_limit),
            core_count=self.cores,
            memory_limit=config.memory_limit_bytes or available_bytes() // 2,
            loads_by=_loads_by(config, self.plan),
            has_collate_fn=config.collate_fn is not None,
            most_workers=config.most_workers,
            keeps_workers=self.engine_cache.is_keeping,
            prefetch=config.prefetch or (config.prefetch_factor or 0) * config.most_workers,
            is_on_cluster=config.ray is not None,
        )

    def trace(self) -> Trace:
        """Return the recorded trace of the run so far.

        Raises:
            ConfigError: ``observe`` is not ``'timeline'``.
        """
        config = self.config
        if config.observe != "timeline":
            raise ConfigError(f"observe={config.observe!r} records no timeline; use observe='timeline' (the default)")
        statistics = self.statistics()
        return self.collector.trace(statistics, config.shown(), describe_machine(statistics.core_count))

    def show(self, progress: Progress) -> ProgressDisplay | None:
        """Return the progress display of an iteration, if one is configured."""
        config = self.config
        callback = config.statistics_callback
        if not config.progress and callback is None:
            return None
        if config.progress:
            check_progress()
        try:
            batch_count = self.plan.batch_count()
        except Exception:  # unknown length, or the user's __len__ raises: the bar has no total
            batch_count = None
        show = ProgressDisplay(
            self.statistics,
            epoch=progress.epoch,
            first_step=progress.start.step,
            batch_count=batch_count,
            is_shown=config.progress,
            on_statistics=None if callback is None else callback.function,
            every_s=0 if callback is None else callback.interval,
        )
        self._shows.add(show)
        return show

    def close(self) -> None:
        """Stop workers and release memory; an iteration in progress keeps what it has displayed."""
        self.engine_cache.close()
        for show in list(self._shows):
            show.close()

    def _error_budget(self) -> ErrorBudget:
        budget = self.config.error_policy.budget
        return ErrorBudget(budget, self._bad_samples, partial(_epoch_length, self.config, self.plan))

    def take_back(self, progress: Progress) -> None:
        """Undo ``begin`` after a failure: the epoch is the next one again."""
        with self._lock:
            if self._progress is progress:
                self._next, self._progress = progress.start, None


def cores_of_workers(config: Options, cores: float) -> float:
    """Return the CPU cores for which the tuner may add workers: also those of a Ray cluster, if the user allows it."""
    if config.ray is None or not config.is_auto:
        return cores
    from infeed.workers.ray_cluster import capacity

    return min(cores, config.ray.local) + capacity(config.ray) / config.ranks


def _loads_by(config: Options, plan: Plan) -> str:
    """Return the dataset method that loads samples, for display."""
    if plan.table is not None:
        return "gathering rows"
    if config.is_stream:
        return "__iter__"
    return "__getitems__" if is_loaded_together(config) else "__getitem__"


def _epoch_length(config: Options, plan: Plan) -> int | None:
    """Return the samples per epoch of this rank, if known; with a user's sampler, rounded to whole batches."""
    identity = plan.identity(is_fresh=False)
    if identity.epoch_length is not None:
        return identity.epoch_length // identity.world_size
    try:
        return None if config.is_stream else plan.batch_count() * (config.batch_size or 1)
    except Exception:  # a user's sampler without a length may raise anything
        return None


def _no_session() -> None:
    return None
