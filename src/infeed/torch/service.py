"""Runs any torch ``DataLoader`` on infeed's engine: infeed's own class, and torch's after ``install``."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, final

import torch
from torch.utils.data import DataLoader as TorchDataLoader  # before `install` patches it
from torch.utils.data import IterDataPipe, MapDataPipe, default_collate
from torch.utils.data._utils import collate as torch_collation
from torch.utils.data.dataloader import _BaseDataLoaderIter

from infeed.engine.session import Session
from infeed.errors import ConfigError, WorkerStartError
from infeed.memory.inheriting import ANONYMOUS_MEMORY, USE_ARRAY
from infeed.metrics.statistics import Statistics, Trace
from infeed.options import TORCH_OPTIONS, AutoCount, Options, core_limit
from infeed.torch.iterator import EngineIter, InlineIter, WorkersIter
from infeed.torch.plan import TorchPlan
from infeed.torch.summary import TALLY

_LOG: Final = logging.getLogger("infeed")
_torch_iterator: Final[Callable[[Any], _BaseDataLoaderIter]] = TorchDataLoader._get_iterator
# The built-in types of default_collate: any other entry was registered by user code.
_KNOWN_TYPES: Final = dict(torch_collation.default_collate_fn_map)
# Loader attribute that holds its Session. Written to __dict__ to bypass __setattr__, which Lightning hooks. A copy of the
# loader gets no Session (see ``Session.__reduce__``).
_SESSION: Final = "_infeed_session"
_MAKING: Final = threading.RLock()  # held while a Session is created
# Loader attribute: the reason, if its latest iteration runs on torch's own iterator.
_REFUSED: Final = "_infeed_refused"
# Loader attribute: the reason why its dataset cannot be pickled for infeed's workers, or unpickled, after the first attempt.
_UNPICKLABLE: Final = "_infeed_unpicklable"
# Loader attribute: whether workers have unpickled its dataset once.
_STARTED: Final = "_infeed_started"
_LEAVE_OUT: Final = "exclude it in __getstate__ and open it in each worker on first use"
_UNPICKLE: Final = "make pickle.loads(pickle.dumps(dataset)) work in a new process"
_NEW_CONTEXT: Final = "create it with multiprocessing.get_context('spawn')"


def iterator_of(loader: TorchDataLoader[Any]) -> _BaseDataLoaderIter:
    """Return the iterator for ``iter(loader)``: infeed's, or torch's own with a warning that states the reason."""
    why = why_not(loader)
    if why is not None:
        return refuse(loader, why)
    session = session_of(loader)
    generator = loader.generator if loader.generator is not None else torch.default_generator
    before = generator.get_state()
    try:
        if loader.num_workers > 0:
            awaits_start = not loader.__dict__.get(_STARTED, False) and _torch_forks(loader)
            made: EngineIter = WorkersIter(loader, session, awaits_start=awaits_start)
            loader.__dict__[_STARTED] = True
        else:
            made = InlineIter(loader, session)
    except WorkerStartError as error:
        cure = _cure(error)
        if error.unpicklable is None or not (cure is _NEW_CONTEXT or _torch_forks(loader)):
            raise  # torch's workers could not receive it either
        generator.set_state(before)  # torch draws the base seed again
        # Remember the reason: pickling may be slow, and the next epoch would fail again.
        loader.__dict__[_UNPICKLABLE] = why = error.unpicklable
        return refuse(loader, why, cure)
    loader.__dict__.pop(_REFUSED, None)
    TALLY.serve(session)
    return made


def session_of(loader: TorchDataLoader[Any]) -> Session:
    """Return the loader's session, updated to its current options: torch allows changing most of them between epochs."""
    config = config_of(loader)
    session = known_session(loader) or _make_session(loader, config)
    plan = plan_of(session)
    before, table_before = session.config, plan.table
    keeps_seed = bool(loader.persistent_workers) and loader.num_workers > 0
    plan.configure(config, loader._index_sampler, _lookahead(loader), loader.generator, keeps_seed=keeps_seed)
    # An engine that gathers arrays has no workers, no user code and no random state, so it can always be kept.
    is_gathered = plan.table is not None and plan.table is table_before and _is_same(before, config)
    is_persistent = bool(loader.persistent_workers)
    session.reconfigure(
        config, keeps_engine=is_persistent or plan.table is not None, is_outdated=not (is_gathered or is_persistent)
    )
    return session


