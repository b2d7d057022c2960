"""A torch loader's plan: its samplers, asked as torch asks them, and much faster where it is known what they would say."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from infeed.batch.arrays import ArrayTable, table_of
from infeed.batch.torchlike import torch_table_layout
from infeed.config import LoaderConfig
from infeed.errors import StateError
from infeed.memory.sharedarrays import SharedArray
from infeed.plan.batches import BatchPlan, given_batches, ordered_batch, ordered_batches, sampled_batches
from infeed.plan.cursor import Cursor, Identity
from infeed.plan.order import Indices, Order, SequentialOrder, ShuffledOrder
from infeed.plan.shards import Cut, Steps
from infeed.planning import Plan, substitute_in

# States of a sampler that are kept, because what it yielded lies ahead of what the user was given.
_SNAPSHOTS_KEPT: Final = 4096


# Samplers that draw, and all at once.
_DRAWING: Final = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@final
class ListedOrder(Order):
    """An order that is written down, as torch's is."""

    def __init__(self, indices: Indices) -> None:
        self.length = len(indices)
        self._indices = indices

    def take(self, start: int, stop: int) -> Indices:
        return self._indices[start:stop]


@final
class TorchPlan(Plan):
    """Order and batches from the loader's samplers; with ``seed=`` a plain shuffle is infeed's own."""

    def __init__(self, config: LoaderConfig, sampler: Any, seed: int) -> None:
        self.seed = seed
        self.torch_seed: int | None = seed
        self._table: ArrayTable | None = None
        self._columns_seen: list[Any] | None = None
        self.configure(config, sampler)
        self._asked: Iterator[Any] = iter(())
        self._drawn_from: dict[str, Any] | None = None  # what torch's own sampler draws this epoch's order from
        self._resumed: dict[str, Any] = {}
        self._snapshots: dict[int, Any] = {}
        self._epoch = -1
        self._seed_resumed: int | None = None

    def configure(self, config: LoaderConfig, sampler: Any) -> None:
        """Take over options that were changed since the last epoch; ``sampler`` is asked for indices or for lists of them."""
        self._config, self._sampler = config, sampler
        self.cut = Cut(config.batch_size or 1, config.drop_last)
        columns = _columns(config)
        seen = None if columns is None else list(map(_place_of, columns))
        if seen != self._columns_seen:
            self._columns_seen = seen
            self._table = None if columns is None else _table(config.dataset)

    @property
    def table(self) -> ArrayTable | None:
        """Only if the sampler is torch's: another may yield indices that are no numbers."""
        return self._table if type(self._inner()).__module__.startswith("torch.utils.data") else None

    def arm(self, asked: Iterator[Any], base_seed: int) -> None:
        """The next epoch asks the sampler by this iterator of it; its seeds are counted from ``base_seed``."""
        self._asked = asked
        if self._config.seed is None:
            self.seed = base_seed if self._seed_resumed is None else self._seed_resumed
            self.torch_seed = base_seed
        self._seed_resumed = None

    def prepare(self, sampler: Any) -> None:
        """Before ``iter(sampler)``: put a sampler that keeps a state where it was."""
        state = self._resumed.get("state")
        if state is not None:
            keeper = _keeper(sampler)
            if keeper is None:
                raise StateError("state holds one of a sampler's own, but the sampler has no load_state_dict")
            keeper.load_state_dict(state)

    @property
    def is_given(self) -> bool:
        return not self._is_ours()

    @property
    def is_foreseeable(self) -> bool:
        return False  # the dataset is sent anew for each epoch, or samplers are asked when it begins

    def batches(self, cursor: Cursor) -> Iterator[BatchPlan]:
        resumed, self._resumed = self._resumed, {}
        self._epoch = cursor.epoch
        self._drawn_from = None
        self._snapshots.clear()
        order = self._own_order(cursor.epoch)
        if order is not None:
            return ordered_batches(order, self._sampler_cut(), cursor.position)
        if type(self._inner()) is RandomSampler and self._inner().generator is None:
            return self._seeded_batches(cursor, resumed)
        if type(self._inner()) in _DRAWING:
            return self._generated_batches(cursor, resumed)
        if resumed.get("state") is not None:  # the sampler goes on by itself
            return self._watched(self._given(self._asked, 0), cursor.step, cursor.position)
        return self._watched(self._given(self._asked, cursor.position), cursor.step, 0)

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

    def sampler_state(self, cursor: Cursor) -> Any:
        if self._resumed:
            return self._resumed
        if cursor.epoch != self._epoch:
            return None
        if self._drawn_from is not None:
            return self._drawn_from
        state = self._snapshots.get(cursor.step)
        return None if state is None else {"state": state}

    def load_sampler_state(self, state: Any) -> None:
        if state is None:
            self._resumed = {}
            return
        if not isinstance(state, dict) or not state.keys() <= {"seed", "generator", "default", "state"}:
            raise StateError("state has a sampler that is not one of infeed's; use a state that state_dict() made")
        seed = state.get("seed")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 64):
            raise StateError(f"state has seed={type(seed).__name__} of the sampler; it must be a whole number of 64 bits")
        for name in ("generator", "default"):
            if name in state:
                _generator_state(state[name])
        self._resumed = dict(state)

    def resume_seed(self, seed: int) -> None:
        """Let the next epoch draw random numbers from this seed, and not from one that is drawn."""
        self._seed_resumed = seed

    # --- samplers

    def _inner(self) -> Any:
        """The sampler of single indices, if torch's own batches, or none, are made of it."""
        if type(self._sampler) is BatchSampler:
            return self._sampler.sampler
        is_unbatched = self._config.batch_size is None and self._config.batch_sampler is None
        return self._sampler if is_unbatched else None

    def _sampler_cut(self) -> Cut:
        """How torch's own batches are cut. Read off the batch sampler, which may be the user's."""
        sampler = self._sampler
        return Cut(sampler.batch_size, sampler.drop_last) if type(sampler) is BatchSampler else Cut(1)

    def _is_whole_shuffle(self) -> bool:
        sampler = self._inner()
        return type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)

    def _is_ours(self) -> bool:
        if self._config.is_stream or self._sampler is None:
            return False
        if type(self._inner()) is SequentialSampler:
            return True
        return self._config.seed is not None and self._is_whole_shuffle() and self._inner().generator is None

    def _own_order(self, epoch: int) -> Order | None:
        if not self._is_ours():
            return None
        length = len(self._inner().data_source)
        if type(self._inner()) is SequentialSampler:
            return SequentialOrder(length)
        return ShuffledOrder(length, seed=self.seed, epoch=epoch)

    def _seeded_batches(self, cursor: Cursor, resumed: dict[str, Any]) -> Iterator[BatchPlan]:
        """What a ``RandomSampler`` yields that draws a seed from the default generator for each epoch."""
        seed = resumed.get("seed")
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
        self._drawn_from = {"seed": seed}
        generator = torch.Generator()
        generator.manual_seed(seed)
        if self._is_whole_shuffle():
            # It is nobody's after this epoch: what the sampler draws last need not be drawn.
            yield from self._shuffled_batches(generator, cursor.position, is_kept=False)
            return
        sampler = self._inner()
        again: Any = RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples, generator)
        if type(self._sampler) is BatchSampler:
            again = BatchSampler(again, self._sampler.batch_size, self._sampler.drop_last)
        yield from self._given(iter(again), cursor.position)

    def _generated_batches(self, cursor: Cursor, resumed: dict[str, Any]) -> Iterator[BatchPlan]:
        """What a sampler of torch's yields that draws from a generator of the user's, or from the default one itself."""
        sampler = self._inner()
        name = "default" if sampler.generator is None else "generator"
        generator = torch.default_generator if sampler.generator is None else sampler.generator
        before = generator.get_state()
        if name in resumed:
            generator.set_state(_generator_state(resumed[name]))
        self._drawn_from = {name: base64.b64encode(generator.get_state().numpy().tobytes()).decode()}
        if self._is_whole_shuffle():
            yield from self._shuffled_batches(generator, cursor.position)
            return
        batches = self._given(self._asked, cursor.position)
        first = next(batches, None)  # all that these samplers draw, they draw with their first index
        if name == "default" and name in resumed:
            generator.set_state(before)  # the process's own: it goes on where it was
        if first is not None:
            yield first
            yield from batches

    def _shuffled_batches(self, generator: torch.Generator, start: int, *, is_kept: bool = True) -> Iterator[BatchPlan]:
        """A whole shuffle, as ``RandomSampler`` draws it, without making a list of it."""
        length = len(self._inner().data_source)
        indices = torch.randperm(length, generator=generator).numpy()
        cut = self._sampler_cut()
        for plan in ordered_batches(ListedOrder(indices), cut, start):
            if is_kept and len(plan.indices) < cut.batch_size:
                # It exhausts the sampler, which then draws once more, for a remainder that it does not have.
                torch.randperm(length, generator=generator)
                yield plan
                return
            yield plan
        if is_kept:
            torch.randperm(length, generator=generator)

    def _given(self, asked: Iterator[Any], start: int) -> Iterator[BatchPlan]:
        if self._config.batch_size is None and self._config.batch_sampler is None:
            return sampled_batches(asked, Cut(1), start)
        return given_batches(asked, Cut(1), start, is_torch=True)

    def _watched(self, batches: Iterator[BatchPlan], step: int, shift: int) -> Iterator[BatchPlan]:
        """Keep the sampler's own state behind each batch, if it has one."""
        keeper = _keeper(self._sampler)
        for indices, first_position, stop in batches:
            step += 1
            # A batch that is not full has exhausted the sampler, which may have begun anew: then nothing is left to go on with.
            size = getattr(self._sampler, "batch_size", None)
            is_full = size is None or len(indices) == size
            if keeper is not None and is_full:
                if len(self._snapshots) >= _SNAPSHOTS_KEPT:
                    del self._snapshots[next(iter(self._snapshots))]
                self._snapshots[step] = keeper.state_dict()
            yield BatchPlan(indices, first_position + shift, stop + shift)


