"""``infeed.torch.DataLoader``: torch's class, torch's arguments, infeed's engine."""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, TypeVar

import torch
import torch.utils.data
from torch.utils.data import DataLoader as TorchDataLoader  # now, because `install` puts our class in its place
from torch.utils.data import IterDataPipe, MapDataPipe, default_collate
from torch.utils.data._utils import collate as torch_collation
from torch.utils.data.dataloader import _BaseDataLoaderIter

from infeed.config import LoaderConfig, WorkerKind
from infeed.core import Core
from infeed.errors import WorkerStartError
from infeed.lineage import Lineage
from infeed.torch.iterators import EngineIter
from infeed.torch.plans import TorchPlan

_LOG: Final = logging.getLogger("infeed")
_T = TypeVar("_T", covariant=True)

# What default_collate knows by itself: with more, the user has taught it types of their own.
_KNOWN_TYPES: Final = dict(torch_collation.default_collate_fn_map)


class DataLoader(TorchDataLoader[_T], Generic[_T]):
    """torch's ``DataLoader`` on infeed's engine: the same arguments, attributes, batches and errors; a subclass of it.

    No ``if __name__ == "__main__"`` is needed, the process is never forked, and lambdas and classes of a script or notebook
    travel to workers. What differs is in the migration page of the documentation.

    Args:
        seed: makes the order (of a plain ``shuffle=True``) and random numbers in the dataset a function of seed and epoch, also
            with ``num_workers=0``. Without it both come from torch's generators, as with torch.
        worker: ``"process"``, or ``"thread"`` for datasets that leave the GIL.
        memory_limit: bytes, or text such as ``"2GiB"``: the most that batches in flight and batches kept may take together.
        grain_size: samples that share one seed and are loaded by one worker; 1 gives each sample its own.

    The other arguments are torch's.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        worker: WorkerKind = "process",
        memory_limit: int | str | None = None,
        grain_size: int | None = None,
    ) -> None:
        newer = {} if in_order else {"in_order": in_order}  # torch has it since 2.6
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **newer,
        )
        self.in_order = in_order
        # Under these names, and as given: frameworks make a loader anew from its attributes.
        self.seed = seed
        self.worker = worker
        self.memory_limit = memory_limit
        self.grain_size = grain_size
        self._prefetch = None if prefetch_factor is None else prefetch_factor * num_workers
        self._core: Core | None = None
        self._config()  # wrong arguments are told now

    # --- iteration

    def _get_iterator(self) -> _BaseDataLoaderIter:
        why = self._why_not()
        if why is not None:
            return self._torch_iterator(why)
        core = self._ready_core()
        plan = core.plan
        assert isinstance(plan, TorchPlan)
        plan.prepare(self._index_sampler)
        generator = self.generator if self.generator is not None else torch.default_generator
        before = generator.get_state()
        try:
            return EngineIter(self, core)
        except WorkerStartError as error:
            if not _is_for_forks(error):
                raise
            generator.set_state(before)  # torch draws its own base seed
            return self._torch_iterator("the dataset holds a multiprocessing object that only a forked process can use")

    def _why_not(self) -> str | None:
        """Why infeed's engine cannot serve this loader, if so."""
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            return "the dataset is a DataPipe"
        context = self.multiprocessing_context
        if context is not None and context.get_start_method() == "fork":
            return "multiprocessing_context='fork' was asked for"
        return None

    def _torch_iterator(self, why: str) -> _BaseDataLoaderIter:
        if self.num_workers > 0:
            warnings.warn(
                f"this loader runs on torch's own workers, forked from this process, because {why}; leave that out to have "
                "infeed's: a process with threads (OpenMP, OpenCV, CUDA) may hang or crash when it is forked",
                RuntimeWarning,
                stacklevel=4,
            )
        else:
            _LOG.info("a loader runs on torch's own iterator, because %s", why)
        made: _BaseDataLoaderIter = super()._get_iterator()
        return made

    def _ready_core(self) -> Core:
        """The core, with the options as they are now: torch lets most be changed between epochs."""
        config = self._config()
        if self._core is None:
            self._core = Core(config, TorchPlan(config, self.seed if self.seed is not None else 0))
            weakref.finalize(self, self._core.garage.close)
        plan = self._core.plan
        assert isinstance(plan, TorchPlan)
        self._core.config = config
        plan.configure(config)
        self._core.garage.is_keeping = self.persistent_workers
        return self._core

    def _config(self) -> LoaderConfig:
        is_stream = isinstance(self.dataset, torch.utils.data.IterableDataset)
        is_batched = self.batch_sampler is not None and self.batch_size is None
        return LoaderConfig(
            dataset=self.dataset,
            batch_size=self.batch_size,
            shuffle=False,
            sampler=None,
            batch_sampler=self.batch_sampler if is_batched else None,
            num_workers=self.num_workers,
            worker=self.worker,
            collate_fn=self._effective_collate_fn(),
            drop_last=self.drop_last if is_stream or not is_batched else False,
            seed=self.seed,
            in_order=self.in_order,
            prefetch=max(1, self._prefetch) if self._prefetch is not None and self.num_workers > 0 else None,
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            memory_limit=self.memory_limit,
            grain_size=self.grain_size,
            start_method=self._start_method(),
            is_torch=True,
        )

    def _start_method(self) -> Any:
        context = self.multiprocessing_context
        method = "auto" if context is None else context.get_start_method()
        return "spawn" if method == "spawn" else "forkserver" if method == "forkserver" and sys.platform == "linux" else "auto"

    def _effective_collate_fn(self) -> Callable[[list[Any]], Any] | None:
        """``None`` for torch's default, which is then written row by row; with what the user has taught it, a function."""
        given: Callable[[list[Any]], Any] = self.collate_fn
        if given is not default_collate:
            return given
        taught = torch_collation.default_collate_fn_map
        if taught == _KNOWN_TYPES:
            return None
        return _TaughtCollate(dict(taught))

    # --- what torch's loader does not have

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or the next one if there is none."""
        return self._ready_core().epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch; the sampler is told too, if it has ``set_epoch``."""
        core = self._ready_core()
        for one in (self.batch_sampler, self.sampler, getattr(self.batch_sampler, "sampler", None)):
            hear = getattr(one, "set_epoch", None)
            if callable(hear):
                hear(epoch)
        core.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this loader stands: what was given to the loop, not what was loaded ahead. Plain data, fit for JSON."""
        return self._ready_core().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a state says, with the next iteration; as ``torchdata``'s ``StatefulDataLoader``.

        Raises:
            StateError: it is damaged, or of another dataset or other options. The loader is as it was.
        """
        core = self._ready_core()
        core.load_state_dict(state_dict)
        if state_dict and isinstance(core.plan, TorchPlan):
            core.plan.resume_seed(core.plan.seed)

    def explain(self, step: int, *, epoch: int | None = None) -> Lineage:
        """Where batch ``step`` (from 0) of an epoch comes from: see ``infeed.DataLoader.explain``."""
        return self._ready_core().explain(step, epoch)

    def replay(self, step: int, *, epoch: int | None = None) -> Any:
        """Load batch ``step`` of an epoch again, in this thread: see ``infeed.DataLoader.replay``."""
        return self._ready_core().replay(step, epoch)

    def close(self) -> None:
        """Stop workers now; iterating again starts others."""
        if self._core is not None:
            self._core.garage.clear()
        self._iterator = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_core": None, "_iterator": None}


class _TaughtCollate:
    """``default_collate`` with what this process has registered; a worker does not know of it."""

    def __init__(self, taught: dict[Any, Any]) -> None:
        self._taught = taught

    def __call__(self, samples: list[Any]) -> Any:
        return torch_collation.collate(samples, collate_fn_map=self._taught)


def _is_for_forks(error: WorkerStartError) -> bool:
    """Whether what could not be sent is one of multiprocessing's locks, queues or values."""
    text = f"{error} {error.__cause__}"
    return any(words in text for words in ("through inheritance", "SemLock", "fork context"))
