"""Iterators of torch loaders: they have the interface of torch's iterators and run an epoch of infeed's engine."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import torch
from torch.utils.data._utils import pin_memory as torch_pinning
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from infeed.engine.epoch_iterator import EpochIterator
from infeed.engine.session import Session
from infeed.errors import LoadTimeoutError, WorkerDiedError, WorkerError
from infeed.torch.plan import TorchPlan
from infeed.torch.summary import TALLY
from infeed.workers.launcher import Process

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_KILLED: Final = re.compile(r"\(pid (\d+)\) was killed by (\w+)")
_GONE: Final = re.compile(r"\(pid (\d+)\)")


_is_profiled: Final[Callable[[], bool]] = getattr(torch.autograd, "_profiler_enabled", lambda: True)
_pinned: Final[Callable[..., Any]] = torch_pinning.pin_memory


# Longest single wait on the fork server for a worker's exit, because other threads may need the fork server.
_JOIN_S: Final = 0.1


@final
class WorkerHandle:
    """A worker process with the parts of ``multiprocessing.Process`` that libraries use in ``iterator._workers``."""

    daemon = True

    def __init__(self, number: int, process: Process) -> None:
        self._process = process
        self.name = f"infeed-worker-{number}"
        self.pid = self.ident = process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.wait(0)

    def is_alive(self) -> bool:
        import psutil

        # The exit code stays unknown if a worker ended together with the fork server.
        return self.exitcode is None and psutil.pid_exists(self.pid)

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive():
            left_s = _JOIN_S if deadline is None else min(_JOIN_S, deadline - time.monotonic())
            if left_s <= 0:
                return
            self._process.wait(left_s)

    def terminate(self) -> None:
        """Kill the process. If the iteration continues, the engine replaces the worker."""
        self._process.kill()

    kill = terminate

    def close(self) -> None:
        """Do nothing: a handle holds no resources."""


class EngineIter(_BaseDataLoaderIter):
    """A torch iterator on infeed's engine. torch's base class warns, draws the base seed and calls ``iter`` of the sampler."""

    _awaits_start = False

    def __init__(self, loader: DataLoader[Any], session: Session) -> None:
        self._session = session  # not the loader, which may reference this iterator
        with self._plan.drawing(loader, session.next) as self._run:
            _BaseDataLoaderIter.__init__(self, loader)  # not the constructors of torch's subclasses, which start workers
            if self._num_workers > 0 and not self._run.is_resumed:
                self._sampler_iter = iter(self._index_sampler)  # a second time, as torch does: it may draw random numbers
        self._pins = self._pin_memory and not session.config.is_staged  # batches on a device cannot be pinned
        self._is_plain = self._dataset_kind != _DatasetKind.Iterable and not self._pins
        self._begin()

    @property
    def _plan(self) -> TorchPlan:
        assert isinstance(self._session.plan, TorchPlan)
        return self._session.plan

    def _begin(self) -> None:
        self._base_seed = self._plan.start(self._run, self._sampler_iter, int(self._base_seed))
        self._epoch = EpochIterator(self._session, asked=self._run)
        # torch calls user code at this point: the sampler with workers, an iterable dataset without them.
        if self._num_workers > 0 or self._dataset_kind == _DatasetKind.Iterable:
            try:
                engine = self._epoch.begin()
                if self._awaits_start:
                    engine.await_start()
                engine.prime()
            except BaseException:
                self._epoch.leave()
                raise

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        with self._plan.drawing(loader, self._session.next, is_reset=True) as self._run:
            _BaseDataLoaderIter._reset(self, loader, first_iter)
        self._begin()

    def __next__(self) -> Any:
        if self._is_plain and not _is_profiled():
            try:
                data = next(self._epoch)
            except WorkerError as error:
                self._raise(error)
            self._num_yielded += 1
            TALLY.add_batch()
            return data
        with torch.autograd.profiler.record_function(self._profile_name) if _is_profiled() else nullcontext():
            return self._counted(self._next_data())

    def _next_data(self) -> Any:
        try:
            data = next(self._epoch)
        except WorkerError as error:
            self._raise(error)
        return _pinned(data, self._pin_memory_device) if self._pins else data

    def _raise(self, error: WorkerError) -> NoReturn:
        """Raise the error; timeouts and worker deaths start with torch's well-known message."""
        if isinstance(error, LoadTimeoutError) and str(error).startswith("timeout="):
            raise LoadTimeoutError(f"DataLoader timed out after {self._timeout} seconds; {error}") from None
        if isinstance(error, WorkerDiedError):
            _raise_in_torch_words(error)
        raise error

    def _counted(self, data: Any) -> Any:
        self._num_yielded += 1
        TALLY.add_batch()
        said = self._IterableDataset_len_called
        if self._dataset_kind == _DatasetKind.Iterable and said is not None and self._num_yielded > said:
            text = (
                f"Length of IterableDataset {self._dataset} was reported to be {said} (when accessing len(dataloader)), but "
                f"{self._num_yielded} samples have been fetched."
            )
            if self._num_workers > 0:
                text += (
                    " Every worker reads the whole dataset; yield only this worker's share in __iter__ "
                    "(torch.utils.data.get_worker_info())."
                )
            warnings.warn(text, stacklevel=3)
        return data

    def _shutdown_workers(self) -> None:
        """End the iteration; there are no workers to stop."""
        self._epoch.leave()


@final
class InlineIter(EngineIter, _SingleProcessDataLoaderIter):
    """Iterator for ``num_workers=0``."""


@final
class WorkersIter(EngineIter, _MultiProcessingDataLoaderIter):
    """Iterator with workers. Libraries check for torch's class to stop workers, and use some of its attributes."""

    _handles: list[WorkerHandle]
    _shutdown: bool

    def __init__(self, loader: DataLoader[Any], session: Session, *, awaits_start: bool) -> None:
        """Create an iterator. With ``awaits_start``, a dataset that workers cannot unpickle raises here, before any batch."""
        self._handles = []
        self._awaits_start = awaits_start
        self._prefetch_factor = loader.prefetch_factor
        super().__init__(loader, session)

    def _begin(self) -> None:
        self._shutdown = False
        super()._begin()

    @property
    def _workers(self) -> list[WorkerHandle]:  # type: ignore[override]  # a plain attribute in torch
        """The current workers, or the last known ones if none are left."""
        processes = self._epoch.worker_processes()
        if processes and processes != [handle._process for handle in self._handles]:
            self._handles = [WorkerHandle(number, process) for number, process in enumerate(processes)]
        return self._handles

    def _shutdown_workers(self) -> None:
        """Stop all workers, including persistent ones."""
        self._handles = self._workers  # callers check afterwards whether they have ended
        self._epoch.leave(stops_workers=True)
        self._session.engine_cache.clear(keeps_workers=False)
        self._shutdown = True

    def __del__(self) -> None:
        """Override torch's method, which needs queues. Dropping the epoch ends it; the engine ends with the loader."""


def _raise_in_torch_words(error: WorkerDiedError) -> NoReturn:
    text = str(error)
    killed, gone = _KILLED.search(text), _GONE.search(text)
    if killed is not None:
        raise WorkerDiedError(f"DataLoader worker (pid {killed[1]}) is killed by signal: {killed[2]}. {text}") from None
    if gone is not None:
        raise WorkerDiedError(f"DataLoader worker (pid(s) {gone[1]}) exited unexpectedly. {text}") from None
    raise error
