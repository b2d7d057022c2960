"""Iterations of any torch ``DataLoader`` on infeed's engine: of infeed's own class, and of torch's after ``install``."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, final

import torch
from torch.utils.data import DataLoader as TorchDataLoader  # now, because `install` changes it
from torch.utils.data import IterDataPipe, MapDataPipe, default_collate
from torch.utils.data._utils import collate as torch_collation
from torch.utils.data.dataloader import _BaseDataLoaderIter

from infeed.config import LoaderConfig
from infeed.core import Core
from infeed.errors import ConfigError, WorkerStartError
from infeed.observe.records import Statistics, Trace
from infeed.torch.iterators import EngineIter
from infeed.torch.plans import TorchPlan
from infeed.torch.tally import TALLY

_LOG: Final = logging.getLogger("infeed")
_torch_iterator: Final[Callable[[Any], _BaseDataLoaderIter]] = TorchDataLoader._get_iterator
# What default_collate knows by itself: with more, the user has taught it types of their own.
_KNOWN_TYPES: Final = dict(torch_collation.default_collate_fn_map)
# Where a loader has its core. Put past __setattr__, which Lightning watches; a copy of the loader gets none (see ``Core``).
_CORE: Final = "_infeed_core"
_MAKING: Final = threading.RLock()  # held by who makes one
# Why its latest iteration is torch's own, if it is.
_REFUSED: Final = "_infeed_refused"


def iterator_of(loader: TorchDataLoader[Any]) -> _BaseDataLoaderIter:
    """What ``iter(loader)`` gives: infeed's, or torch's own with a word of why."""
    why = _why_not(loader)
    if why is not None:
        return _refuse(loader, why)
    loader.__dict__.pop(_REFUSED, None)
    core = core_of(loader)
    plan_of(core).prepare(loader._index_sampler)
    generator = loader.generator if loader.generator is not None else torch.default_generator
    before = generator.get_state()
    try:
        made = EngineIter(loader, core)
    except WorkerStartError as error:
        if not _is_for_forks(error):
            raise
        generator.set_state(before)  # torch draws its own base seed
        return _refuse(loader, "the dataset holds a multiprocessing object that only a forked process can use")
    return made


def core_of(loader: TorchDataLoader[Any]) -> Core:
    """The loader's core, with its options as they are now: torch lets most be changed between epochs."""
    config = config_of(loader)
    core = known_core(loader) or _make_core(loader, config)
    plan = plan_of(core)
    before, table_before = core.config, plan.table
    core.config = config
    plan.configure(config, loader._index_sampler)
    # Where arrays are gathered there is no worker, nothing of the user's and nothing random that an engine could keep.
    is_gathered = plan.table is not None and plan.table is table_before and _is_same(before, config)
    if not (is_gathered or loader.persistent_workers):
        core.garage.clear()
    core.garage.is_keeping = bool(loader.persistent_workers) or plan.table is not None
    return core


def _is_same(config: LoaderConfig, other: LoaderConfig) -> bool:
    return all(getattr(config, name) is getattr(other, name) for name in LoaderConfig.__slots__)


def _make_core(loader: TorchDataLoader[Any], config: LoaderConfig) -> Core:
    with _MAKING:
        plan = TorchPlan(config, loader._index_sampler, 0 if config.seed is None else config.seed)
        made = Core(config, plan)
        core = known_core(loader) or made  # another thread, or a signal handler, may have asked for statistics meanwhile
        if core is made:
            loader.__dict__[_CORE] = core
            # With the core, and not with the loader: an iteration may outlive the loader, and holds the core.
            weakref.finalize(core, core.garage.close_unasked)
            TALLY.loader_count += 1
        return core


def known_core(loader: TorchDataLoader[Any]) -> Core | None:
    """The loader's core if it has one, as it is."""
    core: Core | None = loader.__dict__.get(_CORE)
    return core


def statistics_of(loader: TorchDataLoader[Any]) -> Statistics:
    statistics = (known_core(loader) or core_of(loader)).statistics()
    unmeasured = _unmeasured(loader)
    return statistics if unmeasured is None else replace(statistics, verdict=unmeasured)


def trace_of(loader: TorchDataLoader[Any]) -> Trace:
    """
    Raises:
        ConfigError: there is nothing to show.
    """
    unmeasured = _unmeasured(loader)
    if unmeasured is not None:
        raise ConfigError(unmeasured)
    return (known_core(loader) or core_of(loader)).trace()


def _unmeasured(loader: TorchDataLoader[Any]) -> str | None:
    """A sentence, if the latest iteration was not infeed's to measure."""
    why = loader.__dict__.get(_REFUSED)
    if why is None:
        return None
    own = "torch's own workers" if loader.num_workers > 0 else "torch's own iterator"
    return f"nothing is measured: this loader runs on {own}, because {why}; infeed measures what its own workers do"


