"""One iteration of a torch loader: torch's own iterator on the outside, an epoch of infeed's engine inside."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import torch
from torch.utils.data._utils import pin_memory as torch_pinning
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from infeed.core import Core
from infeed.epoch import Epoch
from infeed.errors import LoadTimeoutError, WorkerDiedError, WorkerError
from infeed.torch.tally import TALLY

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_KILLED: Final = re.compile(r"\(pid (\d+)\) was killed by (\w+)")
_GONE: Final = re.compile(r"\(pid (\d+)\)")


_is_profiled: Final[Callable[[], bool]] = getattr(torch.autograd, "_profiler_enabled", lambda: True)
_pinned: Final[Callable[..., Any]] = torch_pinning.pin_memory


@final
class WorkerHandle:
    """A worker's process, as far as people look at ``iterator._workers``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid


@final
class EngineIter(_BaseDataLoaderIter):
    """An iterator of torch's kind. torch's part of it warns, draws the base seed and asks the sampler, in torch's order."""

    def __init__(self, loader: DataLoader[Any], core: Core) -> None:
        super().__init__(loader)
        self._core = core  # and not the loader, which may hold this
        self._pins = self._pin_memory and not core.config.is_staged  # what is on a device is not pinned
        self._is_plain = self._dataset_kind != _DatasetKind.Iterable and not self._pins
        self._begin()

    def _begin(self) -> None:
        self._core.plan.arm(self._sampler_iter, self._base_seed)  # type: ignore[attr-defined]
        self._epoch = Epoch(self._core)
        if self._num_workers > 0:
            self._epoch.begin().prime()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
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

    @property
    def _workers(self) -> list[WorkerHandle]:
        return [WorkerHandle(pid) for pid in self._epoch.worker_pids()]

    def _shutdown_workers(self) -> None:
        self._epoch.leave()


def _raise_in_torch_words(error: WorkerDiedError) -> NoReturn:
    text = str(error)
    killed, gone = _KILLED.search(text), _GONE.search(text)
    if killed is not None:
        raise WorkerDiedError(f"DataLoader worker (pid {killed[1]}) is killed by signal: {killed[2]}. {text}") from None
    if gone is not None:
        raise WorkerDiedError(f"DataLoader worker (pid(s) {gone[1]}) exited unexpectedly. {text}") from None
    raise error
