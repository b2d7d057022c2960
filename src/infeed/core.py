"""What every loader knows, whatever its arguments look like: where it stands, where batches came from, what it found out.

``infeed.DataLoader`` and ``infeed.torch.DataLoader`` are two doors to this.
"""

from __future__ import annotations

import logging
import operator
import threading
import weakref
from dataclasses import replace
from functools import partial
from typing import Any, Final, final

from infeed.assembly import build_engine
from infeed.config import LoaderConfig
from infeed.engine import Engine
from infeed.errors import ConfigError, LoaderClosedError, StateError, WorkerStartError
from infeed.garage import MSG_CLOSED, Garage
from infeed.ledger import BadSample, Ledger, new_list
from infeed.lineage import Lineage, lineage_of
from infeed.memory.budget import available_bytes
from infeed.observe.machine import describe_machine
from infeed.observe.meter import Meter
from infeed.observe.records import Statistics, Trace
from infeed.observe.showing import Show, check_progress
from infeed.plan.batches import BatchPlan
from infeed.plan.cursor import Cursor, ShareCursor, StreamCursor, read_state, write_state
from infeed.plan.stateful import is_stateful, load_own_state, own_state, source_state
from infeed.planning import Plan, seed_grain
from infeed.staff import Staff
from infeed.trail import Past, Trail

_LOG: Final = logging.getLogger("infeed")


