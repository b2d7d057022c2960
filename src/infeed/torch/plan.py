"""The batch plan of a torch loader: iterates its samplers as torch does, with fast paths for samplers of known behavior."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, final
from weakref import ref

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from infeed.collate.arrays import ArrayTable, table_of
from infeed.collate.leaves import has_own_strides
from infeed.collate.torch_compat import torch_table_layout
from infeed.engine.planning import Plan, is_loaded_together, substitute_in
from infeed.errors import StateError
from infeed.memory.shared_arrays import SharedArray
from infeed.options import Options
from infeed.plan.batches import BatchPlan, GivenIndices, Lookahead, compacted, listed, ordered_batch, ordered_batches
from infeed.plan.order import Indices, Order, SequentialOrder, ShuffledOrder
from infeed.plan.sharding import Cut, Steps
from infeed.plan.state import Cursor, Identity
from infeed.plan.stateful import SamplerReader, SamplerStates, check_reading, is_stateful, restore, source_state
from infeed.torch.generators import DEFAULT, LOADER, NAMES, NOW, ORDER, SAMPLER, LentGenerator, decoded, encoded

# Samplers that draw random numbers, all at once.
_DRAWING: Final = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# Samplers that draw all random numbers before their first index, so reading further ahead than torch has no visible effect.
_DRAWING_FIRST: Final = (SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


@final
class ListedOrder(Order):
    """An order given as an array of indices, such as torch's permutation."""

    def __init__(self, indices: Indices) -> None:
        self.length = len(indices)
        self._indices = indices

    def take(self, start: int, stop: int) -> Indices:
        return self._indices[start:stop]


