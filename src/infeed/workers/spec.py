"""What a worker loads from: the dataset, and how its samples become a batch."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

from infeed.collate.arrays import ArrayTable
from infeed.plan.seeds import derive
from infeed.plan.shards import Cut
from infeed.workers.recorder import Observe


class Making(enum.Enum):
    """How samples become what the user gets."""

    ROWS = "rows"  # written into the slot row by row, by default collation
    COLLATED = "collated"  # given as a list to the user's collate_fn, the result moved into the slot
    SINGLE = "single"  # batch_size=None: each sample as it is, through collate_fn if there is one
    GATHERED = "gathered"  # taken from in-memory arrays


@final
@dataclass(frozen=True, slots=True)
class Source:
    """The user's side of loading; travels to workers by value."""

    dataset: Any
    making: Making
    is_stream: bool
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], Any] | None
    table: ArrayTable | None = None
    # Torch's default_collate, where batches are to be as it makes them; called where rows cannot be written one by one.
    torch_collate: Callable[[list[Any]], Any] | None = None

    @property
    def is_batched(self) -> bool:
        """Whether the dataset takes a whole list of indices: ``__getitems__``."""
        return callable(getattr(self.dataset, "__getitems__", None))


class Seeding(enum.Enum):
    """What to do with the global generators before a grain."""

    SET = "set"  # a process of ours
    LEND = "lend"  # the user's own process, inline
    LEAVE = "leave"  # threads


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything a worker knows at birth; it learns the rest from messages."""

    worker: int
    worker_count: int
    seed: int
    grain_size: int
    seeding: Seeding
    cut: Cut  # how a stream is shared with other ranks
    kind: Literal["inline", "thread", "process"]
    retries: int = 0  # how often a sample that raises is asked for again
    handles_bad_samples: bool = False  # bad samples are left out or replaced: tell of all that a task has
    is_watched: bool = False  # samples have a time limit: note each
    observe: Observe = "timeline"
    probes: bool = False  # finds out whether threads would do
    probes_gil: bool = False  # how much of the time the GIL is held, which one of them is enough for
    tells_epochs: bool = True  # calls set_epoch of the dataset, its transforms and collate_fn
    torch_seed: int | None = None  # of a torch loader: what its workers' seeds are counted from, as torch does

    @property
    def share(self) -> int:
        """This worker among those of all ranks."""
        return self.worker + (self.cut.shard.rank << 32)

    @property
    def worker_seed(self) -> int:
        """What the worker's generators are seeded with when it starts, and what user code is told as its seed."""
        return derive(self.seed, self.share) if self.torch_seed is None else self.torch_seed + self.worker

    @property
    def is_as_torch(self) -> bool:
        """Whether user code is to find in it what it finds in torch's own workers: their seeds, their ``get_worker_info``."""
        return self.torch_seed is not None and self.seeding is Seeding.SET