def _lookahead(loader: TorchDataLoader[Any]) -> int:
    """Return how many batches torch requests from the sampler beyond those it has delivered."""
    return loader.num_workers * (loader.prefetch_factor or 2)  # None if num_workers was 0 when the loader was created


def _is_same(config: Options, other: Options) -> bool:
    return all(getattr(config, name) is getattr(other, name) for name in Options.__slots__)


def _make_session(loader: TorchDataLoader[Any], config: Options) -> Session:
    with _MAKING:
        plan = TorchPlan(config, loader._index_sampler, _lookahead(loader), 0 if config.seed is None else config.seed)
        made = Session(config, plan)
        # Another thread or a signal handler may have called statistics() and created a session meanwhile.
        session = known_session(loader) or made
        if session is made:
            loader.__dict__[_SESSION] = session
            # Finalize with the session, not the loader: an iteration references the session and may outlive the loader.
            weakref.finalize(session, session.engine_cache.close_unasked)
        return session


def known_session(loader: TorchDataLoader[Any]) -> Session | None:
    """Return the loader's session if it has one, without updating its options."""
    session: Session | None = loader.__dict__.get(_SESSION)
    return session


def statistics_of(loader: TorchDataLoader[Any]) -> Statistics:
    statistics = (known_session(loader) or session_of(loader)).statistics()
    unmeasured = _unmeasured(loader)
    return statistics if unmeasured is None else replace(statistics, finding=None, diagnosis=unmeasured)


def trace_of(loader: TorchDataLoader[Any]) -> Trace:
    """Return the trace of the loader.

    Raises:
        ConfigError: the latest iteration ran on torch's own workers, or no timeline was recorded.
    """
    unmeasured = _unmeasured(loader)
    if unmeasured is not None:
        raise ConfigError(unmeasured)
    return (known_session(loader) or session_of(loader)).trace()


def _unmeasured(loader: TorchDataLoader[Any]) -> str | None:
    """Return a message if the latest iteration ran on torch's iterator and was not measured, or if the next one will."""
    why = refused_reason(loader) or why_not(loader)
    if why is None:
        return None
    own = "torch's own workers" if loader.num_workers > 0 else "torch's own iterator"
    return f"No measurements: this loader runs on {own}, because {why}; infeed measures only its own workers."


def plan_of(session: Session) -> TorchPlan:
    assert isinstance(session.plan, TorchPlan)
    return session.plan


def stop_workers(loader: TorchDataLoader[Any]) -> None:
    session = known_session(loader)
    if session is not None:
        session.engine_cache.stop()


def config_of(loader: TorchDataLoader[Any]) -> Options:
    """Return the loader's attributes as infeed's options.

    Raises:
        ConfigError: an infeed-only option is invalid; torch has checked the others.
    """
    has_own_batches = loader.batch_sampler is not None and loader.batch_size is None
    return Options(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        batch_sampler=loader.batch_sampler if has_own_batches else None,
        num_workers=loader.num_workers,
        collate_fn=_collate_fn(loader),
        pin_memory=bool(loader.pin_memory),
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        in_order=getattr(loader, "in_order", True),
        start_method=_start_method(loader),
        prefetch_factor=getattr(loader, "_infeed_prefetch_factor", None) if loader.num_workers > 0 else None,
        is_torch=True,
        **own_options(loader),
    )


def own_options(loader: TorchDataLoader[Any]) -> dict[str, Any]:
    """Return the options that infeed's class adds to torch's, with their defaults for a loader of torch's class."""
    # Subclasses of torch's class may use the same names for something else.
    is_ours = hasattr(type(loader), "_infeed_source")
    return {name: getattr(loader, name, usual) if is_ours else usual for name, usual in TORCH_OPTIONS.items()}


def why_not(loader: TorchDataLoader[Any]) -> str | None:
    """Return why infeed's engine does not support this loader, or ``None`` if it does."""
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        return "the dataset is a DataPipe"
    context = loader.multiprocessing_context
    if context is not None and context.get_start_method() == "fork":
        return "multiprocessing_context='fork' was passed"
    unpicklable: str | None = loader.__dict__.get(_UNPICKLABLE)
    return unpicklable if loader.num_workers > 0 and context is None else None


def _torch_forks(loader: TorchDataLoader[Any]) -> bool:
    """Whether torch forks its own workers, which then need no pickling."""
    context = loader.multiprocessing_context
    if context is not None:
        return bool(context.get_start_method() == "fork")
    # Without `allow_none`, this call would fix the start method of the process. The first start method is the default.
    return (multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]) == "fork"