@final
class Core:
    """Belongs to one loader, which closes it."""

    def __init__(self, config: LoaderConfig, plan: Plan) -> None:
        self.config = config
        self.plan = plan
        # Where the next epoch begins. Taken when its first batch is asked for: `iter` alone, as frameworks call it to look,
        # begins nothing.
        self._next = Cursor()
        self._trail: Trail | None = None  # of the epoch that was begun last
        # The latest iteration that was made and has not begun. A state is of it while somebody holds it.
        self._made: weakref.ref[object] | None = None
        self._lock = threading.Lock()  # guards these while an epoch begins
        self.garage = Garage()
        self._shows: weakref.WeakSet[Show] = weakref.WeakSet()
        self._bad_samples = new_list()
        self.meter = Meter(config.observe)
        self.staff = Staff()
        self.cores = config.core_limit
        if config.progress:
            check_progress()

    def __reduce__(self) -> Any:
        return _no_core, ()  # a loader that is copied or sent makes another

    def offer(self, iteration: object) -> Cursor:
        """Where ``iteration`` would begin, which is being made.

        Raises:
            LoaderClosedError: there is none any more.
        """
        if self.garage.is_closed:
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
        if not (self._next.epoch == epoch and self._trail is None):
            self._next = Cursor(epoch)
            self._trail = None

    def state_dict(self) -> dict[str, Any]:
        trail = self._trail
        if trail is None or trail.is_over or (self._made is not None and self._made() is not None):
            cursor, start = self._next, None  # between epochs
            if cursor.stream is None:
                cursor = replace(cursor, stream=self._beginning())
        else:
            cursor, start = trail.cursor(), trail.start
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
        self._trail = self._made = None
        # Its workers were born with the other seed, or have gone on with the stream.
        if seed != self.plan.seed or self.config.is_stream:
            self.plan.seed = seed
            self.garage.clear()

    def _beginning(self) -> StreamCursor | None:
        """The states that the shares of a stream begin the next epoch with, unless a loaded state says otherwise."""
        config = self.config
        if not config.is_stream or self.plan.cut.shard.world_size > 1:
            return None
        if self.staff.kind(config) == "process":
            # Worker processes that are kept go on with their copy of the dataset; others get a new copy.
            return self._trail.carried if self._trail is not None and self._trail.is_over and self.garage.is_keeping else None
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
            Meter("off"),
            only=plan,
        )
        try:
            engine.begin_epoch(Trail(start))
            return engine.next_batch()
        finally:
            engine.close()

    def _stream_start(self, start: Cursor, past: Past) -> Cursor:
        """Where a stream is to be read from again, from its beginning, to come to a batch."""
        if self._trail is None or self._trail.share_count > 1:
            raise ConfigError(
                "replay cannot read the share of one worker of a stream again; use num_workers=1 to replay, or replay what "
                "__iter__ reads by hand"
            )
        rows = past.plan.first_position
        return Cursor(start.epoch, start.step, rows, stream=StreamCursor(0, (ShareCursor(rows),)))

    def _look_up(self, epoch: int | None, step: int) -> tuple[int, BatchPlan | None, Past | None]:
        """The epoch that is meant, and of its batch ``step`` either what is planned or what is remembered."""
        trail = self._trail
        if epoch is None:
            epoch = self.epoch if trail is None else trail.epoch
        if trail is not None and trail.epoch != epoch:
            trail = None
        past = trail.find(step) if trail is not None else None
        if past is not None:
            return epoch, None, past
        if self.plan.is_given:
            raise IndexError(
                f"batch {step} of epoch {epoch} is not remembered; of samplers and streams only the latest batches are, of the "
                "epoch that was begun last"
            )
        start = trail.start if trail is not None else self._next
        if start.epoch != epoch or step < start.step:
            start = Cursor(epoch)
        plan = self.plan.batch(start, step)
        if plan is None:
            raise IndexError(f"epoch {epoch} has no batch {step}; it has {self.plan.batch_count()} batches, counted from 0")
        return epoch, plan, None

    def _cursor(self) -> Cursor:
        return self._next if self._trail is None else self._trail.cursor()

    def begin(self, offered: Cursor) -> Trail:
        """Begin an epoch for an iteration that was made when ``offered`` was the next."""
        beginning = self._beginning() if self._next.stream is None else None
        with self._lock:
            if self._next is not offered and self._trail is None:
                # A state was loaded, or an epoch set, after `iter`: that is for the next one.
                return Trail(offered, self._ledger())
            start = self._next
            trail = self._trail = Trail(start, self._ledger(), beginning)
            self._next, self._made = Cursor(start.epoch + 1), None
        self.plan.begin(start, lambda: trail.cursor().step)
        return trail

    @property
    def bad_samples(self) -> list[BadSample]:
        return list(self._bad_samples)

    def build(self, config: LoaderConfig) -> Engine:
        """An engine for an epoch, with as many workers, and of the kind, that have turned out best so far."""
        staff = self.staff
        tuner = staff.tuner(config, self.cores)
        # Of several engines at a time only one is tuned by what it does: the others have as many workers as that.
        is_alone = not self.garage.has_engines_out
        build = partial(
            build_engine, config, self.plan, self.meter,
            tuner=tuner if is_alone else None,
            first_count=None if tuner is None else tuner.count,
            probes=config.is_kind_auto and staff.is_open,
        )  # fmt: skip
        try:
            return build(kind=staff.kind(config))
        except WorkerStartError as error:
            if not staff.is_back(config):
                raise
            # Threads have used the dataset meanwhile, and left something in it that cannot be sent.
            _LOG.info("workers stay threads: %s", error)
            staff.stay("thread")
            return build(kind="thread")

    def learn(self, engine: Engine) -> None:
        """An epoch is over, or was left: see whether another kind of worker would be better."""
        if not (self.config.is_kind_auto and self.staff.is_open):
            return
        if self.staff.reconsider(engine.work(), self.cores):
            self.garage.retire(engine)

    def statistics(self) -> Statistics:
        config = self.config
        return self.meter.statistics(
            epoch=self.epoch,
            is_auto=config.is_auto,
            is_settled=self.staff.is_settled,
            bound=self.staff.bound,
            cpu_limit=None if config.cpu_limit is None else float(config.cpu_limit),
            core_count=self.cores,
            memory_limit=config.memory_limit_bytes or available_bytes() // 2,
            loads_by=_loads_by(config, self.plan),
            has_collate_fn=config.collate_fn is not None,
            most_workers=config.most_workers,
            keeps_workers=self.garage.is_keeping,
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
        return self.meter.trace(statistics, config.shown(), describe_machine(statistics.core_count))

    def show(self, trail: Trail) -> Show | None:
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
            epoch=trail.epoch,
            first_step=trail.start.step,
            batch_count=batch_count,
            is_shown=config.progress,
            on_statistics=config.on_statistics,
            every_s=config.statistics_every,
        )
        self._shows.add(show)
        return show

    def close(self) -> None:
        """Stop workers and give memory back; what was shown of an iteration in progress is as it is."""
        self.garage.close()
        for show in list(self._shows):
            show.close()

    def _ledger(self) -> Ledger:
        return Ledger(self.config.error_budget, self._bad_samples)

    def take_back(self, trail: Trail) -> None:
        """The epoch could not begin: it is still the next."""
        with self._lock:
            if self._trail is trail:
                self._next, self._trail = trail.start, None


def _loads_by(config: LoaderConfig, plan: Plan) -> str:
    """What of the dataset gives samples, as a user knows it."""
    if plan.table is not None:
        return "gathering rows"
    if config.is_stream:
        return "__iter__"
    is_batched = config.batch_size is not None and callable(getattr(config.dataset, "__getitems__", None))
    return "__getitems__" if is_batched else "__getitem__"


def _no_core() -> None:
    return None
