"""A loader's plan: which samples, in which order, in which batches, under which seeds. Known before anything is loaded."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, final

from infeed.batch.arrays import ArrayTable, as_rows, table_of
from infeed.config import LoaderConfig
from infeed.errors import ConfigError
from infeed.plan.batches import (
    BatchPlan,
    Lookahead,
    default_grain_size,
    given_batches,
    ordered_batch,
    ordered_batches,
    sampled_batches,
)
from infeed.plan.cursor import Cursor, Identity
from infeed.plan.order import Order, RepeatingOrder, SequentialOrder, ShuffledOrder, WeightedOrder, weight_ladder
from infeed.plan.shards import Cut, Shard, Steps
from infeed.plan.stateful import Reading, Readings, check_reading

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
