"""Plans and feeds: the batches of an epoch, by index or from the shares of an iterable dataset."""

from __future__ import annotations

import sys
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, final

import numpy as np

from infeed.collate.arrays import ArrayTable, as_rows, table_of
from infeed.errors import ConfigError
from infeed.options import Options, RandomSampler
from infeed.plan.batches import (
    BatchPlan,
    Lookahead,
    default_grain_size,
    grain_count,
    ordered_batch,
    ordered_batches,
    sampled_batches,
    user_batches,
)
from infeed.plan.order import (
    Blocks,
    BlockShuffledOrder,
    EqualBlocks,
    Indices,
    ListedBlocks,
    Order,
    RepeatingOrder,
    SequentialOrder,
    ShuffledOrder,
    WeightedOrder,
    weight_ladder,
)
from infeed.plan.sharding import Cut, Shard, Steps
from infeed.plan.state import Cursor, Identity, ShareCursor, StreamCursor
from infeed.plan.stateful import SamplerReader, SamplerStates, check_reading
from infeed.scheduler.messages import WorkerId
from infeed.workers.exceptions import kept
from infeed.workers.protocol import OpenStream

_ALL: Final = sys.maxsize
# The batch size of a batch sampler is unknown; assume a common one.
_USUAL_BATCH_SIZE: Final = 32
# Samples per block of a dataset that does not say how it is stored.
_USUAL_BLOCK_SIZE: Final = 64
# Blocks whose samples are shuffled together: so few that a batch usually has all of them, because what a batch reads of a block
# and does not need is read again for another batch. A batch of blocks of 16 samples took 7 times as long with a window of 16.
_USUAL_WINDOW: Final = 4


class Plan(Protocol):
    """Interface of a plan, as engines and loaders use it."""

    seed: int
    cut: Cut
    torch_seed: int | None  # base of the seeds of torch's workers
    sets_epochs: bool  # workers call set_epoch of the dataset, its transforms and collate_fn

    def reseed(self, seed: int) -> None:
        """Continue with the seed of a loaded state."""
        self.seed = seed

    @property
    def table(self) -> ArrayTable | None:
        """The dataset as in-memory arrays, if rows can be gathered from it."""

    @property
    def is_given(self) -> bool:
        """Whether a sampler or an iterable dataset sets the order, so that it is known only by reading it."""

    @property
    def is_foreseeable(self) -> bool:
        """Whether the next epoch may be prefetched before the training loop starts it."""

    def begin(self, start: Cursor, reached: Callable[[], int]) -> None:
        """Begin an epoch whose state may be saved; ``reached`` returns the next step of the training loop."""

    def batches(self, cursor: Cursor, asked: Iterator[Any] | None = None) -> Iterator[BatchPlan | Exception]:
        """Yield this rank's batches of an epoch, from a cursor on.

        Args:
            asked: The sampler's iterator for this iteration, if ``iter`` was already called on the sampler.
        """

    def lookahead(self, cursor: Cursor) -> Lookahead | None:
        """Return how far ahead the epoch at ``cursor`` may read its sampler; ``None`` sets no limit."""

    def batch(self, cursor: Cursor, step: int) -> BatchPlan | None:
        """Return batch ``step`` of the epoch that resumes at ``cursor``, or ``None``. Not available if ``is_given``."""

    def substitute(self, epoch: int, drawn: int) -> Any:
        """Return an index of the epoch, chosen by a random number; ``None`` if only the user's sampler knows the order."""

    def batch_count(self) -> int:
        """Return the number of batches per epoch of this rank.

        Raises:
            TypeError: The dataset, sampler or batch sampler has no length.
        """

    def identity(self, *, is_fresh: bool = True) -> Identity:
        """Return the identity that states are checked against. Unless ``is_fresh``, the length is that at epoch start."""

    def sampler_state(self, cursor: Cursor, start: Cursor | None) -> Any:
        """Return the sampler state needed to resume planning at ``cursor``, as plain data; ``None`` if none is needed.

        ``start`` is the start of the epoch of ``cursor``; ``None`` if it has not begun.
        """

    def read_sampler_state(self, state: Any, cursor: Cursor) -> Any:
        """Check a value of ``sampler_state`` and return it for ``cursor.sampler`` of the resumed epoch.

        Raises:
            StateError: The value is not a sampler state, or belongs to another plan.
        """