def refuse(
    loader: TorchDataLoader[Any],
    why: str,
    cure: str = "",
    iterate: Callable[[Any], _BaseDataLoaderIter] = _torch_iterator,
) -> _BaseDataLoaderIter:
    """Return torch's own iterator, or that of ``iterate``, with one warning per loader."""
    is_new = loader.__dict__.get(_REFUSED) != why
    loader.__dict__[_REFUSED] = why
    if is_new:
        TALLY.refuse(loader, why)
        if loader.num_workers > 0:
            to_use = f"to use infeed's, {cure}; " if cure else ""
            warnings.warn(
                f"this loader runs on torch's own workers, because {why}; {to_use}forked workers may hang or crash if this "
                f"process has threads (OpenMP, OpenCV, CUDA){_unserved(loader)}",
                RuntimeWarning,
                stacklevel=5,
            )
        else:
            _LOG.info("a loader runs on torch's own iterator, because %s", why)
    if isinstance(loader.num_workers, AutoCount):
        # torch starts num_workers processes, and for "auto" that number is the maximum.
        loader.num_workers = max(1, int(core_limit(own_options(loader)["cpu_limit"])))
    return iterate(loader)


def notice(loader: Any, iterator: _BaseDataLoaderIter) -> None:
    """Warn if a library created torch's iterator directly instead of through the loader."""
    attributes = getattr(loader, "__dict__", {})
    if isinstance(iterator, EngineIter) or attributes.get(_REFUSED) is not None:
        return
    kind = type(iterator)
    why = f"it creates {kind.__module__}.{kind.__qualname__} directly"
    attributes[_REFUSED] = why
    TALLY.refuse(loader, why)
    if loader.num_workers > 0:
        name = f"{type(loader).__module__}.{type(loader).__qualname__}"
        warnings.warn(f"{name} runs on torch's own workers, because {why}", RuntimeWarning, stacklevel=4)


def refused_reason(loader: TorchDataLoader[Any]) -> str | None:
    """Return why the latest iteration runs on torch's own iterator, or ``None`` if it does not."""
    reason: str | None = loader.__dict__.get(_REFUSED)
    return reason


def _unserved(loader: TorchDataLoader[Any]) -> str:
    """Return a note on the requested options that only infeed's iterators support."""
    names = [name for name, value in own_options(loader).items() if value != TORCH_OPTIONS[name]]
    session = known_session(loader)
    if session is not None and session.next.step:
        names.append("load_state_dict")
    return f"; {' and '.join(names)} {'has' if len(names) == 1 else 'have'} no effect" if names else ""


def _start_method(loader: TorchDataLoader[Any]) -> Any:
    context = loader.multiprocessing_context
    method = None if context is None else context.get_start_method()
    if method == "forkserver" and sys.platform == "linux":
        return "forkserver"
    return "spawn" if method == "spawn" else "auto"


def _collate_fn(loader: TorchDataLoader[Any]) -> Callable[[list[Any]], Any] | None:
    """Return ``None`` for torch's default, so infeed writes batches row by row; a function if user code registered types."""
    given: Callable[[list[Any]], Any] = loader.collate_fn
    if given is not default_collate:
        return given
    taught = torch_collation.default_collate_fn_map
    if taught != _KNOWN_TYPES:
        return TaughtCollate(dict(taught))
    return None if loader.batch_sampler is not None else given  # without batches, torch calls it with each sample


@final
class TaughtCollate:
    """``default_collate`` with the types registered in this process, which workers do not have."""

    def __init__(self, taught: dict[Any, Any]) -> None:
        self._taught = taught

    def __call__(self, samples: list[Any]) -> Any:
        return torch_collation.collate(samples, collate_fn_map=self._taught)


def _cure(error: WorkerStartError) -> str:
    """Return what to change so that infeed's workers can receive the dataset."""
    text = f"{error} {error.__cause__}"
    # A multiprocessing lock, queue or value, which torch can pass to its workers.
    if any(words in text for words in ("through inheritance", "SemLock", "fork context")):
        return _NEW_CONTEXT
    if ANONYMOUS_MEMORY in text:
        return USE_ARRAY
    return _UNPICKLE if "unpickled" in (error.unpicklable or "") else _LEAVE_OUT
