"""Iterations of any torch ``DataLoader`` on infeed's engine: of infeed's own class, and of torch's after ``install``."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, final

import torch
from torch.utils.data import DataLoader as TorchDataLoader  # now, because `install` changes it
from torch.utils.data import IterDataPipe, MapDataPipe, default_collate
from torch.utils.data._utils import collate as torch_collation
from torch.utils.data.dataloader import _BaseDataLoaderIter

from infeed.engine.session import Session
from infeed.errors import ConfigError, WorkerStartError
from infeed.metrics.statistics import Statistics, Trace
from infeed.options import AutoCount, LoaderConfig, core_limit
from infeed.torch.iterator import EngineIter, InlineIter, WorkersIter
from infeed.torch.plan import TorchPlan
from infeed.torch.summary import TALLY

_LOG: Final = logging.getLogger("infeed")
_torch_iterator: Final[Callable[[Any], _BaseDataLoaderIter]] = TorchDataLoader._get_iterator
# What default_collate knows by itself: with more, the user has taught it types of their own.
_KNOWN_TYPES: Final = dict(torch_collation.default_collate_fn_map)
# Where a loader has its core. Put past __setattr__, which Lightning watches; a copy of the loader gets none (see ``Core``).
_CORE: Final = "_infeed_core"
_MAKING: Final = threading.RLock()  # held by who makes one
# Why its latest iteration is torch's own, if it is.
_REFUSED: Final = "_infeed_refused"
# Why infeed's workers cannot have its dataset, once that has been tried.
_UNPICKLABLE: Final = "_infeed_unpicklable"
_LEAVE_OUT: Final = "leave it out with __getstate__ and open it in each worker on first use"
_NEW_CONTEXT: Final = "make it with multiprocessing.get_context('spawn')"
# Options that only infeed's own iterator serves, with their defaults.
_OWN_OPTIONS: Final = {
    "seed": None, "worker": "process", "memory_limit": None, "grain_size": None, "device": None, "convert": None,
    "on_error": "raise", "error_budget": None, "retries": 0, "sample_timeout": 0, "progress": False, "on_statistics": None,
}  # fmt: skip


def iterator_of(loader: TorchDataLoader[Any]) -> _BaseDataLoaderIter:
    """What ``iter(loader)`` gives: infeed's, or torch's own with a word of why."""
    why = why_not(loader)
    if why is not None:
        return _refuse(loader, why)
    session = session_of(loader)
    generator = loader.generator if loader.generator is not None else torch.default_generator
    before = generator.get_state()
    try:
        made = (WorkersIter if loader.num_workers > 0 else InlineIter)(loader, session)
    except WorkerStartError as error:
        is_for_forks = _is_for_forks(error)
        if error.unpicklable is None or not (is_for_forks or _torch_forks(loader)):
            raise  # torch could not send it to its workers either
        generator.set_state(before)  # torch draws its own base seed
        # Remembered: a dataset may take long to pickle, and the next epoch would end here again.
        loader.__dict__[_UNPICKLABLE] = why = error.unpicklable
        return _refuse(loader, why, _NEW_CONTEXT if is_for_forks else _LEAVE_OUT)
    loader.__dict__.pop(_REFUSED, None)
    TALLY.serve(session)
    return made


def session_of(loader: TorchDataLoader[Any]) -> Session:
    """The loader's core, with its options as they are now: torch lets most be changed between epochs."""
    config = config_of(loader)
    session = known_session(loader) or _make_core(loader, config)
    plan = plan_of(session)
    before, table_before = session.config, plan.table
    session.config = config
    keeps_seed = bool(loader.persistent_workers) and loader.num_workers > 0
    plan.configure(config, loader._index_sampler, _lookahead(loader), loader.generator, keeps_seed=keeps_seed)
    # Where arrays are gathered there is no worker, nothing of the user's and nothing random that an engine could keep.
    is_gathered = plan.table is not None and plan.table is table_before and _is_same(before, config)
    if not (is_gathered or loader.persistent_workers):
        session.engine_cache.clear()
    session.engine_cache.is_keeping = bool(loader.persistent_workers) or plan.table is not None
    return session


