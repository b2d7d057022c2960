"""One epoch's batches as the engine plans them: by index, or from the shares of a stream."""

from __future__ import annotations

import sys
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, final

from infeed.collate.arrays import ArrayTable, as_rows, table_of
from infeed.errors import ConfigError
from infeed.options import LoaderConfig
from infeed.plan.batches import (
    BatchPlan,
    Lookahead,
    default_grain_size,
    given_batches,
    grain_count,
    ordered_batch,
    ordered_batches,
    sampled_batches,
)
from infeed.plan.order import Indices, Order, RepeatingOrder, SequentialOrder, ShuffledOrder, WeightedOrder, weight_ladder
from infeed.plan.shards import Cut, Shard, Steps
from infeed.plan.state import Cursor, Identity, ShareCursor, StreamCursor
from infeed.plan.stateful import Reading, Readings, check_reading
from infeed.scheduler.messages import WorkerId
from infeed.workers.exceptions import kept
from infeed.workers.protocol import OpenStream

_ALL: Final = sys.maxsize
# The size of a batch sampler's batches is not known; what batches usually have is the best guess there is.
_USUAL_BATCH_SIZE: Final = 32


class Plan(Protocol):
    """What an engine and a loader ask of a plan."""

    seed: int
    cut: Cut
    torch_seed: int | None  # what the seeds of torch's workers are counted from
    tells_epochs: bool  # workers call set_epoch of the dataset, its transforms and collate_fn

    @property
    def table(self) -> ArrayTable | None:
        """The dataset as arrays that are gathered, if it is that."""

    @property
    def is_given(self) -> bool:
        """Whether the order is the user's: a sampler's or a stream's. Then it is known only by asking them."""

    @property
    def is_foreseeable(self) -> bool:
        """Whether the next epoch may be begun before the user asks for it."""

    def begin(self, start: Cursor, reached: Callable[[], int]) -> None:
        """An epoch begins that states are taken of; ``reached`` is the next step of its user."""

    def batches(self, cursor: Cursor, asked: Iterator[Any] | None = None) -> Iterator[BatchPlan | Exception]:
        """The batches of an epoch of this rank, from a cursor on.

        Args:
            asked: the iterator of the sampler that belongs to this iteration, where ``iter`` was called on it already.
        """

    def lookahead(self, cursor: Cursor) -> Lookahead | None:
        """How far ahead an epoch that begins at ``cursor`` may ask its sampler; ``None`` sets no limit."""

    def batch(self, cursor: Cursor, step: int) -> BatchPlan | None:
        """Batch ``step`` of an epoch that goes on at ``cursor``; ``None`` if there is none. Not if ``is_given``."""

    def substitute(self, epoch: int, drawn: int) -> Any:
        """An index of the epoch, chosen by a random number; ``None`` if its order is known to the user's sampler only."""

    def batch_count(self) -> int:
        """Batches in an epoch of this rank.

        Raises:
            TypeError: the dataset, sampler or batch sampler has no length.
        """

    def identity(self, *, is_fresh: bool = True) -> Identity:
        """What this loader's states belong to. Unless ``is_fresh``, the length is what it was when the epoch began."""

    def sampler_state(self, cursor: Cursor, start: Cursor | None) -> Any:
        """What else is needed to plan again from ``cursor`` on, as plain data; ``None`` if nothing is.

        ``start`` is where the epoch began that ``cursor`` is in; ``None`` if it has yet to begin.
        """

    def read_sampler_state(self, state: Any, cursor: Cursor) -> Any:
        """Check what ``sampler_state`` returned. To be ``cursor.sampler`` of an epoch that begins there.

        Raises:
            StateError: it is not such a state, or not one of this plan.
        """


