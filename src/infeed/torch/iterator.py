"""One iteration of a torch loader: torch's own iterator on the outside, an epoch of infeed's engine inside."""

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

from infeed.engine.iterator import EpochIterator
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


# How long the fork server is asked at a time whether a worker has ended: other threads may need it.
_JOIN_S: Final = 0.1


@final
class WorkerHandle:
    """A worker's process, with what libraries use of the ``multiprocessing.Process`` in ``iterator._workers``."""

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

        # The exit code of a worker that ended together with the fork server is never known.
        return self.exitcode is None and psutil.pid_exists(self.pid)

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive():
            left_s = _JOIN_S if deadline is None else min(_JOIN_S, deadline - time.monotonic())
            if left_s <= 0:
                return
            self._process.wait(left_s)

    def terminate(self) -> None:
        """End the process at once. If the iteration goes on, the worker is replaced."""
        self._process.kill()

    kill = terminate

    def close(self) -> None:
        """Nothing is held that would have to be released."""


class EngineIter(_BaseDataLoaderIter):
    """An iterator of torch's kind. torch's part of it warns, draws the base seed and asks the sampler, in torch's order."""

    def __init__(self, loader: DataLoader[Any], session: Session) -> None:
        self._session = session  # and not the loader, which may hold this
        with self._plan.drawing(loader, session.next) as self._armed:
            _BaseDataLoaderIter.__init__(self, loader)  # and not torch's class of the same name below, which starts workers
            if self._num_workers > 0 and not self._armed.is_resumed:
                self._sampler_iter = iter(self._index_sampler)  # once more, as torch does: it may draw
        self._pins = self._pin_memory and not session.config.is_staged  # what is on a device is not pinned
        self._is_plain = self._dataset_kind != _DatasetKind.Iterable and not self._pins
        self._begin()

    @property
    def _plan(self) -> TorchPlan:
        assert isinstance(self._session.plan, TorchPlan)
        return self._session.plan

    def _begin(self) -> None:
        self._base_seed = self._plan.arm(self._armed, self._sampler_iter, int(self._base_seed))
        self._epoch = EpochIterator(self._session, asked=self._armed)
        # When torch calls user code: with workers the sampler, without them an iterable dataset.
        if self._num_workers > 0 or self._dataset_kind == _DatasetKind.Iterable:
            try:
                self._epoch.begin().prime()
            except BaseException:
                self._epoch.leave()
                raise

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        with self._plan.drawing(loader, self._session.next, is_reset=True) as self._armed:
            _BaseDataLoaderIter._reset(self, loader, first_iter)
        self._begin()

    def __next__(self) -> Any:
        if self._is_plain and not _is_profiled():
            try:
                data = next(self._epoch)
            except WorkerError as error:
                self._raise(error)
            self._num_yielded += 1
            TALLY.batch_count += 1
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
        """Where people know torch's words by heart, begin with them."""
        if isinstance(error, LoadTimeoutError) and str(error).startswith("timeout="):
            raise LoadTimeoutError(f"DataLoader timed out after {self._timeout} seconds; {error}") from None
        if isinstance(error, WorkerDiedError):
            _raise_in_torch_words(error)
        raise error

    def _counted(self, data: Any) -> Any:
        self._num_yielded += 1
        TALLY.batch_count += 1
        said = self._IterableDataset_len_called
        if self._dataset_kind == _DatasetKind.Iterable and said is not None and self._num_yielded > said:
            text = (
                f"Length of IterableDataset {self._dataset} was reported to be {said} (when accessing len(dataloader)), but "
                f"{self._num_yielded} samples have been fetched."
            )
            if self._num_workers > 0:
                text += (
                    " Every worker reads a copy of the dataset: let its __iter__ leave out what other workers read, by "
                    "torch.utils.data.get_worker_info()."
                )
            warnings.warn(text, stacklevel=3)
        return data

    def _shutdown_workers(self) -> None:
        """End the iteration."""
        self._epoch.leave()


@final
class InlineIter(EngineIter, _SingleProcessDataLoaderIter):
    """With ``num_workers=0``."""


@final
class WorkersIter(EngineIter, _MultiProcessingDataLoaderIter):
    """With workers. Libraries ask for torch's class, to stop workers, and for some of its attributes."""

    _handles: list[WorkerHandle]
    _shutdown: bool

    def __init__(self, loader: DataLoader[Any], session: Session) -> None:
        self._handles = []
        self._prefetch_factor = loader.prefetch_factor
        super().__init__(loader, session)

    def _begin(self) -> None:
        self._shutdown = False
        super()._begin()

    @property
    def _workers(self) -> list[WorkerHandle]:  # type: ignore[override]  # torch's are attributes
        """The workers now, or as they were when they were last asked for, if there are none any more."""
        processes = self._epoch.worker_processes()
        if processes and processes != [handle._process for handle in self._handles]:
            self._handles = [WorkerHandle(number, process) for number, process in enumerate(processes)]
        return self._handles

    def _shutdown_workers(self) -> None:
        """Stop them, also persistent ones."""
        self._handles = self._workers  # to be asked afterwards whether they have ended
        self._epoch.leave(stops_workers=True)
        self._session.engine_cache.clear(keeps_workers=False)
        self._shutdown = True

    def __del__(self) -> None:
        """Not torch's, which looks for queues. The epoch ends when it is dropped, and the engine with the loader."""


def _raise_in_torch_words(error: WorkerDiedError) -> NoReturn:
    text = str(error)
    killed, gone = _KILLED.search(text), _GONE.search(text)
    if killed is not None:
        raise WorkerDiedError(f"DataLoader worker (pid {killed[1]}) is killed by signal: {killed[2]}. {text}") from None
    if gone is not None:
        raise WorkerDiedError(f"DataLoader worker (pid(s) {gone[1]}) exited unexpectedly. {text}") from None
    raise error