def _lookahead(loader: TorchDataLoader[Any]) -> int:
    """How many batches torch asks the sampler for beyond those that it has delivered."""
    return loader.num_workers * (loader.prefetch_factor or 2)  # not set if num_workers was 0 when the loader was made


def _is_same(config: LoaderConfig, other: LoaderConfig) -> bool:
    return all(getattr(config, name) is getattr(other, name) for name in LoaderConfig.__slots__)


def _make_core(loader: TorchDataLoader[Any], config: LoaderConfig) -> Session:
    with _MAKING:
        plan = TorchPlan(config, loader._index_sampler, _lookahead(loader), 0 if config.seed is None else config.seed)
        made = Session(config, plan)
        session = known_session(loader) or made  # another thread, or a signal handler, may have asked for statistics meanwhile
        if session is made:
            loader.__dict__[_CORE] = session
            # With the core, and not with the loader: an iteration may outlive the loader, and holds the core.
            weakref.finalize(session, session.engine_cache.close_unasked)
        return session


def known_session(loader: TorchDataLoader[Any]) -> Session | None:
    """The loader's core if it has one, as it is."""
    session: Session | None = loader.__dict__.get(_CORE)
    return session


def statistics_of(loader: TorchDataLoader[Any]) -> Statistics:
    statistics = (known_session(loader) or session_of(loader)).statistics()
    unmeasured = _unmeasured(loader)
    return statistics if unmeasured is None else replace(statistics, diagnosis=unmeasured)


def trace_of(loader: TorchDataLoader[Any]) -> Trace:
    """
    Raises:
        ConfigError: there is nothing to show.
    """
    unmeasured = _unmeasured(loader)
    if unmeasured is not None:
        raise ConfigError(unmeasured)
    return (known_session(loader) or session_of(loader)).trace()


def _unmeasured(loader: TorchDataLoader[Any]) -> str | None:
    """A sentence, if the latest iteration was not infeed's to measure."""
    why = refused_reason(loader)
    if why is None:
        return None
    own = "torch's own workers" if loader.num_workers > 0 else "torch's own iterator"
    return f"nothing is measured: this loader runs on {own}, because {why}; infeed measures what its own workers do"


def plan_of(session: Session) -> TorchPlan:
    assert isinstance(session.plan, TorchPlan)
    return session.plan


def stop_workers(loader: TorchDataLoader[Any]) -> None:
    session = known_session(loader)
    if session is not None:
        session.engine_cache.stop()


def config_of(loader: TorchDataLoader[Any]) -> LoaderConfig:
    """The loader's attributes as infeed's options.

    Raises:
        ConfigError: infeed's own ones are wrong; torch has checked the others.
    """
    own = partial(_own_option, loader)
    has_own_batches = loader.batch_sampler is not None and loader.batch_size is None
    return LoaderConfig(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        shuffle=False,
        sampler=None,
        batch_sampler=loader.batch_sampler if has_own_batches else None,
        num_workers=loader.num_workers,
        worker=own("worker", "process"),
        collate_fn=_collate_fn(loader),
        drop_last=loader.drop_last,
        seed=own("seed", None),
        in_order=getattr(loader, "in_order", True),
        prefetch=None,
        prefetch_factor=own("_infeed_prefetch_factor", None) if loader.num_workers > 0 else None,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        memory_limit=own("memory_limit", None),
        grain_size=own("grain_size", None),
        threads_per_worker=own("threads_per_worker", 1),
        cpu_limit=own("cpu_limit", None),
        start_method=_start_method(loader),
        pin_memory=bool(loader.pin_memory),
        device=own("device", None),
        device_prefetch=own("device_prefetch", 2),
        convert=own("convert", None),
        on_error=own("on_error", "raise"),
        error_budget=own("error_budget", None),
        retries=own("retries", 0),
        sample_timeout=own("sample_timeout", 0),
        hang_warning=own("hang_warning", None),
        observe=own("observe", "timeline"),
        progress=own("progress", False),
        on_statistics=own("on_statistics", None),
        statistics_every=own("statistics_every", 10.0),
        is_torch=True,
    )