@final
class SamplerBatches(Iterator[BatchPlan | Exception]):
    """Calls ``next(asked)`` once per batch, as torch does, and continues after an exception if the sampler does.

    For a batch that is not iterable, yields the exception that loading it would raise.
    """

    def __init__(
        self,
        asked: Iterator[Any],
        start: int,
        *,
        is_batched: bool,
        is_together: bool,
        drawing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Skip the first ``start`` indices. Unless ``is_batched``, each item of the sampler is one index.

        With ``is_together``, the dataset has ``__getitems__`` and gets each batch in the sampler's own type. The first
        ``next`` runs inside ``drawing``, because samplers usually draw at their first index.
        """
        self._asked, self._start, self._drawing = asked, start, drawing
        self._is_batched, self._is_together = is_batched, is_together
        self._position = 0

    def __next__(self) -> BatchPlan | Exception:
        drawing, self._drawing = self._drawing, nullcontext
        with drawing():
            while True:
                first_position = self._position
                plan = self._ask()
                if not isinstance(plan, Exception):
                    self._position = plan.stop
                if first_position >= self._start:
                    return plan

    def _ask(self) -> BatchPlan | Exception:
        chunk = next(self._asked)
        indices: Any = [chunk]
        if self._is_batched:
            indices = listed(chunk)
            if self._is_together and type(chunk) is not list and not isinstance(chunk, Iterator):
                indices = GivenIndices([chunk] if isinstance(indices, Exception) else indices, chunk)
        if isinstance(indices, Exception):
            return indices
        return BatchPlan(compacted(indices), self._position, self._position + len(indices))


@final
class SamplerRun(Iterator[Any]):
    """The sampler iterator of one iteration, and the generators of its order and seeds.

    Generator states are those before ``iter``: see NOTE [generators in states].
    """

    def __init__(self, generators: dict[str, torch.Tensor], seed: int | None, source_state: dict[str, Any] | None) -> None:
        self.iterator: Iterator[Any] = iter(())  # of the sampler
        # Skip torch's second ``iter``: it would consume the sampler's loaded state, or the saved epoch called it once.
        self.is_resumed = False
        self.generators = generators
        self.order_state = torch.empty(0)  # of the generator of the order, after ``iter``
        self.seed = seed  # worker seed from an earlier epoch, if any: persistent workers keep theirs
        self.source_state = source_state  # of the sampler on which torch calls ``iter``

    def __next__(self) -> Any:
        return next(self.iterator)


@final
class TorchPlan(Plan):
    """Takes order and batches from the loader's samplers; with ``seed=``, infeed itself draws a plain shuffle."""

    def __init__(self, config: Options, sampler: Any, lookahead: int, seed: int) -> None:
        self.seed = seed
        self.torch_seed: int | None = seed
        # As in torch: user code may count epochs differently. Calling set_epoch of the loader sets this to True.
        self.sets_epochs = False
        self._table: ArrayTable | None = None
        self._columns_seen: list[Any] | None = None
        self.configure(config, sampler, lookahead)
        self._waiting: ref[SamplerRun] | None = None  # of the latest iteration, until it begins
        self._begun: SamplerRun | None = None  # of the epoch that the readings track
        self._readings = SamplerStates()
        self._has_seed = False  # an iteration has drawn the base seed of workers
        self._draws = True  # whether reading the sampler draws from the default generator; True until known
        self._lent = LentGenerator()

    def start_setting_epochs(self) -> bool:
        """Make workers call ``set_epoch``, and return whether they did not before."""
        is_new, self.sets_epochs = not self.sets_epochs, True
        return is_new

    def configure(
        self, config: Options, sampler: Any, lookahead: int, generator: Any = None, *, keeps_seed: bool = False
    ) -> None:
        """Apply options that changed since the last epoch.

        Args:
            sampler: yields indices, or lists of them.
            lookahead: number of batches that torch requests from the sampler beyond those it has delivered.
            generator: the loader's generator.
            keeps_seed: whether workers and their seed persist between epochs.
        """
        self._config, self._sampler, self._lookahead = config, sampler, lookahead
        self._generator, self._keeps_seed = generator, keeps_seed
        self.cut = Cut(config.batch_size or 1, config.drop_last)
        columns = _columns(config)
        if columns is not None and not _is_gathered_as_stacked(config, columns):
            columns = None
        seen = None if columns is None else list(map(_place_of, columns))
        if seen != self._columns_seen:
            self._columns_seen = seen
            self._table = None if columns is None else _table(config.dataset)

    @property
    def table(self) -> ArrayTable | None:
        """The dataset as arrays to gather from, only with torch's samplers: others may yield non-integer indices."""
        return self._table if type(self._inner()).__module__.startswith("torch.utils.data") else None

    @contextmanager
    def drawing(self, loader: Any, start: Cursor, *, is_reset: bool = False) -> Iterator[SamplerRun]:
        """Wrap torch's part of ``iter`` for an iteration that begins at ``start``; ``is_reset`` for persistent workers."""
        record = start.sampler or {}
        self._lent.restore(self._generators(), record, is_mid_epoch=bool(start.step))
        seed = record.get("seed", self.seed if is_reset and self._config.seed is None else None)
        source, is_torch_batches = self._source()
        if not is_torch_batches:
            restore(source, record.get("state"))
        run = SamplerRun(self._lent.states(self._generators()), seed, None if is_torch_batches else source_state(source))
        run.is_resumed = ("state" in record and start.position > 0) or (seed is not None and not is_reset)
        given = loader.generator
        if seed is not None and not is_reset:
            loader.__dict__["generator"] = torch.Generator()  # torch draws a base seed from it, which is not used
        try:
            with self._lent.lending():
                yield run
        finally:
            loader.__dict__["generator"] = given

    def start(self, run: SamplerRun, asked: Iterator[Any], base_seed: int) -> int:
        """Set the sampler iterator of the next epoch. Return the base seed from which its seeds are derived."""
        run.iterator, run.order_state = asked, self._order_state()
        self._waiting = ref(run)
        seed = base_seed if run.seed is None else run.seed
        if self._config.seed is None:
            self.seed = self.torch_seed = seed
            self._has_seed = True
        return seed

    def begin(self, start: Cursor, reached: Callable[[], int]) -> None:
        self._waiting = self._begun = None
        self._readings.begin(start, reached)

    @property
    def is_given(self) -> bool:
        return not self._is_ours()

    @property
    def is_foreseeable(self) -> bool:
        return False  # each epoch pickles the dataset again, or calls the samplers when it begins

    def batches(self, cursor: Cursor, asked: Iterator[Any] | None = None) -> Iterator[BatchPlan | Exception]:
        assert isinstance(asked, SamplerRun)
        if self._readings.are_of(cursor):
            self._begun = asked
        order = self._own_order(cursor.epoch)
        if order is not None:
            return ordered_batches(order, self._sampler_cut(), cursor.position)
        if self._is_unseeded() or self._is_whole_shuffle():
            return self._random_batches(cursor, asked)
        return self._read_batches(cursor, asked)

    def lookahead(self, cursor: Cursor) -> Lookahead | None:
        sampler = self._inner()
        if not self._lookahead or self._is_ours():
            return None
        if self._is_unseeded() or type(sampler) in _DRAWING_FIRST:
            return Lookahead(self._lookahead, sys.maxsize)
        if not self._is_whole_shuffle():
            return Lookahead(self._lookahead, 0)
        # The sampler draws at its first index, and again when it is read beyond its full batches.
        rest = max(0, len(sampler.data_source) - cursor.position)
        return Lookahead(self._lookahead, rest // self._sampler_cut().batch_size)

    def batch(self, cursor: Cursor, step: int) -> BatchPlan | None:
        order = self._own_order(cursor.epoch)
        assert order is not None
        steps = Steps(cursor.position, order.length, self.cut)
        number = step - cursor.step
        return ordered_batch(order, steps.piece(number)) if 0 <= number < steps.count else None

    def substitute(self, epoch: int, drawn: int) -> Any:
        order = self._own_order(epoch)
        return None if order is None else substitute_in(order, drawn)

    def batch_count(self) -> int:
        return len(self._sampler)

    def identity(self, *, is_fresh: bool = True) -> Identity:
        del is_fresh
        config = self._config
        sized = hasattr(config.dataset, "__len__") and not config.is_stream
        return Identity(
            order="stream" if config.is_stream else "torch",
            length=len(config.dataset) if sized else None,
            num_samples=None,
            seed=self.seed,
            is_seed_given=config.seed is not None,
            batch_size=config.batch_size,
            world_size=1,
            worker_count=max(1, config.most_workers),
        )

    def sampler_state(self, cursor: Cursor, start: Cursor | None) -> Any:
        if start is None and cursor.sampler is not None:
            return cursor.sampler or None
        run = None if self._waiting is None else self._waiting()
        if start is not None:
            if self._begun is None or not self._readings.are_of(start):
                return start.sampler or None
            run = self._begun
        if run is not None:
            states, seed = run.generators, run.seed
        else:
            states, seed = self._lent.states(self._generators()), self.seed if self._keeps_seed and self._has_seed else None
        record: dict[str, Any] = {**encoded({name: states[name] for name in (*self._generators(), ORDER) if name in states})}
        if seed is not None:
            record["seed"] = seed
        reading = None if self._is_ours() else self._readings.state(self._source()[0], cursor, start)
        return {**record, **(reading or {})} or None

    def read_sampler_state(self, state: Any, cursor: Cursor) -> Any:
        self._lent.begin_resume()
        if state is None:
            state = {}
        known = {*NAMES, NOW, "seed"}
        if not isinstance(state, dict) or not state.keys() <= {*known, "state", "position", "ended"}:
            raise StateError("state has an invalid sampler; pass the result of state_dict()")
        seed = state.get("seed", 0)
        if type(seed) is not int or not 0 <= seed < 1 << 64 or type(state.get(NOW, "")) is not str:
            raise StateError("state has an invalid worker seed; pass the result of state_dict()")
        for name in NAMES:
            if name in state:
                decoded(state[name])
        source = None if self._config.is_stream or self._is_ours() else self._source()[0]
        reading = {name: part for name, part in state.items() if name not in known}
        if reading:
            check_reading(reading, cursor, source)
        # In mid-epoch, the state must contain the generator of the order.
        own = self._order_generator()
        name = DEFAULT if own is None else LOADER if own is self._generator else SAMPLER
        if cursor.position and not self._is_ours() and type(self._inner()) in _DRAWING and name not in state:
            raise StateError(
                f"state is in mid-epoch but has no {name!r}; load it into a loader with the same sampler and generator"
            )
        return state

    # --- generators

    def _generators(self) -> dict[str, torch.Generator]:
        """Return the generators that the loader draws from, by their names in a state."""
        config, generator = self._config, self._generator
        found: dict[str, torch.Generator] = {}
        is_seeding = (
            config.seed is None and self.table is None and (config.most_workers > 0 or config.error_policy.action != "raise")
        )
        is_ordering = not config.is_stream and not self._is_ours()
        own = self._order_generator() if is_ordering else None
        if generator is not None and (is_seeding or own is generator):
            found[LOADER] = generator
        if own is not None and own is not generator:
            found[SAMPLER] = own
        if (is_seeding and generator is None) or (is_ordering and own is None and self._draws):
            found[DEFAULT] = torch.default_generator
        return found

    def _order_generator(self) -> torch.Generator | None:
        """Return the generator passed to the sampler."""
        own = getattr(self._inner(), "generator", None)
        return own if isinstance(own, torch.Generator) else None

    def _order_state(self) -> torch.Tensor:
        own = self._order_generator()
        return self._lent.states({DEFAULT: torch.default_generator})[DEFAULT] if own is None else own.get_state()

    @contextmanager
    def _ordering(self, cursor: Cursor, run: SamplerRun, *, is_watching: bool) -> Iterator[None]:
        """Lend while the order is drawn, from the saved generator if user code had drawn from it after ``iter``.

        If ``is_watching``, record whether the order draws from the default generator.
        """
        own, saved = self._order_generator(), (cursor.sampler or {}).get(ORDER)
        if saved is not None:
            (self._lent.lend if own is None else own.set_state)(decoded(saved))
        before = self._order_state()
        with self._lent.lending():
            yield
        has_drawn = not torch.equal(before, self._order_state())
        if has_drawn and not torch.equal(before, run.order_state):
            run.generators[ORDER] = before
        if is_watching and own is None:
            self._draws = has_drawn

    # --- samplers

    def _inner(self) -> Any:
        """Return the sampler of single indices, without batches or below torch's own ``BatchSampler``; else ``None``."""
        if not self._is_batched:
            return self._sampler
        return self._sampler.sampler if type(self._sampler) is BatchSampler else None

    @property
    def _is_batched(self) -> bool:
        """Whether the sampler yields batches; if not, each item is one index, even a list from a ``BatchSampler``."""
        return self._config.batch_size is not None or self._config.batch_sampler is not None

    def _sampler_cut(self) -> Cut:
        """Return batch size and ``drop_last`` of the batch sampler, which the user may have passed."""
        sampler = self._sampler
        return Cut(sampler.batch_size, sampler.drop_last) if self._is_batched else Cut(1)

    def _is_whole_shuffle(self) -> bool:
        sampler = self._inner()
        return type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)

    def _is_unseeded(self) -> bool:
        """Whether the sampler draws the seed of a generator of its own, once per epoch."""
        sampler = self._inner()
        return type(sampler) is RandomSampler and sampler.generator is None

    def _is_ours(self) -> bool:
        if self._config.is_stream or self._sampler is None:
            return False
        if type(self._inner()) is SequentialSampler:
            return True
        return self._config.seed is not None and self._is_whole_shuffle() and self._is_unseeded()

    def _own_order(self, epoch: int) -> Order | None:
        if not self._is_ours():
            return None
        length = len(self._inner().data_source)
        if type(self._inner()) is SequentialSampler:
            return SequentialOrder(length)
        return ShuffledOrder(length, seed=self.seed, epoch=epoch)

    def _source(self) -> tuple[Any, bool]:
        """Return the sampler whose state is saved, and whether torch's own ``BatchSampler`` wraps it.

        As in torchdata, this is the object on which torch calls ``iter``. A user's batch sampler without a state may wrap a
        sampler that has one.
        """
        sampler = self._sampler
        if type(sampler) is BatchSampler:
            return sampler.sampler, True
        inner = getattr(sampler, "sampler", None)
        return (inner if not is_stateful(sampler) and is_stateful(inner) else sampler), False

    def _read_batches(self, cursor: Cursor, run: SamplerRun) -> Iterator[BatchPlan | Exception]:
        """Read batches from the sampler and track its states."""
        source, is_torch_batches = self._source()
        record = cursor.sampler if cursor.sampler is not None and "state" in cursor.sampler else None
        reading = SamplerReader(
            source,
            cursor,
            record,
            self._readings,
            iterator=None if is_torch_batches else run.iterator,
            before=run.source_state,
            again=None if is_torch_batches else partial(iter, self._sampler),
            is_kept=is_torch_batches or source is self._sampler,
            full_size=self._sampler.batch_size if is_torch_batches and self._is_batched else None,
        )
        read: Any = BatchSampler(reading, self._sampler.batch_size, self._sampler.drop_last) if is_torch_batches else reading
        # Other samplers may draw in `iter`, which torch has already called.
        drawing = partial(self._ordering, cursor, run, is_watching=is_torch_batches)
        return reading.watched(self._given(iter(read), reading.skip, drawing))

    def _random_batches(self, cursor: Cursor, run: SamplerRun) -> Iterator[BatchPlan | Exception]:
        """Yield the batches of a ``RandomSampler``; a whole shuffle is drawn as it does, without converting it to a list."""
        sampler, cut, start = self._inner(), self._sampler_cut(), cursor.position
        length, is_whole, generator = len(sampler.data_source), self._is_whole_shuffle(), sampler.generator
        has_final_draw = generator is not None  # else nobody can notice
        with self._ordering(cursor, run, is_watching=False):
            if generator is None:
                generator = torch.Generator()
                generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
            indices = torch.randperm(length if is_whole else 0, generator=generator).numpy()
        if not is_whole:
            again: Any = RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples, generator)
            yield from self._given(
                iter(BatchSampler(again, cut.batch_size, cut.drop_last) if self._is_batched else again), start
            )
            return
        for plan in ordered_batches(ListedOrder(indices), cut, start):
            if has_final_draw and len(plan.indices) < cut.batch_size:
                # This batch exhausts the sampler, which then draws again for an empty remainder.
                torch.randperm(length, generator=generator)
                has_final_draw = False
            yield plan
        if has_final_draw:
            torch.randperm(length, generator=generator)

    def _given(
        self, asked: Iterator[Any], start: int, drawing: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[BatchPlan | Exception]:
        is_together = is_loaded_together(self._config)
        return SamplerBatches(asked, start, is_batched=self._is_batched, is_together=is_together, drawing=drawing)


def is_gathered(config: Options) -> bool:
    """Whether the main process probably gathers batches from arrays; the sampler may still prevent it."""
    return _columns(config) is not None


def _columns(config: Options) -> tuple[Any, ...] | None:
    """Return the tensors of a ``TensorDataset``, or a single array, if loading is only default collation of rows."""
    dataset = config.dataset
    if config.worker_init_fn is not None:
        return None  # a worker_init_fn needs workers
    if config.collate_fn is not None or config.is_stream or (config.batch_size is None and config.batch_sampler is None):
        return None
    if type(dataset) is np.ndarray or type(dataset) is SharedArray:
        return (dataset,)
    if type(dataset) is not torch.utils.data.TensorDataset:
        return None
    # Tensors that require gradients need torch's stacking, which keeps the autograd graph.
    return None if any(tensor.requires_grad for tensor in dataset.tensors) else dataset.tensors


def _is_gathered_as_stacked(config: Options, columns: tuple[Any, ...]) -> bool:
    """Whether torch would stack the rows into contiguous batches: without workers, not if rows are channels-last."""
    return config.most_workers > 0 or not has_own_strides([column[0] for column in columns if len(column)])


def _place_of(column: Any) -> tuple[Any, ...]:
    """Return the memory address and layout of a column, on which its table depends."""
    if isinstance(column, np.ndarray):
        return column.__array_interface__["data"], column.shape, column.strides, column.dtype
    if column.layout is not torch.strided:
        return (column,)
    return type(column), column.data_ptr(), column.shape, column.stride(), column.dtype, column.device


def _table(dataset: Any) -> ArrayTable | None:
    table = table_of(dataset)
    layout = None if table is None else torch_table_layout(table.layout)
    return None if table is None or layout is None else table.with_layout(layout)