@final
class Planner(Plan):
    """The plan of ``infeed.DataLoader``. ``seed`` may change, when a state is loaded; all else is fixed by the options."""

    torch_seed = None
    tells_epochs = True

    def __init__(self, config: LoaderConfig, seed: int) -> None:
        assert isinstance(config.shard, Shard)
        self._config = config
        self.seed = seed
        self._table = _table_for(config)
        self.cut = Cut(config.batch_size or 1, config.drop_last, config.shard, config.pad)
        self._ladder = None if config.weights is None else weight_ladder(config.weights)
        self._order_name = self._named_order()
        self._length: int | None = None
        self._readings = Readings()
        self._check_lengths()

    @property
    def table(self) -> ArrayTable | None:
        return self._table

    @property
    def is_given(self) -> bool:
        config = self._config
        return config.is_stream or config.sampler is not None or config.batch_sampler is not None

    @property
    def is_foreseeable(self) -> bool:
        # A sampler of the user's may depend on what they do between epochs, such as set_epoch: it is asked when they begin.
        return not self.is_given

    def batches(self, cursor: Cursor, asked: Iterator[Any] | None = None) -> Iterator[BatchPlan | Exception]:
        del asked
        config = self._config
        sampler = self._sampler()
        if sampler is not None:
            is_batched = config.batch_sampler is not None
            # The epoch's first rows, which ranks are padded with, are known only if it is read from its beginning.
            is_alone = self.cut.shard.world_size == 1
            size = None if is_batched else self.cut.batch_size
            reading = Reading(sampler, cursor, cursor.sampler, is_kept=is_alone, full_size=size if is_alone else None)
            self._readings.follow(cursor, reading)
            return reading.watched((given_batches if is_batched else sampled_batches)(reading, self.cut, reading.skip))
        return ordered_batches(self._order(cursor.epoch), self.cut, cursor.position)

    def lookahead(self, cursor: Cursor) -> Lookahead | None:
        del cursor
        return None

    def batch(self, cursor: Cursor, step: int) -> BatchPlan | None:
        order = self._order(cursor.epoch)
        steps = Steps(cursor.position, order.length, self.cut)
        number = step - cursor.step
        return ordered_batch(order, steps.piece(number)) if 0 <= number < steps.count else None

    def substitute(self, epoch: int, drawn: int) -> Any:
        return None if self.is_given else substitute_in(self._order(epoch), drawn)

    def batch_count(self) -> int:
        config = self._config
        if config.batch_sampler is not None:
            return -(-_length(config.batch_sampler, "batch_sampler") // self.cut.shard.world_size)
        if config.sampler is not None:
            length = _length(config.sampler, "sampler")
        else:
            length = config.num_samples or self._dataset_length()
        steps = Steps(0, length, self.cut)
        return steps.count - steps.is_last_empty

    def identity(self, *, is_fresh: bool = True) -> Identity:
        config = self._config
        if is_fresh or self._length is None:
            self._length = self._dataset_length() if hasattr(config.dataset, "__len__") else None
        return Identity(
            order=self._order_name,
            length=self._length,
            num_samples=config.num_samples,
            seed=self.seed,
            is_seed_given=config.seed is not None,
            batch_size=config.batch_size,
            world_size=self.cut.shard.world_size,
            worker_count=max(1, config.most_workers),
        )

    def begin(self, start: Cursor, reached: Callable[[], int]) -> None:
        self._readings.begin(start, reached)

    def sampler_state(self, cursor: Cursor, start: Cursor | None) -> Any:
        sampler = self._sampler()
        return None if sampler is None else self._readings.state(sampler, cursor, start)

    def read_sampler_state(self, state: Any, cursor: Cursor) -> Any:
        return check_reading(state, cursor, self._sampler())

    def _sampler(self) -> Any:
        config = self._config
        return config.sampler if config.batch_sampler is None else config.batch_sampler

    def _order(self, epoch: int) -> Order:
        config = self._config
        length = self._length = self._dataset_length()
        count = config.num_samples or length
        if self._ladder is not None:
            return WeightedOrder(self._ladder, count, seed=self.seed, epoch=epoch)
        if config.replacement:
            return RepeatingOrder(length, count, seed=self.seed, epoch=epoch)
        if config.shuffle:
            return ShuffledOrder(length, seed=self.seed, epoch=epoch, count=count)
        return SequentialOrder(count)

    def _dataset_length(self) -> int:
        if self.table is not None:
            return self.table.length
        return _length(rows_of(self._config), "dataset")

    def _named_order(self) -> str:
        config = self._config
        if config.is_stream:
            return "stream"
        if config.batch_sampler is not None:
            return "batch_sampler"
        if config.sampler is not None:
            return "sampler"
        if self._ladder is not None:
            return f"weighted {zlib.crc32(self._ladder.tobytes()):08x}"
        if config.replacement:
            return "replacement"
        return "shuffled" if config.shuffle else "sequential"

    def _check_lengths(self) -> None:
        """The options that must fit the number of samples."""
        config = self._config
        if config.weights is not None and len(config.weights) != self._dataset_length():
            raise ConfigError(
                f"weights has {len(config.weights)} numbers for {self._dataset_length()} samples; give one for each sample"
            )
        count = config.num_samples
        if count is None:
            return
        if count >> 62:
            raise ConfigError("num_samples must be below 2**62; use a smaller number of samples for an epoch")
        length = self._dataset_length()
        if config.replacement and not length:
            raise ConfigError(f"num_samples={count} cannot be drawn from an empty dataset; leave it out, or fill the dataset")
        if count > length and not config.replacement and config.weights is None:
            raise ConfigError(
                f"num_samples={count} must be at most {length}, the length of the dataset; use replacement=True to draw more"
            )


def _is_single(config: LoaderConfig) -> bool:
    return config.batch_size is None and config.batch_sampler is None


def is_loaded_together(config: LoaderConfig) -> bool:
    """Whether ``__getitems__`` of the dataset loads several samples at once."""
    return not _is_single(config) and callable(getattr(rows_of(config), "__getitems__", None))


def seed_grain(config: LoaderConfig) -> int:
    """Rows that share one seed. What is fetched or collated as a whole is seeded as a whole."""
    is_together = is_loaded_together(config)
    if is_together and config.is_torch:
        return _ALL  # torch's loader calls it once for a batch
    if config.grain_size is not None:
        return config.grain_size
    if _is_single(config):
        return 1
    if config.collate_fn is not None or is_together:
        return _ALL
    if config.batch_sampler is not None:
        return default_grain_size(_USUAL_BATCH_SIZE)
    return default_grain_size(config.batch_size or 1)


def substitute_in(order: Order, drawn: int) -> int:
    """The index at a random position of an order."""
    position = drawn % order.length
    return int(order.take(position, position + 1)[0])


def rows_of(config: LoaderConfig) -> Any:
    """The dataset by rows. To torch a tuple of arrays is a dataset of arrays."""
    return config.dataset if config.is_torch else as_rows(config.dataset)


def _table_for(config: LoaderConfig) -> ArrayTable | None:
    """The dataset as a table of arrays, if it is one and batches are made by default collation."""
    if config.collate_fn is not None or config.batch_size is None or config.is_stream:
        return None
    return table_of(config.dataset)


def _length(value: Any, name: str) -> int:
    if not callable(getattr(type(value), "__len__", None)):
        raise TypeError(f"{name} of type {type(value).__qualname__} has no len(), so the loader has none; add __len__ to it")
    return len(value)


class PlannedBatch(NamedTuple):
    """A batch before it is loaded. ``indices`` is ``None`` for streams, which are asked for whatever comes next."""

    epoch: int
    first_position: int
    row_count: int
    grain_count: int
    step: int
    stop: int  # the position that all ranks have come to with it
    indices: Indices | list[Any] | None = None
    worker: WorkerId | None = None
    rows: list[int] | None = None  # where each sample stood before others were left out; None: none were


class Feed(ABC):
    """The source of an epoch's batches. Taken from no earlier than there is room in flight."""

    def __init__(self, cursor: Cursor) -> None:
        self.epoch = cursor.epoch
        self._step = cursor.step
        self.is_exhausted = False
        # What the user's sampler raised. No batch is taken until those before it are delivered and it was raised.
        self.error: Exception | None = None

    def take_error(self) -> Exception:
        """What is to be raised, once; the epoch goes on behind it."""
        error, self.error = self.error, None
        assert error is not None
        self.delivered()
        return error

    def prime(self) -> None:
        """Ask for as many batches as may be asked for before the first is delivered.

        Raises:
            Exception: what the user's sampler raised.
        """
        return

    def delivered(self) -> None:
        """A batch, or an exception in its place, is delivered: the sampler may be asked for another."""
        return

    @property
    def share_count(self) -> int:
        """Into how many shares a stream is cut; 0 if this is none."""
        return 0

    def carried(self) -> StreamCursor | None:
        """What the shares of a stream that has ended hand on to the next epoch, if its dataset has a state."""
        return None

    @abstractmethod
    def take(self) -> PlannedBatch | None:
        """The next batch; ``None`` if there is none now, and none ever again if ``is_exhausted``."""


@final
class IndexedFeed(Feed):
    def __init__(
        self,
        cursor: Cursor,
        batches: Iterator[BatchPlan | Exception],
        grain_size: int,
        lookahead: Lookahead | None = None,
        *,
        is_inline: bool = False,
    ) -> None:
        """``batches`` may go on after it raised. An exception that it yields is raised in the place of a batch.

        With ``is_inline``, an exception is raised at once, with its traceback.
        """
        super().__init__(cursor)
        self._ahead = set(cursor.ahead)
        self._batches = batches
        self._grain_size = grain_size
        self._lookahead, known_count = lookahead or (0, sys.maxsize)
        self._asked: deque[BatchPlan | Exception] = deque()  # yielded by the sampler, not taken yet
        self._asked_count = 0
        self._due_count = self._lookahead  # as many are asked for whether there is room for them or not
        self._limit = max(known_count, self._due_count)  # as many may be asked for when there is
        self._is_at_end = False
        self._is_inline = is_inline

    def prime(self) -> None:
        self._asked.extend(islice(self._batches, self._lookahead))
        self._asked_count = len(self._asked)
        self._is_at_end = self._asked_count < self._lookahead

    def delivered(self) -> None:
        if not self._lookahead:
            return
        self._due_count += 1
        self._limit = max(self._limit, self._due_count)
        while self._asked_count < self._due_count and (plan := self._ask()) is not None:
            self._asked.append(plan)

    def _ask(self) -> BatchPlan | Exception | None:
        if self._is_at_end:
            return None
        self._asked_count += 1
        try:
            return next(self._batches)
        except StopIteration:
            self._is_at_end = True
            return None
        except Exception as error:  # the user's sampler
            return error if self._is_inline else kept(error)

    def _next(self) -> BatchPlan | None:
        if self.error is not None:
            return None
        if self._asked:
            plan: BatchPlan | Exception | None = self._asked.popleft()
        else:
            plan = self._ask() if self._asked_count < self._limit else None
        if plan is None:
            self.is_exhausted = self._is_at_end
        elif isinstance(plan, Exception):
            self.error = plan
            return None
        return plan

    def take(self) -> PlannedBatch | None:
        plan = self._next()
        while plan is not None and self._step in self._ahead:  # the user had it before the ones that were still missing
            self._step += 1
            self.delivered()
            plan = self._next()
        if plan is None:
            return None
        indices, first_position, stop, rows = plan
        count = len(indices)
        step = self._step
        self._step += 1
        grains = max(1, grain_count(count, self._grain_size))
        return PlannedBatch(self.epoch, first_position, count, grains, step, stop, indices, None, rows)


@final
@dataclass(slots=True)
class _Share:
    planned_rows: int = 0
    loaded_rows: int = 0
    is_open: bool = False
    is_ended: bool = False
    is_over: bool = False  # had ended before this run: its worker puts the dataset where it was, and reads nothing
    state: Any = None  # the dataset's own, when it had given ``state_rows``
    state_rows: int = 0
    final_state: Any = None  # the dataset's own, when the share had ended


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

    def __init__(self, cursor: Cursor, batch_size: int, shares: StreamShares) -> None:
        super().__init__(cursor)
        self._batch_size = batch_size
        self._shares = shares
        self._by_worker = {WorkerId(0): _Share()}
        self._turn = 0
        self._has_asked = False
        self._was_alone = False  # this epoch is read by one worker to its end, whatever is known of the dataset
        if cursor.stream is not None:
            self._resume(cursor.stream)

    def _resume(self, stream: StreamCursor) -> None:
        self._turn = stream.turn
        self._was_alone = stream.is_alone
        for number, share in enumerate(stream.shares):
            has_state = share.state is not None
            self._by_worker[WorkerId(number)] = _Share(
                share.rows,
                share.rows,
                is_ended=share.is_ended and not has_state,
                is_over=share.is_ended,
                state=share.state,
                state_rows=share.rows if has_state else 0,
            )
        if not stream.is_alone:
            self._shares.decide(shards_itself=True)

    @property
    def share_count(self) -> int:
        return 1 if self.is_alone else self._shares.worker_count

    @property
    def is_alone(self) -> bool:
        return self._was_alone or self._shares.is_alone

    @property
    def is_known(self) -> bool:
        return self._was_alone or self._shares.is_known

    def take(self) -> PlannedBatch | None:
        if not self.is_known:
            # Until the first batch is here it is not known who else will read.
            if self._has_asked:
                return None
            self._has_asked = True
        elif not self.is_alone:
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
                step = self._step
                self._step += 1
                return PlannedBatch(self.epoch, position, self._batch_size, 1, step, 0, worker=worker)
        self.is_exhausted = self.is_known
        return None

    def opening(self, worker: WorkerId) -> bool:
        """Whether this share is used for the first time in this epoch."""
        share = self._by_worker[worker]
        is_first, share.is_open = not share.is_open, True
        return is_first

    def open_message(self, worker: WorkerId) -> OpenStream:
        """What a worker is told that begins to read this share, or goes on where another has died."""
        share = self._by_worker.get(worker) or _Share()
        return OpenStream(
            self.epoch, share.state_rows, share.loaded_rows - share.state_rows, share.state, self.is_alone, self.is_known,
            share.is_over or share.is_ended,
        )  # fmt: skip

    def loaded(self, worker: WorkerId, row_count: int, planned_count: int, state: Any = None) -> None:
        share = self._by_worker[worker]
        share.loaded_rows += row_count
        if state is not None:
            share.state, share.state_rows = state, share.loaded_rows
        if row_count < planned_count:
            share.is_ended = True
            share.final_state = state

    def carried(self) -> StreamCursor | None:
        if all(share.final_state is None for share in self._by_worker.values()):
            return None
        return StreamCursor(0, tuple(ShareCursor(state=share.final_state) for share in self._by_worker.values()))