def _own_option(loader: TorchDataLoader[Any], name: str, default: Any) -> Any:
    """An option of infeed's own class. Subclasses of torch's may have attributes of the same name for something else."""
    return getattr(loader, name, default) if hasattr(type(loader), "_infeed_source") else default


def why_not(loader: TorchDataLoader[Any]) -> str | None:
    """Why infeed's engine cannot serve this loader, if so."""
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        return "the dataset is a DataPipe"
    context = loader.multiprocessing_context
    if context is not None and context.get_start_method() == "fork":
        return "multiprocessing_context='fork' was asked for"
    unpicklable: str | None = loader.__dict__.get(_UNPICKLABLE)
    return unpicklable if loader.num_workers > 0 and context is None else None


def _torch_forks(loader: TorchDataLoader[Any]) -> bool:
    """Whether torch's own workers are forked, and so need nothing pickled."""
    context = loader.multiprocessing_context
    if context is not None:
        return bool(context.get_start_method() == "fork")
    # Without `allow_none` the answer would become the process's start method for good. The first of all is the default.
    return (multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]) == "fork"


def _refuse(loader: TorchDataLoader[Any], why: str, cure: str = "") -> _BaseDataLoaderIter:
    """torch's own iterator, with one warning for each loader."""
    is_new = loader.__dict__.get(_REFUSED) != why
    loader.__dict__[_REFUSED] = why
    if is_new:
        TALLY.refuse(loader, why)
        if loader.num_workers > 0:
            to_use = f"to use infeed's, {cure}; " if cure else ""
            warnings.warn(
                f"this loader runs on torch's own workers, and not on infeed's, because {why}; {to_use}if they are forked, "
                f"threads of this process (OpenMP, OpenCV, CUDA) may make them hang or crash{_unserved(loader)}",
                RuntimeWarning,
                stacklevel=5,
            )
        else:
            _LOG.info("a loader runs on torch's own iterator, because %s", why)
    if isinstance(loader.num_workers, AutoCount):
        # torch starts as many as it says, and 'auto' says the most that there may be.
        loader.num_workers = max(1, int(core_limit(_own_option(loader, "cpu_limit", None))))
    return _torch_iterator(loader)


def notice(loader: Any, iterator: _BaseDataLoaderIter) -> None:
    """An iterator of torch's is made. Say so if it was not made here: by a library that does not ask its loader for one."""
    attributes = getattr(loader, "__dict__", {})
    if isinstance(iterator, EngineIter) or attributes.get(_REFUSED) is not None:
        return
    kind = type(iterator)
    why = f"it creates {kind.__module__}.{kind.__qualname__} itself"
    attributes[_REFUSED] = why
    TALLY.refuse(loader, why)
    if loader.num_workers > 0:
        name = f"{type(loader).__module__}.{type(loader).__qualname__}"
        warnings.warn(f"{name} runs on torch's own workers, and not on infeed's, because {why}", RuntimeWarning, stacklevel=4)


def refused_reason(loader: TorchDataLoader[Any]) -> str | None:
    """Why the latest iteration is torch's own, if it is."""
    reason: str | None = loader.__dict__.get(_REFUSED)
    return reason


def _unserved(loader: TorchDataLoader[Any]) -> str:
    """What was asked for and only infeed's own iterator does."""
    names = [name for name, default in _OWN_OPTIONS.items() if _own_option(loader, name, default) != default]
    session = known_session(loader)
    if session is not None and session.next.step:
        names.append("load_state_dict")
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
    if taught != _KNOWN_TYPES:
        return TaughtCollate(dict(taught))
    return None if loader.batch_sampler is not None else given  # called with each sample if there are no batches


@final
class TaughtCollate:
    """``default_collate`` with what this process has registered; a worker does not know of it."""

    def __init__(self, taught: dict[Any, Any]) -> None:
        self._taught = taught

    def __call__(self, samples: list[Any]) -> Any:
        return torch_collation.collate(samples, collate_fn_map=self._taught)


def _is_for_forks(error: WorkerStartError) -> bool:
    """Whether what could not be sent is one of multiprocessing's locks, queues or values, which torch can send."""
    text = f"{error} {error.__cause__}"
    return any(words in text for words in ("through inheritance", "SemLock", "fork context"))