def _keeper(sampler: Any) -> Any:
    """Who knows where a sampler is: the batch sampler, or the sampler in it."""
    for one in (sampler, getattr(sampler, "sampler", None)):
        if all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict")):
            return one
    return None


def _generator_state(text: Any) -> torch.Tensor:
    try:
        data = base64.b64decode(text, validate=True)
        state = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        torch.Generator().set_state(state)  # refuses what is not one
    except (TypeError, ValueError, RuntimeError):
        raise StateError("state has a generator that is none of torch's; use a state that state_dict() made") from None
    return state


def _columns(config: LoaderConfig) -> tuple[Any, ...] | None:
    """What a ``TensorDataset`` is made of, or one array, if default collation of its rows is all that is asked for."""
    dataset = config.dataset
    if config.worker_init_fn is not None:
        return None  # who has something to be done in workers wants workers
    if config.collate_fn is not None or config.is_stream or (config.batch_size is None and config.batch_sampler is None):
        return None
    if type(dataset) is np.ndarray or type(dataset) is SharedArray:
        return (dataset,)
    if type(dataset) is not torch.utils.data.TensorDataset:
        return None
    # Who differentiates through them has the graph from torch.
    return None if any(tensor.requires_grad for tensor in dataset.tensors) else dataset.tensors


def _place_of(column: Any) -> tuple[Any, ...]:
    """Where a column's numbers are, and how to read them: what a table of it depends on."""
    if isinstance(column, np.ndarray):
        return column.__array_interface__["data"], column.shape, column.strides, column.dtype
    if column.layout is not torch.strided:
        return (column,)
    return type(column), column.data_ptr(), column.shape, column.stride(), column.dtype, column.device


def _table(dataset: Any) -> ArrayTable | None:
    table = table_of(dataset)
    layout = None if table is None else torch_table_layout(table.layout)
    if table is None or layout is None:
        return None
    table.layout = layout
    return table