def plan_of(core: Core) -> TorchPlan:
    assert isinstance(core.plan, TorchPlan)
    return core.plan


def stop_workers(loader: TorchDataLoader[Any]) -> None:
    core = known_core(loader)
    if core is not None:
        core.garage.stop()


def config_of(loader: TorchDataLoader[Any]) -> LoaderConfig:
    """The loader's attributes as infeed's options.

    Raises:
        ConfigError: infeed's own ones are wrong; torch has checked the others.
    """
    has_own_batches = loader.batch_sampler is not None and loader.batch_size is None
    return LoaderConfig(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        shuffle=False,
        sampler=None,
        batch_sampler=loader.batch_sampler if has_own_batches else None,
        num_workers=loader.num_workers,
        worker=getattr(loader, "worker", "process"),
        collate_fn=_collate_fn(loader),
        drop_last=loader.drop_last,
        seed=getattr(loader, "seed", None),
        in_order=getattr(loader, "in_order", True),
        prefetch=None,
        prefetch_factor=getattr(loader, "_infeed_prefetch_factor", None) if loader.num_workers > 0 else None,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        memory_limit=getattr(loader, "memory_limit", None),
        grain_size=getattr(loader, "grain_size", None),
        threads_per_worker=getattr(loader, "threads_per_worker", 1),
        cpu_limit=getattr(loader, "cpu_limit", None),
        start_method=_start_method(loader),
        pin_memory=bool(loader.pin_memory),
        device=getattr(loader, "device", None),
        device_prefetch=getattr(loader, "device_prefetch", 2),
        convert=getattr(loader, "convert", None),
        on_error=getattr(loader, "on_error", "raise"),
        error_budget=getattr(loader, "error_budget", None),
        retries=getattr(loader, "retries", 0),
        sample_timeout=getattr(loader, "sample_timeout", 0),
        hang_warning=getattr(loader, "hang_warning", None),
        observe=getattr(loader, "observe", "timeline"),
        progress=getattr(loader, "progress", False),
        on_statistics=getattr(loader, "on_statistics", None),
        statistics_every=getattr(loader, "statistics_every", 10.0),
        is_torch=True,
    )


def _why_not(loader: TorchDataLoader[Any]) -> str | None:
    """Why infeed's engine cannot serve this loader, if so."""
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        return "the dataset is a DataPipe"
    context = loader.multiprocessing_context
    if context is not None and context.get_start_method() == "fork":
        return "multiprocessing_context='fork' was asked for"
    return None


def _refuse(loader: TorchDataLoader[Any], why: str) -> _BaseDataLoaderIter:
    TALLY.refused[why] += 1
    loader.__dict__[_REFUSED] = why
    if loader.num_workers > 0:
        warnings.warn(
            f"this loader runs on torch's own workers, and not on infeed's, because {why}; if they are forked, threads of this "
            f"process (OpenMP, OpenCV, CUDA) may make them hang or crash{_unserved(loader)}",
            RuntimeWarning,
            stacklevel=5,
        )
    else:
        _LOG.info("a loader runs on torch's own iterator, because %s", why)
    return _torch_iterator(loader)


def _unserved(loader: TorchDataLoader[Any]) -> str:
    """What was asked for and only infeed's own iterator does."""
    names = [name for name in ("progress", "on_statistics") if getattr(loader, name, None)]
    return f"; {' and '.join(names)} will do nothing" if names else ""


def _start_method(loader: TorchDataLoader[Any]) -> Any:
    context = loader.multiprocessing_context
    method = None if context is None else context.get_start_method()
    if method == "forkserver" and sys.platform == "linux":
        return "forkserver"
    return "spawn" if method == "spawn" else "auto"


def _collate_fn(loader: TorchDataLoader[Any]) -> Callable[[list[Any]], Any] | None:
    """``None`` for torch's default, which is then written row by row; with what the user has taught it, a function."""
    given: Callable[[list[Any]], Any] = loader.collate_fn
    if given is not default_collate:
        return given
    taught = torch_collation.default_collate_fn_map
    return None if taught == _KNOWN_TYPES else TaughtCollate(dict(taught))


@final
class TaughtCollate:
    """``default_collate`` with what this process has registered; a worker does not know of it."""

    def __init__(self, taught: dict[Any, Any]) -> None:
        self._taught = taught

    def __call__(self, samples: list[Any]) -> Any:
        return torch_collation.collate(samples, collate_fn_map=self._taught)


def _is_for_forks(error: WorkerStartError) -> bool:
    """Whether what could not be sent is one of multiprocessing's locks, queues or values."""
    text = f"{error} {error.__cause__}"
    return any(words in text for words in ("through inheritance", "SemLock", "fork context"))
