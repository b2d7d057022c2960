"""The configuration of a worker: dataset, collation, seeding and what to record."""

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
    """How samples become a batch."""

    ROWS = "rows"  # written into the slot row by row, by default collation
    COLLATED = "collated"  # passed as a list to the user's collate_fn; the result is packed into the slot
    SINGLE = "single"  # batch_size=None: each sample unchanged, or passed through collate_fn
    GATHERED = "gathered"  # rows copied from in-memory arrays


@final
@dataclass(frozen=True, slots=True)
class Source:
    """The user's dataset and functions; pickled by value for worker processes."""

    dataset: Any
    making: Making
    is_stream: bool
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], Any] | None
    table: ArrayTable | None = None
    # Torch's default_collate, if batches must match its results; called if rows cannot be written one by one.
    torch_collate: Callable[[list[Any]], Any] | None = None

    @property
    def is_batched(self) -> bool:
        """Whether the dataset has ``__getitems__``, which takes a list of indices."""
        return callable(getattr(self.dataset, "__getitems__", None))


class Seeding(enum.Enum):
    """How a worker treats the global random generators for each grain."""

    SET = "set"  # seed them: worker processes
    LEND = "lend"  # seed them, then restore them: main process (num_workers=0)
    LEAVE = "leave"  # do not seed them: threads


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The settings of a worker at start-up; messages carry the rest."""

    worker: int
    worker_count: int
    seed: int
    grain_size: int
    seeding: Seeding
    cut: Cut  # how an iterable dataset is split among ranks
    kind: Literal["inline", "thread", "process"]
    retries: int = 0  # how often to retry a sample that raises
    handles_bad_samples: bool = False  # bad samples are skipped or replaced: report all of a task together
    is_watched: bool = False  # samples have a time limit: record each one
    observe: Observe = "timeline"
    probes: bool = False  # measure whether threads would be as fast
    probes_gil: bool = False  # also measure the GIL share; one worker is enough
    tells_epochs: bool = True  # calls set_epoch of the dataset, its transforms and collate_fn
    torch_seed: int | None = None  # torch loader only: base of the worker seeds, as in torch

    @property
    def share(self) -> int:
        """The number of this worker, unique among all ranks."""
        return self.worker + (self.cut.shard.rank << 32)

    @property
    def worker_seed(self) -> int:
        """The seed of the generators at worker start-up, and the seed in ``WorkerInfo``."""
        return derive(self.seed, self.share) if self.torch_seed is None else self.torch_seed + self.worker

    @property
    def is_as_torch(self) -> bool:
        """Whether to reproduce torch's worker environment for user code: seeds and ``get_worker_info``."""
        return self.torch_seed is not None and self.seeding is Seeding.SET
