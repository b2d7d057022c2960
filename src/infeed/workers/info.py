"""``get_worker_info``: lets user code find out which worker it runs in."""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from infeed.import_hooks import when_imported

if TYPE_CHECKING:
    from infeed.workers.protocol import WorkerSpec  # needs NumPy


@final
@dataclass(frozen=True, slots=True, weakref_slot=True)
class WorkerInfo:
    """The result of ``get_worker_info``, as in torch.

    Attributes:
        id: number of the worker, from 0.
        num_workers: number of workers that read the dataset.
        seed: seed of this worker.
        dataset: the worker's copy of the dataset.

    Examples:
        >>> import infeed
        >>> def collate(samples):
        ...     return infeed.get_worker_info().num_workers
        >>> with infeed.DataLoader(range(4), 2, collate_fn=collate, num_workers=1, worker="thread") as loader:
        ...     list(loader)
        [1, 1]
    """

    __module__ = "infeed"

    id: int
    num_workers: int
    seed: int
    dataset: Any


_TORCH_WORKER: Final = "torch.utils.data._utils.worker"


class _LocalInfo(threading.local):
    info: WorkerInfo | None = None
    # Whether user code called get_worker_info: an iterable dataset that does splits itself among workers.
    was_asked: bool = False


_LOCAL: Final = _LocalInfo()


def get_worker_info() -> WorkerInfo | None:
    """Return the current worker, or ``None`` outside a worker (also with ``num_workers=0``, as in torch).

    An iterable dataset that several workers read uses it to select its share. If an iterable dataset never calls it, only one
    worker reads it. Either way each element is delivered once.

    Examples:
        >>> import infeed
        >>> class Numbers:
        ...     def __iter__(self):
        ...         info = infeed.get_worker_info()
        ...         return iter(range(6)) if info is None else iter(range(info.id, 6, info.num_workers))
        >>> with infeed.DataLoader(Numbers(), batch_size=None, num_workers=2, worker="thread") as loader:
        ...     sorted(loader)
        [0, 1, 2, 3, 4, 5]
    """
    _LOCAL.was_asked = True
    return _LOCAL.info


get_worker_info.__module__ = "infeed"


def set_worker_info(info: WorkerInfo | None) -> None:
    """Set the worker of the calling thread."""
    _LOCAL.info = info


def is_in_worker() -> bool:
    """Whether the calling thread belongs to a worker."""
    return _LOCAL.info is not None


def set_torch_info(info: WorkerInfo) -> None:
    """Make ``torch.utils.data.get_worker_info`` in this process return the same, as soon as it is imported."""
    current = weakref.ref(info)  # the hook stays until torch is imported, and must not keep the dataset

    def set_info() -> None:
        worker: Any = sys.modules[_TORCH_WORKER]
        info = current()
        if info is not None and _LOCAL.info is info:
            shown = worker.WorkerInfo(id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset)
            worker._worker_info = shown

    when_imported(_TORCH_WORKER, set_info)


def release_dataset() -> None:
    """Reset the worker info of a worker that waits for another loader: it references the dataset."""
    set_worker_info(None)
    if (worker := sys.modules.get(_TORCH_WORKER)) is not None:
        worker._worker_info = None  # type: ignore[attr-defined]


def introduce(spec: WorkerSpec, dataset: Any, worker_count: int) -> None:
    """Set the worker info for user code in this thread, with the given number of workers."""
    if spec.kind == "inline":
        return  # num_workers=0: get_worker_info returns None, as in torch
    info = WorkerInfo(spec.worker, worker_count, spec.worker_seed, dataset)
    set_worker_info(info)
    if spec.is_as_torch:
        set_torch_info(info)


def take_was_asked() -> bool:
    """Return whether user code called ``get_worker_info`` in this thread since the last call of this function."""
    was_asked, _LOCAL.was_asked = _LOCAL.was_asked, False
    return was_asked
