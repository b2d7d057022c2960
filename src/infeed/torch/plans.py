"""A torch loader's plan: its samplers, asked as torch asks them, and much faster where it is known what they would say."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from infeed.batch.arrays import ArrayTable, table_of
from infeed.batch.torchlike import torch_table_layout
from infeed.config import LoaderConfig
from infeed.errors import StateError
from infeed.plan.batches import BatchPlan, given_batches, ordered_batch, ordered_batches, sampled_batches
from infeed.plan.cursor import Cursor, Identity
from infeed.plan.order import Indices, Order, SequentialOrder, ShuffledOrder
from infeed.plan.shards import Cut, Steps
from infeed.planning import Plan

# States of a sampler that are kept, because what it yielded lies ahead of what the user was given.
_SNAPSHOTS_KEPT: Final = 4096


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

    def __init__(self, config: LoaderConfig, seed: int) -> None:
        self.seed = seed
        self.torch_seed: int | None = seed
        self.configure(config)
        self._sampler: Any = None  # what is asked for indices or for lists of them
        self._asked: Iterator[Any] = iter(())
        self._sampler_seed: int | None = None
        self._generator_state: str | None = None
        self._resumed: dict[str, Any] = {}
        self._snapshots: dict[int, Any] = {}
        self._epoch = -1
        self._seed_resumed: int | None = None

    def configure(self, config: LoaderConfig) -> None:
        """Take over options that were changed since the last epoch."""
        self._config = config
        self.cut = Cut(config.batch_size or 1, config.drop_last)
        self.table = _table(config)

    def arm(self, sampler: Any, asked: Iterator[Any], base_seed: int) -> None:
        """The next epoch asks this sampler, by this iterator of it; its seeds are counted from ``base_seed``."""
        self._sampler, self._asked = sampler, asked
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
        return not self._is_ours(self._sampler)

    @property
    def is_foreseeable(self) -> bool:
        return False  # the dataset is sent anew for each epoch, or samplers are asked when it begins

    def batches(self, cursor: Cursor) -> Iterator[BatchPlan]:
        resumed, self._resumed = self._resumed, {}
        self._epoch = cursor.epoch
        self._sampler_seed, self._generator_state = None, None
        self._snapshots.clear()
        order = self._own_order(cursor.epoch)
        if order is not None:
            return ordered_batches(order, self.cut, cursor.position)
        if self._is_plain(RandomSampler):
            return self._random_batches(cursor, resumed)
        if resumed.get("state") is not None:  # the sampler goes on by itself
            return self._watched(self._given(0), cursor.step, cursor.position)
        return self._watched(self._given(cursor.position), cursor.step, 0)

    def batch(self, cursor: Cursor, step: int) -> BatchPlan | None:
        order = self._own_order(cursor.epoch)
        assert order is not None
        steps = Steps(cursor.position, order.length, self.cut)
        number = step - cursor.step
        return ordered_batch(order, steps.piece(number)) if 0 <= number < steps.count else None

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
            worker_count=max(1, config.num_workers),
        )

    def sampler_state(self, cursor: Cursor) -> Any:
        if self._resumed:
            return self._resumed
        if cursor.epoch != self._epoch:
            return None
        if self._sampler_seed is not None:
            return {"seed": self._sampler_seed}
        if self._generator_state is not None:
            return {"generator": self._generator_state}
        state = self._snapshots.get(cursor.step)
        return None if state is None else {"state": state}

    def load_sampler_state(self, state: Any) -> None:
        if state is None:
            self._resumed = {}
            return
        if not isinstance(state, dict) or not state.keys() <= {"seed", "generator", "state"}:
            raise StateError("state has a sampler that is not one of infeed's; use a state that state_dict() made")
        seed = state.get("seed")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 64):
            raise StateError(f"state has seed={type(seed).__name__} of the sampler; it must be a whole number of 64 bits")
        if "generator" in state:
            _generator_bytes(state["generator"])
        self._resumed = dict(state)

    def resume_seed(self, seed: int) -> None:
        """Let the next epoch draw random numbers from this seed, and not from one that is drawn."""
        self._seed_resumed = seed

    # --- samplers

    def _is_plain(self, cls: type[Any]) -> bool:
        """Whether the sampler is torch's own of this class, in torch's own batches, so that it is known what it yields."""
        sampler = self._sampler
        if type(sampler) is BatchSampler:
            if sampler.batch_size != self._config.batch_size or sampler.drop_last != self._config.drop_last:
                return False
            sampler = sampler.sampler
        elif self._config.batch_size is not None or self._config.batch_sampler is not None:
            return False
        if type(sampler) is not cls:
            return False
        if cls is RandomSampler:
            return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return True

    def _inner(self) -> Any:
        return self._sampler.sampler if type(self._sampler) is BatchSampler else self._sampler

    def _is_ours(self, sampler: Any) -> bool:
        if self._config.is_stream or sampler is None:
            return False
        if self._is_plain(SequentialSampler):
            return True
        return self._config.seed is not None and self._is_plain(RandomSampler) and self._inner().generator is None

    def _own_order(self, epoch: int) -> Order | None:
        if not self._is_ours(self._sampler):
            return None
        length = len(self._inner().data_source)
        if self._is_plain(SequentialSampler):
            return SequentialOrder(length)
        return ShuffledOrder(length, seed=self.seed, epoch=epoch)

    def _random_batches(self, cursor: Cursor, resumed: dict[str, Any]) -> Iterator[BatchPlan]:
        """What ``RandomSampler`` yields, drawn as it draws, without making a list of it."""
        sampler = self._inner()
        generator = sampler.generator
        if generator is None:
            seed = resumed.get("seed")
            if seed is None:
                seed = int(torch.empty((), dtype=torch.int64).random_().item())
            self._sampler_seed = seed
            generator = torch.Generator()
            generator.manual_seed(seed)
        else:
            if "generator" in resumed:
                generator.set_state(torch.frombuffer(bytearray(_generator_bytes(resumed["generator"])), dtype=torch.uint8))
            self._generator_state = base64.b64encode(generator.get_state().numpy().tobytes()).decode()
        length = len(sampler.data_source)
        indices = torch.randperm(length, generator=generator).numpy()
        yield from ordered_batches(ListedOrder(indices), self.cut, cursor.position)
        # It draws once more when it is exhausted, for the remainder that it does not have.
        torch.randperm(length, generator=generator)

    def _given(self, start: int) -> Iterator[BatchPlan]:
        if self._config.batch_size is None and self._config.batch_sampler is None:
            return sampled_batches(self._asked, Cut(1), start)
        return given_batches(self._asked, Cut(1), start)

    def _watched(self, batches: Iterator[BatchPlan], step: int, shift: int) -> Iterator[BatchPlan]:
        """Keep the sampler's own state behind each batch, if it has one."""
        keeper = _keeper(self._sampler)
        for indices, first_position, stop in batches:
            step += 1
            if keeper is not None:
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


def _generator_bytes(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise StateError("state has a generator that is not base64; use a state that state_dict() made") from None


def _table(config: LoaderConfig) -> ArrayTable | None:
    """A ``TensorDataset``, or one array or tensor, with default collation: gathered and not looped over."""
    dataset = config.dataset
    if config.worker_init_fn is not None:
        return None  # who has something to be done in workers wants workers
    if config.collate_fn is not None or config.is_stream or (config.batch_size is None and config.batch_sampler is None):
        return None
    if type(dataset) is not np.ndarray and type(dataset) is not torch.utils.data.TensorDataset:
        return None
    table = table_of(dataset)
    layout = None if table is None else torch_table_layout(table.layout)
    if table is None or layout is None:
        return None
    table.layout = layout
    return table