@final
class Planner(Plan):
    """The plan of ``infeed.DataLoader``. Loading a state may change ``seed``; the options fix everything else."""

    torch_seed = None
    sets_epochs = True

    def __init__(self, config: Options, seed: int) -> None:
        assert isinstance(config.shard, Shard)
        self._config = config
        self.seed = seed
        self._table = _table_for(config)
        self.cut = Cut(config.batch_size or 1, config.drop_last, config.shard, config.pad)
        self._drawn = config.random_sampler
        weights = None if self._drawn is None else self._drawn.weights
        self._ladder = None if weights is None else weight_ladder(weights)
        self._blocks = _blocks_of(config.dataset, self._drawn)
        self._window = _window_of(config.dataset, self._drawn)
        self._order_name = self._named_order()
        self._length: int | None = None
        self._readings = SamplerStates()
        self._check_lengths()

    @property
    def table(self) -> ArrayTable | None:
        return self._table

    @property
    def is_given(self) -> bool:
        config = self._config
        return config.is_stream or self._sampler() is not None

    @property
    def is_foreseeable(self) -> bool:
        # A user's sampler may depend on calls between epochs, such as set_epoch, so read it only when the epoch begins.
        return not self.is_given

    def batches(self, cursor: Cursor, asked: Iterator[Any] | None = None) -> Iterator[BatchPlan | Exception]:
        del asked
        config = self._config
        sampler = self._sampler()
        if sampler is not None:
            is_batched = config.batch_sampler is not None
            # Ranks are padded with the first rows of the epoch, which are known only when reading from its start.
            is_alone = self.cut.shard.world_size == 1
            size = self.cut.batch_size if is_alone and not is_batched else None
            reading = SamplerReader(sampler, cursor, cursor.sampler, self._readings, is_kept=is_alone, full_size=size)
            return reading.watched((user_batches if is_batched else sampled_batches)(reading, self.cut, reading.skip))
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
        sampler = config.index_sampler
        length = self._epoch_length() if sampler is None else _length(sampler, "sampler")
        steps = Steps(0, length, self.cut)
        return steps.count - steps.is_last_empty

    def identity(self, *, is_fresh: bool = True) -> Identity:
        config = self._config
        if is_fresh or self._length is None:
            self._length = self._dataset_length() if hasattr(config.dataset, "__len__") else None
        return Identity(
            order=self._order_name,
            length=self._length,
            num_samples=None if self._drawn is None else self._drawn.num_samples,
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
        return config.index_sampler if config.batch_sampler is None else config.batch_sampler

    def _order(self, epoch: int) -> Order:
        length = self._length = self._dataset_length()
        drawn = self._drawn
        if drawn is None:
            return SequentialOrder(length)
        count = drawn.num_samples or length
        if self._ladder is not None:
            return WeightedOrder(self._ladder, count, seed=self.seed, epoch=epoch)
        if drawn.replacement:
            return RepeatingOrder(length, count, seed=self.seed, epoch=epoch)
        if self._blocks is None:
            return ShuffledOrder(length, seed=self.seed, epoch=epoch, count=count)
        blocks: Blocks
        if isinstance(self._blocks, int):
            blocks = EqualBlocks(length, self._blocks, self._window, seed=self.seed, epoch=epoch)
        else:
            blocks = ListedBlocks(self._blocks, self._window, seed=self.seed, epoch=epoch)
        return BlockShuffledOrder(blocks, count, seed=self.seed, epoch=epoch)

    def _epoch_length(self) -> int:
        return (self._drawn and self._drawn.num_samples) or self._dataset_length()

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
        if config.index_sampler is not None:
            return "sampler"
        if self._drawn is None:
            return "sequential"
        if self._ladder is not None:
            return f"weighted {zlib.crc32(self._ladder.tobytes()):08x}"
        if self._blocks is not None:
            size = self._blocks if isinstance(self._blocks, int) else f"{zlib.crc32(self._blocks.tobytes()):08x}"
            return f"block {size} x {self._window}"
        return "replacement" if self._drawn.replacement else "shuffled"

    def _check_lengths(self) -> None:
        """Check the options that depend on the number of samples."""
        drawn = self._drawn
        if drawn is None:
            return
        if drawn.weights is not None and len(drawn.weights) != self._dataset_length():
            raise ConfigError(
                f"weights has {len(drawn.weights)} numbers for {self._dataset_length()} samples; pass one number per sample"
            )
        count = drawn.num_samples
        if count is None:
            return
        if count >> 62:
            raise ConfigError("num_samples must be below 2**62; use a smaller number")
        length = self._dataset_length()
        if drawn.replacement and not length:
            raise ConfigError(f"num_samples={count} cannot be drawn from an empty dataset; omit num_samples or add samples")
        if count > length and not drawn.replacement and drawn.weights is None:
            raise ConfigError(
                f"num_samples={count} must be at most {length}, the length of the dataset; use replacement=True to draw more"
            )


def _blocks_of(dataset: Any, drawn: RandomSampler | None) -> int | Indices | None:
    """Return the size of the blocks to shuffle, or the end of each block; ``None`` shuffles single samples."""
    if drawn is None or drawn.block_size == 1:
        return None
    if drawn.block_size != "auto":
        return drawn.block_size
    blocks = getattr(dataset, "shuffle_blocks", _USUAL_BLOCK_SIZE)
    if isinstance(blocks, np.ndarray):
        return blocks
    return None if blocks == 1 else int(blocks)


def _window_of(dataset: Any, drawn: RandomSampler | None) -> int:
    if drawn is not None and drawn.window is not None:
        return drawn.window
    return getattr(dataset, "shuffle_window", None) or _USUAL_WINDOW


def _is_single(config: Options) -> bool:
    return config.batch_size is None and config.batch_sampler is None


def is_loaded_together(config: Options) -> bool:
    """Whether ``__getitems__`` of the dataset loads several samples at once."""
    return not _is_single(config) and callable(getattr(rows_of(config), "__getitems__", None))


def seed_grain(config: Options) -> int:
    """Return the number of rows that share one seed. A batch fetched or collated as a whole has one seed."""
    is_together = is_loaded_together(config)
    if is_together and config.is_torch:
        return _ALL  # torch's DataLoader calls it once per batch
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
    """Return the index at a random position of an order."""
    position = drawn % order.length
    return int(order.take(position, position + 1)[0])


def rows_of(config: Options) -> Any:
    """Return the dataset with row access. For torch, a tuple of arrays is a dataset whose samples are the arrays."""
    return config.dataset if config.is_torch else as_rows(config.dataset)


def _table_for(config: Options) -> ArrayTable | None:
    """Return the dataset as a table of arrays, if it is one and default collation applies."""
    if config.collate_fn is not None or config.batch_size is None or config.is_stream:
        return None
    return table_of(config.dataset)


def _length(value: Any, name: str) -> int:
    if not callable(getattr(type(value), "__len__", None)):
        raise TypeError(f"{name} of type {type(value).__qualname__} has no len(), so the loader has none; implement __len__")
    return len(value)


class PlannedBatch(NamedTuple):
    """A batch before it is loaded. ``indices`` is ``None`` for iterable datasets, which are read in their own order."""

    epoch: int
    first_position: int
    row_count: int
    grain_count: int
    step: int
    stop: int  # position that all ranks have reached after this batch
    indices: Indices | list[Any] | None = None
    worker: WorkerId | None = None
    rows: list[int] | None = None  # original row of each sample; None: no sample was skipped


class Feed(ABC):
    """Source of an epoch's batches. The engine takes a batch only when the window has room for it."""

    def __init__(self, cursor: Cursor) -> None:
        self.epoch = cursor.epoch
        self._step = cursor.step
        self.is_exhausted = False
        # Error of the user's sampler. No batch is taken until the earlier batches are delivered and the error is raised.
        self.error: Exception | None = None

    def take_error(self) -> Exception:
        """Return the error to raise, once; the epoch continues after it."""
        error, self.error = self.error, None
        assert error is not None
        self.delivered()
        return error

    def prime(self) -> None:
        """Read the sampler as far ahead as allowed before the first batch is delivered.

        Raises:
            Exception: The user's sampler raised it.
        """
        return

    def delivered(self) -> None:
        """Note that a batch, or an exception in its place, was delivered; the sampler may be read further."""
        return

    @property
    def share_count(self) -> int:
        """Number of shares of an iterable dataset; 0 for an indexed dataset."""
        return 0

    def carried(self) -> StreamCursor | None:
        """Return the state that an iterable dataset passes to the next epoch, if it has a ``state_dict``."""
        return None

    @abstractmethod
    def take(self) -> PlannedBatch | None:
        """Return the next batch, or ``None`` if there is none now; if ``is_exhausted``, there will be none."""


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
        """Create a feed. ``batches`` may continue after raising; an exception that it yields is raised in place of a batch.

        With ``is_inline``, an exception is raised immediately, with its traceback.
        """
        super().__init__(cursor)
        self._ahead = set(cursor.ahead)
        self._batches = batches
        self._grain_size = grain_size
        self._lookahead, known_count = lookahead or (0, sys.maxsize)
        self._asked: deque[BatchPlan | Exception] = deque()  # yielded by the sampler, not yet taken
        self._asked_count = 0
        self._due_count = self._lookahead  # batches to read from the sampler, even without room for them
        self._limit = max(known_count, self._due_count)  # batches that may be read when there is room
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

    def take(self) -> PlannedBatch | None:
        while self.error is None:
            if self._asked:
                plan: BatchPlan | Exception | None = self._asked.popleft()
            else:
                plan = self._ask() if self._asked_count < self._limit else None
            if plan is None:
                self.is_exhausted = self._is_at_end
                break
            if isinstance(plan, Exception):
                self.error = plan
                break
            step = self._step
            self._step += 1
            if step in self._ahead:  # delivered out of order before the state was saved
                self.delivered()
                continue
            indices, first_position, stop, rows = plan
            count = len(indices)
            grains = max(1, grain_count(count, self._grain_size))
            return PlannedBatch(self.epoch, first_position, count, grains, step, stop, indices, None, rows)
        return None


@final
@dataclass(slots=True)
class _ShareProgress:
    planned_rows: int = 0
    loaded_rows: int = 0
    is_open: bool = False
    is_ended: bool = False
    is_over: bool = False  # had ended before this run: its worker restores the dataset and reads nothing
    state: Any = None  # the dataset's own, after ``state_rows`` rows
    state_rows: int = 0
    final_state: Any = None  # the dataset's own, at the end of the share


@final
@dataclass(slots=True)
class StreamShares:
    """Whether one or all workers read an iterable dataset: all if it calls ``get_worker_info``. Known after the first batch."""

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
    """Batches of each share in turn: 0, 1, ..., 0, 1, ...; shares that have ended are skipped."""

    def __init__(self, cursor: Cursor, batch_size: int, shares: StreamShares) -> None:
        super().__init__(cursor)
        self._batch_size = batch_size
        self._shares = shares
        self._by_worker = {WorkerId(0): _ShareProgress()}
        self._turn = 0
        self._has_asked = False
        self._was_alone = False  # one worker reads this epoch to its end, even if all could
        if cursor.stream is not None:
            self._resume(cursor.stream)

    def _resume(self, stream: StreamCursor) -> None:
        self._turn = stream.turn
        self._was_alone = stream.is_alone
        for number, share in enumerate(stream.shares):
            has_state = share.state is not None
            self._by_worker[WorkerId(number)] = _ShareProgress(
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
            # Which other workers read is unknown until the first batch arrives.
            if self._has_asked:
                return None
            self._has_asked = True
        elif not self.is_alone:
            for number in range(self._shares.worker_count):
                self._by_worker.setdefault(WorkerId(number), _ShareProgress())
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
        """Whether this is the first use of the share in this epoch."""
        share = self._by_worker[worker]
        is_first, share.is_open = not share.is_open, True
        return is_first

    def open_message(self, worker: WorkerId) -> OpenStream:
        """Return the message for a worker that starts this share, or continues it after another worker died."""
        share = self._by_worker.get(worker) or _ShareProgress()
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
